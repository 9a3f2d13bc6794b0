"""A program that cannot outlive this process, under a leash (see kvlab.leash): a server, or a router beside it."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import psutil

from kvlab import processes

LEASH = Path(__file__).with_name("leash.py")

_ropes: weakref.WeakSet = weakref.WeakSet()


def _drop_ropes() -> None:
    for rope in list(_ropes):
        with contextlib.suppress(OSError):
            rope.close()


# A forked child that kept the pipe open would keep the program alive after its owner's death.
os.register_at_fork(after_in_child=_drop_ropes)


def new_rope() -> tuple[int, IO[bytes]]:
    """The read end for a leash, and the rope itself, which no forked child keeps."""
    read_end, write_end = os.pipe()
    rope = os.fdopen(write_end, "wb", buffering=0)
    _ropes.add(rope)
    return read_end, rope


def launch(
    argv: Sequence[str],
    *,
    name: str,
    port: int,
    log_path: Path,
    env: dict[str, str],
    grace_s: float,
    remove: str = "",
    note: str = "",
) -> tuple[subprocess.Popen, IO[bytes]]:
    """Starts a program; returns its leash and the rope: closing that one ends the program.

    `name` marks its processes, `grace_s` lies between SIGTERM and SIGKILL, and the folder `remove` goes with it.
    It works in the folder of its log, which has to be there and begins with `note`.
    """
    read_end, rope = new_rope()
    # Isolated: the program's PYTHONPATH and packages are not the leash's business.
    leash = [sys.executable, "-I", "-S", str(LEASH), "--fd", str(read_end), "--grace", str(grace_s)]
    leash += ["--remove", remove] if remove else []
    try:
        with log_path.open("wb", buffering=0) as log:
            log.write(note.encode())
            process = subprocess.Popen(
                [*leash, "--", *argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=env | processes.marks(name, port),
                cwd=log_path.parent,  # python -m puts it first in the path: it must hold no modules
                start_new_session=True,
                pass_fds=(read_end,),
            )
    finally:
        os.close(read_end)
    return process, rope


def end(leash: subprocess.Popen, rope: IO[bytes], name: str) -> None:
    """Ends the program with everything below it, and verifies it."""
    rope.close()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            leash.wait(processes.LEASH_S)
    finally:
        processes.kill_tree(name)
        leash.wait()


def main_pid(leash: subprocess.Popen) -> int | None:
    """The program's main process, a child of its leash; None where it has none."""
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(leash.pid).children():
            if os.getpgid(process.pid) == process.pid:
                return process.pid
    return None


class Leashed:
    """A program beside the servers, such as a router. `grace_s`: from SIGTERM to SIGKILL; `remove`: goes with it."""

    def __init__(
        self,
        argv: Sequence[str],
        *,
        port: int,
        log_dir: Path,
        name: str,
        env: dict[str, str],
        grace_s: float = 1.0,
        remove: str = "",
    ):
        self.argv, self.port, self._env, self._grace_s, self._remove = list(argv), port, env, grace_s, remove
        self.id = f"{port}-{secrets.token_hex(3)}"
        self.log_path = Path(log_dir) / f"{name}-{self.id}.log"
        self._leash: subprocess.Popen | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Starts it; whether it gets ready is for the caller to see."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self._leash, self._rope = launch(
            self.argv,
            name=self.id,
            port=self.port,
            log_path=self.log_path,
            env=self._env,
            grace_s=self._grace_s,
            remove=self._remove,
        )

    @property
    def exit_code(self) -> int | None:
        """None while it runs, and before it was started."""
        return None if self._leash is None else self._leash.poll()

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._leash is not None and self._leash.poll() is None

    @property
    def leash_pid(self) -> int | None:
        """The leash's process, above the program."""
        return None if self._leash is None else self._leash.pid

    @property
    def pid(self) -> int | None:
        """The program's main process; None where it has none."""
        return None if self._leash is None else main_pid(self._leash)

    def log_text(self) -> str:
        """What it has said so far."""
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def stop(self) -> None:
        """Ends it with everything below it, and verifies it. Safe to call twice, and in a forked child."""
        if self._leash is None or os.getpid() != self._owner:
            return
        try:
            end(self._leash, self._rope, self.id)
        finally:
            self._leash = None
