"""A run that needs no server: a plain computation on this machine, stored as the runs of servers are."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from kvlab import config, provenance, quiet, store
from kvlab.config import Cell
from kvlab.errors import KvlabError
from kvlab.results import EMPTY, Result

LIMIT_S = 600


def measured(lab, cell: Cell, compute: Callable[[], dict[str, Any]], elsewhere: str) -> Result:
    """The stored run of `cell`, or a new one of what `compute` returns, as the mode asks; a replay only reads it.

    Call it before the first `lab.measure`, which holds the computer until the section is written. `elsewhere`: why
    there is nothing to compute where the server is an existing one. Raises what `compute` raises, and KvlabError where
    another measurement runs.
    """
    if lab.base_url or lab.no_grid:
        return Result(cell, None, lab.no_grid or elsewhere)
    run = store.find_run(lab.machine, lab.section, config.key(cell))
    if lab.mode == "measure" or (run is None and lab.mode == "auto"):
        run = _measure(lab, cell, compute)
    return Result(cell, run, None if run else f"no run is stored for this machine; kvlab measure {lab.section}")


def _measure(lab, cell: Cell, compute: Callable[[], dict[str, Any]]) -> store.Run:
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


def in_a_process(module: str, *arguments: str, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The JSON in the last line that a module prints, run in a process of its own: its memory and threads go with it.

    KvlabError where it prints none within LIMIT_S.
    """
    command = [sys.executable, "-m", module, *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, errors="replace", timeout=LIMIT_S, env=os.environ | (env or {})
        )
        return json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        raise KvlabError(f"{module} took longer than {LIMIT_S} s.") from None
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or ["the process said nothing"])[-1]
        raise KvlabError(f"{module} gave no result (exit code {done.returncode}): {said}") from None
