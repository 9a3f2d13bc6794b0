"""Real vLLM on the CPU, ended from outside while `kvlab measure` uses it: three starts."""

import os
import re
import signal
import subprocess
import sys
import time

import psutil
import pytest

from kvlab import engine, ports, processes, profile, quiet, store
from kvlab.errors import EngineMissing

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
STARTED: list[subprocess.Popen] = []
COMMAND = [sys.executable, "-c", "from kvlab.cli import app; app()"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    try:
        build, _ = engine.installed_build()
    except EngineMissing:
        build = None
    if build != "cpu":
        pytest.skip("the CPU build of vLLM is not installed")
    text = (profile.FOLDER / "cpu-tiny.toml").read_text()
    (tmp_path / "own.toml").write_text(re.sub(r"min_requests = \d+", "min_requests = 12", text))
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for child in STARTED:  # only where the test failed
        child.send_signal(signal.SIGINT)
    STARTED.clear()


def measure(project, *more):
    """`kvlab measure load` with one, then many clients, running."""
    options = ["--profile", "own.toml", "--machine", "live", "-p", "CONCURRENCY=[1,8,16]", *more]
    child = subprocess.Popen(
        [*COMMAND, "measure", "load", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    STARTED.append(child)
    return child


def wait_for(child, found):
    """What `found()` gives, as soon as it gives something; the measurement must not end before."""
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline and child.poll() is None:
        if there := found():
            return there
        time.sleep(0.2)
    pytest.fail(f"it never came: {child.communicate()}")


def server_in_use(child):
    """The server of the measurement, once it has answered."""
    own = wait_for(child, lambda: [s for s in processes.list_servers() if owner(s) in tree(child.pid)])[0]
    wait_for(child, lambda: not ports.is_free(own.port))
    time.sleep(3.0)
    return own


def owner(server):
    return int(processes.environment_of(psutil.Process(server.pid)).get(processes.OWNER, "0:").partition(":")[0])


def tree(pid):
    return {process.pid for process in psutil.Process(pid).children(recursive=True)} | {pid}


def end(child, server):
    """What the command said at its end; nothing of its server is left, and others may measure."""
    out, told = child.communicate(timeout=90)
    assert not processes.members(server.id) and quiet.measuring() is None
    assert "Traceback" not in told + out and told.count("Next:") <= 1
    return child.returncode, told


def kept():
    return [run.id for run in store.list_runs("live", "load") if run.valid]


def test_stop_kill_and_ctrl_c_each_end_in_one_message_and_keep_what_was_measured(project):  # pitfall 26, pitfall 28
    child = measure(project)
    server = server_in_use(child)
    wait_for(child, kept)
    stopped = subprocess.run([*COMMAND, "stop", server.id], capture_output=True, text=True)
    assert stopped.returncode == 0, stopped.stderr
    code, told = end(child, server)
    assert code == 1 and "asked to end" in told and "kvlab stop" in told and "is kept" in told
    first = kept()
    assert first

    child = measure(project)
    server = server_in_use(child)
    next(process for process in processes.members(server.id) if "EngineCore" in process.name()).kill()
    code, told = end(child, server)
    assert code == 1 and "signal 9 (SIGKILL)" in told and "stack trace" not in told.lower()
    assert set(first) <= set(kept())

    child = measure(project)
    server = server_in_use(child)
    os.kill(child.pid, signal.SIGINT)
    code, told = end(child, server)
    assert code == 130 and told.strip().endswith("the same command resumes.")
    assert set(first) <= set(kept())
