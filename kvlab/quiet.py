"""One measurement at a time on this computer: two at once would measure each other."""

from __future__ import annotations

import fcntl
import os

from kvlab import engine
from kvlab.errors import KvlabError


def take_machine():
    """The lock that one measurement at a time holds on this computer; closing it, or the end of the process, frees it.

    Raises KvlabError where another one measures: two at once would measure each other.
    """
    path = engine.cache_dir() / "measuring.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = path.open("a+")
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
    return handle
