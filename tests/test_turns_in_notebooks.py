"""Notebooks that compare take turns: their cells, run here on made-up runs, and on those of an older version."""

import json
from types import SimpleNamespace

import matplotlib
import pytest
from replays_for_tests import ROOT

from kvlab import claims, measure, plot, profile, reference, store
from kvlab.config import Cell
from kvlab.results import NO_ROWS, NO_SAMPLES

matplotlib.use("agg")


class Made:
    """A stored run: the later the repeat, the larger its numbers; fp8 and caching make them smaller."""

    def __init__(self, cell, index):
        self.id, scale = f"{cell.name}-r{cell.repeat}-{index}", 1 + 0.01 * cell.repeat
        scale *= 0.5 if cell.server.kv_cache_dtype == "fp8" or cell.server.enable_prefix_caching is not False else 1
        step_s = scale * (0.01 + 0.001 * cell.load.concurrency)
        summary = {"itl_p50_s": step_s, "throughput_tok_s": 0.9 * cell.load.concurrency / step_s, "n": 8}
        summary |= {"ttft_p50_s": scale * (0.05 + cell.load.input_tokens / 5000), "queue_mean_s": 0.01 * scale}
        summary |= {"ttft_p50_s_low": 0.01, "ttft_p50_s_high": 9.0, "running_max": 3, "preemptions": cell.repeat}
        server = {"capacity": {"metric_blocks": 85, "metric_block_size": 32}}
        created = f"2026-01-01T00:00:00.{index:03d}Z"  # one after another, as asked for
        self.manifest = {"summary": summary, "server": server, "certificate": {}, "created_utc": created}

    def requests(self):
        return NO_ROWS

    def samples(self):
        return NO_SAMPLES

    def log(self):
        return None


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Runs a notebook's code cells up to the one that holds `last`; `order` of its variables names what it measured.

    `turns`: repeats that are stored; an older version left one.
    """
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(plot, "save", lambda figure, *_, **__: figure)  # drawn, and not written
    monkeypatch.setattr(reference, "measured", lambda lab, server, load, _: not_there(lab, server, load))

    def execute(name, last, turns=9, **given):
        order = []

        def measured(lab, cells, **_):
            order.extend(cells)
            there = [cell.repeat < turns and cell.load.workload != "perplexity" for cell in cells]
            return [
                measure.Result(cell, Made(cell, n) if is_there else None, None if is_there else "no run is stored")
                for n, (cell, is_there) in enumerate(zip(cells, there, strict=True))
            ]

        monkeypatch.setattr(measure.Lab, "measure", measured)
        notebook = json.loads((ROOT / "notebooks" / f"{name}.ipynb").read_text())
        space = {"__name__": "cells"}
        for source in ("".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"):
            exec(source, space)
            if "PROFILE: str" in source:
                space |= {"PROFILE": "cpu-tiny", "MACHINE": "fake", "MODE": "replay"} | given
            if last in source:
                return SimpleNamespace(**space | {"order": order})
        raise AssertionError(f"no cell of {name} holds {last}")

    return execute


def not_there(lab, server, load):
    return measure.Result(Cell(name="reference", server=server, load=load), None, "no run is stored")


def stated(quantity, **where):
    found = claims.from_frame(claims.read(store.machine_dir("fake")))
    wanted = {key: str(value) for key, value in where.items()}
    found = [c for c in found if c.quantity == quantity]
    return [c for c in found if wanted.items() <= claims.parse_conditions(c.conditions).items()]


def test_long_inputs_of_both_kv_formats_take_turns(run):  # pitfall 16
    done = run("05_fp8_kv", 'plot.save(figure, lab, "fp8_kv"')
    long = [(c.name.partition("-")[0], c.repeat) for c in done.order if c.load.concurrency == 8]
    assert long == [("float32", 0), ("fp8", 0), ("fp8", 1), ("float32", 1), ("float32", 2), ("fp8", 2)]
    across = [*stated("ttft_p50_s", input="long"), *stated("queue_mean_s", input="long")]
    (ratio,) = stated("ttft_ratio")
    assert [len(c.runs) for c in across] == [3] * 4 and len(ratio.runs) == 6
    assert ratio.measured == pytest.approx(2) and ratio.ci_low == pytest.approx(2)  # each pair alike, the turns are not
    assert all(c.ci_low < c.measured < c.ci_high < 1 for c in across)  # of the turns, not of the requests of one
    assert not any(c.reason for c in [*across, ratio])
    assert "one turn" in done.left.get_legend_handles_labels()[1]
    assert "95%" in done.right.texts[0].get_text()


def test_one_turn_of_long_inputs_stays_measured_and_says_so(run):
    ids = [c.id for c in run("05_fp8_kv", "lab.write(claims)").claims]
    done = run("05_fp8_kv", 'plot.save(figure, lab, "fp8_kv"', turns=1)
    assert [c.id for c in done.claims] == ids
    (ratio,) = stated("ttft_ratio")
    assert (ratio.measured, ratio.ci_low, ratio.reason) == (
        pytest.approx(2),
        None,
        "fewer than three turns: too few for an interval",
    )
    assert len(ratio.runs) == 2
    assert {c.reason for c in stated("queue_mean_s", input="long")} == {"one value (needs 2)"}
    assert {(c.ci_low, c.ci_high) for c in stated("ttft_p50_s", input="long")} == {(0.01, 9.0)}  # of the run's requests
    assert "one turn" not in done.left.get_legend_handles_labels()[1]
    assert "one value" in done.right.texts[0].get_text()


@pytest.mark.parametrize("turns", [9, 1])
def test_one_client_with_and_without_a_cache_takes_turns(run, turns):
    done = run("06_prefix_cache", "lab.write(claims)", turns)
    single = [c for c in done.order if c.name == "alone-in3000"]
    assert [(c.server.enable_prefix_caching is not False, c.repeat) for c in single] == [
        (True, 0), (False, 0), (False, 1), (True, 1), (True, 2), (False, 2)
    ]  # fmt: skip
    found = stated("ttft_s", c=1)
    assert [claims.parse_conditions(c.conditions)["caching"] for c in found] == ["on", "off"]
    if turns > 1:
        assert all(len(c.runs) == 3 and 0.3 < c.ci_low < c.measured < c.ci_high and not c.reason for c in found)
    else:
        assert all(len(c.runs) == 1 and c.ci_low == 0.01 and "not in turns" in c.reason for c in found)


@pytest.mark.parametrize("turns", [9, 1])
def test_every_repeat_of_a_cap_is_drawn_beside_the_mean(run, turns):  # pitfall 16
    done = run("04_max_num_seqs", 'plot.save(figure, lab, "max_num_seqs"', turns, CAPS=[2, 4], CLIENTS=4)
    for axis, quantity in zip(done.axes, ("throughput_tok_s", "ttft_p50_s"), strict=False):
        drawn = [line.get_ydata() for line in axis.lines if line.get_label() == "one repeat"]
        seen = sorted(r.value(quantity) for r in done.runs if r.run is not None)
        assert len(seen) == min(turns, 3) * len(done.caps)
        assert [sorted(points) for points in drawn] == ([seen] if turns > 1 else [])  # a single one is the mean


def test_what_the_cpu_profile_compares_is_repeated():
    chosen = profile.load_profile("cpu-tiny")
    assert min(chosen.max_num_seqs.repeats, chosen.fp8_kv.long.repeats, chosen.prefix_cache.single_repeats) >= 3


def test_random_and_trained_weights_take_turns_on_two_servers_each(run):  # pitfall 16
    done = run("13_repeatability", "lab.write(claims)")
    pairs = [(c.name, c.server) for c in done.order if "-turn" in c.name]
    assert [name for name, _ in pairs[:4]] == ["trained-turn0", "dummy-turn0", "dummy-turn1", "trained-turn1"]
    kinds = [
        {server.model_dump_json() for _, server in pairs if server.load_format == kind} for kind in ("auto", "dummy")
    ]
    assert [len(kind) for kind in kinds] == [2, 2]
    starts = {c.server.model_dump_json() for c in done.order if c.name.startswith("start")}
    assert kinds[0] < starts and not kinds[1] & starts  # those with trained weights are up already
    (change,) = stated("dummy_changes_throughput_tok_s")
    assert change.computed == 0 and change.measured == pytest.approx(0) and len(change.runs) == len(pairs)
    assert [c.measured for c in stated("num_blocks")] == [85, 85]


def test_a_profile_with_random_weights_only_says_so(run):
    run("13_repeatability", "lab.write(claims)", PROFILE="h200")
    missing = [*stated("num_blocks"), *stated("dummy_changes_itl_p50_s")]
    assert {c.reason for c in missing} == {"this profile has random weights only"} and len(missing) == 3
