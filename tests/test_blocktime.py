"""The account in seconds, against sums made by hand."""

import pytest

from kvlab.blocks import Engine, Job, closed_loop
from kvlab.blocktime import step_s, timed
from kvlab.predict import PrefillModel
from kvlab.steptime import StepModel

STEP, PREFILL = StepModel(0.010, 0.001, 0.0), PrefillModel(0.005, 0.001, 0.0)


def test_one_client_pays_a_prefill_and_its_steps():
    account = closed_loop(Engine(31, 32), 1, [Job(100, 11)] * 3)
    found = timed(account, STEP, PREFILL)
    request_s = 0.005 + 0.100 + 10 * 0.011
    empty_s = 2 * 0.005  # the steps in which the client is away
    assert found.ttft_p50_s == pytest.approx(0.105 + 0.005)
    assert found.wall_s == pytest.approx(3 * request_s + empty_s)
    assert found.throughput_whole_tok_s == pytest.approx(33 / found.wall_s)
    assert found.paused_s == 0


def test_a_long_prefill_costs_its_pairs():
    step = closed_loop(Engine(31, 32), 1, [Job(200, 1)]).steps[0]
    assert step_s(step, STEP, PrefillModel(0.005, 0.001, 1e-6)) == pytest.approx(0.005 + 0.2 + 1e-6 * 200 * 100)


def test_a_capped_server_lets_requests_queue():
    jobs = [Job(100, 50)] * 16
    wide = timed(closed_loop(Engine(100, 32, max_num_seqs=8), 8, jobs), STEP, PREFILL)
    narrow = timed(closed_loop(Engine(100, 32, max_num_seqs=2), 8, jobs), STEP, PREFILL)
    assert narrow.queue_s > wide.queue_s + 1
    assert narrow.ttft_p50_s > wide.ttft_p50_s
    assert narrow.throughput_tok_s < wide.throughput_tok_s


def test_a_preempted_request_pauses_until_its_next_token():
    account = closed_loop(Engine(4, 4, prefix_caching=False), 2, [Job(4, 6)] * 2)
    # Evicted before step 5, which takes one decode; back in step 6 with a prefill of its 8 tokens.
    assert timed(account, STEP, PREFILL).paused_s == pytest.approx((0.011 + 0.005 + 0.008) / 2)
