"""Several notebooks: those that measure run one after another, those that only replay run side by side.

A section whose notebook, profile and runs are what they were when it last finished has nothing to measure; it replays.
A replay of which nothing has changed is taken over as it stands in the build folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from kvlab import files, kube_rules, l4, preload, progress, provenance, router_packages, run, store, takeover
from kvlab.errors import KvlabError, NotebookError

_ended: Any = None  # an event, in a process that replays
DONE = "finished.json"  # in the build folder: section -> stamp of its last complete execution, by machine


def execute(
    paths: list[Path],
    given: dict[str, Any],
    build: Path,
    profile: str,
    *,
    go_on: bool,
    told: Callable[[str, float | None, bool], None],
    begun: Callable[[str, bool], None] = lambda section, measures: None,
    shown: bool = False,
    again: bool = False,
    settle: bool = False,
    named: bool = True,
) -> tuple[dict[str, float], dict[str, str]]:
    """Executes notebooks into build/notebooks; returns seconds a section and failures a section.

    `profile` is the profile's whole text; `begun(section, measures)` is called as each one begins that measures, and
    `told(section, seconds or None, taken over)` as each one ends. Without `go_on` the first failure raises.
    `again`: nothing is taken over. `settle`: what has measured is replayed at the end too, beside what was measured
    after it. `shown`: what runs is told on standard error. `named`: somebody has chosen the machine's name, which a
    notebook that measures is told only then (see `kvlab.outcome`).
    """
    machine, measures = given["MACHINE"], given["MODE"] != "replay"
    measuring = given if named else given | {"MACHINE": ""}
    todo = unfinished(paths, given, build, profile)
    timings: dict[str, float] = {}
    failures: dict[str, str] = {}

    def note(path: Path, outcome: Callable[[], float], taken: bool = False) -> bool:
        section, before = path.stem[3:], timings.get(path.stem[3:])
        try:
            took_s = outcome()
            timings.setdefault(section, took_s)
            if measures and before is None:
                _remember(build, machine, path, profile)
        except KvlabError as error:
            if not go_on:
                raise
            failures[section] = str(error)
            timings.pop(section, None)
        if before is None or section in failures:
            told(section, timings.get(section), taken)
        return section not in failures

    with preload.shared() if todo else contextlib.nullcontext():
        for path in todo:
            begun(path.stem[3:], True)
            note(path, lambda path=path: run.execute(path, measuring, _out(build, path), shown=shown))
    ready = [path for path in paths if path not in todo or (settle and path.stem[3:] in timings)]
    if ready:
        times = 2 if settle and todo else 1
        _replay(ready, given | {"MODE": "replay"}, build, profile, note, again=again, shown=shown, times=times)
    order = [path.stem[3:] for path in paths]
    return {name: timings[name] for name in order if name in timings}, failures


def _replay(
    paths: list[Path], given, build: Path, profile: str, note: Callable, *, again: bool, shown: bool, times: int
) -> None:
    """Takes over what has not changed, and executes the rest, up to so many times until no claim changes by it."""
    common = takeover.inputs(profile)
    known = {} if again else {path: takeover.take(path, given, build, common) for path in paths}
    for path in paths:
        if known.get(path) is not None:
            note(path, lambda path=path: known[path], True)
    rest = [path for path in paths if known.get(path) is None]
    for _ in range(times if rest else 0):
        took_s, before, common = _side_by_side(rest, given, build, note, shown), common, takeover.inputs(profile)
        if common == before:  # else a claim has changed that another one may have read before
            takeover.remember(took_s, given, build, common)
            break


def unfinished(paths: list[Path], given: dict[str, Any], build: Path, profile: str) -> list[Path]:
    """The notebooks that may have something to measure; the others only replay."""
    if given["MODE"] == "replay":
        return []
    machine, again = given["MACHINE"], given["MODE"] == "measure"
    return [path for path in paths if again or not _finished(build, machine, path, profile)]


def _side_by_side(paths: list[Path], given, build: Path, note: Callable, shown: bool) -> dict[Path, float]:
    if len(paths) == 1:  # another process would only import everything once more
        path, took_s = paths[0], {}
        note(path, lambda: took_s.setdefault(path, run.execute(path, given, _out(build, path), shown=shown)))
        return took_s
    workers, took_s, began = min(len(paths), max(1, provenance.cores()), 4), {}, time.monotonic()
    spawn = multiprocessing.get_context("spawn")  # a fork would copy whatever threads and event loops the caller has
    ended = spawn.Event()
    with ProcessPoolExecutor(workers, mp_context=spawn, initializer=_begin, initargs=(ended,)) as pool:
        try:
            jobs = {path: pool.submit(_execute, path, given, _out(build, path)) for path in paths}
            for path, job in jobs.items():
                with progress.line(lambda: _state(jobs), began) if shown else contextlib.nullcontext():
                    wait([job])
                if note(path, lambda path=path, job=job: _seconds(path, job)):
                    took_s[path] = job.result()
        except BaseException:  # a failure that ends the command, or Ctrl-C: what has not begun does not begin
            ended.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return took_s


def _begin(ended: Any) -> None:
    """In a process that replays: what tells that the command has ended, as a pool may hand out jobs even then."""
    global _ended
    _ended = ended


def _execute(path: Path, given: dict[str, Any], out: Path) -> float:
    if _ended.is_set():
        raise KeyboardInterrupt
    return run.execute(path, given, out)


def _seconds(path: Path, job: Future) -> float:
    """How long a replay took; NotebookError where its process was killed, or that of a replay beside it."""
    try:
        return job.result()
    except BrokenProcessPool:
        raise NotebookError(
            f"{path.name} was not replayed: one of the processes that replay side by side was killed.",
            "out of memory (free -h; dmesg says so too), or somebody ended it",
            "run the same command again",
        ) from None


def _state(jobs: dict[Path, Future]) -> str:
    done = sum(job.done() for job in jobs.values())
    running = [path.stem[3:] for path, job in jobs.items() if job.running() and not job.done()]
    return f"replaying: {done} of {len(jobs)} done, now {', '.join(running[: provenance.cores()]) or 'the last one'}"


def _out(build: Path, path: Path) -> Path:
    return build / "notebooks" / path.name


def _stamp(machine: str, path: Path, profile: str) -> str:
    section = store.machine_dir(machine) / path.stem[3:]
    runs = sorted(folder.parent.name for folder in section.glob("*/run.json"))
    return hashlib.sha256(
        json.dumps([path.read_text(encoding="utf-8"), profile, runs, _helpers()]).encode()
    ).hexdigest()


def _helpers() -> list[str | None]:
    """What a section measures only where it is there: whoever has installed one since then gets its cells measured."""
    routers = [router_packages.version(product) for product in router_packages.PRODUCTS]
    return [*routers, l4.find_nginx(), str(kube_rules.why_not() is None)]


def _read(build: Path) -> dict[str, dict[str, str]]:
    try:
        return json.loads((build / DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _finished(build: Path, machine: str, path: Path, profile: str) -> bool:
    return _read(build).get(machine, {}).get(path.stem[3:]) == _stamp(machine, path, profile)


def _remember(build: Path, machine: str, path: Path, profile: str) -> None:
    with files.locked(build):  # sections that are measured together end at any time
        done = _read(build)
        done.setdefault(machine, {})[path.stem[3:]] = _stamp(machine, path, profile)
        store.write_text(build / DONE, json.dumps(done, indent=1, sort_keys=True) + "\n")
