"""The manifest of a run: which fields it has, and how anything becomes plain JSON."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from pydantic import BaseModel

from kvlab import __version__
from kvlab.config import NAME
from kvlab.errors import StoreError
from kvlab.privacy import scrub
from kvlab.records import SCHEMA_VERSION

FAKE_MACHINE = "fake"  # test data never lies beside measurements
# Every manifest has these fields; what is not known is null.
FIELDS = (
    *("schema_version", "kvlab_version", "run_id", "section", "machine", "cell", "key", "profile", "created_utc"),
    *("duration_s", "nonce", "window_s", "server", "predictions", "provenance", "summary", "certificate"),
    *("valid", "problems", "fake"),
)


# What the readers of a stored manifest rely on; a field that is not known is null, but for those of NEEDED.
SHAPES: Mapping[type | tuple[type, ...], tuple[str, ...]] = {
    str: ("key", "section", "machine", "profile", "kvlab_version"),
    dict: ("cell", "server", "predictions", "provenance", "summary", "certificate"),
    list: ("problems", "window_s"),
    (int, float): ("duration_s",),
}
NEEDED = ("cell", "key", "created_utc")


def damage(manifest: Mapping[str, Any]) -> str | None:
    """What in a stored manifest no reader can use, such as `its cell is 5`; null where nothing is."""
    for kind, names in SHAPES.items():
        for name in names:
            if manifest.get(name) is not None and not isinstance(manifest[name], kind):
                return f"its {name} is {str(manifest[name]):.40}"
    if missing := [name for name in NEEDED if manifest.get(name) is None]:
        return f"it has no {missing[0]}"
    if not isinstance(manifest["cell"].get("server"), dict):
        return "its cell names no server"
    try:
        datetime.fromisoformat(manifest["created_utc"])
    except (TypeError, ValueError):
        return f"its created_utc is {str(manifest['created_utc']):.40}"
    return None


def complete(machine: str, section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest to store: `given` with every field, plain values and nothing private.

    Raises StoreError where the run cannot be named, or is a fake one for a real machine.
    """
    values = {name: None for name in FIELDS} | plain(given)
    values["fake"] = bool(values["fake"])
    if values["fake"] and machine != FAKE_MACHINE:
        raise StoreError(
            f"These rows come from the fake server; they are not stored as machine {machine}.",
            cause="an endpoint that answers for the unit tests was measured",
            next_step="start a real server, or use the machine name 'fake' in a test",
        )
    cell, key = values["cell"], values["key"]
    if not (isinstance(cell, dict) and re.fullmatch(NAME, str(cell.get("name", ""))) and "repeat" in cell and key):
        raise StoreError("A manifest needs cell.name, cell.repeat and key.", next_step="pass cell.model_dump() and key")
    values |= {"schema_version": SCHEMA_VERSION, "kvlab_version": __version__, "section": section, "machine": machine}
    values["run_id"] = run_id(cell["name"], cell["repeat"], key)
    values["created_utc"] = values["created_utc"] or datetime.now(UTC).isoformat(timespec="milliseconds")
    values["valid"], values["problems"] = bool(values["valid"]), values["problems"] or []
    return scrub(values)


def run_id(name: str, repeat: int, key: str) -> str:
    """The folder name of a run."""
    return f"{name}-r{repeat}-{key[:8]}"


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: NaN, infinity and NA become null; numpy, pydantic and dataclasses plain values."""
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, BaseModel):
        return plain(value.model_dump(mode="json"))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    raise StoreError(f"A manifest cannot hold {type(value).__name__}: {value!r}")
