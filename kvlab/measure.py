"""One section's laboratory: predict first, then measure or replay the cells of a grid, then state claims.

    lab = open_lab("load", profile="auto")
    lab.predict([lab.claim("requests_that_fit_low", {...}, computed=10.6, unit="requests")])
    results = lab.measure(cells)          # starts servers only for what is not measured yet
    lab.write(claims)
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from kvlab import claims as claims_module
from kvlab import config, display, engine, geometry, predict, profile, provenance, stats, steptime, store
from kvlab.claims import Claim
from kvlab.config import Cell, ServerConfig
from kvlab.errors import ConfigError, KvlabError, ServerError
from kvlab.records import REQUEST_COLUMNS

MODES = ("auto", "measure", "replay")


@dataclass(frozen=True)
class Result:
    """A cell and its run; `run` is None where it is not measured, and `reason` says why."""

    cell: Cell
    run: store.Run | None
    reason: str | None = None

    def value(self, name: str) -> float | None:
        """A number of the run's summary; None where it is missing."""
        return None if self.run is None else self.run.manifest["summary"].get(name)

    def estimate(self, name: str) -> stats.Estimate | None:
        """The number with its interval (`name_low`, `name_high` of the summary, where they are stored)."""
        value = self.value(name)
        if value is None:
            return None
        low, high, note = (self.value(f"{name}_{part}") for part in ("low", "high", "note"))
        return stats.Estimate(value, low, high, self.value("n") or 0, note or "")


@dataclass
class Lab:
    section: str
    profile: profile.Profile
    machine: str
    mode: str
    base_url: str = ""
    _server: Any = None
    _server_config: ServerConfig | None = None
    _quiet: Any = None  # the lock file while this laboratory measures
    _logs: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="kvlab-")))

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

    # -- predict ------------------------------------------------------------------------------------------------

    def claim(self, quantity: str, conditions: dict, *, results: list[Result] = (), **values) -> Claim:
        """A claim of this section. Its runs, and the reason where nothing is measured, come from `results`."""
        runs = tuple(r.run.id for r in results if r.run is not None)
        if values.get("measured") is None and "reason" not in values and results:
            notes = [note for r in results if (note := r.value(f"{quantity}_note"))]
            reasons = [*(r.reason for r in results if r.reason), *notes]
            values["reason"] = next(iter(reasons), "the runs do not hold this number")
        return claims_module.claim(self.section, quantity, conditions, runs=runs, **values)

    def predict(self, predicted: list[Claim]) -> pd.DataFrame:
        """Stores the computed numbers with the time, before any server starts. A replay leaves the stored ones alone."""
        path = self.folder / "computed.json"
        rows = [{"id": c.id, "computed": c.computed, "unit": c.unit} for c in predicted]
        stored = json.loads(path.read_text()) if path.is_file() else {"stored": []}
        if self.mode != "replay" and rows not in [entry["rows"] for entry in stored["stored"]]:
            stored["stored"].append({"utc": _now(), "profile": self.profile.name, "rows": rows})
            store.write_text(path, json.dumps(stored, indent=1, sort_keys=True) + "\n")
        return display.show(predicted)

    # -- measure ------------------------------------------------------------------------------------------------

    def measure(self, cells: list[Cell]) -> list[Result]:
        """One result a cell, in order. Runs that are stored are replayed; the rest is measured unless mode is replay.

        A cell whose load fails is stored as not valid and the next one goes on; a server that cannot start or dies
        raises, with everything measured before it kept.
        """
        _check_unique(cells)
        todo = [cell for cell in cells if self._must_measure(cell)]
        if todo:
            self._quiet = self._quiet or take_machine()
            with tqdm(total=len(todo), desc=self.section, unit="cell", leave=False) as bar:
                for cell in todo:
                    self._measure_cell(cell, bar)
                    bar.update()
        return [self._result(cell) for cell in cells]

    def _must_measure(self, cell: Cell) -> bool:
        if self.mode == "replay" or self._unreachable(cell):
            return False
        return self.mode == "measure" or store.find_run(self.machine, self.section, self._key(cell)) is None

    def _result(self, cell: Cell) -> Result:
        run = store.find_run(self.machine, self.section, self._key(cell))
        if run is not None:
            return Result(cell, run)
        return Result(cell, None, self._unreachable(cell) or self._why_missing(cell))

    def _why_missing(self, cell: Cell) -> str:
        failed = [run for run in store.list_runs(self.machine, self.section) if run.manifest["key"] == self._key(cell)]
        if failed:
            return "; ".join(failed[-1].manifest.get("problems") or ["the run is not valid"])
        return f"no run is stored for this machine; measure it with: kvlab measure {self.section}"

    def _unreachable(self, cell: Cell) -> str | None:
        """Why an existing server cannot show this cell; None where it can."""
        if not self.base_url:
            return None
        if cell.fresh or cell.server != self.server():
            return "an existing server cannot be restarted with other flags"
        return None

    def _key(self, cell: Cell) -> str:
        if self.base_url:
            there = ServerConfig(model=f"existing server {self.base_url}")
            cell = cell.model_copy(update={"server": there})
        return config.key(cell)

    def _measure_cell(self, cell: Cell, bar) -> None:
        from kvlab import load  # not needed, and slow to import, in a replay

        server = self._serve(cell, bar)
        bar.set_postfix_str(cell.name)
        nonce = secrets.randbits(48)
        began, utc = time.monotonic(), _now()
        result = load.run_load(server.endpoint, cell.load, nonce=nonce, progress=True)
        duration_s = time.monotonic() - began
        problems = [*result.certificate.get("failures", [])]
        try:
            server.check_alive()
        except ServerError as error:
            problems.append(str(error))
            self._save(cell, server, result, nonce, utc, duration_s, problems)
            self.close()
            raise
        if result.interrupted:
            problems.append("interrupted")
        self._save(cell, server, result, nonce, utc, duration_s, problems)
        if result.interrupted:
            self.close()
            raise KeyboardInterrupt
        if cell.fresh:
            self._stop_server()

    def _serve(self, cell: Cell, bar) -> Any:
        from kvlab import server

        if self.base_url:
            self._server = self._server or server.attach(self.base_url)
        elif self._server is None or self._server_config != cell.server or cell.fresh:
            self._stop_server()
            bar.set_postfix_str("starting a server")
            self._server = server.VllmServer(
                cell.server, log_dir=self._logs, on_phase=lambda phase, s: bar.set_postfix_str(f"{phase}, {s:.0f} s")
            )
            self._server.start()
            self._server_config = cell.server
        return self._server

    def _save(self, cell, server, result, nonce, utc, duration_s, problems) -> None:
        block_size = cell.server.block_size or server.capacity.metric_block_size
        summary = stats.summarise(result.requests, result.samples, result.window, cell.load, block_size)
        manifest = {
            "key": self._key(cell),
            "cell": cell.model_dump(mode="json"),
            "profile": self.profile.name,
            "created_utc": utc,
            "duration_s": duration_s,
            "nonce": nonce,
            "window_s": result.window,
            "server": server.describe(),
            "predictions": _predictions(self.folder),
            "provenance": provenance.collect(),
            "summary": summary,
            "certificate": result.certificate,
            "fake": bool(result.certificate.get("fake")),
            "valid": not problems and (summary.get("n") or 0) > 0,
            "problems": problems,
        }
        store.save_run(self.machine, self.section, manifest, result.requests, result.samples, server.log_path)

    def close(self) -> None:
        """Stops the server, if one runs, and lets others measure. Safe to call twice."""
        self._stop_server()
        if self._quiet is not None:
            self._quiet.close()
            self._quiet = None

    def _stop_server(self) -> None:
        server, self._server, self._server_config = self._server, None, None
        if hasattr(server, "stop"):
            server.stop()

    # -- claims -------------------------------------------------------------------------------------------------

    def write(self, claims: list[Claim]) -> pd.DataFrame:
        """Replaces this section's claims of this machine; returns them for display. Stops the server."""
        self.close()
        claims_module.write_section(store.machine_dir(self.machine), self.section, claims)
        return display.show(claims)


def open_lab(section: str, *, profile_name: str = "auto", machine: str = "", mode: str = "auto", base_url: str = ""):
    """The laboratory of one section.

    `profile_name`: "auto", a built-in name or a TOML path. `machine`: the data folder; empty = named after the
    hardware (or after the profile when it replays a committed machine). `base_url`: an existing server instead of an own one.
    """
    if mode not in MODES:
        raise ConfigError(f"MODE is {mode!r}.", next_step=f"use one of: {', '.join(MODES)}")
    hardware = provenance.hardware()
    if profile_name == "auto":
        profile_name = _profile_of(machine) or profile.choose(hardware)
    chosen = profile.load_profile(profile_name)
    if not machine:
        machine = provenance.external_name(base_url) if base_url else provenance.machine_name()
    if mode != "replay" and not base_url:
        profile.check_fits(chosen, hardware)
    return Lab(section, chosen, machine, mode, base_url)


def frame(results: list[Result], *names: str) -> pd.DataFrame:
    """One row a result: c, in, out, repeat, and the named numbers of the summary (missing where not measured)."""
    rows = []
    for result in results:
        load = result.cell.load
        row = {"c": load.concurrency, "in": load.input_tokens, "out": load.output_tokens, "repeat": result.cell.repeat}
        rows.append(row | {name: result.value(name) for name in names})
    return pd.DataFrame(rows)


def across(results: list[Result], name: str) -> stats.Estimate | None:
    """Mean of the repeats with its t interval; the run's own interval where there is a single run."""
    found = [result for result in results if result.value(name) is not None]
    if len(found) <= 1:
        return found[0].estimate(name) if found else None
    return stats.mean_interval([result.value(name) for result in found])


def _profile_of(machine: str) -> str | None:
    """The profile with which a stored machine was measured; None for an unknown one."""
    runs = store.list_runs(machine) if machine else []
    return runs[-1].manifest.get("profile") if runs else None


def _predictions(folder: Path) -> dict | None:
    """When the predictions were stored, so that a run shows that they came first."""
    path = folder / "computed.json"
    if not path.is_file():
        return None
    last = json.loads(path.read_text())["stored"][-1]
    return {"stored_utc": last["utc"], "numbers": len(last["rows"])}


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


def _check_unique(cells: list[Cell]) -> None:
    keys = [config.key(cell) for cell in cells]
    twice = sorted({cell.name for cell, key in zip(cells, keys, strict=True) if keys.count(key) > 1})
    if twice:
        raise KvlabError(f"The same cell is asked for twice: {', '.join(twice)}.", next_step="number them by repeat")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def running_while_waiting(result: Result) -> float | None:
    """Median over time of the requests running while others wait: what the server fits, without ramp and drain."""
    if result.run is None:
        return None
    samples = result.run.samples()
    full = samples[(samples["waiting"] > 0).fillna(False)]
    return float(full["running"].median()) if len(full) else None


def rows(result: Result) -> pd.DataFrame:
    """The successful measured requests of a run, one a row; an empty table with the same columns where there is no run."""
    if result.run is None:
        return pd.DataFrame({name: pd.Series(dtype=dtype) for name, (dtype, _) in REQUEST_COLUMNS.items()})
    requests = result.run.requests()
    return requests[(requests["phase"] == "measure") & requests["ok"].fillna(False)].reset_index(drop=True)


def relative_difference(changed: list[Result], base: list[Result], name: str) -> stats.Estimate | None:
    """Mean of (changed - base) / base over repeats that both sides have, with its t interval."""
    pairs = [(a.value(name), b.value(name)) for a, b in zip(changed, base, strict=True)]
    found = [a / b - 1 for a, b in pairs if a is not None and b]
    return stats.mean_interval(found) if found else None


def fit_step_model(results: list[Result]) -> tuple[steptime.StepModel | None, float | None]:
    """The step-time model and the prefill speed in tok/s, from runs at low concurrency; None for what they do not give.

    A step is the median gap between tokens; the KV tokens are those of requests spread evenly over their lives.
    The prefill speed is the slope of TTFT over prompt length at one client.
    """
    points, alone = [], []
    for result in results:
        load, step_s = result.cell.load, result.value("itl_p50_s")
        if step_s:
            held = load.concurrency * steptime.Shape(load.input_tokens, load.output_tokens).mean_kv_tokens()
            points.append(steptime.StepPoint(load.concurrency, held, step_s))
        if load.concurrency == 1:
            alone.append((load.input_tokens, result.value("ttft_p50_s")))
    enough = len(points) >= 3 and len({point.running for point in points}) >= 2
    return (steptime.fit(points) if enough else None), predict.prefill_line(alone)[1]
