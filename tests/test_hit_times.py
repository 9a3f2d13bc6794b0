"""The median of a mixture, and hits and misses apart."""

import numpy as np
import pytest

from kvlab import hit_times
from kvlab.hit_times import Split

HIT, MISS = np.linspace(0.03, 0.05, 101), np.linspace(0.09, 0.13, 101)


def test_the_median_moves_from_hits_to_misses_with_their_share():
    medians = [hit_times.mixture_quantile(HIT, MISS, share) for share in (1.0, 0.95, 0.5, 0.1, 0.0)]
    assert medians == sorted(medians)
    assert medians[0] == pytest.approx(0.04) and medians[-1] == pytest.approx(0.11)


def test_a_mixture_is_the_distribution_of_what_was_mixed():
    rng = np.random.default_rng(1)
    mixed = np.concatenate([rng.choice(HIT, 3000), rng.choice(MISS, 7000)])
    assert hit_times.mixture_quantile(HIT, MISS, 0.3) == pytest.approx(np.median(mixed), abs=0.001)


def test_a_part_that_is_missing_gives_no_median():
    assert hit_times.mixture_quantile(np.array([]), MISS, 0.5) is None
    assert hit_times.mixture_quantile(HIT, np.array([]), 1.0) == pytest.approx(0.04)
    nothing = Split(np.array([]), np.array([]), None)
    assert nothing.share is None and hit_times.mixed_median(nothing, [Split(HIT, MISS, None)]) is None
    assert hit_times.mixed_median(Split(HIT, MISS, None), []) is None


def test_other_points_times_and_this_points_share():
    here = Split(HIT[:10], np.repeat(MISS, 3), None)  # mostly misses
    assert hit_times.mixed_median(here, [Split(HIT, MISS, None)]) == pytest.approx(0.11, abs=0.002)


def test_tails_of_few_requests_have_no_value():
    found = hit_times.percentiles(HIT[:20])
    assert found["p50"].value is not None and found["p99"].value is None and "too small" in found["p99"].note
    assert hit_times.percentiles(np.array([]))["p50"].value is None


def test_without_runs_there_is_nothing_to_split():
    assert len(hit_times.split([]).every) == 0 and hit_times.split([]).share is None
