"""What a person sees where something outside of kvlab fails: a full disk, another program's server, `kvlab stop`."""

import errno
import json
import os
import subprocess
import sys
import threading

import pytest
from child_server import serve
from fakes import EVENTS, FAILS_TO_START, SAYS, cell, install, open_lab

from kvlab import claims, control, existing, files, invocation, plot, processes, store
from kvlab.errors import ServerDied, ServerError, ServerStopped, StoreError


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


# -- the disk -----------------------------------------------------------------------------------------------------


def full(*_, **__):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_one_message_and_keeps_what_was_measured(monkeypatch):
    lab = open_lab()
    (first,) = lab.measure([cell(lab, 1)])
    monkeypatch.setattr("kvlab.store.write_synced", full)
    with pytest.raises(StoreError, match="could not be stored: the disk is full") as caught:
        lab.measure([cell(lab, 2)])
    assert "Likely cause: no space is left" in str(caught.value) and "df -h" in str(caught.value)
    assert EVENTS[-1] == "stop"  # no server outlives it
    assert [run.id for run in store.list_runs("fake")] == [first.run.id]
    assert not list(store.root().rglob(".new-*"))


@pytest.mark.parametrize("write", ["claims", "figure", "computed"])
def test_whatever_is_written_names_the_full_disk(monkeypatch, write):
    lab = open_lab()
    claim = lab.claim("knee_low", {}, computed=1.0, unit="requests")
    monkeypatch.setattr("kvlab.files.write_synced", full)
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    figure, _ = plot.panels(1)
    calls = {
        "claims": lambda: lab.write([claim]),
        "figure": lambda: plot.save(figure, lab, "x", alt="x"),
        "computed": lambda: lab.predict([claim]),
    }
    with pytest.raises(StoreError, match="the disk is full"):
        calls[write]()


@pytest.mark.parametrize(
    ("number", "cause"),
    [
        (errno.EROFS, "read-only"),
        (errno.EACCES, "belongs to somebody else"),
        (errno.ENOTDIR, "a file stands where a folder is needed"),
        (errno.EDQUOT, "no space is left"),
    ],
)
def test_each_refusal_of_the_disk_has_its_cause(number, cause):
    error = files.explained(OSError(number, os.strerror(number)), "a run")
    assert cause in error.cause and "KVLAB_DATA" in error.next_step and str(error).count("Next:") == 1


def test_broken_claims_are_set_aside_and_a_replay_goes_on(tmp_path):
    lab = open_lab()
    (result,) = lab.measure([cell(lab, 1)])
    rows = [lab.claim("running_max", {"c": 1}, measured=1.0, unit="requests", results=[result])]
    lab.write(rows)
    path = store.machine_dir("fake") / "claims.csv"
    whole = path.read_text()
    for broken in (b"a,b\n1,2\n", b"\xff\xfe", b"", whole.replace("measured", "guessed").encode()):
        path.write_bytes(broken)
        with pytest.warns(UserWarning, match="set aside as claims.broken-"):
            open_lab(mode="replay").write(rows)
        assert path.read_text() == whole
    assert len(list(path.parent.glob("claims.broken-*.csv"))) == 4
    assert len(claims.read(path.parent)) == 1


# -- servers of others, and servers that are ended ------------------------------------------------------------------


PAGE = "<!DOCTYPE html>\n<html><head><title>Router\n login</title></head><body>" + "x" * 5000 + "</body></html>"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (PAGE, "a web page titled 'Router login'"),
        ("<html>", "a web page"),
        ("", "nothing"),
        (json.dumps({"error": {"message": "no such path"}}), "'no such path'"),
        (json.dumps({"detail": "Not Found"}), "'Not Found'"),
        ("y" * 500, "..."),
    ],
)
def test_a_foreign_answer_is_told_in_a_line(text, told):
    gist = control.gist(text)
    assert told in gist and len(gist) < 200 and "<" not in gist


@pytest.fixture
def locked():
    server = serve(0, [], key="right")
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_a_wrong_key_is_told_before_anything_is_stored(locked, monkeypatch):
    monkeypatch.delenv("KVLAB_API_KEY", raising=False)
    with pytest.raises(ServerError, match=r"HTTP 401(.|\n)*wants an API key"):
        open_lab(base_url=locked, machine="mine")
    monkeypatch.setenv("KVLAB_API_KEY", "wrong")
    with pytest.raises(ServerError, match=r"HTTP 401(.|\n)*not accepted") as caught:
        open_lab(base_url=locked, machine="mine")
    assert "wrong" not in str(caught.value) and not store.root().exists()


def test_a_key_that_is_asked_for_with_the_completion_only_is_told_too(monkeypatch):
    monkeypatch.setattr(control, "served_models", lambda endpoint, timeout_s=10.0: [{"id": "a"}])
    monkeypatch.setattr(control, "complete", lambda endpoint, prompt, timeout_s=60.0: (401, {}))
    with pytest.raises(ServerError, match="KVLAB_API_KEY"):
        existing.attach("http://127.0.0.1:9")


def test_a_stopped_server_ends_its_measurement_with_one_message_and_keeps_the_rest(monkeypatch):
    """`kvlab stop` ends the server under the load: what the laboratory does is the same as with any death."""
    lab = open_lab()
    (first,) = lab.measure([cell(lab, 1)])
    stopped = ServerDied("The vLLM server was asked to end while it was in use, and did.", "kvlab stop", "run it again")
    asked = iter([None, stopped, stopped, stopped])

    def check_alive(self):
        if error := next(asked):
            raise error

    monkeypatch.setattr("fakes.FakeVllm.check_alive", check_alive)
    with pytest.raises(ServerDied, match="was asked to end"):
        lab.measure([cell(lab, 2), cell(lab, 3), cell(lab, 4)])
    runs = store.list_runs("fake")
    assert runs[0].id == first.run.id and [run.valid for run in runs].count(False) == 1
    assert EVENTS[-1] == "stop" and EVENTS.count("start") == EVENTS.count("stop")
    assert not [server for server in processes.list_servers() if server.orphan and "fake" in server.cmd]


@pytest.mark.parametrize("side_by_side", [False, True])
def test_a_server_that_is_stopped_while_it_starts_is_not_started_again(monkeypatch, side_by_side):
    """Neither by its own cell, nor for the cells after it; and it is no result of that cell."""
    SAYS[:] = [ServerStopped("The vLLM server was asked to end during its start-up, and did.", "kvlab stop", "again")]
    FAILS_TO_START.extend([True, False, False])
    lab = open_lab()
    with pytest.raises(ServerStopped, match="was asked to end"):
        lab.measure([cell(lab, 1), cell(lab, 2)], side_by_side=side_by_side, skip_refused=True)
    assert EVENTS == ["fails"] and store.list_runs("fake") == []


# -- commands in messages -------------------------------------------------------------------------------------------


def test_commands_are_written_as_they_were_typed(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "nowhere"))
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "kvlab").write_text("")
    said = "Next: kvlab measure load, or `kvlab ps`; the kvlab package; kvlab measures"
    monkeypatch.setattr(sys, "argv", [".venv/bin/kvlab", "check"])
    typed = "Next: .venv/bin/kvlab measure load, or `.venv/bin/kvlab ps`; the kvlab package; kvlab measures"
    assert invocation.as_typed(said) == typed and invocation.as_typed(typed) == typed
    (tmp_path / ".venv" / "bin" / "kvlab").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    assert invocation.as_typed(said) == said


def test_an_error_in_a_notebook_is_its_message():
    code = (
        "from IPython.core.interactiveshell import InteractiveShell as S; "
        'S.instance().run_cell(\'from kvlab.errors import LoadError; raise LoadError("It broke.", "why", "what")\')'
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    assert "It broke." in shown and "Next: what" in shown and "Traceback" not in shown
