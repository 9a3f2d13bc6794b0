"""One section's laboratory: predict first, then measure or replay the cells of a grid, then state claims.

lab = open_lab("load", profile="auto")
lab.predict([lab.claim("requests_that_fit_low", {...}, computed=10.6, unit="requests")])
results = lab.measure(cells)          # starts servers only for what is not measured yet
lab.write(claims)
"""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from kvlab import claims as claims_module
from kvlab import (
    config,
    display,
    existing,
    geometry,
    outcome,
    own_delay,
    predictions,
    profile,
    progress,
    provenance,
    quiet,
    stats,
    store,
)
from kvlab.claims import Claim
from kvlab.config import Cell, ServerConfig
from kvlab.errors import ConfigError, KvlabError, ServerError, ServerStopped, StoreError
from kvlab.existing import EXISTING as EXISTING
from kvlab.paired import paired_change as paired_change
from kvlab.paired import paired_ratio as paired_ratio
from kvlab.paired import took_turns as took_turns
from kvlab.parameters import listed as listed  # what a notebook needs is offered here too
from kvlab.results import EMPTY, readable, refusal
from kvlab.results import Result as Result
from kvlab.results import across as across
from kvlab.results import fit_step_model as fit_step_model
from kvlab.results import frame as frame
from kvlab.results import relative_difference as relative_difference
from kvlab.results import rows as rows
from kvlab.results import running_while_waiting as running_while_waiting
from kvlab.results import single_or_mean as single_or_mean
from kvlab.results import turns as turns
from kvlab.sending import send as send
from kvlab.servers import Servers

MODES = ("auto", "measure", "replay")
PUBLISHED = "article"
BORROWED = {"cpu": "cpu-tiny", "cuda": "gpu-8gb"}  # whose grid stands in where a profile has none
NO_RUN = "no run"  # how the reason of a point begins that was not measured here


@dataclass
class Lab:
    section: str
    profile: profile.Profile
    machine: str
    mode: str
    base_url: str = ""
    _servers: Servers = field(default_factory=Servers)
    _quiet: Any = None  # the lock file while this laboratory measures
    no_grid: str | None = None  # why this machine cannot measure the section
    asked: dict[str, Any] = field(default_factory=dict)  # the parameters of the notebook around it

    @cached_property
    def aside(self) -> Path | None:
        """Where a what-if puts claims and figures; None: they go to the machine's own folders."""
        return outcome.aside(self)

    @property
    def folder(self) -> Path:
        """Where this machine's data of this section lies."""
        return store.machine_dir(self.machine) / self.section

    @property
    def geometry(self) -> geometry.Geometry:
        return geometry.load(self.profile.geometry)

    def server(self, changes: dict | None = None) -> ServerConfig:
        """The profile's server with some fields changed."""
        return self.profile.server_with(changes or {})

    def section_grid(self) -> Any:
        """The profile's grid of this section; a profile without one borrows one and measures nothing."""
        grid = getattr(self.profile, self.section)
        if grid is None:
            self.no_grid = f"the profile {self.profile.name} has no [{self.section}]"
            lenders = (BORROWED[self.profile.server.engine], BORROWED["cuda"])
            grid = next(filter(None, (getattr(profile.load_profile(name), self.section) for name in lenders)))
        return grid

    # -- predict ------------------------------------------------------------------------------------------------

    def claim(self, quantity: str, conditions: dict, *, results: list[Result] = (), **values) -> Claim:
        """A claim of this section. Its runs, and the reason where nothing is measured, come from `results`."""
        runs = tuple(r.run.id for r in results if r.run is not None)
        if values.get("measured") is None and "reason" not in values and results:
            values.setdefault("failed", any(r.failed for r in results))
            notes = [note for r in results if (note := r.value(f"{quantity}_note"))]
            reasons = [*notes, *(r.reason for r in results if r.reason)]
            values["reason"] = next(iter(reasons), "the runs do not hold this number")
        return claims_module.claim(self.section, quantity, conditions, runs=runs, **values)

    def predict(self, predicted: list[Claim]) -> pd.DataFrame:
        """Stores the computed numbers with the time, before any server starts. A replay leaves them alone."""
        if self.mode != "replay":
            predictions.store(self.folder, self.profile.name, predicted)
        return display.show(predicted)

    # -- measure ------------------------------------------------------------------------------------------------

    def measure(self, cells: list[Cell], *, side_by_side=False, skip_refused=False, ahead=(), up=None) -> list[Result]:
        """One result a cell, in order. Runs that are stored are replayed; the rest is measured unless mode is replay.

        A cell whose load fails is stored as not valid and the next one goes on; a server that cannot start or dies
        raises, with everything measured before it kept. After an exception no server is left running.
        `side_by_side`: the servers of all configurations stay up, so that the arms of a comparison take turns without
        restarts, and start at once; an idle server costs memory only. A cell that asks for a fresh one is alone.
        `skip_refused`: a server that does not start or dies is a failed result with its reason, and not the end.
        `ahead`: cells of later calls; where servers start together, those of these cells do so too.
        `up(cell, server)` is called before the load is sent: what follows from that very start can be stored there.
        """
        _check_unique(cells)
        self._servers.side_by_side, self._up = side_by_side, up
        todo = [cell for cell in cells if self._must_measure(cell)]
        if todo:
            _make_way_for(self)
            self._quiet = self._quiet or quiet.take_machine(f"section {self.section} of machine {self.machine}")
            try:
                self._measure_all(todo, skip_refused, [cell for cell in ahead if self._must_measure(cell)])
            except BaseException as error:
                self._servers.keep_logs |= isinstance(error, ServerError)  # its message names the log
                self.close()
                raise
        return [self._result(cell) for cell in cells]

    def _measure_all(self, todo: list[Cell], skip_refused: bool, ahead: list[Cell]) -> None:
        coming = [*todo, *ahead]
        self._servers.will_serve(coming)
        if (self._quiet.turns or self._servers.side_by_side) and not self.base_url:
            self._servers.side_by_side = True
            self._servers.start_together([cell for cell in coming if not cell.fresh], self._quiet)
        with tqdm(total=len(todo), desc=self.section, unit="cell", leave=False) as bar:
            for cell in todo:
                try:
                    self._measure_cell(cell, bar)
                except ServerError as error:
                    if not skip_refused or isinstance(error, ServerStopped):
                        raise
                    self._servers.keep_logs = True
                    self._servers.end_current()
                bar.update()

    def _must_measure(self, cell: Cell) -> bool:
        if self.mode == "replay" or self._unreachable(cell):
            return False
        return self.mode == "measure" or store.find_run(self.machine, self.section, self._key(cell)) is None

    def _result(self, cell: Cell) -> Result:
        # First: on an existing server a cell with other flags has the key of the one without them.
        unreachable = self._unreachable(cell)
        if unreachable:
            return Result(cell, None, unreachable)
        key = self._key(cell)
        run = store.find_run(self.machine, self.section, key)
        if run is not None:
            return Result(cell, run)
        stored = store.list_runs(self.machine, self.section)
        failed = [run for run in stored if run.manifest["key"] == key]
        if failed:
            problems = failed[-1].manifest.get("problems") or ["no request of the run succeeded"]
            return Result(cell, None, "; ".join(map(readable, problems)), failed=True)
        missing = "of this point is stored" if stored else "is stored for this machine"
        return Result(cell, None, f"{NO_RUN} {missing}; measure it with: kvlab measure {self.section}")

    def _unreachable(self, cell: Cell) -> str | None:
        """Why this cell cannot be measured: no grid, or an existing server; None where it can."""
        if self.no_grid or not self.base_url:
            return self.no_grid
        return existing.unreachable(cell, self.profile, self.section, self.base_url, self._servers.outside)

    def _key(self, cell: Cell) -> str:
        return config.key(existing.as_served(cell, self.base_url))

    def _measure_cell(self, cell: Cell, bar) -> None:
        try:
            server = self._servers.serve(cell, self._quiet, bar, self.base_url)
        except ServerStopped:
            raise  # it says nothing of the cell
        except ServerError as error:
            manifest = self._about(cell, _now()) | refusal(error)
            store.save_run(self.machine, self.section, manifest, *EMPTY)
            raise
        progress.show(bar, cell.name)
        if self._up is not None:
            self._up(cell, server)
        nonce = secrets.randbits(48)
        try:
            with self._quiet.measuring():
                began, utc = time.monotonic(), _now()
                result = send(server.endpoint, cell, nonce)
        except KvlabError:
            server.check_alive()  # a dead server is the better explanation
            raise
        duration_s = time.monotonic() - began
        problems = [*result.certificate.get("failures", []), *getattr(server, "changes", list)()]
        try:
            server.check_alive()
        except ServerError as error:
            problems.append(str(error))
            self._save(cell, server, result, nonce, utc, duration_s, problems)
            raise
        if result.interrupted:
            problems.append("interrupted")
        self._save(cell, server, result, nonce, utc, duration_s, problems)
        if result.interrupted:
            raise KeyboardInterrupt
        if cell.fresh:
            self._servers.end_current()

    def _save(self, cell, server, result, nonce, utc, duration_s, problems) -> None:
        block_size = server.capacity.metric_block_size or cell.server.block_size
        summary = stats.summarise(result.requests, result.samples, result.window, cell.load, block_size)
        certificate = result.certificate if problems else own_delay.complete(result.certificate, cell.load, summary)
        manifest = self._about(cell, utc) | {
            "duration_s": duration_s,
            "nonce": nonce,
            "window_s": result.window,
            "server": {name: value for name, value in server.describe().items() if name != "base_url"},
            "summary": summary | getattr(result, "summary", {}),
            "certificate": certificate,
            "fake": bool(result.certificate.get("fake")),
            "valid": not problems and (summary.get("n") or 0) > 0,
            "problems": problems,
        }
        store.save_run(self.machine, self.section, manifest, result.requests, result.samples, server.log_path)

    def _about(self, cell: Cell, utc: str) -> dict[str, Any]:
        return {
            "key": self._key(cell),
            "cell": existing.as_served(cell, self.base_url).model_dump(mode="json"),
            "profile": self.profile.name,
            "created_utc": utc,
            "predictions": predictions.last(self.folder),
            "provenance": provenance.collect(),
        }

    def close(self) -> None:
        """Stops the server, if one runs, and lets others measure. Safe to call twice."""
        self._servers.stop()
        if self._quiet is not None:
            self._quiet.close()
            self._quiet = None

    # -- claims -------------------------------------------------------------------------------------------------

    def write(self, claims: list[Claim]) -> pd.DataFrame:
        """Replaces this section's claims of this machine, or of a what-if, and returns them. Stops the server."""
        self.close()
        outcome.write(self, claims)
        return display.show(claims)


def open_lab(section: str, *, profile_name: str = "auto", machine: str = "", mode: str = "auto", base_url: str = ""):
    """The laboratory of one section.

    `profile_name`: "auto", a built-in name or a TOML path. `machine`: the data folder; empty = named after the
    hardware, in a replay the one that has runs (`outcome.machine`). `base_url`: an existing server instead of an own
    one. Raises ConfigError for what cannot be measured.
    """
    if mode not in MODES:
        raise ConfigError(f"MODE is {mode!r}.", next_step=f"use one of: {', '.join(MODES)}")
    asked = outcome.asked(section)
    hardware = provenance.hardware()
    if not machine:
        machine = outcome.machine(mode, base_url)
    _check_machine(machine)
    existing.check_address(base_url)
    if base_url and profile_name == "auto" and mode != "replay":
        raise ConfigError(
            "An existing server is measured without a profile.",
            cause="its model and its KV pool cannot be seen from outside, and the computed numbers need them",
            next_step="name the TOML file that describes it: --profile mine.toml (PROFILE in a notebook)",
        )
    if profile_name == "auto":
        profile_name = _profile_of(machine) or profile.choose(hardware)
    chosen = profile.load_profile(profile_name)
    if mode != "replay" and not base_url:
        profile.check_fits(chosen, hardware)
    lab = Lab(section, chosen, machine, mode, base_url, asked=asked)
    if base_url and mode != "replay":  # one that does not answer is an error before anything is stored
        lab._servers.outside = existing.open_outside(base_url)
    return lab


def _profile_of(machine: str) -> str | None:
    """The built-in profile with which the machine was measured last; None where there is none."""
    names = [run.manifest.get("profile") for run in store.list_runs(machine)]
    return next((name for name in reversed(names) if name in profile.built_in()), None)


def _check_machine(machine: str) -> None:
    try:
        store.machine_dir(machine)
    except StoreError as error:
        raise ConfigError(error.what, error.cause, "choose such a name, or leave it out") from None
    if machine == PUBLISHED:
        raise ConfigError(
            f"The machine {PUBLISHED} holds published values; nothing is measured or replayed into it.",
            next_step="use another name, or leave it out; its values stand in every figure and in the report anyway",
        )


_measuring: Lab | None = None


def _make_way_for(lab: Lab) -> None:
    """Closes the laboratory that measured before in this process: whoever opens another one is done with it.

    Else a notebook whose first cell is run a second time would wait for itself.
    """
    global _measuring
    if _measuring is not None and _measuring is not lab:
        _measuring.close()
    _measuring = lab


def _check_unique(cells: list[Cell]) -> None:
    keys = [config.key(cell) for cell in cells]
    twice = sorted({cell.name for cell, key in zip(cells, keys, strict=True) if keys.count(key) > 1})
    if twice:
        raise KvlabError(f"The same cell is asked for twice: {', '.join(twice)}.", next_step="number them by repeat")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
