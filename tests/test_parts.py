"""The parts of a request's time, from a made-up pair of repeats."""

import pandas as pd
import pytest

from kvlab import claims, parts
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.results import Result

CELL = Cell(name="x", server=ServerConfig(model="tiny"), load=LoadConfig(requests=2, input_tokens=100, output_tokens=3))


class Run:
    """A stored run of two requests that waited `ttft` and `latency` seconds."""

    def __init__(self, ttft, latency, **summary):
        columns = {"phase": "measure", "ok": True, "prompt_tokens": 100}
        self.table = pd.DataFrame({"ttft_s": [ttft, ttft + 0.2], "latency_s": [latency, latency + 0.2]}).assign(
            **columns
        )
        self.manifest = {"summary": summary}

    def requests(self):
        return self.table


def result(*args, **summary):
    return Result(CELL, Run(*args, **summary))


BASE = [result(0.9, 1.9, queue_mean_s=0.5, prefill_mean_s=0.3, wall_s=4.0)] * 2


def test_the_parts_add_up_to_the_latency():
    found = parts.parts_s(BASE[0])
    assert found["rest"] == pytest.approx(1.0 - 0.5 - 0.3)
    assert found["queue"] + found["prefill"] + found["rest"] == pytest.approx(found["ttft"])
    assert found["ttft"] + found["decode"] == pytest.approx(found["latency"])


def test_without_the_servers_histograms_the_rest_is_unknown_not_the_whole():
    found = parts.parts_s(result(0.9, 1.9, queue_mean_s=0.5))
    assert found["rest"] is None and found["decode"] == pytest.approx(1.0)
    assert set(parts.parts_s(Result(CELL, None)).values()) == {None}


def test_what_a_change_adds_is_paired_by_repeat():
    changed = [result(0.9 + d, 2.0 + d, queue_mean_s=0.5 + d, prefill_mean_s=0.3, wall_s=4.2) for d in (0.1, 0.12)]
    added = parts.added_s(changed, BASE)
    assert added["queue"].value == pytest.approx(0.11)
    assert added["prefill"].value == 0 and added["rest"].value == pytest.approx(0)
    assert added["decode"].value == pytest.approx(0.1)
    assert parts.per_token_s(changed, BASE).value == pytest.approx(0.2 / 200)
    assert parts.littles_latency_s(8, 0.001, 100) == pytest.approx(0.8)


def test_the_sentence_names_the_parts_that_are_told_from_zero():
    def claim(part, value, low, high):
        return claims.claim("x", f"adds_{part}_s", "c=8", measured=value, ci=(low, high), unit="s")

    said = parts.sentence([claim("queue", 0.1, 0.05, 0.15), claim("decode", -0.02, -0.05, 0.01)], "adds_")
    assert "distinguishable from 0: queue (waiting" in said and "decode −20 ms (−50 ms to +10 ms)" in said
    assert parts.sentence([], "adds_") is None
