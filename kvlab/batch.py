"""Several notebooks: those that measure run one after another, those that only replay run side by side.

A section whose notebook, profile and runs are what they were when it last finished has nothing to measure; it replays.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from kvlab import provenance, run, store
from kvlab.errors import KvlabError

DONE = "finished.json"  # in the build folder: section -> stamp of its last complete execution, by machine


def execute(
    paths: list[Path],
    given: dict[str, Any],
    build: Path,
    profile: str,
    *,
    go_on: bool,
    told: Callable[[str, float | None], None],
    begun: Callable[[str, bool], None] = lambda section, measures: None,
    progress: bool = False,
) -> tuple[dict[str, float], dict[str, str]]:
    """Executes notebooks into build/notebooks; returns seconds a section and failures a section.

    `profile` is the profile's whole text; `begun(section, measures)` is called as each one begins that measures, and
    `told(section, seconds or None)` as each one ends. Without `go_on` the first failure raises.
    """
    machine, measures = given["MACHINE"], given["MODE"] != "replay"
    todo = unfinished(paths, given, build, profile)
    timings: dict[str, float] = {}
    failures: dict[str, str] = {}

    def note(path: Path, outcome: Callable[[], float]) -> None:
        section = path.stem[3:]
        try:
            timings[section] = outcome()
            if measures:
                _remember(build, machine, path, profile)
        except KvlabError as error:
            if not go_on:
                raise
            failures[section] = str(error)
        told(section, timings.get(section))

    for path in paths:
        if path in todo:
            begun(path.stem[3:], True)
            note(path, lambda path=path: run.execute(path, given, _out(build, path), progress=progress))
    if ready := [path for path in paths if path not in todo]:
        _side_by_side(ready, given | {"MODE": "replay"}, build, note)
    order = [path.stem[3:] for path in paths]
    return {name: timings[name] for name in order if name in timings}, failures


def unfinished(paths: list[Path], given: dict[str, Any], build: Path, profile: str) -> list[Path]:
    """The notebooks that may have something to measure; the others only replay."""
    if given["MODE"] == "replay":
        return []
    machine, again = given["MACHINE"], given["MODE"] == "measure"
    return [path for path in paths if again or not _finished(build, machine, path, profile)]


def _side_by_side(paths: list[Path], given: dict[str, Any], build: Path, note: Callable) -> None:
    workers = min(len(paths), max(1, provenance.cores()), 4)
    # Spawned: a fork would copy whatever threads and event loops the caller has.
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [(path, pool.submit(run.execute, path, given, _out(build, path))) for path in paths]
        for path, job in jobs:
            note(path, job.result)


def _out(build: Path, path: Path) -> Path:
    return build / "notebooks" / path.name


def _stamp(machine: str, path: Path, profile: str) -> str:
    section = store.machine_dir(machine) / path.stem[3:]
    runs = sorted(folder.parent.name for folder in section.glob("*/run.json"))
    return hashlib.sha256(json.dumps([path.read_text(), profile, runs]).encode()).hexdigest()


def _read(build: Path) -> dict[str, dict[str, str]]:
    try:
        return json.loads((build / DONE).read_text())
    except (OSError, ValueError):
        return {}


def _finished(build: Path, machine: str, path: Path, profile: str) -> bool:
    return _read(build).get(machine, {}).get(path.stem[3:]) == _stamp(machine, path, profile)


def _remember(build: Path, machine: str, path: Path, profile: str) -> None:
    done = _read(build)
    done.setdefault(machine, {})[path.stem[3:]] = _stamp(machine, path, profile)
    store.write_text(build / DONE, json.dumps(done, indent=1, sort_keys=True) + "\n")
