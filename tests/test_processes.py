"""Servers found by their mark, ended, and cleaned up after."""

import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest
from waiting_for_tests import LIMIT_S, until

from kvlab import leash, ports, processes
from kvlab.errors import ServerError

SLEEP = "import time; time.sleep(300)"
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(300)"


@pytest.fixture
def marked():
    """marked(code, **marks) -> (process, server id): a process with the marks of a server."""
    started = []

    def start(code=SLEEP, port=12345, **changes):
        server_id = f"test-{uuid.uuid4().hex[:8]}"
        env = os.environ | processes.marks(server_id, port) | changes
        started.append(subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE))
        return started[-1], server_id

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def listed(server_id):
    return next((server for server in processes.list_servers() if server.id == server_id), None)


def test_a_server_is_listed_with_its_port_start_and_memory(marked):
    process, server_id = marked()
    found = listed(server_id)
    assert (found.pid, found.port, found.orphan) == (process.pid, 12345, False)
    assert found.memory_bytes > 2**20 and SLEEP in found.cmd
    assert abs(found.started.timestamp() - time.time()) < 60 and found.started.tzinfo
    assert server_id in processes.describe(found) and "ORPHAN" not in processes.describe(found)


def test_an_unmarked_process_is_never_listed():
    with subprocess.Popen([sys.executable, "-c", SLEEP]) as process:
        assert process.pid not in [server.pid for server in processes.list_servers()]
        process.kill()


@pytest.mark.parametrize("owner", ["dead", "reused process id"])
def test_a_server_without_its_owner_is_an_orphan(marked, owner):  # pitfall 26
    gone = subprocess.Popen(["true"])
    gone.wait()
    identity = f"{gone.pid}:1.00" if owner == "dead" else f"{os.getpid()}:1.00"
    _, server_id = marked(**{processes.OWNER: identity})
    assert listed(server_id).orphan and "ORPHAN" in processes.describe(listed(server_id))


def test_a_server_is_marked_with_the_folder_from_which_it_was_started(marked, monkeypatch, tmp_path):
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "data").mkdir()
    monkeypatch.delenv(processes.PROJECT, raising=False)
    monkeypatch.chdir(tmp_path / "notebooks")  # where a kernel works
    _, server_id = marked()
    assert listed(server_id).project == str(tmp_path) and f"from {tmp_path}" in processes.describe(listed(server_id))
    monkeypatch.setenv(processes.PROJECT, "/of/the/command")  # which started the kernel
    assert processes.project() == "/of/the/command"


def test_those_of_this_folder_are_meant_where_none_is_named(marked):
    here, elsewhere = marked()[1], marked(**{processes.PROJECT: "/another/clone"})[1]
    unknown = marked(**{processes.PROJECT: ""})[1]  # as an older version marked it

    def ids(servers):
        return {server.id for server in servers} & {here, elsewhere, unknown}

    meant, others = processes.choose([])
    assert ids(meant) == {here} and ids(others) == {elsewhere, unknown}
    meant, others = processes.choose([], everywhere=True)
    assert ids(meant) == {here, elsewhere, unknown} and not others
    assert [server.id for server in processes.choose([elsewhere])[0]] == [elsewhere]


def test_stop_ends_the_named_server_only(marked):
    first, second = marked(), marked()
    processes.end_tree(first[1])
    assert listed(first[1]) is None and listed(second[1]) is not None
    assert first[0].wait(LIMIT_S) == -signal.SIGTERM


def test_stop_ends_a_deaf_orphan(marked, monkeypatch):  # pitfall 26
    monkeypatch.setattr(processes, "GRACE_S", 0.3)
    process, server_id = marked(DEAF)
    process.stdout.readline()
    processes.end_tree(server_id)
    assert process.wait(LIMIT_S) == -signal.SIGKILL


def test_stop_goes_through_the_leash(monkeypatch):
    server_id = f"test-{uuid.uuid4().hex[:8]}"
    read_end, write_end = os.pipe()
    argv = [sys.executable, "-I", "-S", leash.__file__, "--fd", str(read_end), "--", sys.executable, "-c", SLEEP]
    env = os.environ | processes.marks(server_id, 1)
    process = subprocess.Popen(argv, env=env, pass_fds=(read_end,), start_new_session=True, stderr=subprocess.DEVNULL)
    until(lambda: len(processes.members(server_id)) == 3)  # leash, guard, server
    assert listed(server_id).pid != process.pid  # the server, not its leash
    processes.end_tree(server_id)
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM  # the leash saw its server end
    os.close(read_end)
    os.close(write_end)


def test_an_unknown_server_is_an_error_that_lists_the_known(marked):
    _, server_id = marked()
    with pytest.raises(ServerError, match=server_id):
        processes.choose(["nonsense"])


def test_shared_memory_is_removed_only_where_nobody_else_holds_it(marked):
    name = f"kvlab-test-{uuid.uuid4().hex[:8]}"
    own, shared = (Path(leash.SHM) / f"{name}-{kind}" for kind in ("own", "shared"))
    code = "import mmap, time; f = [open(p, 'wb+') for p in {!r}]; [x.truncate(4096) for x in f]; "
    code += "m = [mmap.mmap(x.fileno(), 4096) for x in f]; print('up', flush=True); time.sleep(300)"
    server, server_id = marked(code.format([str(own), str(shared)]))
    server.stdout.readline()
    other, _ = marked(code.format([str(shared)]).replace("wb+", "rb+"))
    other.stdout.readline()
    assert leash.shared_files(processes.pids(server_id)) == {str(own), str(shared)}
    processes.end_tree(server_id)
    try:
        assert not own.exists() and shared.exists()
    finally:
        shared.unlink(missing_ok=True)


NAMED = "import multiprocessing as m, time; s = m.get_context('spawn').Lock(); print(s._semlock.name, flush=True); "


def test_a_named_semaphore_is_removed_with_its_killed_owner(marked):  # pitfall 26
    server, server_id = marked(NAMED + "time.sleep(300)")
    name = Path(leash.SHM) / f"sem.{server.stdout.readline().decode().strip().strip('/')}"
    held = leash.shared_files(processes.pids(server_id))
    assert str(name) in held  # though /proc shows it under the name of a removed temporary file
    leash.remove_shared_files(held)
    assert name.exists()  # somebody alive holds it
    processes.kill_tree(server_id)
    leash.remove_shared_files(held)
    assert not name.exists()


def test_the_holder_of_a_port_is_named(marked):
    port = ports.free_port()
    code = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); print(flush=True); time.sleep(300)"
    process, server_id = marked(code)
    process.stdout.readline()
    assert not ports.is_free(port)
    assert f"pid {process.pid}" in ports.holder_of(port) and server_id in ports.holder_of(port)
    assert ports.listens(process.pid, port) and not ports.listens(marked()[0].pid, port)


def test_a_free_port_is_not_where_outgoing_connections_come_from():
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert all(ports.free_port() < low for _ in range(5)) or low <= ports.PORTS.stop
    assert ports.holder_of(ports.free_port()) is None


def test_a_process_that_ends_while_it_is_described_is_left_out(marked, monkeypatch):
    process, server_id = marked()

    def gone(self):
        raise psutil.NoSuchProcess(self.pid)

    monkeypatch.setattr(psutil.Process, "cmdline", gone)
    assert listed(server_id) is None
    assert process.poll() is None
