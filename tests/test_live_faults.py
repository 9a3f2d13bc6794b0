"""Real vLLM on the CPU, ended from outside while `kvlab measure` uses it: three starts, two of them at once."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time

import live_for_tests
import psutil
import pytest

from kvlab import processes, profile, quiet, scrape, store
from kvlab.client import Endpoint
from kvlab.errors import ScrapeError

pytestmark = live_for_tests.MARKS
STARTED: list[subprocess.Popen] = []
COMMAND = [sys.executable, "-c", "from kvlab.cli import app; app()"]


@pytest.fixture
def projects(tmp_path):
    """Two folders that know nothing of each other: what is measured in one does not hold up the other."""
    text = re.sub(r"min_requests = \d+", "min_requests = 12", (profile.FOLDER / "cpu-tiny.toml").read_text())
    text = re.sub(r"\[load\.border\]\n(?:[^\[\n].*\n)*", "", text)  # one server each is enough here
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own.toml").write_text(text)
    yield tmp_path / "one", tmp_path / "other"
    for child in STARTED:  # only where the test failed
        child.send_signal(signal.SIGINT)
    STARTED.clear()


def environment(project):
    return {"KVLAB_DATA": str(project / "data"), "KVLAB_CACHE": str(project / "cache")}


@contextlib.contextmanager
def within(project):
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(project).items():
            patch.setenv(name, value)
        yield


def measure(project):
    """`kvlab measure load` with one, then many clients, running."""
    options = ["--profile", "own.toml", "--machine", "live", "-p", "CONCURRENCY=[1,8,16,24]"]
    child = subprocess.Popen(
        [*COMMAND, "measure", "load", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment(project),
        cwd=project,
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
    """The server of the measurement, once it has requests."""
    own = wait_for(child, lambda: [s for s in processes.list_servers() if owner(s) in tree(child.pid)])[0]
    wait_for(child, lambda: _running(own.port))
    return own


def _running(port):
    """How many requests the server works on; none where it does not answer yet."""
    with contextlib.suppress(ScrapeError):
        return scrape.fetch(Endpoint(f"http://127.0.0.1:{port}", "any"))["running"]


def owner(server):
    return int(processes.environment_of(psutil.Process(server.pid)).get(processes.OWNER, "0:").partition(":")[0])


def tree(pid):
    return {process.pid for process in psutil.Process(pid).children(recursive=True)} | {pid}


def end(project, child, server):
    """What the command said at its end; nothing of its server is left, and others may measure."""
    out, told = child.communicate(timeout=180)
    with within(project):
        assert not processes.members(server.id) and quiet.measuring() is None
    assert "Traceback" not in told + out and told.count("Next:") <= 1
    return child.returncode, told


def kept(project):
    with within(project):
        return {run.id for run in store.list_runs("live", "load") if run.valid}


def test_stop_kill_and_ctrl_c_each_end_in_one_message_and_keep_what_was_measured(projects):  # pitfall 26, pitfall 28
    children = [measure(project) for project in projects]
    servers = [server_in_use(child) for child in children]
    before = [
        wait_for(child, lambda project=project: kept(project))
        for child, project in zip(children, projects, strict=True)
    ]

    next(process for process in processes.members(servers[1].id) if "EngineCore" in process.name()).kill()
    stopped = subprocess.run([*COMMAND, "stop", servers[0].id], capture_output=True, text=True)
    assert stopped.returncode == 0, stopped.stderr
    code, told = end(projects[1], children[1], servers[1])
    assert code == 1 and "signal 9 (SIGKILL)" in told and "stack trace" not in told.lower()
    code, told = end(projects[0], children[0], servers[0])
    assert code == 1 and "asked to end" in told and "kvlab stop" in told and "is kept" in told
    assert all(there <= kept(project) for there, project in zip(before, projects, strict=True))

    child = measure(projects[0])
    server = server_in_use(child)
    os.kill(child.pid, signal.SIGINT)
    code, told = end(projects[0], child, server)
    assert code == 130 and told.strip().endswith("the same command resumes.")
    assert before[0] <= kept(projects[0])
