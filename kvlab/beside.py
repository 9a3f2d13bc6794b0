"""Other machines' claims as points for a figure, so that one's own measurement stands beside the published ones."""

from __future__ import annotations

import warnings
from functools import lru_cache
from pathlib import Path

import pandas as pd

from kvlab import claims, store
from kvlab.errors import StoreError

NOBODY = "nobody"  # a machine without a file: an empty table of the right shape
NUMBERS = ("computed", "measured", "ci_low", "ci_high")


def others(lab) -> list[str]:
    """The machines that have claims of the lab's section, without its own; the article first."""
    names = [name for name in store.machines() if name != lab.machine]
    with_claims = [name for name in names if len(_section(name, lab.section))]
    return sorted(with_claims, key=lambda name: (name != "article", name))


def points(machine: str, section: str, quantity: str, x: str, **where) -> pd.DataFrame:
    """x, computed, measured, ci_low, ci_high of the claims of that quantity, sorted by the condition `x`.

    `where` keeps claims whose conditions hold these values; a condition that a claim does not state does not match,
    and where `x` is not a number there is no point.
    """
    table = _section(machine, section)
    wanted = {key: str(value) for key, value in where.items()}
    rows = []
    for row in table[table["quantity"] == quantity].to_dict("records"):
        stated = claims.parse_conditions(_text(row["conditions"]))
        if x in stated and all(stated.get(key) == value for key, value in wanted.items()):
            numbers = {name: row[name] for name in NUMBERS}
            rows.append({"x": _number(stated[x])} | numbers | {"conditions": row["conditions"]})
    found = pd.DataFrame(rows, columns=["x", *NUMBERS, "conditions"])
    found = found.astype(object).where(found.notna(), float("nan")).astype(dict.fromkeys(("x", *NUMBERS), "float64"))
    return found.dropna(subset="x").sort_values("x", ignore_index=True)


def value(machine: str, section: str, quantity: str, column: str = "measured", **where) -> float | None:
    """The number of the first claim of that quantity whose conditions match; None where there is none."""
    table = _section(machine, section)
    wanted = {key: str(value) for key, value in where.items()}
    for row in table[table["quantity"] == quantity].to_dict("records"):
        stated = claims.parse_conditions(_text(row["conditions"]))
        if all(stated.get(key) == value for key, value in wanted.items()) and not pd.isna(row[column]):
            return float(row[column])
    return None


def relative(machine: str, section: str, quantity: str, key: str, changed: str, base: str, **where) -> float | None:
    """A machine's changed / base - 1 between two values of one condition; None where one is missing."""
    a, b = (value(machine, section, quantity, **where, **{key: side}) for side in (changed, base))
    return a / b - 1 if a is not None and b else None


def article_fit(machine: str, **where) -> float | None:
    """Requests that fit as the article computed them, for a machine whose claims know no interval."""
    found = (value(machine, section, "requests_that_fit", "computed", **where) for section in ("kv_capacity", "load"))
    return next((fit for fit in found if fit is not None), None)


@lru_cache(maxsize=64)
def _table(folder: Path, _stamp: tuple[int, int] | None) -> pd.DataFrame:
    """Read once as long as the file stays the same: a slider asks for the same points at each of its steps."""
    return claims.read(folder)


def _section(machine: str, section: str) -> pd.DataFrame:
    folder = claims.place(store.machine_dir(machine))
    file = folder / claims.FILE
    stamp = (file.stat().st_mtime_ns, file.stat().st_size) if file.is_file() else None
    try:
        table = _table(folder, stamp)
    except StoreError as error:  # somebody else's broken file must not end one's own notebook
        warnings.warn(f"{machine} is left out: {error}", stacklevel=2)
        table = claims.read(store.machine_dir(NOBODY))
    return table[table["section"] == section]


def _text(value) -> str:
    return "" if pd.isna(value) else str(value)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
