"""The load generator in several processes: which cores it takes, one merged set of rows, and its table."""

import itertools
import json
import sys
from types import SimpleNamespace

import pandas as pd
import pytest
from bench_for_tests import bench_tool

from kvlab import client_processes, pages
from kvlab.errors import KvlabError


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    (tmp_path / "data" / "client").mkdir(parents=True)
    return tmp_path / "data" / "client"


@pytest.fixture
def bench(monkeypatch):
    return bench_tool("bench_processes", monkeypatch)


def test_every_process_and_server_needs_a_core(bench):
    possible = {cores: [n for n in bench.PROCESSES if bench.why_not(n, cores) is None] for cores in (2, 4, 8, 16, 32)}
    assert possible == {2: [1], 4: [1, 2], 8: [1, 2, 4], 16: [1, 2, 4, 8], 32: [1, 2, 4, 8]}
    assert bench.why_not(2, 2) == "not measured: 2 cores (2 processes need 3)"
    assert [bench.servers_of(n, 16) for n in bench.PROCESSES] == [1, 2, 4, 4]


def test_the_rows_of_several_processes_are_merged_and_counted(bench, monkeypatch):
    monkeypatch.setattr(bench, "STREAMS", 4)
    monkeypatch.setattr(bench, "rates", lambda arrivals, watch, s: {"events_per_s": 1.0, "events_per_cpu_s": 1.0})
    short = bench.replace(bench.LOADS["paced"], tokens=5, rounds=3)
    found = bench.measure(2, short, sorted(bench.os.sched_getaffinity(0)))
    assert "reason" not in found and found["failures"] == 0
    assert found["rows"] == found["result"]["distinct"] == 24 and found["rows_of_processes"] == [12, 12]
    assert found["ttft_added_p50_s"] > 0 and 0 < found["server_core_share"] < 1


def test_the_first_gap_of_a_stream_is_the_null_servers_own(bench):
    """It is longer by the stream's phase: of 75 events it alone would be the 99th percentile."""
    from gaps import later_gaps_s

    times = [[0.0, 0.030, 0.050, 0.070], [1.0, 1.035, 1.055], [2.0]]
    rows = pd.DataFrame({"event_times_s": times, "event_tokens": [[1, 1, 1, 2], [1, 1, 1], [1]]})
    assert later_gaps_s(rows).round(6).tolist() == [0.02, 0.01, 0.02]
    assert later_gaps_s(rows[:0]).tolist() == []


def test_rows_that_are_missing_and_servers_at_their_limit_are_no_measurement(bench):
    s = bench.replace(bench.LOADS["paced"], streams=4, rounds=2)
    found = {"rows": 8, "rows_of_processes": [4, 4], "result": {"distinct": 8}, "server_core_share": 0.3}
    assert "reason" not in bench._checked(found, s, 2)
    for wrong in ({"rows": 7}, {"rows_of_processes": [4, 3]}, {"result": {"distinct": 7}}, {"rows_of_processes": [8]}):
        assert "merged rows are wrong" in bench._checked(found | wrong, s, 2)["reason"]
    assert "used 95% of its core" in bench._checked(found | {"server_core_share": 0.95}, s, 2)["reason"]


def run(bench, monkeypatch, out, cores, *arguments):
    clock = (tick / 100 for tick in itertools.count())  # however long the computer takes
    monkeypatch.setattr(bench, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(bench, "_usable", lambda: list(range(cores)))
    monkeypatch.setattr(sys, "argv", ["bench_processes.py", "--out", str(out), *arguments])
    bench.main()


def fake(processes, s, cores):
    measured = dict.fromkeys(("events_per_s", "events_per_cpu_s", "others_cpu_share"), 0.01)
    return measured | {"failures": 0, "rows": 8 * processes, "rows_of_processes": [8] * processes}


def test_a_smaller_machine_says_what_it_cannot_show_and_replaces_no_larger_table(bench, monkeypatch, data, capsys):
    out = data / "processes.csv"
    monkeypatch.setattr(bench, "measure", fake)
    run(bench, monkeypatch, out, 2, "--seconds", "0.3")
    table = pd.read_csv(out).set_index(["scenario", "processes"])
    assert (table.loc[("paced", 2), "reason"]) == "not measured: 2 cores (2 processes need 3)"
    assert table.loc[("paced", 1), "repeats"] > 0 and table.loc[("paced", 1), "quiet"]
    run(bench, monkeypatch, out, 16, "--seconds", "0.3")
    table = pd.read_csv(out).set_index(["scenario", "processes"])
    assert table.loc[("saturation", 8), "rows_of_processes"] == "+".join(["8"] * 8) and table["reason"].isna().all()
    with pytest.raises(SystemExit, match="holds a measurement with 8 processes; this machine has 2 cores"):
        run(bench, monkeypatch, out, 2)
    assert (pd.read_csv(out)["repeats"] > 0).all()


def test_a_turn_that_fails_is_a_reason_and_the_others_go_on(bench, monkeypatch, data, capsys):
    def measure(processes, s, cores):
        if processes == 2:
            raise KvlabError("kvlab failed with 2 processes: 1")
        return fake(processes, s, cores)

    monkeypatch.setattr(bench, "measure", measure)
    run(bench, monkeypatch, data / "processes.csv", 16, "--seconds", "0.3")
    table = pd.read_csv(data / "processes.csv").set_index(["scenario", "processes"])
    assert "failed with 2 processes" in table.loc[("paced", 2), "reason"] and table.loc[("paced", 8), "repeats"] > 0


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_report_shows_what_was_measured_and_why_the_rest_was_not(data, language):
    words = pages.words(language)["client_processes"]
    assert client_processes.page(words, language) == {"intro": words["none"], "columns": [], "rows": []}
    assert client_processes.frame() is None
    same = {"scenario": "paced", "cores": 4, "failures": 0, "rows": 1024, "ttft_added_p50_s": 0.0001, "quiet": True}
    rows = [same | {"processes": n, "streams": 256 * n, "events_per_s": 12e3 * n, "repeats": 2} for n in (1, 2)]
    rows[1] |= {"ttft_added_p99_s": 0.5, "quiet": False, "others_cpu_share": 0.2}
    rows.append({"scenario": "paced", "processes": 4, "streams": 1024, "repeats": 0})
    rows[-1] |= {"reason": "not measured: 4 cores (4 processes need 6)"}
    missing = ("events_per_cpu_s", "itl_added_p99_s")
    pd.DataFrame(rows).assign(**dict.fromkeys(missing)).to_csv(data / "processes.csv", index=False)
    told = {"cpu": "Xeon", "cores": 4, "measured_utc": "2026-01-02T00:00:00"}
    told["scenarios"] = [{"streams": 256, "itl_s": 0.02}, {"streams": 256, "itl_s": 0.0}]
    (data / "processes.json").write_text(json.dumps(told))
    shown = client_processes.page(words, language)
    assert "Xeon" in shown["intro"] and "2026-01-02" in shown["intro"] and "256" in shown["intro"]
    assert "20%" in shown["intro"]
    assert shown["rows"][1]["cells"] == ["24,000", "2.0", "–", "0.1 ms", "500 ms", "–", "1,024", "0"]
    assert shown["rows"][2]["cells"] is None and "6" in shown["rows"][2]["reason"]
    assert ("核" if language == "zh" else "need 6") in shown["rows"][2]["reason"]
    assert client_processes.frame().iloc[2, 0] == rows[-1]["reason"] and "Xeon" in client_processes.intro()
