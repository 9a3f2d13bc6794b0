"""Computed numbers, stored with the time before a server starts: data/<machine>/<section>/computed.json."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvlab.claims import Claim
from kvlab.errors import StoreError
from kvlab.files import read_json, write_text

FILE = "computed.json"


def store(folder: Path, profile: str, claims: Iterable[Claim]) -> None:
    """Adds these numbers with the time; the same ones are stored once, and nothing stored is changed."""
    rows = [{"id": c.id, "computed": c.computed, "unit": c.unit} for c in claims]
    entries = _read(folder)
    if rows not in [entry["rows"] for entry in entries]:
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        entries.append({"utc": utc, "profile": profile, "rows": rows})
        write_text(folder / FILE, json.dumps({"stored": entries}, indent=1, sort_keys=True) + "\n")


def last(folder: Path) -> dict[str, Any] | None:
    """When predictions were stored last, so that a run shows that they came first; None where there are none."""
    entries = _read(folder)
    return {"stored_utc": entries[-1]["utc"], "numbers": len(entries[-1]["rows"])} if entries else None


def _read(folder: Path) -> list[dict[str, Any]]:
    path, again = folder / FILE, "restore it from git, or remove it"
    if not path.is_file():
        return []
    entries = read_json(path, again).get("stored")
    whole = isinstance(entries, list) and all(isinstance(e, dict) and isinstance(e.get("rows"), list) for e in entries)
    if not whole or not all(isinstance(e.get("utc"), str) for e in entries):
        raise StoreError(f"{path} holds no list of stored numbers.", "it was cut off, or edited", again)
    return entries
