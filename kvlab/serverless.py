"""A run that needs no server: a plain computation on this machine, stored as the runs of servers are."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from kvlab import config, provenance, quiet, store
from kvlab.config import Cell
from kvlab.results import EMPTY


def measure(lab, cell: Cell, compute: Callable[[], dict[str, Any]]) -> store.Run:
    """Stores the summary that `compute` returns as the run of `cell`; it holds the computer meanwhile.

    Raises what `compute` raises, and KvlabError where another measurement runs.
    """
    turn = quiet.take_machine()
    began, utc = time.monotonic(), datetime.now(UTC).isoformat(timespec="milliseconds")
    try:
        with turn.measuring():
            summary = compute()
    finally:
        turn.close()
    manifest = {
        "key": config.key(cell),
        "cell": cell.model_dump(mode="json"),
        "profile": lab.profile.name,
        "created_utc": utc,
        "duration_s": time.monotonic() - began,
        "provenance": provenance.collect(),
        "summary": summary,
        "certificate": {},
        "valid": True,
    }
    return store.save_run(lab.machine, lab.section, manifest, *EMPTY)
