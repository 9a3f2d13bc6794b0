"""One measurement at a time on this computer: two at once would measure each other.

Alone (the default): whoever measures holds the computer until it is done, and a second one is refused. In turns
(KVLAB_TAKE_TURNS=1, `kvlab measure --together`): several notebooks run at once; servers start side by side, a load
waits until no server is starting and no other load runs, and a start waits for a load that runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from kvlab import engine
from kvlab.errors import ConfigError, KvlabError, StoreError

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


def take_machine(what: str = "") -> Quiet:
    """The right to measure `what`. Raises KvlabError where another measurement holds the computer alone."""
    turns = _takes_turns()
    handle = _open()
    if not turns:
        _claim_alone(handle)
        _sign(handle, what)
    return Quiet(handle, turns)


def _takes_turns() -> bool:
    value = os.environ.get(TURNS, "").strip()
    if value not in ("", "0", "1"):
        raise ConfigError(f"{TURNS} is {value!r}.", next_step=f"export {TURNS}=1 to take turns, or unset {TURNS}")
    return value == "1"


def check() -> None:
    """Raises what `take_machine` would say of the cache folder and of KVLAB_TAKE_TURNS; takes and writes nothing."""
    _takes_turns()
    path = engine.cache_dir() / "measuring.lock"
    there = next(p for p in (path, *path.parents) if os.path.exists(p))
    if not os.access(there, os.W_OK) or (there != path and not there.is_dir()):
        raise _unwritable(path, f"{there} is read-only, or no folder")


def refuse_second() -> None:
    """Raises KvlabError where another measurement holds the computer alone; takes nothing itself."""
    if not _takes_turns():
        handle = _open()
        _claim_alone(handle)
        handle.close()


def measuring() -> str | None:
    """What is being measured on this computer, in words; None where nothing is."""
    handle = _open()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _owner(handle)
    finally:
        handle.close()
    return None


def _open():
    path = engine.cache_dir() / "measuring.lock"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("a+", encoding="utf-8")
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, why: object) -> StoreError:
    return StoreError(
        f"The cache folder {path.parent} cannot be written: {why}",
        cause="the home folder is missing, read-only or full, or KVLAB_CACHE names something else than a folder",
        next_step="set KVLAB_CACHE to a folder that can be written",
    )


def _claim_alone(handle) -> None:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = _owner(handle)
        handle.close()
        raise KvlabError(
            f"Another measurement runs on this computer ({owner}); the two would disturb each other.",
            "another terminal, or a notebook that is still open: it holds the computer until its last cell has run",
            "look at it with kvlab ps; wait for it, or end it there; then run this again. --mode replay needs no quiet",
        ) from None


def _sign(handle, what: str) -> None:
    handle.truncate(0)
    since = datetime.now().strftime("%H:%M:%S")
    handle.write(f"process {os.getpid()}{f', {what}' if what else ''}, since {since}")
    handle.flush()


def _owner(handle) -> str:
    """What the holder has written; one that takes turns writes nothing, and what a dead one wrote is not believed."""
    handle.seek(0)
    text = handle.read().strip()
    match = re.match(r"process (\d+)\b", text)
    return text if match and os.path.exists(f"/proc/{match[1]}") else "sections that take turns"
