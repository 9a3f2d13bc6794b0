"""The step-time model against published throughputs, and the verdict which limit binds."""

import pytest

from kvlab import steptime
from kvlab.errors import ConfigError
from kvlab.predict import Interval, requests_that_fit
from kvlab.steptime import Shape, StepModel

ARTICLE = Shape(512, 128, 8200)
ARTICLE_TOK_S = {1: 66, 8: 383, 32: 831}


def fitted(shape, throughputs):
    points = [
        (n, n * shape.mean_kv_tokens(), steptime.step_from_throughput(n, tok_s, shape))
        for n, tok_s in throughputs.items()
    ]
    return steptime.fit(points)


def test_fit_recovers_all_three_coefficients():
    true = StepModel(2e-3, 3e-5, 2e-8)
    points = [(n, n * kv, true.step_s(n, n * kv)) for n in (1, 4, 16) for kv in (128, 2048)]
    found = steptime.fit(points)
    assert found[:3] == pytest.approx(true[:3], rel=1e-6)
    assert found.relative_error == pytest.approx(0, abs=1e-9)


def test_fit_never_gives_a_negative_cost():
    falling = steptime.fit([(1, 100, 0.010), (4, 400, 0.009), (16, 1600, 0.008)])
    assert min(falling[:3]) >= 0


@pytest.mark.parametrize(
    "points", [[], [(1, 1, 1)], [(4, 1, 1), (4, 2, 1)], [(1, 1, 1), (2, 2, 0)], [(1, 1, 1), (2, 2, float("nan"))]]
)
def test_fit_refuses_points_that_say_too_little(points):
    with pytest.raises(ConfigError, match="cannot be fitted"):
        steptime.fit(points)


def test_article_throughput_between_the_fitted_ends():
    model = fitted(ARTICLE, {n: ARTICLE_TOK_S[n] for n in (1, 32)})
    assert steptime.predict(model, 8, ARTICLE).throughput_tok_s == pytest.approx(383, rel=0.03)
    # Published median gaps grew from 15 to 25 ms; published mean 1/66 s at one client.
    assert steptime.predict(model, 1, ARTICLE).itl_s == pytest.approx(0.0147, rel=0.02)
    assert steptime.predict(model, 32, ARTICLE).itl_s == pytest.approx(0.023, rel=0.02)


def test_ttft_of_the_article_lies_between_spread_and_wave():
    model = fitted(ARTICLE, ARTICLE_TOK_S)
    at_32 = steptime.predict(model, 32, ARTICLE)
    assert at_32.queue_s == 0
    assert at_32.ttft_s < 0.666 < at_32.ttft_wave_s
    at_64 = steptime.predict(model, 64, ARTICLE, requests_that_fit(1378, 512, 128, 16).low)
    assert at_64.ttft_wave_s == pytest.approx(5.7, rel=0.05)


def test_small_cpu_model_saturates_at_what_fits():
    shape = Shape(512, 128, 9500)
    model = fitted(shape, {1: 381, 4: 996, 8: 1387})
    limit = requests_that_fit(213, 512, 128, 32).high
    at_16, at_32 = (steptime.predict(model, n, shape, limit) for n in (16, 32))
    assert at_16.throughput_tok_s == at_32.throughput_tok_s == pytest.approx(1_500, rel=0.06)
    assert at_32.ttft_s == pytest.approx(1.822, rel=0.05)


def test_prefill_share_costs_throughput_but_not_the_median_gap():
    model = StepModel(0.01, 0.0, 0.0)
    free, paid = (steptime.predict(model, 10, Shape(1000, 100, speed)) for speed in (None, 10_000))
    assert free.itl_s == paid.itl_s == 0.01
    assert free.token_s == 0.01
    assert paid.token_s == pytest.approx(0.01 + 10 * 0.1 / 100)
    assert paid.throughput_tok_s == pytest.approx(500)


def test_knee_of_compute():
    model, shape = StepModel(0.01, 0.0005, 0.0), Shape(1000, 100)
    low, high = steptime.compute_knee(model, shape)
    assert low == high == pytest.approx(21)
    # Where the low-load line N / (a + k) meets the ceiling, the inverse of what a request adds to a step.
    assert low / (0.01 + 0.0005) == pytest.approx(1 / 0.0005)
    assert steptime.compute_knee(StepModel(0.01, 0, 0), shape) is None


def test_reading_kv_makes_the_compute_knee_an_interval():
    low, high = steptime.compute_knee(StepModel(0.01, 0.0, 1e-6), Shape(100, 101))
    assert (low, high) == (pytest.approx(51), pytest.approx(101))


FIT = Interval(34.4, 37.8)


@pytest.mark.parametrize(
    ("clients", "max_num_seqs", "binds", "queue"),
    [
        (8, 64, "clients", None),
        (64, 64, "kv", "kv"),
        (64, 16, "max_num_seqs", "max_num_seqs"),
        (16, 16, "clients", None),
    ],
)
def test_which_limit_binds(clients, max_num_seqs, binds, queue):
    verdict = steptime.binding_limit(clients, FIT, max_num_seqs)
    assert (verdict.binds, verdict.queue) == (binds, queue)
    assert binds in verdict.sentence


def test_overlapping_limits_are_named_together():  # pitfall 30
    verdict = steptime.binding_limit(64, FIT, 36)
    assert set(verdict.possible) == {"kv", "max_num_seqs"}
    assert "may bind too" in verdict.sentence


def test_compute_can_bind_far_below_the_kv():  # pitfall 30
    model, shape = StepModel(0.01, 0.001, 0.0), Shape(512, 128)
    verdict = steptime.binding_limit(64, Interval(200, 220), 256, model, shape)
    assert (verdict.binds, verdict.queue) == ("compute", None)
    assert steptime.binding_limit(64, FIT, None, model, shape).queue == "kv"


def test_knee_is_an_interval_with_its_limit():  # pitfall 30
    assert steptime.knee(FIT, 64) == (34.4, 37.8, "kv")
    assert steptime.knee(FIT, 16) == (16, 16, "max_num_seqs")
    assert steptime.knee(FIT, 36) == (34.4, 36, "max_num_seqs")
