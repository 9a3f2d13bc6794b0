"""What the client adds to times, by a server whose delays are known."""

from types import SimpleNamespace

import pytest

from kvlab import explain, own_delay
from kvlab.client import body
from kvlab.config import Cell, LoadConfig
from kvlab.load import run_load
from kvlab.null_server import NullServer
from kvlab.workload import Request

LOAD = LoadConfig(concurrency=3, requests=9, input_tokens=32, output_tokens=5)


@pytest.fixture(autouse=True)
def nothing_kept():
    own_delay._measured.cache_clear()
    yield
    own_delay._measured.cache_clear()


def test_the_null_server_answers_as_a_real_one_at_known_times():
    with NullServer(0.05, 0.01) as server:
        result = run_load(server.endpoint, LOAD, nonce=1, progress=False)
    rows = result.requests
    assert rows["ok"].all() and result.certificate["fake"] and result.certificate["tokens_per_event"] == "exact"
    assert (rows["ttft_s"] >= 0.0499).all() and (rows["latency_s"] >= 0.0899).all()
    assert body(server.endpoint, Request(0, [1], 1))  # its endpoint is like any other
    with pytest.raises(Exception, match="Nothing answers"):
        run_load(server.endpoint, LOAD, nonce=1, progress=False)


def test_what_a_busy_client_adds_is_seen(monkeypatch):
    import time

    from kvlab import answer, kernel_reads

    monkeypatch.setattr(kernel_reads, "available", lambda: False)  # whose stamps hold nothing of the client
    gaps = {"itl_p50_s": 0.13}  # long, so that a pause of a busy machine does not outweigh them
    found = own_delay.added(LOAD, gaps)
    assert set(found) == set(own_delay.NAMES) and None not in found.values()
    assert abs(found["added_itl_p50_s"]) < 0.06 and found["added_ttft_p50_s"] > -0.001
    own_delay._measured.cache_clear()
    plain = answer.plain_events
    monkeypatch.setattr(answer, "plain_events", lambda reads: time.sleep(0.1) or plain(reads))
    slow = own_delay.added(LOAD, gaps)
    assert slow["added_itl_p99_s"] > found["added_itl_p50_s"] + 0.05


def test_loads_of_one_size_are_measured_once(monkeypatch):
    asked = []

    def refuse(*given, **_):
        asked.append(given[1].concurrency)
        raise own_delay.LoadError("no")

    monkeypatch.setattr(own_delay, "run_load", refuse)
    for c, gap_s in ((1, 0.012), (8, 0.015), (9, 0.012), (16, 0.0079), (8, None)):
        found = own_delay.added(LOAD.model_copy(update={"concurrency": c}), {"itl_p50_s": gap_s})
        assert found == own_delay.NOTHING
    assert asked == [8, 16]


def test_other_loads_and_fakes_have_nulls(monkeypatch):
    monkeypatch.setattr(own_delay, "_measured", lambda *given: 1 / 0)
    rate = LOAD.model_copy(update={"arrival": "poisson", "rate_per_s": 3.0})
    assert own_delay.added(rate, {"itl_p50_s": 0.01}) == own_delay.NOTHING
    assert own_delay.added(LOAD, {}) == own_delay.NOTHING
    fake = own_delay.complete({"fake": True, "problems": ["x"]}, LOAD, {"itl_p50_s": 0.01})
    assert fake == {"fake": True, "problems": ["x"], **own_delay.NOTHING}


def test_a_client_that_adds_too_much_is_marked(monkeypatch):
    slow = dict(own_delay.NOTHING) | {"added_itl_p99_s": 0.02}
    monkeypatch.setattr(own_delay, "_measured", lambda *given: tuple(slow.items()))
    found = own_delay.complete({"problems": []}, LOAD, {"itl_p50_s": 0.01})
    assert found["added_itl_p99_s"] == 0.02 and "adds 20.0 ms at p99" in found["problems"][0]
    slow["added_itl_p99_s"] = 0.002
    assert own_delay.complete({"problems": []}, LOAD, {"itl_p50_s": 0.01})["problems"] == []


def test_the_report_says_what_the_client_adds():
    def result(**certificate):
        return SimpleNamespace(run=SimpleNamespace(id="r", manifest={"certificate": {"problems": []} | certificate}))

    known = result(added_ttft_p99_s=0.002, added_itl_p99_s=0.0005)
    said = explain.honest([known, result(added_ttft_p99_s=0.001, added_itl_p99_s=0.0007), result()])
    assert "adds at most 2 ms" in said and "0.7 ms to that of the gaps" in said
    assert "adds" not in explain.honest([result()])


def test_a_measured_cell_is_completed(monkeypatch, tmp_path):
    from fakes import install

    from kvlab import measure

    install(monkeypatch, tmp_path)
    seen = []
    monkeypatch.setattr(own_delay, "complete", lambda given, load, summary: seen.append(load) or given | {"added": 1})
    lab = measure.open_lab("load", profile_name="cpu-tiny", machine="fake", mode="measure")
    (done,) = lab.measure([Cell(name="a", server=lab.server(), load=LOAD)])
    lab.close()
    assert done.run.manifest["certificate"]["added"] == 1 and seen == [LOAD]
