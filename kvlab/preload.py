"""How a CPU server starts without importing again: which servers may, and by what they are started.

"preloaded": forked from a process that has imported everything (kvlab.preloaded), one for each environment. Where that
is not to be had, "forked engine": the server imports, and its engine is forked from it (kvlab.forked_engine). "plain":
vLLM's own start.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from socket import AF_UNIX, SOCK_SEQPACKET, send_fds, socket, socketpair
from typing import IO, Any

import psutil

from kvlab import leashed, processes
from kvlab.config import ServerConfig
from kvlab.leash import ROOM, wait_for

FORKED_ENGINE = Path(__file__).with_name("forked_engine.py")
PRELOADED = Path(__file__).with_name("preloaded.py")
MODULE = ["-m", "vllm.entrypoints.cli.main"]
SHARED = "KVLAB_PRELOADED"  # PID:FOLDER, while the notebooks of one command share such processes
NO_MATTER = ("COLUMNS", "JPY_", "JUPYTER_", "KVLAB_", "LINES")  # of a notebook or terminal: no import reads them
OWN = (processes.MARKER, processes.PORT, processes.OWNER, "VLLM_RPC_BASE_PATH")  # differ from server to server
ROOM_BYTES = 8192
AT_ONCE = 2  # processes that wait, one for each environment; another one ends the oldest
READY_S = 180.0  # the imports take ten seconds, several times that on a busy machine
GONE = 255  # the exit code of a leash that nobody was left to wait for


class Refused(Exception):
    """No server can be forked; the text says why."""


def possible(config: ServerConfig) -> bool:
    """Whether such a server is the same however it started.

    Only without compilation, which is what reads most of the environment, and where the start is not what is measured.
    """
    return (
        config.preload
        and config.engine == "cpu"
        and config.enforce_eager
        and config.caches == "user"
        and config.tensor_parallel_size == 1
    )


def forked_engine(argv: Sequence[str]) -> list[str] | None:
    """The command with an engine process that is forked; None where it does not run vLLM's command line."""
    for i in range(len(argv) - 1):
        if list(argv[i : i + 2]) == MODULE:
            return [*argv[:i], "-P", str(FORKED_ENGINE), *argv[i + 2 :]]
    return None


def words_and_cores(argv: Sequence[str]) -> tuple[list[str], list[int]] | None:
    """The words after vLLM's command, and the cores that `taskset` before it names; None for any other command."""
    cores: list[int] = []
    if list(argv[:2]) == ["taskset", "-c"]:
        cores, argv = [int(core) for core in argv[2].split(",")], argv[3:]
    return (list(argv[3:]), cores) if list(argv[:3]) == [sys.executable, *MODULE] else None


class Leash:
    """The leash of a forked server: what kvlab uses of subprocess.Popen. Another process is its parent, and tells."""

    def __init__(self, pid: int, told):
        self.pid, self.returncode, self._told = pid, None, told
        self._lock = threading.Lock()
        self._process: psutil.Process | None = None
        with contextlib.suppress(psutil.NoSuchProcess):
            self._process = psutil.Process(pid)

    def poll(self) -> int | None:
        """Its exit code, -n for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._told_code()
            return self.returncode

    def _told_code(self) -> int | None:
        try:
            message = self._told.recv(256) if self._told.fileno() >= 0 else b""
        except BlockingIOError:
            return None
        except OSError:
            message = b""
        self._told.close()
        if message:
            return json.loads(message)["exit"]
        return None if self._process is not None and processes.runs(self._process) else GONE

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; subprocess.TimeoutExpired where it runs on."""
        return wait_for(self, timeout)


class _Waiting:
    """One preloaded process of this one."""

    def __init__(self, env: dict[str, str], place: tuple[int, Path] | None):
        self.process: subprocess.Popen | None = None
        self.control = place and _connect(place[1])
        self.imported = self.control is not None
        if self.control is None:
            self._start(env, place)

    def _start(self, env: dict[str, str], place: tuple[int, Path] | None) -> None:
        self.control, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        self.said = tempfile.TemporaryFile()  # noqa: SIM115  it lives as long as the process
        owner = place[0] if place else os.getpid()
        argv = [sys.executable, "-P", str(PRELOADED), "--control", str(theirs.fileno()), "--owner", str(owner)]
        with theirs:
            self.process = subprocess.Popen(
                argv + (["--listen", str(place[1])] if place else []),
                stdin=subprocess.DEVNULL,
                stdout=self.said,
                stderr=self.said,
                env=env | {ROOM: "x" * ROOM_BYTES},
                cwd="/",
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # an interrupt from the keyboard is for its owner
            )

    def fork(self, request: dict[str, Any], read_end: int, log: IO[bytes]) -> Leash:
        """A server; Refused where this process has ended, or cannot fork one."""
        told, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        told.settimeout(READY_S)
        try:
            with theirs, tempfile.TemporaryFile() as wanted:
                wanted.write(json.dumps(request).encode())
                wanted.seek(0)
                send_fds(self.control, [b"+"], [wanted.fileno(), read_end, log.fileno(), theirs.fileno()])
            answer = json.loads(told.recv(4096) or b"{}")
        except OSError as error:
            told.close()
            raise Refused(str(error) or type(error).__name__) from None
        if "pid" not in answer:
            told.close()
            raise Refused(answer.get("refused") or self._last_words())
        told.setblocking(False)
        self.imported = True
        return Leash(answer["pid"], told)

    def _last_words(self) -> str:
        if self.process is None:
            return "the process that has imported vLLM ended"
        self.said.seek(0)
        lines = self.said.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "the process that has imported vLLM ended"

    def end(self) -> None:
        """Ends it, with the last of the servers that it has forked."""
        self.control.close()
        if not self.imported:
            self.process.kill()
        if self.process is not None:
            _ended.append(self.process)  # collected when the next one starts


def _connect(path: Path) -> socket | None:
    """The control socket of a process that another notebook has started; None where there is none."""
    control = socket(AF_UNIX, SOCK_SEQPACKET)
    try:
        control.connect(str(path))
    except OSError:
        control.close()
        return None
    return control


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Within, the notebooks that this process executes share their preloaded processes, which end with it."""
    with tempfile.TemporaryDirectory(prefix="kvlab-") as folder:
        os.environ[SHARED] = f"{os.getpid()}:{folder}"
        try:
            yield
        finally:
            os.environ.pop(SHARED, None)
            for path in Path(folder).iterdir():
                if (control := _connect(path)) is not None:
                    with control, contextlib.suppress(OSError):
                        control.send(b"-")


def _place(key: frozenset) -> tuple[int, Path] | None:
    """Whose the shared process of an environment is, and its socket; None where nothing is shared."""
    owner, _, folder = os.environ.get(SHARED, "").partition(":")
    name = hashlib.sha256(json.dumps(sorted(key)).encode()).hexdigest()[:16]
    return (int(owner), Path(folder) / name) if folder else None


_ended: list[subprocess.Popen] = []
_waiting: dict[frozenset, _Waiting] = {}
_refusals: dict[frozenset, str] = {}
_lock = threading.Lock()


def _forget() -> None:
    # A forked child has no process of its own yet, and holds none of its parent's sockets.
    global _lock
    _lock = threading.Lock()
    for one in _waiting.values():
        one.control.close()
    _waiting.clear()


os.register_at_fork(after_in_child=_forget)


def _process_for(env: dict[str, str]) -> tuple[frozenset, _Waiting]:
    """The preloaded process of this environment, started where there is none; Refused if it was in vain before."""
    env = {name: value for name, value in env.items() if name not in OWN}
    key = frozenset((name, value) for name, value in env.items() if not name.startswith(NO_MATTER))
    with _lock:
        if key in _refusals:
            raise Refused(_refusals[key])
        if key not in _waiting:
            while len(_waiting) >= AT_ONCE:
                _waiting.pop(next(iter(_waiting))).end()
            _ended[:] = [process for process in _ended if process.poll() is None]
            _waiting[key] = _Waiting(env, _place(key))
        return key, _waiting[key]


@atexit.register
def end_all() -> None:
    """Ends the preloaded processes of this one, each with the last of its servers."""
    with _lock:
        for one in _waiting.values():
            one.end()
        _waiting.clear()


def pids() -> list[int]:
    """The preloaded processes of this one."""
    return [one.process.pid for one in _waiting.values() if one.process is not None]


def launch(argv: Sequence[str], *, spared: bool, **options) -> tuple[Any, IO[bytes], str]:
    """Starts a server as `leashed.launch` does, with its `options`; returns leash, rope and how it was started.

    `spared`: without imports, where that can be had; the log begins with the reason where it cannot.
    """
    note = ""
    if spared and sys.platform == "linux" and (found := words_and_cores(argv)):
        try:
            return (*_fork(*found, **options), "preloaded")
        except (Refused, OSError) as error:
            note = f"[start] not from a preloaded process: {error}\n"
    forked = forked_engine(argv) if spared else None
    leash, rope = leashed.launch(forked or argv, note=note, **options)
    return leash, rope, "forked engine" if forked else "plain"


def _fork(
    words: list[str],
    cores: list[int],
    *,
    name: str,
    port: int,
    log_path: Path,
    env: dict[str, str],
    grace_s: float,
    remove: str,
) -> tuple[Leash, IO[bytes]]:
    env = env | processes.marks(name, port)
    key, process = _process_for(env)
    about = {"argv": words, "cores": cores, "env": env, "grace_s": grace_s, "remove": remove}
    read_end, rope = leashed.new_rope()
    try:
        with log_path.open("wb") as log:
            return process.fork(about | {"folder": str(log_path.parent.absolute())}, read_end, log), rope
    except BaseException as error:
        rope.close()
        if isinstance(error, Refused):
            with _lock:
                _refusals[key] = str(error)
                _waiting.pop(key, process).end()
        raise
    finally:
        os.close(read_end)
