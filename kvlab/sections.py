"""Sections as the command line runs them: checked first, then executed, and each one's progress told."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import typer

from kvlab import batch, gpu_time, measure, outcome, parameters, profile, quiet, ready, run, store, time_left
from kvlab.errors import ConfigError, EngineMissing, NotebookError
from kvlab.files import check_writable, near, typed
from kvlab.invocation import as_typed

BUILD = Path("_build")


class Asked(NamedTuple):
    """What the options of a command say of all its sections; their help is in `kvlab.cli`."""

    profile_name: str = "auto"
    machine: str = ""
    mode: str = "auto"
    base_url: str = ""
    param: Sequence[str] = ()
    allow_empty: bool = False
    again: bool = False  # of --execute

    def words(self) -> list[str]:
        """The same for another command."""
        found = ["--profile", self.profile_name, "--mode", self.mode, *(f"--param={text}" for text in self.param)]
        found += ["--machine", self.machine] if self.machine else []
        found += ["--base-url", self.base_url] if self.base_url else []
        flags = {"--allow-empty": self.allow_empty, "--execute": self.again}
        return found + [flag for flag, given in flags.items() if given]


class Executed(NamedTuple):
    """What became of a command: seconds a section, failures a section, and which sections were what-ifs, and why."""

    machine: str
    timings: dict[str, float]
    failures: dict[str, str]
    what_if: dict[str, str]


def execute(sections: list[str], asked: Asked, *, go_on: bool = False) -> Executed:
    """Executes the notebooks; failures are returned with `go_on` only, else the first one raises.

    Everything that is known to fail is one error before the first notebook.
    """
    profile_name, machine, mode, base_url = asked.profile_name, asked.machine, asked.mode, asked.base_url
    run.require_notebooks()
    paths = list(dict.fromkeys(run.notebook_of(section) for section in sections))
    if mode == "replay" and not machine and not base_url:
        machine = store.default_replay_machine()
    lab = measure.open_lab(_name(paths[0]), profile_name=profile_name, machine=machine, mode=mode, base_url=base_url)
    common = {"PROFILE": _everywhere(profile_name, lab), "MACHINE": lab.machine, "MODE": mode, "BASE_URL": base_url}
    given = common | _own(asked.param, common)
    for path in paths:
        parameters.check_parameters(path, given)
        parameters.check_kernel(path)
    if mode == "replay":
        if not asked.allow_empty:
            _refuse_empty(lab.machine)
        check_writable(store.root())  # claims are stated anew
    else:
        _require_engine(lab, machine)
    text = lab.profile.model_dump_json() + json.dumps({name: given[name] for name in sorted(set(given) - set(common))})
    todo = batch.unfinished(paths, given, BUILD, text)
    if todo:
        quiet.refuse_second()
    what_if = {_name(path): said for path in paths if (said := _what_if(path, given, lab, mode, machine, path in todo))}
    progress = _Progress(lab, mode, paths, todo)
    progress.start()
    for said in what_if.values():
        typer.echo(as_typed(f"what if: {said}"))
    try:
        timings, failures = batch.execute(
            paths,
            given,
            BUILD,
            text,
            go_on=go_on,
            begun=progress.begun,
            told=progress.told,
            shown=True,
            again=asked.again,
            settle=go_on,
            named=bool(machine),
        )
    finally:
        progress.warn()
        progress.used()
        if mode != "replay":
            store.forget_attempt(lab.machine)
    return Executed(lab.machine, timings, failures, what_if)


def together(sections: list[str], asked: Asked) -> None:
    """A process a section, all at once; they take turns at measuring. Raises NotebookError naming those that failed."""
    names = list(dict.fromkeys(_name(run.notebook_of(section)) for section in sections))
    if asked.mode != "replay":
        quiet.refuse_second()
    command = [sys.executable, "-m", "kvlab.cli", "measure"]
    environment = os.environ | {quiet.TURNS: "1"}
    started = {name: subprocess.Popen([*command, name, *asked.words()], env=environment) for name in names}
    try:
        failed = [name for name, process in started.items() if process.wait() != 0]
    except KeyboardInterrupt:  # each process has heard it too, and says what it keeps
        for process in started.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(60)
        raise
    if failed:
        raise NotebookError(
            f"{len(failed)} of {len(names)} sections failed: {', '.join(failed)}.",
            cause="each one's own message stands above",
            next_step="the same command resumes; without --together they run one after another",
        )


def results(done: Executed) -> str:
    """Where the results of a finished command lie."""
    notebooks = [os.path.relpath(BUILD / "notebooks" / run.notebook_of(name).name) for name in done.timings]
    folders = [
        outcome.what_if_dir(done.machine, name) if name in done.what_if else store.machine_dir(done.machine)
        for name in done.timings
    ]
    claims = [file for folder in dict.fromkeys(folders) if (file := folder / "claims.csv").is_file()]
    lines = [
        f"claims     {', '.join(map(near, claims)) or 'none were stated'}",
        f"notebooks  {', '.join(notebooks)}",
        f"report     kvlab report --mode replay --machine {done.machine}",
    ]
    lines[:0] = [f"what if    {said}" for said in done.what_if.values()]
    return as_typed("\n".join(lines))


def _what_if(path: Path, given: dict, lab: measure.Lab, mode: str, typed: str, measures: bool) -> str:
    """What a notebook asks that is a what-if, where its claims and figures go, and how to keep them; else ""."""
    section, mode = _name(path), mode if measures else "replay"
    asked = given | {"MACHINE": typed}
    words = outcome.changes(section, asked, lab.machine, lab.profile.name, mode)
    place = near(outcome.what_if_dir(lab.machine, section))
    return f"{'; '.join(words)}: claims and figures go to {place}; {outcome.kept(lab.machine, mode)}" if words else ""


class _Progress:
    """Says before each section what it does and how long it may take, and after it what there is."""

    def __init__(self, lab: measure.Lab, mode: str, paths: list[Path], todo: list[Path]):
        self.lab, self.mode, self.paths = lab, mode, paths
        self.left = time_left.of_sections([_name(path) for path in todo], lab.profile, lab.machine)
        self.broken, self.taken_over = self._set_aside(), False
        self.began_utc = datetime.now(UTC)

    def start(self) -> None:
        typer.echo(f"machine {self.lab.machine}, profile {self.lab.profile.name}, mode {self.mode}")
        if self.mode == "replay":
            stored = ", ".join(name for name in store.machines() if name != measure.PUBLISHED)
            typer.echo(f"stored machines: {stored} (--machine, or MACHINE= with make, chooses)")
        elif not self.lab.base_url and (estimate := time_left.gpu_told(self.left, self.lab.profile.server.engine)):
            typer.echo(estimate)

    def begun(self, section: str, measures: bool) -> None:
        place = [_name(path) for path in self.paths].index(section) + 1
        if measures:
            typer.echo(f"[{place}/{len(self.paths)}] {section}: measures what is missing{time_left.told(self.left)}")

    def told(self, section: str, seconds: float | None, taken_over: bool) -> None:
        self.left.pop(section, None)
        runs = store.list_runs(self.lab.machine, section)
        invalid = sum(not r.valid for r in runs)
        stored = f"   {len(runs)} runs stored" + (f", {invalid} of them not valid" if invalid else "") if runs else ""
        took = "failed" if seconds is None else "taken over unchanged" if taken_over else f"{seconds:6.1f} s"
        self.taken_over |= taken_over
        typer.echo(f"  {section:<16} {took}{'' if seconds is None else stored}")

    def warn(self) -> None:
        if self.taken_over:
            typer.echo("  taken over unchanged: nothing that it reads has changed since; --execute executes it again")
        for name in sorted(self._set_aside() - self.broken):
            path = near(store.machine_dir(self.lab.machine) / name)
            others = as_typed(f"kvlab report --mode replay --machine {self.lab.machine}")
            typer.secho(
                f"claims.csv could not be read and is set aside as {path}.\n"
                f"Next: {others} writes the claims of all sections anew, from their runs",
                err=True,
                fg="yellow",
            )

    def used(self) -> None:
        """GPU minutes of the runs that were stored since the command began; nothing where none saw a GPU."""
        made = [run.manifest for run in store.list_runs(self.lab.machine)] if self.mode != "replay" else []
        made = [m for m in made if datetime.fromisoformat(m["created_utc"]) >= self.began_utc]
        if (minutes := gpu_time.minutes(made)) is not None:
            typer.echo(
                f"GPU minutes used: {minutes:.1f}, by the runs stored now; failed starts and idle time are not in it"
            )

    def _set_aside(self) -> set[str]:
        return {path.name for path in store.machine_dir(self.lab.machine).glob("claims.broken-*.csv")}


def _name(path: Path) -> str:
    return path.stem[3:]


def _require_engine(lab: measure.Lab, named: str) -> None:
    """Raises what keeps a measurement from running; a named machine without runs may be a typing error."""
    try:
        ready.require(lab)
    except EngineMissing as error:
        if not named or any(store.machine_dir(named).glob("*/[!.]*/run.json")):
            raise
        raise ConfigError(
            f"No machine {named} is stored, and nothing can be measured here: {error.what}",
            f"a typing error, or it was never measured; stored machines: {_stored()}",
            "show a stored one (--mode replay --machine NAME), or install vLLM to measure: make install",
        ) from None


def _stored() -> str:
    return ", ".join(name for name in store.machines() if name != measure.PUBLISHED) or "none"


def _everywhere(given: str, lab: measure.Lab) -> str:
    """The profile as it is found from the notebooks' folder too: its name, or the whole path of a file."""
    by_name = given == "auto" or given in profile.built_in()
    return lab.profile.name if by_name else str(typed(given).resolve())


def _own(param: Sequence[str], common: dict) -> dict:
    own = dict(parameters.parse_parameter(text) for text in param)
    if taken := sorted(set(own) & set(common)):
        options = ", ".join(f"--{name.lower().replace('_', '-')}" for name in taken)
        raise ConfigError(f"--param may not set {', '.join(taken)}.", next_step=f"use the option {options}")
    return own


def _refuse_empty(machine: str) -> None:
    if not any(store.machine_dir(machine).glob("*/[!.]*/run.json")):
        raise ConfigError(
            f"Nothing was measured on the machine {machine}: there is no run to replay under {store.root()}.",
            f"a typing error, or it was never measured; stored machines: {_stored()}",
            f"choose one (--machine, MACHINE= with make), or measure: kvlab measure kv_capacity --machine {machine}",
        )
