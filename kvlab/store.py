"""Measured runs on disk: data/<machine>/<section>/<run>/{run.json, requests.parquet, samples.parquet, server.log.gz}.

A run appears whole or not at all, and an older run of the same id is lost only once the new one stands.
"""

from __future__ import annotations

import contextlib
import csv
import dataclasses
import gzip
import io
import json
import os
import re
import shutil
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import provenance, tables
from kvlab.errors import SchemaError, StoreError
from kvlab.files import LOCK, disk_errors, locked, project_folder, sync_folder, typed, write_synced
from kvlab.files import write_text as write_text  # offered here too: callers write beside the runs
from kvlab.manifest import FIELDS, complete, damage
from kvlab.privacy import scrub
from kvlab.records import SCHEMA_VERSION

MACHINE = r"[a-z0-9][a-z0-9-]*"
MANIFEST, LOG = "run.json", "server.log.gz"
NEW, OLD = ".new-", ".old-"
REPLAY_FIRST = ("h200", "cpu-tiny")  # committed machines, the one closest to production first


# -- where --------------------------------------------------------------------------------------------------------


def root() -> Path:
    """The data folder: $KVLAB_DATA, or `data` of the project around the current folder, or ./data."""
    if os.environ.get("KVLAB_DATA"):
        return typed(os.environ["KVLAB_DATA"]).absolute()
    return project_folder() / "data"


def machine_dir(machine: str) -> Path:
    """data/<machine>; the name is checked, the folder need not exist."""
    if not re.fullmatch(MACHINE, machine):
        raise StoreError(
            f"{machine!r} is not a machine name.",
            cause="a machine is a folder name of lower-case letters, digits and hyphens, such as cpu-tiny",
        )
    return root() / machine


def figures_dir(machine: str) -> Path:
    """figures/<machine>, beside the data folder."""
    return root().parent / "figures" / machine_dir(machine).name


def machines() -> list[str]:
    """Every machine with a measured claim or a valid run under the data folder, in alphabetical order.

    One that a newer kvlab has measured is left out with a warning: whoever asks for another one can go on.
    """
    folders = sorted(p for p in root().glob("*") if re.fullmatch(MACHINE, p.name) and p.is_dir())
    return [p.name for p in folders if (_has_measured_claim(p / "claims.csv") or _has_valid_run(p)) and not _newer(p)]


def _has_measured_claim(path: Path) -> bool:
    """Whether a table of claims holds one that was measured; a file that cannot be read counts, so that it is named."""
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))) if path.is_file() else []
    except (OSError, ValueError, csv.Error):
        return True
    return any(row.get("state", "measured") == "measured" for row in rows)


def _newer(machine: Path) -> bool:
    found = (re.search(r'"schema_version": (\d+)', text) for text in _manifests(machine))
    newer = any(match and int(match[1]) > SCHEMA_VERSION for match in found)
    if newer:
        warnings.warn(f"The machine {machine.name} is left out: a newer kvlab has measured it.", stacklevel=3)
    return newer


def _has_valid_run(machine: Path) -> bool:
    return any('"valid": true' in text for text in _manifests(machine))


def _manifests(machine: Path) -> Iterator[str]:
    """The texts of a machine's manifests; one that cannot be read is named when the run is wanted."""
    for path in machine.glob("*/[!.]*/run.json"):
        with contextlib.suppress(OSError):
            yield path.read_text(encoding="utf-8", errors="replace")


def forget_attempt(machine: str) -> None:
    """Removes the folder of a machine of which nothing is stored but numbers computed before an attempt that failed."""
    folder = machine_dir(machine)
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    if folder.is_dir() and all(path.name in ("computed.json", LOCK) for path in files):
        shutil.rmtree(folder, ignore_errors=True)


def default_replay_machine() -> str:
    """The machine whose stored runs a replay shows: this hardware's own, else a committed one. Raises StoreError."""
    for name in (provenance.machine_name(), *REPLAY_FIRST):
        if any(machine_dir(name).glob("*/*/run.json")):
            return name
    raise StoreError(f"No runs are stored under {root()}.", **nothing_stored())


def nothing_stored() -> dict[str, str]:
    """Cause and next step of an error where the data folder holds no machine."""
    if os.environ.get("KVLAB_DATA"):
        return {
            "cause": f"nothing was measured yet, or KVLAB_DATA points elsewhere: {root()}",
            "next_step": "correct or unset KVLAB_DATA, or measure something: kvlab measure kv_capacity",
        }
    return {
        "cause": f"nothing is stored under {root()}: kvlab was called outside of its project, or nothing was measured",
        "next_step": "cd into the folder of kvlab, or measure something: kvlab measure kv_capacity",
    }


def _section_dir(machine: str, section: str) -> Path:
    if not re.fullmatch(r"[a-z0-9][a-z0-9_]*", section):
        raise StoreError(f"{section!r} is not a section name.", cause="use a notebook's name without its number")
    return machine_dir(machine) / section


# -- writing ------------------------------------------------------------------------------------------------------


def save_run(
    machine: str,
    section: str,
    manifest: Mapping[str, Any],
    requests: pd.DataFrame,
    samples: pd.DataFrame,
    log_path: Path | None = None,
) -> Run:
    """Stores a run whole or not at all; replaces an older one of the same id. Raises StoreError."""
    folder = _section_dir(machine, section)
    full = complete(machine, section, manifest)
    files = {
        "requests.parquet": tables.to_bytes(requests, "requests"),
        "samples.parquet": tables.to_bytes(samples, "samples"),
        MANIFEST: (json.dumps(full, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode(),
    }
    log = _log_bytes(log_path)
    if log is not None:
        files[LOG] = log
    final, new = folder / full["run_id"], folder / f"{NEW}{full['run_id']}-{uuid.uuid4().hex[:8]}"
    with disk_errors(f"run {full['run_id']}"), locked(machine_dir(machine)):
        folder.mkdir(exist_ok=True)
        _tidy(folder)
        try:
            new.mkdir()
            for name, data in files.items():
                write_synced(new / name, data)
            sync_folder(new)
            _swap(new, final)
        finally:
            shutil.rmtree(new, ignore_errors=True)
    return Run(final, full)


def _log_bytes(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        # Losing the measurement over its log would be worse.
        warnings.warn(f"The server log is not stored with the run: {error}", stacklevel=3)
        return None
    return gzip.compress(scrub(text).encode(), mtime=0)


def _swap(new: Path, final: Path) -> None:
    old = final.with_name(OLD + final.name)
    if final.exists():
        final.rename(old)
    try:
        new.rename(final)
    except OSError:
        if old.exists():
            old.rename(final)
        raise
    sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _tidy(folder: Path) -> None:
    # Only called under the machine's lock: whatever is half done now was left by a process that died.
    for new in folder.glob(f"{NEW}*"):
        shutil.rmtree(new, ignore_errors=True)
    for old in folder.glob(f"{OLD}*"):
        final = folder / old.name.removeprefix(OLD)
        if final.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:
            old.rename(final)


# -- reading ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Run:
    """A stored run: its folder and its manifest."""

    path: Path
    manifest: dict[str, Any]

    @property
    def id(self) -> str:
        return self.path.name

    @property
    def valid(self) -> bool:
        return self.manifest.get("valid") is True

    def requests(self) -> pd.DataFrame:
        """One row a request: the columns of `records.REQUEST_COLUMNS`."""
        return self._table("requests")

    def samples(self) -> pd.DataFrame:
        """One row a scrape: the columns of `records.SAMPLE_COLUMNS`."""
        return self._table("samples")

    def log(self) -> str | None:
        """The server's log; None where none was stored."""
        path = self.path / LOG
        return gzip.decompress(path.read_bytes()).decode(errors="replace") if path.is_file() else None

    def _table(self, kind: str) -> pd.DataFrame:
        path = self.path / f"{kind}.parquet"
        try:
            return tables.from_bytes(path.read_bytes(), kind)
        except (OSError, StoreError) as error:
            raise StoreError(f"{path}: {error}", next_step="remove this run's folder and measure it again") from None


def load_run(path: Path) -> Run:
    """The run in a folder. Raises StoreError on damage, SchemaError where a newer kvlab wrote it."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        version = int(manifest["schema_version"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path / MANIFEST} cannot be read: {error}", next_step="remove that folder") from None
    if version > SCHEMA_VERSION:
        raise SchemaError(
            f"{path} was made by a newer kvlab (layout {version}; this one knows up to {SCHEMA_VERSION}).",
            next_step="upgrade kvlab: git pull, then make install",
        )
    if wrong := damage(manifest):
        raise StoreError(f"{path / MANIFEST} cannot be used: {wrong}", "it was edited or cut", "remove that folder")
    return Run(path, {name: None for name in FIELDS} | manifest)


def list_runs(machine: str, section: str | None = None) -> list[Run]:
    """Every readable run, valid or not, oldest first. A damaged one is skipped with a warning that names it."""
    if section is not None:
        return _runs(machine, _section_dir(machine, section))
    folders = sorted(p for p in machine_dir(machine).glob("*") if p.is_dir())
    return sorted((run for folder in folders for run in _runs(machine, folder)), key=_age)


def find_run(machine: str, section: str, key: str) -> Run | None:
    """The newest valid run of that configuration whose tables can be read; None where there is none."""
    for run in reversed(_runs(machine, _section_dir(machine, section), f"[!.]*-{key[:8]}")):
        if run.valid and run.manifest["key"] == key:
            try:
                run.requests(), run.samples()
            except StoreError as error:
                warnings.warn(f"Skipped a damaged run: {error}", stacklevel=2)
            else:
                return run
    return None


def damaged_runs(folder: Path, ids: Iterable[str]) -> list[str]:
    """Those of the runs that lie in the section's folder and cannot be read whole."""
    damaged = []
    for name in sorted(set(ids)):
        if (folder / name).is_dir():
            try:
                run = load_run(folder / name)
                run.requests(), run.samples()
            except StoreError:
                damaged.append(name)
    return damaged


def _runs(machine: str, folder: Path, pattern: str = "[!.]*") -> list[Run]:
    _recover(machine, folder)
    runs = []
    for path in sorted(p for p in folder.glob(pattern) if p.is_dir()):
        try:
            runs.append(load_run(path))
        except SchemaError:
            raise
        except StoreError as error:
            warnings.warn(f"Skipped a damaged run: {error}", stacklevel=3)
    return sorted(runs, key=_age)


def _age(run: Run) -> tuple[str, str]:
    return str(run.manifest["created_utc"]), run.id


def _recover(machine: str, folder: Path) -> None:
    # A process that died between two renames has left the only copy under its aside name.
    if any(folder.glob(f"{OLD}*")) and os.access(folder, os.W_OK):
        with locked(machine_dir(machine)):
            _tidy(folder)
