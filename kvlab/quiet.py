"""One measurement at a time on this computer: two at once would measure each other.

Alone (the default): whoever measures holds the computer until it is done, and a second one is refused. In turns
(KVLAB_TAKE_TURNS=1, `kvlab measure --together`): several notebooks run at once; servers start side by side, a load
waits until no server is starting and no other load runs, and a start waits for a load that runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator

from kvlab import engine
from kvlab.errors import KvlabError, StoreError

TURNS = "KVLAB_TAKE_TURNS"


class Quiet:
    """The right to measure on this computer; `close`, or the end of the process, gives it back."""

    def __init__(self, handle, turns: bool):
        self._handle, self.turns = handle, turns

    @contextlib.contextmanager
    def starting(self) -> Iterator[None]:
        """While a server starts."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """While a load runs."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        if not self.turns:  # held all the time
            yield
            return
        fcntl.flock(self._handle, kind)
        try:
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)

    def close(self) -> None:
        self._handle.close()


def take_machine() -> Quiet:
    """The right to measure. Raises KvlabError where another measurement holds the computer alone."""
    turns = os.environ.get(TURNS) == "1"
    path = engine.cache_dir() / "measuring.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = path.open("a+")
    except OSError as error:
        raise StoreError(
            f"The cache folder {path.parent} cannot be written: {error}",
            cause="the home folder is missing or read-only",
            next_step="set KVLAB_CACHE to a folder that can be written",
        ) from None
    if not turns:
        _claim_alone(handle)
    return Quiet(handle, turns)


def _claim_alone(handle) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.seek(0)
        owner = handle.read().strip() or "unknown"
        handle.close()
        raise KvlabError(
            f"Another measurement runs on this computer (process {owner}); the two would disturb each other.",
            next_step="wait for it, or close the notebook or command that holds it; then run this again",
        ) from None
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
