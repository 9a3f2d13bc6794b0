"""The servers that kvlab has started on this machine, found by a mark in their environment, and how they are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime

import psutil

from kvlab.errors import ServerError
from kvlab.files import project_folder
from kvlab.leash import GRACE_S, LINGER_S, MARKER, remove_shared_files, shared_files

PORT = "KVLAB_SERVER_PORT"
PROJECT = "KVLAB_PROJECT"  # the project folder from which it was started
OWNER = "KVLAB_SERVER_OWNER"  # "process id:creation time" of the program that started it
LEASH_S = GRACE_S + LINGER_S + 7.0  # the leash needs at most this long to end its server
GONE = (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied)


@dataclass(frozen=True)
class ServerProcess:
    """One server. `pid` is its main process; `memory_bytes` the whole tree's; `orphan`: its owner is gone.

    `project`: the folder from which it was started; null where an older kvlab started it.
    """

    id: str
    pid: int
    port: int | None
    started: datetime
    orphan: bool
    memory_bytes: int
    cmd: str
    project: str | None = None


def marks(server_id: str, port: int) -> dict[str, str]:
    """Environment variables by which the processes of a server are found again."""
    return {MARKER: server_id, PORT: str(port), OWNER: _identity(psutil.Process()), PROJECT: project()}


def project() -> str:
    """The project folder for which this process works: that of the command that started it, else the one around it."""
    return os.environ.get(PROJECT) or str(project_folder().resolve())


def _identity(process: psutil.Process) -> str:
    return f"{process.pid}:{process.create_time():.2f}"


def environment_of(process: psutil.Process) -> dict[str, str]:
    """The environment that a process of this user was started with; {} where it cannot be read."""
    with contextlib.suppress(*GONE, OSError):
        if process.uids().real == os.getuid() and process.status() != psutil.STATUS_ZOMBIE:
            return process.environ()
    return {}


def _by_id() -> dict[str, list[tuple[psutil.Process, dict[str, str]]]]:
    found: dict[str, list] = {}
    for process in psutil.process_iter():
        env = environment_of(process)
        if MARKER in env and process.pid != os.getpid():
            found.setdefault(env[MARKER], []).append((process, env))
    return found


def members(server_id: str) -> list[psutil.Process]:
    """Every live process of one server, its leash included."""
    return [process for process, _ in _by_id().get(server_id, [])]


def pids(server_id: str) -> set[int]:
    """Process ids of one server, its leash included."""
    return {process.pid for process in members(server_id)}


def _is_leash(process: psutil.Process) -> bool:
    return any(part.endswith("leash.py") for part in process.cmdline()[:5])


def list_servers() -> list[ServerProcess]:
    """The servers of this user that still have a process, oldest first, whichever program started them."""
    servers = []
    for server_id, found in _by_id().items():
        with contextlib.suppress(*GONE):  # it ended meanwhile
            servers.append(_describe(server_id, found))
    return sorted(servers, key=lambda server: server.started)


def _describe(server_id: str, found: list[tuple[psutil.Process, dict[str, str]]]) -> ServerProcess:
    tree = sorted((process for process, _ in found), key=lambda process: process.create_time())
    main = next((process for process in tree if not _is_leash(process)), tree[0])
    env = found[0][1]
    return ServerProcess(
        id=server_id,
        pid=main.pid,
        port=int(env[PORT]) if env.get(PORT, "").isdigit() else None,
        started=datetime.fromtimestamp(tree[0].create_time(), UTC),
        orphan=not _alive(env.get(OWNER, "")),
        memory_bytes=sum(_memory_bytes(process) for process in tree),
        cmd=" ".join(main.cmdline()),
        project=env.get(PROJECT),
    )


def _alive(identity: str) -> bool:
    with contextlib.suppress(*GONE, ValueError):
        process = psutil.Process(int(identity.partition(":")[0]))
        return process.status() != psutil.STATUS_ZOMBIE and _identity(process) == identity
    return False


def runs(process: psutil.Process) -> bool:
    """Whether this very process is there and has not ended; an uncollected one has."""
    with contextlib.suppress(*GONE):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def memory_of(server_id: str) -> dict[str, int]:
    """Main memory of one server's processes in bytes, `pss`: shared pages counted once; and how many processes."""
    tree = members(server_id)
    return {"pss_bytes": sum(map(_memory_bytes, tree)), "processes": len(tree)}


def _memory_bytes(process: psutil.Process) -> int:
    with contextlib.suppress(*GONE):
        full = process.memory_full_info()
        return getattr(full, "pss", full.rss)  # the proportional size counts shared pages once
    return 0


def describe(server: ServerProcess) -> str:
    """One line for people."""
    gib = server.memory_bytes / 2**30
    since = server.started.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    note = "  ORPHAN: the program that started it is gone" if server.orphan else ""
    where = server.project or "a folder that is not known"
    return f"{server.id}  pid {server.pid}  port {server.port}  since {since}  {gib:.1f} GiB  from {where}{note}"


def choose(ids: Iterable[str], everywhere: bool = False) -> tuple[list[ServerProcess], list[ServerProcess]]:
    """(the servers that are meant, those that are not and were started elsewhere); ServerError for an unknown id.

    Without ids those of this project folder are meant; `everywhere`: all of this user's.
    """
    there = {server.id: server for server in list_servers()}
    ids = list(dict.fromkeys(ids))
    if unknown := [server_id for server_id in ids if server_id not in there]:
        known = ", ".join(there) or "none"
        raise ServerError(
            f"No server of kvlab is called {', '.join(unknown)}",
            f"it has ended already, or belongs to another user; running: {known}",
            "kvlab ps lists them",
        )
    if ids:
        return [there[server_id] for server_id in ids], []
    meant = [server for server in there.values() if everywhere or server.project == project()]
    return meant, [server for server in there.values() if server not in meant]


def end_tree(server_id: str) -> None:
    """End every process of a server, politely through its leash where that lives; ServerError if one stays."""
    leftovers = shared_files(pids(server_id))
    leashes = [process for process in members(server_id) if _is_leash(process)]
    for process in leashes or members(server_id):
        _signal(process, signal.SIGTERM)
    wait_until_gone(server_id, LEASH_S if leashes else GRACE_S)
    kill_tree(server_id)
    remove_shared_files(leftovers)


def wait_until_gone(server_id: str, timeout_s: float) -> bool:
    """Whether every process of the server ended within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while members(server_id):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def kill_tree(server_id: str) -> None:
    """SIGKILL to whatever is left of a server; ServerError if something survives even that."""
    for _ in range(20):
        left = members(server_id)
        for process in left:
            _signal(process, signal.SIGKILL)
        if not left or wait_until_gone(server_id, 0.5):
            return
    pids = ", ".join(str(process.pid) for process in members(server_id))
    raise ServerError(
        f"Processes {pids} of the server {server_id} survive SIGKILL",
        "they hang in the kernel, as a rule in the GPU driver",
        "see `dmesg | tail`; a restart of the machine or of the container ends them",
    )


def _signal(process: psutil.Process, number: int) -> None:
    with contextlib.suppress(*GONE):
        process.send_signal(number)  # psutil refuses if the process id has been reused
