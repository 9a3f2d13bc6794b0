"""Where the seconds and the memory of a start go, what warm caches can save, and when graphs pay."""

import pytest

from kvlab import claims, explain, plot, plot_start, predict, startup, store
from kvlab.startup_log import PHASES

COLD = {
    "imports": 15.0,
    "model inspection": 22.0,
    "engine imports": 26.0,
    "engine start": 3.0,
    "weights": 1.0,
    "profile run": 9.0,
    "compile": 21.0,
    "kv profiling": 3.0,
    "kv cache": 0.0,
    "graph capture": 7.0,
    "warm-up": 20.0,
    "API start": 1.0,
    "first answer": 0.5,
}


def server(**startup_fields):
    return {"startup": startup_fields}


def test_every_phase_of_the_log_has_a_place_in_the_bar():
    grouped = [phase for phases in startup.GROUPS.values() for phase in phases]
    assert sorted(grouped) == sorted(["imports", *(name for name, _ in PHASES)])


def test_the_groups_add_up_to_the_whole_start():
    found = startup.phase_seconds(server(timeline=COLD))
    assert sum(found.values()) == pytest.approx(sum(COLD.values()))
    assert (found["imports"], found["compile"], found["first answer"]) == (44.0, 30.0, 1.5)


def test_a_phase_that_a_start_lacks_is_no_zero():
    eager = {name: s for name, s in COLD.items() if name not in ("profile run", "compile", "graph capture")}
    found = startup.phase_seconds(server(timeline=eager))
    assert not {"compile", "graph capture"} & found.keys()
    assert startup.phase_seconds(None) == startup.phase_seconds(server()) == {}


def test_what_caches_and_eager_can_save_follows_from_the_cold_start():
    found = startup.phase_seconds(server(timeline=COLD))
    assert startup.warm_ready_s(found) == pytest.approx(sum(COLD.values()) - 22.0 - 30.0 - 20.0)
    assert startup.saved_by_eager_s(found) == pytest.approx(30.0 + 7.0 + 20.0)
    assert startup.warm_ready_s({}) is None
    assert startup.saved_by_eager_s({"imports": 9.0}) is None


PARTS = {"requested": 13.98, "weights": 3.22, "peak_activation": 0.64, "non_torch": 0.22, "graphs": 0.53}


def test_the_pool_is_what_the_other_parts_leave():  # pitfall 19
    parts = startup.memory_bytes(server(memory_gib=PARTS, available_kv_gib=9.9))
    assert parts["kv"] == 9.9 * 2**30
    # A recorded start of vLLM 0.26: the graphs are captured after the pool is sized.
    assert startup.kv_bytes_from_parts(parts) == pytest.approx(parts["kv"], rel=2e-3)
    newer = {name: v for name, v in PARTS.items() if name not in ("weights", "non_torch")}
    newer["weights_and_non_torch"] = 3.44
    assert startup.kv_bytes_from_parts(newer) == pytest.approx(startup.kv_bytes_from_parts(PARTS))


def test_without_a_part_there_is_no_sum():
    for name in ("requested", "weights", "peak_activation"):
        assert startup.kv_bytes_from_parts({k: v for k, v in PARTS.items() if k != name}) is None
    assert startup.memory_bytes(server(memory_gib={}, available_kv_gib=0.04)) == {}
    assert startup.memory_bytes(None) == {}


def test_what_a_warm_start_no_longer_holds_back_becomes_tokens():
    cold, warm = {"peak_activation": 3_000_000.0}, {"peak_activation": 1_000_000.0}
    assert startup.tokens_given_back(cold, warm, 1000) == 2000
    assert startup.tokens_given_back(cold, {}, 1000) is None


def test_the_part_that_moved_most_is_named_and_the_pool_is_none_of_them():
    cold = {"peak_activation": 2.0, "non_torch": 1.0, "kv": 5.0}
    assert startup.moved_most(cold, {"peak_activation": 1.5, "non_torch": 0.8, "kv": 5.7}) == ("peak_activation", -0.5)
    assert startup.moved_most(cold, {"kv": 6.0}) is None


def test_a_gpu_hides_the_launches_of_a_large_model_and_a_cpu_none():
    """The article's steps: 5.95 and 9.26 ms on 28 layers; the larger models then gain nothing."""
    launch = predict.step_overhead_s(5.95e-3, 9.26e-3, asynchronous=True)
    assert predict.eager_step_s(15.15e-3, launch, asynchronous=True) == 15.15e-3
    assert predict.eager_step_s(2.7e-3, launch, asynchronous=True) == 9.26e-3
    overhead = predict.step_overhead_s(2.4e-3, 3.0e-3, asynchronous=False)
    assert predict.eager_step_s(20e-3, overhead, asynchronous=False) == pytest.approx(20.6e-3)
    assert predict.step_overhead_s(3.0e-3, 2.9e-3, asynchronous=False) == 0.0


def test_a_gain_is_what_the_longer_step_adds_to_the_whole_time_of_a_token():
    # 10 ms a token with graphs, 4 of them the step; an eager step of 14 ms makes 20 ms of it.
    assert predict.gain_of_shorter_step(4e-3, 14e-3, 32 / 10e-3, 32) == pytest.approx(1.0)


def test_gains_come_from_the_claims_of_any_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))

    def claim(switch, arm, c, value):
        at = {"model": "tiny", "c": c, switch: arm}
        return claims.claim("cuda_graphs", "throughput_tok_s", at, measured=value, unit="tok/s")

    rows = [claim("compile", "on", 1, 150), claim("compile", "off", 1, 100), claim("compile", "on", 32, 500)]
    reason = {"measured": None, "unit": "tok/s", "reason": "no GPU"}
    rows += [claims.claim("cuda_graphs", "throughput_tok_s", {"model": "tiny", "c": 1, "graphs": "on"}, **reason)]
    claims.write_section(store.machine_dir("mine"), "cuda_graphs", rows)
    (found,) = plot_start.gains("mine")
    assert (found["model"], found["c"], found["gain"]) == ("tiny", 1, pytest.approx(0.5))
    assert plot_start.gains("other") == []
    gain = claims.claim("cuda_graphs", "gain_throughput", {"model": "tiny", "c": 1}, measured=0.48, unit="ratio")
    claims.write_section(store.machine_dir("mine"), "cuda_graphs", [*rows, gain])  # the picture says what the text says
    assert plot_start.gains("mine")[0]["gain"] == 0.48


def phase(name, seconds, start="server=a;caches=cold"):
    value = {"measured": seconds} if seconds is not None else {"reason": "this start has no such phase"}
    return claims.claim("startup", "phase_s", f"{start};phase={name}", unit="s", **value)


def test_the_longest_phase_of_one_start_is_said():
    rows = [phase("imports", 6.0), phase("compile", 14.0), phase("graph-capture", None)]
    rows.append(phase("imports", 90.0, "server=a;caches=warm"))
    said = explain.longest_phase(rows, {"server": "a", "caches": "cold"})
    assert said == "server=a;caches=cold: compile takes 14.0 of 20.0 s (70%)."
    assert explain.longest_phase(rows, {"server": "b", "caches": "cold"}) is None


def test_the_change_of_the_pool_is_said_with_the_part_that_moved():
    cold, warm = {"peak_activation": 2.0**31, "kv": 2.0**33}, {"peak_activation": 2.0**30, "kv": 9 * 2.0**30}
    said = explain.moved_memory(cold, warm, "a")
    assert "the pool changes by +1,024 MiB" in said and "peak activation changes most, by -1,024 MiB" in said
    assert explain.moved_memory({}, {}, "a") is None


def test_what_compilation_saves_of_a_step_is_compared_over_the_batch():
    grows = explain.saved_per_step([(1, 8e-3, 9.8e-3), (32, 17.7e-3, 23.2e-3)], "tiny")
    assert grows.startswith("tiny: a decode step saves 1.8 ms at c=1, 5.5 ms at c=32; it grows with the batch")
    assert "does not grow" in explain.saved_per_step([(1, 2e-3, 6e-3), (32, 5e-3, 6e-3)], "m")
    assert explain.saved_per_step([(1, 2e-3, None), (32, 5e-3, 6e-3)], "m") is None


def test_a_warm_start_that_compiles_again_says_why():
    warning = "Compiling model again due to a load failure from ~/model, reason: no attribute 'x'"
    warm = {"startup": {"warnings": [warning]}}
    said = explain.recompiled("compiled", warm, {"compile": 31.7}, {"compile": 15.5})
    assert said.endswith("still takes 15.5 of 31.7 s. The log says why: no attribute 'x'.")
    assert explain.recompiled("eager", warm, {}, {}) is None


def test_starts_are_named_in_words():
    _, (axis,) = plot.panels(1)
    plot_start.draw_capacity(axis, {"h200": [1.0, 1.1, 1.1, 1.2, 1.2]})
    assert [label.get_text() for label in axis.get_xticklabels()] == ["first", "second", "third", "4th", "5th"]
