"""The load generator's own table: what is drawn and said of it, and the tools that make it."""

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pandas as pd
import psutil
import pytest
from bench_for_tests import bench_tool
from processes_for_tests import alive
from waiting_for_tests import until

from kvlab import explain, findings, instrument, pages, plot, report
from kvlab.claims import claim
from kvlab.config import LoadConfig
from kvlab.errors import KvlabError
from kvlab.load import run_load

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data" / "client").mkdir(parents=True)
    return tmp_path / "data" / "client"


def line(tool, rate, **more):
    quick = {"ttft_added_p50_s": 0.0001, "ttft_added_p99_s": 0.002, "itl_added_p50_s": 0.0, "itl_added_p99_s": 0.0005}
    rates = {"events_per_cpu_s": rate, "events_per_cpu_s_low": rate, "events_per_cpu_s_high": rate}
    same = {
        "version": "1",
        "scenario": "paced",
        "streams": 256,
        "quiet": True,
        "others_cpu_share": 0.01,
        "reason": None,
    }
    return {"tool": tool, "events_per_s": 12600.0} | rates | quick | same | more


def test_without_a_measurement_there_is_nothing():
    assert instrument.peers() is None and instrument.record("open") is None


def test_the_sentences_follow_from_the_table(data):
    rows = [line("kvlab", 60e3), line("vllm bench", 24e3), line("aiperf", None, reason="could not be installed")]
    rows += [line("null reader", 120e3), line("kvlab", 300e3, scenario="saturation")]
    pd.DataFrame(rows).to_csv(data / "peers.csv", index=False)
    (data / "open.json").write_text(json.dumps({"streams": 10000, "processes": 4, "cores": 2, "failures": 0}))
    (data / "memory.json").write_text(json.dumps({"slope_bytes_per_event": 0.5, "events": 6e6, "minutes": 10}))
    table = instrument.peers()
    said = " ".join(instrument.told(table))
    assert "kvlab digests 2.5 times vllm bench." in said and "0.1 ms to the median" in said
    assert "takes 50% of kvlab's CPU time" in said and "aiperf is missing: could not be installed." in said
    assert "10,000 streams" in said and "17 MiB an hour" in said and "not quiet" not in said
    assert instrument.paced(table)["tool"].tolist() == ["vllm bench", "kvlab", "null reader"]
    assert "keep up" not in said
    table.loc[1, "events_per_s"] = 8000.0
    assert "vllm bench (8,000 events/s) could not keep up with 12,600" in " ".join(instrument.told(table))
    table.loc[0, ["quiet", "others_cpu_share"]] = [False, 0.4]
    assert "used up to 40% of it" in " ".join(instrument.told(table))


def test_aims_that_are_missed_are_said_beside_the_bound(data):
    rows = [line("kvlab", 48e3, itl_added_p99_s=0.002), line("vllm bench", 16e3), line("guidellm", 8e3)]
    rows += [line("aiperf", 10e3), line("null reader", 70e3, itl_added_p99_s=0.004)]
    judged = {aim.of: (aim.reached, aim.value, aim.bound) for aim in instrument.aims(pd.DataFrame(rows))}
    assert judged["vllm bench"] == (True, 3.0, 4.375) and judged["guidellm"] == (True, 6.0, 8.75)
    assert judged["aiperf"] == (False, 4.8, 7.0) and judged["itl_added_p99_s"] == (False, 0.002, 0.004)
    assert judged["ttft_added_p50_s"][0] and judged["ttft_added_p99_s"][0]
    said = instrument.told(pd.DataFrame(rows))
    missed = next(text for text in said if text.startswith("Aims not reached"))
    assert "4.8 × aiperf (aim: 6 ×, the C program: 7 ×)" in missed and "2 ms (aim: 1 ms, the C program: 4 ms)" in missed
    assert "aiperf" not in next(text for text in said if text.startswith("Aims reached"))
    alone = instrument.aims(pd.DataFrame([line("kvlab", 48e3), line("aiperf", None)]))
    assert {aim.of for aim in alone} == set(instrument.TIMES_S) and all(aim.bound is None for aim in alone)


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_report_shows_the_committed_table_with_the_aims_that_it_misses(language, monkeypatch):
    words = pages.words(language)["instrument"]
    assert instrument.page(words) is None
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    table, shown = instrument.peers(), instrument.page(words)
    assert {"tool", "version", "scenario", "events_per_cpu_s", "events_per_s"} <= set(table)
    assert [row["tool"] for row in shown["rows"]] == ["kvlab", "vllm bench", "guidellm", "aiperf", instrument.READER]
    assert len(shown["missed"]) + len(shown["reached"]) == len(instrument.RATES) + len(instrument.TIMES_S)
    content = report.content("cpu-tiny", language, pictures=dict.fromkeys(findings.listed(), ""))
    method = next(page for page in content["contents"] if page["name"] == "method")
    site = {"first": False, "shown": [method], "home": "/", "before": None, "after": None, "style": "", "style_url": ""}
    text = report.render(content | site | {"link": str, "picture": str, "other_language": "x"})
    rate = table.query("tool == 'kvlab' and scenario == 'paced'")["events_per_cpu_s"].item()
    assert f"{rate:,.0f}" in text and all(aim in text for aim in shown["missed"] + shown["reached"])
    late = table.query("tool == 'aiperf' and scenario == 'paced'")["ttft_added_p99_s"].item()
    assert f">{1e3 * late:,.0f} ms<" in text and not re.search(r"\de[+-]\d\d ms", text)


def test_the_picture_holds_every_tool_and_not_the_floor(data):
    rows = [line("kvlab", 60e3), line("guidellm", 8e3, ttft_added_p99_s=0.2), line("null reader", 120e3)]
    figure, axes = plot.panels(2)
    instrument.draw(list(axes), pd.DataFrame(rows))
    labels = [text.get_text() for text in axes[0].get_yticklabels()]
    assert labels == ["guidellm 1", "kvlab 1"] and "200 ms" in [text.get_text() for text in axes[1].texts]


def checked(change_of_gaps, change_of_ttft=0.1, change_of_tpot=0.0):
    changes = {
        "throughput_whole_tok_s": 0.0,
        "ttft_p50_s": change_of_ttft,
        "tpot_p50_s": change_of_tpot,
        "itl_p50_s": change_of_gaps,
    }
    given = {f"cross_check_{name}_change": value for name, value in changes.items()}
    return [claim("load", name, {"c": 4}, unit="ratio", measured=value) for name, value in given.items()]


def test_a_cross_check_is_explained_only_as_far_as_it_holds():
    assert "is its client's" in explain.cross_check(checked(0.01))
    assert "so large a difference" in explain.cross_check(checked(0.2))
    assert "varies by more" in explain.cross_check(checked(0.01, -0.02))
    assert "single long pauses" in explain.cross_check(checked(0.01, change_of_tpot=0.4))
    sure = [replace(c, ci_low=-0.02, ci_high=0.05) for c in checked(0.01)]
    assert "gap between tokens +1.0% (-2.0% to +5.0%)" in explain.cross_check(sure)  # an interval of the turns
    assert explain.cross_check([]) is None
    missing = [claim("load", "cross_check_itl_p50_s_change", {"c": 4}, unit="ratio", reason="no pandas")]
    assert explain.cross_check(missing) == "There is no cross-check: no pandas."


# -- the tools ----------------------------------------------------------------------------------------------------


@pytest.fixture
def bench(monkeypatch):
    return bench_tool("bench_client", monkeypatch)


def test_the_null_server_answers_as_a_real_one_at_known_times(bench):
    from null import NullServer

    from kvlab.client import Endpoint

    with NullServer(0.05, 0.01) as server:
        load = LoadConfig(concurrency=4, requests=12, input_tokens=32, output_tokens=10)
        result = run_load(Endpoint(server.base_url, "kvlab-null"), load, nonce=1, progress=False)
        stats, arrivals = server.stats(), server.arrivals_s()
    rows = result.requests
    assert rows["ok"].all() and result.certificate["fake"] and result.certificate["tokens_per_event"] == "exact"
    assert (rows["ttft_s"] >= 0.05).all() and (rows["latency_s"] >= 0.1399).all()
    assert rows["ttft_s"].min() < 0.15
    assert stats["requests"] == len(arrivals) == 13 and stats["events"] == 121  # with the probe
    assert arrivals == sorted(arrivals)


def test_the_null_server_outlives_clients_that_go_away(bench):
    import socket

    from null import NullServer

    with NullServer(0.0, 0.0, 16) as server:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port)) as client:
                body = b'{"prompt":[1],"max_tokens":100000}'
                client.sendall(b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
                client.recv(1000)
        assert server.stats()["requests"] == 20


def test_rates_count_what_was_digested_between_whole_rounds(bench):
    from watch import Watch

    watch = Watch.__new__(Watch)
    watch.times, watch.cpu = [0.0, 10.0], [0.0, 5.0]
    arrivals = [0.0, 0.0, 2.0, 2.0, 4.0, 4.0]  # two streams, three rounds
    paced = bench.SCENARIOS["paced"]
    rates = bench.rates(arrivals, watch, paced.__class__("x", 1, 1, 1, streams=2, tokens=100, rounds=3, fast_rounds=3))
    assert rates == {"events_per_cpu_s": 200 / 1.0, "events_per_s": 200 / 2.0}


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "1e400", "many"])
def test_a_tool_takes_no_number_that_is_none(bench, text):
    from arguments import above_zero, whole_above_zero

    for read in (above_zero, whole_above_zero):
        with pytest.raises(argparse.ArgumentTypeError, match="number above 0"):
            read(text)
    assert above_zero("0.5") == 0.5 and whole_above_zero("2") == 2


def test_a_tool_that_is_missing_is_a_row_with_its_reason(bench):
    why = [{"reason": "could not be installed: no network"}]
    row = bench.line_of(bench.TOOLS[2], bench.SCENARIOS["paced"], why, "now")
    assert row["reason"].endswith("no network") and row["repeats"] == 0 and "events_per_cpu_s" not in row


def test_the_cpu_time_of_a_tree_holds_its_children(bench):
    import subprocess

    from watch import tree

    burn = "import subprocess,sys; subprocess.run([sys.executable,'-c','sum(range(10**7))'])"
    process = subprocess.Popen([sys.executable, "-c", burn + "; input()"], stdin=subprocess.PIPE)
    until(lambda: tree(process.pid)[0] > 0.1)  # s
    _, rss = tree(process.pid)
    process.communicate(b"\n")
    assert rss > 0


# -- what bad arguments, tools that fail and Ctrl-C leave of the comparison


def compare(bench, monkeypatch, out, measure, *arguments):
    """Runs the comparison with two tools that are not there; `measure` stands in for them."""
    tools = tuple(bench.Tool(name, "1", None, None) for name in ("kvlab", "other"))
    monkeypatch.setattr(bench, "TOOLS", tools)
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(bench, "install", lambda tool: None)
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(bench.os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["bench_client.py", "--out", str(out), "--repeats", "1", *arguments])
    bench.main()


def rate(value):
    return {"events_per_cpu_s": value, "events_per_s": value, "failures": 0, "others_cpu_share": 0.0}


@pytest.mark.parametrize("arguments", [("--tools", "kvlob"), ("--scenarios", "open"), ("--tools", ",")])
def test_an_unknown_tool_or_scenario_is_named_before_anything_is_written(
    bench, monkeypatch, tmp_path, capsys, arguments
):
    with pytest.raises(SystemExit) as end:
        compare(bench, monkeypatch, tmp_path / "peers.csv", lambda *_: rate(1.0), *arguments)
    assert end.value.code == 2 and f"{arguments[1]!r} is unknown; known: " in capsys.readouterr().err
    assert not (tmp_path / "peers.csv").exists()


def test_turns_that_are_over_stay_when_the_comparison_is_interrupted(bench, monkeypatch, tmp_path):
    def measure(tool, scenario):
        if tool.name == "other":
            raise KeyboardInterrupt
        return rate(5.0)

    out = tmp_path / "peers.csv"
    with pytest.raises(SystemExit, match="Interrupted"):
        compare(bench, monkeypatch, out, measure)
    assert pd.read_csv(out)["events_per_cpu_s"].tolist() == [5.0]
    assert list(json.loads(out.with_suffix(".json").read_text())["repeats"]) == ["kvlab, paced"]


def test_a_tool_that_cannot_be_measured_keeps_its_earlier_row_and_the_others_go_on(bench, monkeypatch, tmp_path):
    out = tmp_path / "peers.csv"
    compare(bench, monkeypatch, out, lambda tool, _: rate(5.0 if tool.name == "kvlab" else 7.0))

    def measure(tool, scenario):
        if tool.name == "other":
            raise FileNotFoundError("other.json")
        return rate(6.0)

    compare(bench, monkeypatch, out, measure, "--scenarios", "paced")
    rows = pd.read_csv(out)
    assert rows["tool"].tolist() == ["kvlab", "other"] * 2
    assert rows["events_per_cpu_s"].tolist() == [6.0, 7.0, 5.0, 7.0]
    repeats = json.loads(out.with_suffix(".json").read_text())["repeats"]
    assert repeats["other, paced"][0]["events_per_cpu_s"] == 7.0


def test_a_tool_that_was_never_measured_says_why(bench, monkeypatch, tmp_path):
    def measure(tool, scenario):
        raise FileNotFoundError("other.json")

    compare(bench, monkeypatch, tmp_path / "peers.csv", measure)
    assert pd.read_csv(tmp_path / "peers.csv")["reason"].str.contains("FileNotFoundError: other.json").all()


def test_a_place_that_cannot_be_written_and_missing_cores_are_one_message(bench, monkeypatch, tmp_path):
    with pytest.raises(SystemExit, match="is a folder"):
        compare(bench, monkeypatch, tmp_path, lambda *_: rate(1.0))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="cannot be written"):
        compare(bench, monkeypatch, tmp_path / "file" / "peers.csv", lambda *_: rate(1.0))
    monkeypatch.setattr(bench, "CLIENT_CORE", 7)
    with pytest.raises(SystemExit, match="cores 0 and 7 are used"):
        compare(bench, monkeypatch, tmp_path / "peers.csv", lambda *_: rate(1.0))


def test_what_a_tool_has_started_ends_with_it(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "LIMIT_S", 1)
    monkeypatch.setattr(bench, "pinned", lambda core: [])
    script = "sleep 600 & echo $! > child; sleep 600"
    tool = bench.Tool("other", "1", lambda ask: ["sh", "-c", script], None)
    status = bench._run(tool, bench.Ask(1, 1, 1, 1, tmp_path))[1]
    child = [
        psutil.Process(pid) for pid in map(int, (tmp_path / "child").read_text().split()) if psutil.pid_exists(pid)
    ]
    assert "not done after 1 s" in status and not alive(child)


def test_a_null_server_that_does_not_start_is_one_message(bench, monkeypatch):
    import null

    monkeypatch.setattr(null, "compiled", lambda name: "false")
    with pytest.raises(KvlabError, match="did not start"), null.NullServer(0, 0):
        pass
