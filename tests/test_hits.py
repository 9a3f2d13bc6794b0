"""Hit-ratio laws against published measurements and a block simulation."""

import random
from collections import OrderedDict

import numpy as np
import pytest

from kvlab import hits

FIT = hits.prefixes_that_fit(584, 148)


def simulate(usable, prefix_blocks, own_blocks, prefixes, requests, seed=1):
    """One worker, one request at a time: LRU over blocks, a request's last blocks are evicted first."""
    rng, cache, found = random.Random(seed), OrderedDict(), []
    for request in range(requests):
        prefix = rng.randrange(prefixes)
        blocks = [(prefix, i) for i in range(prefix_blocks)] + [(-1 - request, i) for i in range(own_blocks)]
        cached = next((i for i, block in enumerate(blocks) if block not in cache), len(blocks))
        for block in blocks:
            cache.pop(block, None)
        while len(cache) > usable - len(blocks):
            cache.popitem(last=False)
        cache.update((block, None) for block in reversed(blocks))
        if request >= 50 * prefixes:
            found.append(cached)
    return [
        sum(c >= 1 for c in found) / len(found),
        sum(found) / len(found) / prefix_blocks,
        sum(c == prefix_blocks for c in found) / len(found),
    ]


@pytest.mark.parametrize(("prefixes", "published"), [(2, 1.0), (7, 0.564), (12, 0.329), (24, 0.165)])
def test_simple_law_of_the_article(prefixes, published):  # pitfall 32
    assert hits.hit_ratio(FIT, prefixes) == pytest.approx(published, abs=0.0006)


def test_stack_model_at_four_prefixes():
    assert [round(100 * r, 1) for r in hits.stack_hit_ratios(584, 125, 23, 4)] == [94.5, 86.7, 77.2]


@pytest.mark.parametrize("prefixes", [1, 4, 7, 12])
def test_stack_model_against_a_block_simulation(prefixes):
    model = hits.stack_hit_ratios(58, 12, 2, prefixes)
    assert list(model) == pytest.approx(simulate(58, 12, 2, prefixes, 12_000), abs=0.02)
    assert model.any >= model.token >= model.full


def test_a_cache_that_holds_everything_always_hits():
    assert hits.stack_hit_ratios(10_000, 10, 0, 3) == pytest.approx((1, 1, 1))
    assert hits.che_hit_ratio(100, 10, 0, hits.zipf_weights(3, 0)) == 1


@pytest.mark.parametrize(("exponent", "che"), [(0, 16.2), (0.6, 21.9), (0.8, 27.6), (1.0, 35.6), (1.2, 45.0)])
def test_che_at_24_prefixes(exponent, che):
    ratio = hits.che_hit_ratio(584, 125, 23, hits.zipf_weights(24, exponent))
    assert 100 * ratio == pytest.approx(che, abs=0.1)


@pytest.mark.parametrize(("workers", "misses"), [(6, 10), (3, 4)])
def test_first_touch_of_two_prefixes(workers, misses):  # pitfall 32
    assert hits.first_touch_misses(2, workers) == misses
    assert hits.first_touch_misses(2, workers, 200) == pytest.approx(misses, abs=0.01)


def test_first_touch_before_every_pair_was_seen():
    rng, trials = random.Random(2), 4000
    missed = 0
    for _ in range(trials):
        warm = {(0, k) for k in range(4)}
        for _ in range(10):
            pair = (rng.randrange(3), rng.randrange(4))
            missed += pair not in warm
            warm.add(pair)
    assert hits.first_touch_misses(4, 3, 10) == pytest.approx(missed / trials, rel=0.02)
    assert hits.first_touch_misses(4, 3, 0) == 0


def test_affinity_bounds_at_24_prefixes_on_6_workers():
    assert 100 * hits.affinity_bound(FIT, 24, 6) == pytest.approx(98.6, abs=0.06)
    assert 100 * hits.hash_affinity_bound(FIT, 24, 6) == pytest.approx(81.4, abs=0.06)
    assert hits.affinity_bound(FIT, 7, 6) == 1


@pytest.mark.parametrize(("prefixes", "workers", "first_touches"), [(2, 6, 10), (2, 3, 4), (4, 6, 20)])
def test_a_run_from_empty_caches_pays_its_first_touches(prefixes, workers, first_touches):  # pitfall 32
    ample = hits.run_hit_ratios(10_000, 10, 0, prefixes, workers, 400, prefixes)
    assert (1 - ample.any) * 400 == pytest.approx(first_touches, abs=0.5)
    short = hits.run_hit_ratios(10_000, 10, 0, prefixes, workers, 1, prefixes)
    assert short.any == pytest.approx(1 / workers, rel=0.35)  # the warm-up has put each prefix on one worker


def test_a_long_run_comes_to_the_steady_ratio():
    run = hits.run_hit_ratios(584, 125, 23, 7, 3, 20_000, 7)
    assert list(run) == pytest.approx(hits.stack_hit_ratios(584, 125, 23, 7), abs=0.002)


def test_prefixes_of_two_sizes_lie_between_the_two():
    sizes = np.array([60, 190] * 6)
    mixed = hits.che_hit_ratio(584, sizes, 23, hits.zipf_weights(12, 0))
    small, large = (hits.che_hit_ratio(584, size, 23, hits.zipf_weights(12, 0)) for size in (60, 190))
    assert large < mixed < small
