"""The live view: samples come in while a load runs from another cell, and the picture follows."""

import threading

import fakes
import pytest
from tables_for_tests import samples
from waiting_for_tests import LIMIT_S, until

from kvlab import live
from kvlab.config import LoadConfig
from kvlab.errors import ConfigError, EngineMissing, KvlabError, ServerError, StoreError
from kvlab.fake_server import Behaviour, FakeServer

LOAD = LoadConfig(concurrency=3, requests=9, input_tokens=32, output_tokens=16)


@pytest.fixture
def fake():
    with FakeServer(Behaviour(ttft_s=0.05, itl_s=0.02)) as fake:
        yield fake


def test_a_load_runs_beside_the_watch_and_the_caller_goes_on(fake, monkeypatch):
    monkeypatch.setattr(live, "INTERVAL_S", 0.02)
    watch = live.Watch(fake.endpoint, interval_s=0.02).start()
    sending = live.Sending(fake.endpoint, LOAD)
    assert not sending.done  # the kernel is free
    until(lambda: (watch.frame()["running"] > 0).any())
    rows = sending.wait(LIMIT_S)
    watch.stop()
    assert sending.done and len(rows) == 9 and rows["ok"].all()
    frame = watch.frame()
    assert frame["running"].max() == 3 and frame["t_s"].is_monotonic_increasing
    assert not any(thread.name == "kvlab-watch" for thread in threading.enumerate())


def test_the_view_is_drawn_again_while_samples_come(fake):
    with live.Session(Attached(fake)) as session:
        session.watch.interval_s = 0.02
        image_box = session.view()
        said, image = image_box.children
        until(lambda: image.value[:4] == b"\x89PNG")
        first = said.value
        session.send(LOAD).wait(LIMIT_S)
        until(lambda: said.value != first)
    assert "running" in said.value


class Attached:
    """A server that somebody else runs: it has no `stop`."""

    def __init__(self, fake):
        self.endpoint = fake.endpoint


def test_a_server_of_its_own_ends_with_the_session_and_its_log_folder_too(monkeypatch, tmp_path):
    fakes.install(monkeypatch, tmp_path)
    logs = tmp_path / "cache" / "logs"
    monkeypatch.setattr(live, "can_start", lambda: True)
    monkeypatch.setattr("kvlab.profile.check_fits", lambda profile, hardware: None)
    with live.open_session(profile_name="cpu-tiny"):
        assert len(list(logs.glob("*/server.log"))) == 1
    assert not list(logs.iterdir()) and fakes.EVENTS == ["start", "stop"]
    fakes.FAILS_TO_START.append(True)
    with pytest.raises(ServerError):
        live.open_session(profile_name="cpu-tiny")
    assert len(list(logs.iterdir())) == 1  # the error names the log


def test_a_server_that_goes_away_is_said_and_does_not_end_the_watch():
    with FakeServer() as fake:
        watch = live.Watch(fake.endpoint, interval_s=0.02).start()
        said, _ = live.view(watch).children
        until(lambda: len(watch.frame()) > 1)
    until(lambda: watch.failure is not None and "could not be read" in said.value)
    assert len(watch.frame()) > 1
    watch.stop()
    watch.stop()


def test_what_the_load_raises_is_raised_where_it_is_waited_for(fake):
    sending = live.Sending(fake.endpoint, LOAD.model_copy(update={"requests": 3, "timeout_s": LIMIT_S}))
    with pytest.raises(KvlabError, match="still runs"):
        sending.wait(0.001)
    sending.wait(LIMIT_S)
    sending.failure = ServerError("gone")
    with pytest.raises(ServerError, match="gone"):
        sending.wait()


def test_the_picture_counts_preemptions_from_the_start_and_bears_missing_values():
    rows = [{"t_s": t, "running": 2.0, "waiting": t, "kv_usage": 0.5, "preemptions": 7.0 + t} for t in (0.0, 1.0, 2.0)]
    made = live.figure(samples(*rows))
    requests, kv, preempted = made.axes
    assert list(preempted.lines[0].get_ydata()) == [0, 1, 2] and list(kv.lines[0].get_ydata()) == [50] * 3
    assert {line.get_label() for line in requests.lines} == {"running", "waiting"}
    nothing = live.figure(samples({"t_s": 0.0}))
    assert any("not measured" in text.get_text() for text in nothing.axes[2].texts)
    assert live.last_words(samples({"t_s": 3.0, "running": 1.0})) == "3 s: 1 running"


def test_bad_addresses_and_a_missing_engine_are_explained(monkeypatch):
    with pytest.raises(ConfigError, match="not an address"):
        live.open_session("localhost:8000:1")
    with pytest.raises(ServerError, match="No server answers"):
        live.open_session("http://127.0.0.1:9")
    monkeypatch.setattr(live, "can_start", lambda: False)
    with pytest.raises(EngineMissing, match="No vLLM"):
        live.open_session()


def test_a_stored_run_stands_in_for_a_live_one(tmp_path, monkeypatch):
    assert "cpu-tiny" in live.stored("cpu-tiny").axes[0].get_title("left")
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    with pytest.raises(StoreError, match="no run"):
        live.stored("cpu-tiny")
    with pytest.raises(ConfigError, match="published no samples"):
        live.replay_machine("article")
