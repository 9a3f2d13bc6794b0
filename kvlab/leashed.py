"""A program beside the servers, such as a router: it listens on a local port and cannot outlive this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

from kvlab import processes, server
from kvlab.leash import MARKER


class Leashed:
    """One program under a leash of its own (see kvlab.leash). `grace_s`: from SIGTERM to SIGKILL."""

    def __init__(
        self, argv: Sequence[str], *, port: int, log_dir: Path, name: str, env: dict[str, str], grace_s: float = 1.0
    ):
        self.argv, self.port, self._env, self._grace_s = list(argv), port, env, grace_s
        self.id = f"{port}-{secrets.token_hex(3)}"
        self.log_path = Path(log_dir) / f"{name}-{self.id}.log"
        self._leash: subprocess.Popen | None = None
        self._owner = os.getpid()

    def start(self) -> None:
        """Starts it; whether it gets ready is for the caller to see."""
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        read_end, write_end = os.pipe()
        self._rope = os.fdopen(write_end, "wb", buffering=0)
        server._ropes.add(self._rope)
        leash = [sys.executable, "-I", "-S", str(server.LEASH), "--fd", str(read_end), "--grace", str(self._grace_s)]
        marks = processes.marks(self.id, self.port)
        try:
            with self.log_path.open("wb") as log:
                self._leash = subprocess.Popen(
                    [*leash, "--", *self.argv],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=self._env | marks | {MARKER: self.id},
                    cwd=self.log_path.parent,
                    start_new_session=True,
                    pass_fds=(read_end,),
                )
        finally:
            os.close(read_end)

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
        with contextlib.suppress(psutil.NoSuchProcess, AttributeError):
            for process in psutil.Process(self._leash.pid).children():
                if os.getpgid(process.pid) == process.pid:
                    return process.pid
        return None

    def log_text(self) -> str:
        """What it has said so far."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def stop(self) -> None:
        """Ends it with everything below it, and verifies it. Safe to call twice, and in a forked child."""
        if self._leash is None or os.getpid() != self._owner:
            return
        self._rope.close()
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._leash.wait(processes.LEASH_S)
        finally:
            processes.kill_tree(self.id)
            self._leash.wait()
            self._leash = None
