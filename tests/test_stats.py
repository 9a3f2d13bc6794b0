"""Intervals with a minimum n, and the summary of a run, on rows small enough to compute by hand."""

import math

import numpy as np
import pandas as pd
import pytest
from scipy import stats as scipy_stats
from tables_for_tests import failure, request, requests, samples

from kvlab import rows, stats
from kvlab.config import LoadConfig
from kvlab.errors import KvlabError

LOAD = LoadConfig(concurrency=2, requests=2, input_tokens=100, output_tokens=3)


def summary(frame, scrapes=None, window=None, load=LOAD, **more):
    return stats.summarise(frame, samples() if scrapes is None else scrapes, window, load, **more)


# -- estimates


def test_minimum_n_is_the_published_rule():  # pitfall 16
    assert stats.minimum_n(0.95) == 72
    assert stats.minimum_n(0.99) == 368
    assert stats.minimum_n(0.05) == 72


@pytest.mark.parametrize("q", [0.5, 0.9, 0.95, 0.99])
def test_minimum_n_is_where_the_interval_becomes_finite(q):
    n = stats.minimum_n(q)
    at, below = (scipy_stats.quantile_test(np.arange(float(k)), p=q).confidence_interval() for k in (n, n - 1))
    assert np.isfinite([at.low, at.high]).all()
    assert not np.isfinite([below.low, below.high]).all()


def test_too_few_values_have_no_interval_and_say_how_many_are_needed():  # pitfall 16
    few = stats.percentile(range(71), 0.95)
    assert (few.low, few.high) == (None, None)
    assert few.note == "n too small (71, needs 72)"
    enough = stats.percentile(range(72), 0.95)
    assert enough.low <= enough.value <= enough.high == 71
    assert enough.note == ""


def test_the_interval_covers_the_true_percentile_as_often_as_it_says():
    rng = np.random.default_rng(1)
    truth = -math.log(0.05)
    found = [stats.percentile(rng.exponential(size=200), 0.95) for _ in range(300)]
    assert np.mean([e.low <= truth <= e.high for e in found]) > 0.93


def test_nulls_are_no_values():  # pitfall 5
    found = stats.percentile(pd.array([None, 1.0, None, 3.0], dtype="Float64"), 0.5)
    assert (found.value, found.n) == (2.0, 2)
    assert stats.percentile([None, float("nan")], 0.5) == stats.Estimate(None, None, None, 0, "no values")


def test_a_percentage_in_place_of_a_share_is_refused():
    with pytest.raises(KvlabError, match="0.95, not 95"):
        stats.percentile([1, 2], 95)


def test_infinity_is_refused():
    with pytest.raises(KvlabError, match="infinite"):
        stats.percentile([1.0, math.inf], 0.5)


def test_mean_interval_is_students():
    found = stats.mean_interval([1.0, 2.0, 3.0])
    assert found.value == 2.0
    assert found.high - 2.0 == pytest.approx(4.302653 / math.sqrt(3))
    assert stats.mean_interval([5.0]).low is None
    assert stats.mean_interval([]).value is None


def test_paired_difference_is_second_minus_first_and_drops_incomplete_pairs():  # pitfall 25
    found = stats.paired_difference([1.0, 2.0, None], [2.0, 4.0, 9.0])
    assert (found.value, found.n) == (1.5, 2)
    # The pairs differ little although the values differ a lot: that is what pairing is for.
    assert stats.paired_difference([1, 100, 1000], [2, 101, 1001]).high == pytest.approx(1)
    with pytest.raises(KvlabError, match="equal lengths"):
        stats.paired_difference([1], [1, 2])


def test_spread():
    assert stats.spread([831, 833]) == pytest.approx(2 / 832)
    assert stats.spread([831]) is None


def test_share_has_an_interval_inside_zero_and_one():
    found = stats.share(200, 200)
    assert found.value == 1.0 and 0.97 < found.low < 1 and found.high == 1
    assert stats.share(0, 0).value is None


# -- rows


def test_itl_divides_the_gap_by_the_tokens_of_its_event():  # pitfall 2
    frame = requests(request(0.0, [(1.0, 1), (1.4, 4), (1.5, 1)]))
    assert rows.itl_s(frame) == pytest.approx([0.1, 0.1])
    assert rows.gaps_s(frame) == pytest.approx([0.4, 0.1])


def test_events_without_tokens_are_no_events():  # pitfall 1
    frame = requests(request(0.0, [(0.1, 0), (1.0, 1), (1.2, 0), (1.5, 1)]))
    assert rows.itl_s(frame) == pytest.approx([0.5])


def test_itl_is_pooled_so_that_one_stall_stays_visible():
    steady = [request(0.0, [(0.1 * (i + 1), 1) for i in range(11)]) for _ in range(3)]
    stalled = request(0.0, [(0.1, 1), (0.2, 1), (5.2, 1)])
    found = summary(requests(*steady, stalled))
    assert found["itl_max_s"] == pytest.approx(5.0)
    assert found["itl_p50_s"] == pytest.approx(0.1)
    assert found["itl_n"] == 32


def test_throughput_counts_tokens_by_the_time_of_their_event():  # pitfall 17
    frame = requests(request(0.0, [(1.0, 1), (2.0, 3), (3.0, 1), (9.0, 5)]))
    found = summary(frame, window=(1.0, 3.0))
    assert found["throughput_tok_s"] == pytest.approx(4 / 2)
    assert found["throughput_whole_tok_s"] == pytest.approx(10 / 9)


def test_the_whole_time_ends_at_the_last_content():  # pitfall 4
    frame = requests(request(0.0, [(1.0, 1), (2.0, 1)], end_s=50.0))
    assert summary(frame)["wall_s"] == pytest.approx(2.0)


def test_no_window_no_plateau_throughput():
    found = summary(requests(request()), window=None)
    assert found["throughput_tok_s"] is None and found["concurrency_delivered"] is None
    assert summary(requests(request()), window=(1.0, 1.0))["throughput_tok_s"] is None


def test_missing_stamps_make_the_plateau_throughput_null_not_small():
    frame = requests(request(), request(event_times_s=None, event_tokens=None))
    assert summary(frame, window=(0.0, 1.0))["throughput_tok_s"] is None


def test_failures_are_counted_with_their_reasons_and_never_as_fast_answers():  # pitfall 5, pitfall 6
    frame = requests(request(0.0), failure(0.0, 10.0), failure(0.0, 10.0), failure(0.0, 0.1, "HTTP 503"))
    found = summary(frame, window=(0.0, 10.0))
    assert (found["requests"], found["n"], found["failures"]) == (4, 1, 3)
    assert found["failure_reasons"] == {"timeout": 2, "HTTP 503": 1}
    assert found["ttft_p50_s"] == pytest.approx(0.5)
    # The time that failures took is not left out.
    assert found["throughput_whole_tok_s"] == pytest.approx(3 / 10)
    assert found["requests_per_s"] == pytest.approx(1 / 10)


def test_only_failures_give_nulls_not_zeros():  # pitfall 5
    found = summary(requests(failure(0.0, 1.0)), window=(0.0, 1.0))
    numbers = ("throughput_tok_s", "throughput_whole_tok_s", "ttft_p50_s", "itl_p50_s", "itl_max_s", "token_hit_ratio")
    assert [found[name] for name in numbers] == [None] * len(numbers)
    assert found["n"] == 0 and found["failures"] == 1


def test_no_rows_at_all():
    found = summary(requests(), window=(0.0, 1.0))
    assert found["n"] == 0 and found["wall_s"] is None and found["littles_law_residual"] is None


def test_the_warm_up_is_not_measured():  # pitfall 18
    slow = request(0.0, [(9.0, 1), (9.1, 1)], phase="warmup", cached_tokens=0)
    found = summary(requests(slow, request(10.0, [(10.5, 1), (10.6, 1)], cached_tokens=50)), window=(0.0, 20.0))
    assert found["n"] == 1
    assert found["ttft_p50_s"] == pytest.approx(0.5)
    assert found["token_hit_ratio"] == pytest.approx(0.5)
    assert found["throughput_tok_s"] == pytest.approx(2 / 20)


def test_a_tail_percentile_of_few_requests_is_null_and_says_why():  # pitfall 16
    found = summary(requests(*[request(0.0, [(0.1 * k, 1)]) for k in range(1, 72)]))
    assert found["ttft_p95_s"] is None and found["ttft_p95_s_note"] == "n too small (71, needs 72)"
    assert found["ttft_p50_s_low"] < found["ttft_p50_s"] < found["ttft_p50_s_high"]
    assert found["ttft_p50_s_note"] is None
    gaps = [(0.1 * k, 1) for k in range(1, 369)]
    assert summary(requests(request(0.0, gaps)))["itl_p99_s"] is None  # 367 gaps
    assert summary(requests(request(0.0, [*gaps, (36.9, 1)])))["itl_p99_s"] == pytest.approx(0.1)


def test_littles_law_shows_the_concurrency_that_was_not_delivered():  # pitfall 11
    one_at_a_time = [request(float(k), [(k + 0.5, 1), (k + 1.0, 1)]) for k in range(10)]
    found = summary(requests(*one_at_a_time), window=(0.0, 10.0))
    assert found["concurrency_delivered"] == pytest.approx(1.0)
    assert found["littles_law_residual"] == pytest.approx(-0.5)


def test_littles_law_counts_only_the_part_inside_the_window_and_failures_too():
    frame = requests(request(0.0, [(5.0, 1), (20.0, 1)]), failure(5.0, 15.0))
    assert rows.littles_law(frame, (10.0, 20.0)) == pytest.approx(1.5)


def test_an_open_loop_has_no_target_concurrency():
    load = LoadConfig(arrival="poisson", rate_per_s=1.0, requests=2, input_tokens=100, output_tokens=3)
    assert summary(requests(request()), window=(0.0, 1.0), load=load)["littles_law_residual"] is None


def test_hits_by_token_and_by_request():
    load = LoadConfig(requests=4, input_tokens=100, output_tokens=3, workload="shared_prefix", prefix_tokens=70)
    cached = [64, 32, 0, None]
    found = summary(requests(*[request(cached_tokens=c) for c in cached]), load=load, block_size=32)
    assert found["token_hit_ratio"] == pytest.approx(96 / 300)  # the row that reports nothing is left out, not 0
    assert found["requests_with_hit"] == 2
    assert found["request_hit_ratio"] == pytest.approx(1 / 3)  # 64 is the prefix of 70 rounded down to blocks
    unreported = summary(requests(request(cached_tokens=None)), load=load, block_size=32)
    assert unreported["token_hit_ratio"] is None and unreported["requests_with_hit"] is None


# -- samples


def scrape(t_s, preemptions=0.0, **more):
    return {"t_s": t_s, "preemptions": preemptions} | more


def test_counters_start_after_the_warm_up_and_end_at_the_last_scrape():  # pitfall 13
    warm = request(0.0, [(0.5, 1), (1.0, 1)], phase="warmup")
    frame = requests(warm, request(2.0, [(2.5, 1), (3.0, 1)]))
    scrapes = samples(
        scrape(-0.1, 0, prefix_queries=0, prefix_hits=0, queue_sum_s=0, queue_count=0),
        scrape(1.5, 7, prefix_queries=1000, prefix_hits=900, queue_sum_s=5, queue_count=5),
        scrape(3.1, 8, prefix_queries=1100, prefix_hits=900, queue_sum_s=5, queue_count=5),
        scrape(3.2, 9, prefix_queries=1200, prefix_hits=1000, queue_sum_s=6, queue_count=7),
    )
    found = summary(frame, scrapes)
    assert found["preemptions"] == 2
    assert found["token_hit_ratio_counters"] == pytest.approx(0.5)
    assert found["queue_mean_s"] == pytest.approx(0.5)
    assert found["prefill_mean_s"] is None  # not scraped


@pytest.mark.parametrize(
    "scrapes",
    [
        [scrape(0.5), scrape(9.0)],  # none between the warm-up and the start
        [scrape(1.5), scrape(2.9)],  # none after the end
        [scrape(1.5, 5.0), scrape(2.5, 1.0), scrape(9.0, 6.0)],  # the server was restarted
        [scrape(1.5, None), scrape(9.0, 1.0)],  # not reported
    ],
)
def test_a_counter_that_cannot_be_trusted_is_null(scrapes):
    warm = request(0.0, [(0.5, 1), (1.0, 1)], phase="warmup")
    frame = requests(warm, request(2.0, [(2.5, 1), (3.0, 1)]))
    assert summary(frame, samples(*scrapes))["preemptions"] is None


def test_counters_of_several_workers_are_added_and_one_missing_worker_is_null():
    frame = requests(request(1.0, [(1.5, 1), (2.0, 1)]))
    both = [scrape(t, n, worker=w) for w, t, n in [("a", 0, 1), ("b", 0, 1), ("a", 3, 2), ("b", 3.1, 5)]]
    assert summary(frame, samples(*both))["preemptions"] == 5
    assert summary(frame, samples(*both[:3]))["preemptions"] is None


def test_gauges_add_up_over_workers_that_are_scraped_one_after_the_other():
    frame = requests(request(0.0, [(0.5, 1), (2.0, 1)]))
    scrapes = samples(
        {"t_s": 0.1, "worker": "a", "running": 3, "kv_usage": 0.2},
        {"t_s": 0.2, "worker": "b", "running": 4, "kv_usage": 0.9},
        {"t_s": 5.0, "worker": "a", "running": 99, "kv_usage": 1.0},
    )
    found = summary(frame, scrapes)
    assert found["running_max"] == 7
    assert found["kv_usage_max"] == pytest.approx(0.9)
    assert found["waiting_max"] is None


def test_a_request_that_goes_from_one_worker_to_another_counts_once():
    frame = requests(request(0.0, [(0.5, 1), (2.0, 1)]))
    moved = [("a", 0.1, 1), ("b", 0.2, 0), ("b", 0.6, 1), ("a", 0.7, 0)]  # who answers first differs
    scrapes = samples(*({"t_s": t, "worker": worker, "running": n} for worker, t, n in moved))
    assert summary(frame, scrapes)["running_max"] == 1


def test_running_is_averaged_over_the_time_of_the_plateau():
    frame = requests(request(0.0, [(0.5, 1), (10.0, 1)]))
    scrapes = samples(*({"t_s": t, "running": n} for t, n in [(0.5, 100), (1.0, 4), (2.0, 8), (9.0, 100)]))
    assert summary(frame, scrapes, window=(1.0, 5.0))["running_mean"] == pytest.approx((4 * 1 + 8 * 3) / 4)
    assert summary(frame, scrapes)["running_mean"] is None


def test_without_scrapes_the_server_side_is_null():
    found = summary(requests(request()), window=(0.0, 1.0))
    names = ("running_max", "running_mean", "preemptions", "prefix_hits", "token_hit_ratio_counters", "queue_mean_s")
    assert [found[name] for name in names] == [None] * len(names)
