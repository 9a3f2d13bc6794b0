"""What the runs of both layouts say, on small tables; and when splitting a server shortens its step."""

from types import SimpleNamespace

import pandas as pd
import pytest

from kvlab import geometry, layouts
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.measure import Result


def result(*, samples=(), ttft_s=(), c=2, gpus=(), started="a", ready=1.0, itl=None):
    """A result with samples (t_s, running, waiting), and requests sent one after another after a warm-up."""
    load = LoadConfig(concurrency=c, requests=8, warmup_requests=0, input_tokens=16, output_tokens=2)
    requests = pd.DataFrame({"ttft_s": [9.0, *ttft_s], "start_s": range(1 + len(ttft_s)), "ok": True})
    requests["phase"] = ["warmup"] + ["measure"] * len(ttft_s)
    server = {"started_utc": started, "ready_s": ready, "workers": [{"gpu": gpu} for gpu in gpus]}
    run = SimpleNamespace(
        manifest={"server": server, "summary": {"itl_p50_s": itl}},
        samples=lambda: pd.DataFrame(samples, columns=["t_s", "running", "waiting"]),
        requests=lambda: requests,
    )
    return Result(Cell(name="x", server=ServerConfig(model="tiny", engine="cpu"), load=load), run)


def test_the_most_in_one_worker_counts_waiting_requests_of_the_measurement_alone():
    rows = [(0.5, 60, 0), (2.0, 34, 14), (2.1, 16, 0), (6.0, 0, 0)]  # the first one belongs to the warm-up
    assert (
        layouts.most_in_one_worker([result(samples=rows, ttft_s=(1.0,)), result(samples=[(2.0, 40, 0)], ttft_s=(1.0,))])
        == 48
    )
    assert layouts.most_in_one_worker([Result(result().cell, None)]) is None


def test_the_first_wave_is_one_request_a_client_without_the_warm_up():
    found = layouts.first_wave_ttft_s([result(ttft_s=(1.0, 3.0, 50.0))] * 3)
    assert found.value == 2.0 and found.low == found.high == 2.0
    two = layouts.first_wave_ttft_s([result(ttft_s=(1.0, 3.0))] * 2)
    assert (two.low, two.note) == (None, "two repeats: too few for an interval")
    assert layouts.first_wave_ttft_s([Result(result().cell, None)]) is None


def test_repeats_on_one_start_count_once():
    runs = [result(started="a", ready=10.0), result(started="a", ready=10.0), result(started="b", ready=20.0)]
    assert layouts.starts(runs) == [runs[0], runs[2]]
    found = layouts.ready_s(layouts.starts(runs))
    assert (found.value, found.low, found.note) == (15.0, None, "two starts: too few for an interval")


def test_workers_on_one_gpu_are_those_of_the_fullest():
    assert layouts.workers_on_one_gpu(result(gpus=["0", "1", "0"])) == 2
    assert layouts.workers_on_one_gpu(result(gpus=["0", None])) is None


def test_splitting_wins_from_the_weights_on_whose_reading_saves_what_the_exchange_takes():
    border = layouts.split_wins_above_bytes(2e-3, 1e12, 2, kv_bytes=1e9)
    assert border == pytest.approx(3e9)
    assert layouts.split_saves_s(border + 1e9, 1e12, 2) == pytest.approx(2e-3)
    assert layouts.split_wins_above_bytes(1e-3, 1e12, 4) == pytest.approx(4e9 / 3)
    assert layouts.split_wins_above_bytes(-1.0, 1e12, 2) == 0


def test_the_exchange_is_what_reading_does_not_explain_of_paired_steps():
    one, split = [result(itl=2.0), result(itl=3.0)], [result(itl=2.5), result(itl=3.5)]
    found = layouts.exchange_s(one, split, saved_s=1.0)
    assert found.value == 1.5 and found.low is None
    assert layouts.exchange_s(one, [result(), result()], saved_s=1.0) is None


def test_ranks_must_divide_the_heads():
    assert layouts.possible_ranks(geometry.load("Qwen3-1.7B"), {1, 2, 3, 4, 8, 16, 32}) == [1, 2, 4, 8, 16]
