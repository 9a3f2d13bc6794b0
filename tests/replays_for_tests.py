"""Notebooks that are only replayed, each executed once for the whole suite and mostly beside it.

A process of low priority executes them, the last one first, while other tests run; those that need one come after all
of these (see conftest.py). A test whose notebook nobody has begun yet executes it itself.
"""

import json
import multiprocessing
import os
import resource
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from kvlab import run

ROOT = Path(__file__).resolve().parent.parent
NICE = 10  # tests that measure time keep their core
EMPTY = "empty"


@dataclass(frozen=True)
class Replay:
    """One notebook, by its file's stem, replayed for a committed machine, or for one without any run: EMPTY."""

    machine: str
    notebook: str

    def __str__(self):
        return f"{self.machine}-{self.notebook[3:]}"


@dataclass(frozen=True)
class Done:
    """What became of it: the executed notebook, the data folder it wrote to, and its processor time."""

    out: Path
    data: Path
    cpu_s: float


class Replays:
    """The replays of one session, in a folder of their own."""

    def __init__(self, folder: Path, coming: list[Replay]):
        self._folder, self._process = folder, None
        for machine in {replay.machine for replay in coming} - {EMPTY}:
            _copy_data(folder / machine / "data", "article", machine)
        if len(coming) > 1 and "PYTEST_XDIST_WORKER" not in os.environ:
            # Spawned: a fork would copy whatever threads and event loops the tests have.
            context = multiprocessing.get_context("spawn")
            self._process = context.Process(target=_execute_all, args=(folder, coming[::-1]), daemon=True)
            self._process.start()

    def result(self, replay: Replay) -> Done:
        """Waits for it, or executes it. Fails with the message of a notebook that failed."""
        _execute(self._folder, replay)
        told = self._folder / str(replay) / "told.json"
        while not told.exists():
            alive = self._process is not None and self._process.is_alive()
            assert alive or told.exists(), f"{replay}: the process that executed it has ended"
            time.sleep(0.1)
        said = json.loads(told.read_text())
        if said["failure"]:
            pytest.fail(said["failure"], pytrace=False)
        return Done(told.with_name("out.ipynb"), _data(self._folder, replay), said["cpu_s"])

    def stop(self) -> None:
        """Ends the process, with the kernel of a notebook that nobody waits for any more."""
        if self._process is not None and self._process.is_alive():
            for process in psutil.Process(self._process.pid).children(recursive=True):
                process.kill()
            self._process.kill()
            self._process.join()


def _execute_all(folder: Path, replays: list[Replay]) -> None:
    os.nice(NICE)
    for replay in replays:
        if multiprocessing.parent_process().is_alive():
            _execute(folder, replay)


def _execute(folder: Path, replay: Replay) -> None:
    """Executes it, unless somebody has begun."""
    place = folder / str(replay)
    try:
        place.mkdir()
    except FileExistsError:
        return
    data, failure = _data(folder, replay), None
    if not data.exists():
        _copy_data(data, "article")
    given = {"MACHINE": replay.machine, "MODE": "replay"}
    began = _cpu_s()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_DATA", str(data))
        patch.setenv("KVLAB_CACHE", str(place / "cache"))
        if replay.machine == EMPTY:
            given["PROFILE"] = "cpu-tiny"
        try:
            run.execute(ROOT / "notebooks" / f"{replay.notebook}.ipynb", given, place / "out.ipynb")
        except Exception as error:
            failure = f"{replay}: {error}"
    (place / "told").write_text(json.dumps({"failure": failure, "cpu_s": _cpu_s() - began}))
    (place / "told").rename(place / "told.json")  # whole as soon as it is there


def _cpu_s() -> float:
    """Processor time of this process's children that have ended: of kernels, above all."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _data(folder: Path, replay: Replay) -> Path:
    """Sections of one committed machine share its data, as they do where they are measured."""
    return folder / (str(replay) if replay.machine == EMPTY else replay.machine) / "data"


def _copy_data(target: Path, *machines: str) -> None:
    for machine in machines:
        shutil.copytree(ROOT / "data" / machine, target / machine, ignore=shutil.ignore_patterns(".lock"))
