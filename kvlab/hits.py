"""Prefix-cache hit ratios behind one or several workers: pure functions.

K prefixes, N workers; in blocks: P of a prefix, T of a request's own tail and output, C usable ones of a worker.
"any" = some of the prefix was cached, "full" = all of it, "token" = the cached share of the prefix's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import scipy  # its parts load where they are used: a second of every start


class HitRatios(NamedTuple):
    """Three readings of one hit ratio, 0..1; eviction is partial, so they differ."""

    any: float
    token: float
    full: float


def prefixes_that_fit(usable_blocks: int, request_blocks: int) -> float:
    """c = C / (P + T): requests' worth of blocks in one worker. 584 / 148 = 3.95."""
    return usable_blocks / request_blocks


def hit_ratio(fit: float, prefixes: int) -> float:
    """min(1, c / K): the share of prefixes that an LRU cache of c of them holds under uniform random requests.

    The number of workers is not in it: random splitting leaves every worker the same popularity law.
    """
    return min(1.0, fit / prefixes)


def stack_hit_ratios(usable_blocks: int, prefix_blocks: int, own_blocks: int, prefixes: int) -> HitRatios:
    """Hit ratios of uniform random prefixes from LRU stack distances; exact when requests come one at a time.

    J other requests since the last use of the prefix: P(J) = (1/K)(1 - 1/K)^J; D distinct prefixes among them.
    Blocks left of the prefix: clamp(C - P D - T J, 0, P), evicted from its end.
    """
    terms = list(_by_distance(usable_blocks, prefix_blocks, own_blocks, prefixes))
    return HitRatios(*(float(sum(weight * left[i] for weight, left in terms)) for i in range(3)))


def run_hit_ratios(
    usable_blocks: int, prefix_blocks: int, own_blocks: int, prefixes: int, workers: int, requests: int, warmup: int
) -> HitRatios:
    """The same over a run that starts with empty caches, `warmup` requests sent before; first touches are in it.

    Request i is preceded on its worker by B ~ Bin(i + warmup, 1/N) others; a last use J requests ago needs B > J.
    """
    before = np.arange(requests) + warmup
    terms = _by_distance(usable_blocks, prefix_blocks, own_blocks, prefixes)
    binom = scipy.stats.binom
    seen = [(weight * binom.sf(j, before, 1 / workers).mean(), left) for j, (weight, left) in enumerate(terms)]
    return HitRatios(*(float(sum(weight * left[i] for weight, left in seen)) for i in range(3)))


def _by_distance(usable_blocks: int, prefix_blocks: int, own_blocks: int, prefixes: int):
    """For J = 0, 1, ...: its probability, and the hit ratios (any, token, full) at that distance."""
    others = prefixes - 1
    distinct = np.zeros(others + 1)  # distinct[d] = P(D = d) after J requests
    distinct[0] = 1.0
    weight, j, count = 1.0 / prefixes, 0, np.arange(others + 1)
    while usable_blocks - own_blocks * j > 0 and weight > 1e-15:
        left = np.clip(usable_blocks - prefix_blocks * count - own_blocks * j, 0, prefix_blocks)
        token = (distinct * left).sum() / prefix_blocks
        yield weight, HitRatios(distinct[left >= 1].sum(), token, distinct[left == prefix_blocks].sum())
        distinct = _one_more(distinct, others)
        weight *= 1 - 1 / prefixes
        j += 1


def _one_more(distinct: np.ndarray, others: int) -> np.ndarray:
    """The law of the distinct count after one more uniform draw among `others`."""
    if others == 0:
        return distinct
    count = np.arange(others + 1)
    stay = distinct * count / others
    stay[1:] += distinct[:-1] * (others - count[:-1]) / others
    return stay


def zipf_weights(prefixes: int, exponent: float) -> np.ndarray:
    """Popularity of each prefix, proportional to rank^-exponent; 0 is uniform. Sums to 1."""
    weights = np.arange(1, prefixes + 1, dtype=float) ** -exponent
    return weights / weights.sum()


def che_hit_ratio(
    usable_blocks: int, prefix_blocks: int | np.ndarray, own_blocks: int, popularity: np.ndarray
) -> float:
    """Che's approximation with a stream of tails that are never asked for again; popularity p sums to 1.

    `prefix_blocks`: one size for all prefixes, or one for each.

    Characteristic time t (in requests): sum P (1 - e^(-p t)) + T t = C; hit ratio = sum p (1 - e^(-p t)).
    Source: Che, Tung, Wang, IEEE JSAC 20(7), 2002. Lies up to 3 points below a block simulation for skewed p.
    """

    def over(t: float) -> float:
        return float((prefix_blocks * (1 - np.exp(-popularity * t))).sum()) + own_blocks * t - usable_blocks

    if own_blocks == 0 and (prefix_blocks * np.ones_like(popularity)).sum() <= usable_blocks:
        return 1.0
    high = 1.0
    while over(high) < 0:
        high *= 2
    t = scipy.optimize.brentq(over, 0.0, high)
    return float((popularity * (1 - np.exp(-popularity * t))).sum())


def first_touch_misses(prefixes: int, workers: int, requests: int | None = None) -> float:
    """Misses because a worker sees a prefix for the first time, after each prefix was sent once: at most K (N - 1).

    In n requests, uniform over prefixes and workers: K (N - 1) (1 - (1 - 1/(K N))^n). null n: all of them.
    """
    pairs = prefixes * (workers - 1)
    if requests is None:
        return float(pairs)
    return pairs * (1 - (1 - 1 / (prefixes * workers)) ** requests)


def affinity_bound(fit: float, prefixes: int, workers: int) -> float:
    """min(1, N c / K): requests sent to the worker that has their prefix, the prefixes placed perfectly."""
    return min(1.0, workers * fit / prefixes)


def hash_affinity_bound(fit: float, prefixes: int, workers: int) -> float:
    """(N / K) E[min(B, c)], B ~ Binomial(K, 1/N): prefixes placed by a hash, so that some workers have too many."""
    load = np.arange(prefixes + 1)
    share = scipy.stats.binom.pmf(load, prefixes, 1 / workers)
    return float(workers / prefixes * (np.minimum(load, fit) * share).sum())


def placed_hit_ratios(
    usable_blocks: int, prefix_blocks: int, own_blocks: int, prefixes: int, workers: int, *, hashed: bool = False
) -> HitRatios:
    """The stack model where each prefix stays on one worker: K / N prefixes on each, or as many as a hash puts there.

    A request's worker has 1 + Binomial(K - 1, 1/N) prefixes then, since the request chooses the prefix first.
    """
    if hashed:
        counts = np.arange(1, prefixes + 1)
        shares = scipy.stats.binom.pmf(counts - 1, prefixes - 1, 1 / workers)
    else:
        low, more = divmod(prefixes, workers)  # `more` workers have one prefix above the others
        counts, shares = np.array([low, low + 1]), np.array([low * (workers - more), (low + 1) * more]) / prefixes
    each = [
        (share, stack_hit_ratios(usable_blocks, prefix_blocks, own_blocks, int(count)))
        for count, share in zip(counts, shares, strict=True)
        if share > 1e-9
    ]
    return HitRatios(*(float(sum(share * ratios[i] for share, ratios in each)) for i in range(3)))


def first_hit_share(prefixes: int, workers: int, sent: np.ndarray) -> np.ndarray:
    """P(hit) of the request after `sent` others, where everything fits and the warm-up sent each prefix once.

    1 - (1 - 1/N)(1 - 1/(K N))^sent: it starts at 1/N, which is no law but a transient.
    """
    return 1 - (1 - 1 / workers) * (1 - 1 / (prefixes * workers)) ** np.asarray(sent, dtype=float)


class Misfit(NamedTuple):
    """How badly a model fits counted hits: chi2 over `points` independent cells, and the chance of so much or more."""

    chi2: float
    points: int
    p_value: float


def misfit(cells: Iterable[tuple[int, int, float]]) -> Misfit | None:
    """From (hits, requests, ratio) of each cell; where the model says 0 or 1 there is no variance: left out."""
    found = [((hits - n * ratio) ** 2 / (n * ratio * (1 - ratio))) for hits, n, ratio in cells if 0 < ratio < 1]
    if not found:
        return None
    return Misfit(sum(found), len(found), float(scipy.stats.chi2.sf(sum(found), len(found))))


def requests_to_tell_apart(one: float, other: float) -> int:
    """Requests after which two ratios differ by 1.96 standard deviations of a measured one."""
    return math.ceil(one * (1 - one) * (1.96 / (one - other)) ** 2)
