"""Claims: one number each, computed or measured or both, with its conditions; data/<machine>/claims.csv holds them."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import store
from kvlab.display import cells as cells  # how claims are drawn is offered here too
from kvlab.display import number as number
from kvlab.display import show as show
from kvlab.errors import StoreError
from kvlab.files import disk_errors, locked, write_text
from kvlab.stats import Estimate

FILE = "claims.csv"
STATES = ("measured", "computed", "not measured", "failed")
NUMBERS = ("computed", "measured", "ci_low", "ci_high", "residual")
UNITS = {"seconds": "s", "second": "s", "byte": "bytes", "token": "tokens", "request": "requests"}  # other spellings


@dataclass(frozen=True)
class Claim:
    """One line of claims.csv. Missing is None. Units: s, bytes, tokens, tok/s, req/s, ratio, x, count, requests."""

    id: str
    section: str
    quantity: str
    conditions: str  # c=32;in=512;out=128
    computed: float | None
    measured: float | None
    ci_low: float | None
    ci_high: float | None
    unit: str
    residual: float | None
    state: str
    reason: str | None
    runs: tuple[str, ...]


COLUMNS = tuple(field.name for field in fields(Claim))


def claim(
    section: str,
    quantity: str,
    conditions: Mapping[str, Any] | str = "",
    *,
    unit: str,
    computed: float | None = None,
    measured: float | Estimate | None = None,
    ci: tuple[float | None, float | None] | None = None,
    runs: Sequence[str] = (),
    reason: str | None = None,
    failed: bool = False,
) -> Claim:
    """A checked claim; id, residual and state follow from the rest.

    State: `measured` with a measured value; else `failed` where asked; else `not measured` with a `reason`; else
    `computed`. Raises StoreError on NaN, infinity, a missing reason, or a failure that has a value.
    """
    where = f"{section}/{quantity}"
    low, high = ci or (None, None)
    if isinstance(measured, Estimate):
        low, high = (measured.low, measured.high) if ci is None else (low, high)
        reason, measured = reason or measured.note or None, measured.value
    said = conditions_text(conditions)
    numbers = [_number(v, where) for v in (computed, measured, low, high)]
    return Claim(
        "/".join(part for part in (section, quantity, said) if part),
        _name(section),
        _name(quantity),
        said,
        *numbers,
        UNITS.get(unit, unit),
        _residual(numbers[0], numbers[1]),
        _state(numbers[0], numbers[1], reason, failed, where),
        " ".join(reason.split()) if reason else None,
        tuple(runs),
    )


def conditions_text(conditions: Mapping[str, Any] | str) -> str:
    """`c=32;in=512` from a mapping in its order; None is left out, True is on, False is off."""
    if isinstance(conditions, str):
        pairs = [part.strip() for part in conditions.split(";") if part.strip()]
    else:
        pairs = [f"{name}={_word(value)}" for name, value in conditions.items() if value is not None]
    for pair in pairs:
        if not re.fullmatch(r"[A-Za-z_][\w-]*=[^\s;=,|]+", pair):
            raise StoreError(f"{pair!r} is not a condition.", next_step="write key=value, without spaces, such as c=32")
    if len({pair.partition("=")[0] for pair in pairs}) < len(pairs):
        raise StoreError(f"A condition stands twice in {';'.join(pairs)!r}.")
    return ";".join(pairs)


def parse_conditions(text: str) -> dict[str, str]:
    """{"c": "32", "in": "512"} from `c=32;in=512`."""
    return dict(pair.split("=", 1) for pair in text.split(";") if pair)


def _word(value: Any) -> str:
    if value is True or value is False:
        return "on" if value else "off"
    return f"{value:.12g}" if isinstance(value, float) else str(value)


def _name(text: str) -> str:
    if not re.fullmatch(r"[A-Za-z][\w.-]*", text):
        raise StoreError(f"{text!r} is not a section or quantity name.", next_step="use letters, digits and _")
    return text


def _number(value: Any, where: str) -> float | None:
    if value is None or value is pd.NA:
        return None
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise StoreError(f"The claim {where} holds {value!r} where a number belongs.") from None
    if not math.isfinite(number):
        raise StoreError(
            f"The claim {where} holds {number}.",
            cause="a calculation on missing values",
            next_step="pass None with a reason where there is no number",
        )
    return number


def _residual(computed: float | None, measured: float | None) -> float | None:
    return (measured - computed) / computed if computed and measured is not None else None


def _state(computed: float | None, measured: float | None, reason: str | None, failed: bool, where: str) -> str:
    if failed and measured is not None:
        raise StoreError(f"The claim {where} is both failed and measured.", next_step="pass one of the two")
    if measured is not None:
        return "measured"
    if not reason and (failed or computed is None):
        raise StoreError(f"The claim {where} has no number and no reason.", next_step="say why: reason='...'")
    return "failed" if failed else "not measured" if reason else "computed"


# -- the file -----------------------------------------------------------------------------------------------------


_stand_ins: dict[Path, Path] = {}  # machine's folder -> where a what-if of this process keeps its claims


def stand_in(machine_dir: Path, folder: Path | None) -> None:
    """From now on this process keeps the machine's claims in `folder`, which begins as a copy; None: no more.

    What a what-if states is so drawn and explained like any claim, and what is stored stays as it is.
    """
    _stand_ins.pop(Path(machine_dir), None)
    if folder is not None:
        write_text(folder / FILE, to_csv(from_frame(read(machine_dir))))
        _stand_ins[Path(machine_dir)] = folder


def place(machine_dir: Path) -> Path:
    """The folder in which this process finds the claims of a machine's folder."""
    return _stand_ins.get(Path(machine_dir), Path(machine_dir))


def write_section(machine_dir: Path, section: str, claims: Iterable[Claim]) -> None:
    """Replaces the rows of one section, in the order given; other sections stay. Atomic; writers take turns."""
    claims = list(claims)
    _check_section(section, claims)
    path = place(machine_dir) / FILE
    with disk_errors(str(path)), locked(path.parent):
        others = [c for c in from_frame(readable(path.parent)) if c.section != section]
        # Stable: within a section the notebook's order is the order in which a reader meets the numbers.
        write_text(path, to_csv(sorted([*others, *claims], key=lambda c: c.section)))


def readable(machine_dir: Path) -> pd.DataFrame:
    """`read` for whoever is about to write: a file that is not one of claims is renamed and kept, with a warning."""
    path = place(machine_dir) / FILE
    try:
        return read(path.parent)
    except StoreError as error:
        aside = path.with_name(f"claims.broken-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}.csv")
        path.rename(aside)
        warnings.warn(
            f"{error.what}\nIt is set aside as {aside.name}. "
            f"Next: kvlab report --mode replay --machine {path.parent.name} writes all claims anew, from their runs",
            stacklevel=3,
        )
        return read(path.parent)


def _check_section(section: str, claims: list[Claim]) -> None:
    ids = [c.id for c in claims]
    twice = sorted({i for i in ids if ids.count(i) > 1})
    if twice:
        raise StoreError(f"Two claims are called {twice[0]}.", next_step="tell them apart by their conditions")
    strangers = [c.id for c in claims if c.section != section]
    if strangers:
        raise StoreError(f"{strangers[0]} is not a claim of the section {section}.")


def to_csv(claims: Iterable[Claim]) -> str:
    """The text of claims.csv: 12 significant digits, an empty field for null, runs joined by ';'."""
    return _text_frame(claims).to_csv(index=False, lineterminator="\n")


def _text_frame(claims: Iterable[Claim]) -> pd.DataFrame:
    def cell(name: str, value: Any) -> str:
        if value is None:
            return ""
        return f"{value:.12g}" if name in NUMBERS else ";".join(value) if name == "runs" else value

    rows = [[cell(name, getattr(c, name)) for name in COLUMNS] for c in claims]
    return pd.DataFrame(rows, columns=list(COLUMNS), dtype="string")


def read(machine_dir: Path) -> pd.DataFrame:
    """A machine's claims: numbers as Float64, the rest as string (`runs` joined by ';'), nulls as NA.

    No file gives no rows. Raises StoreError where the file is not one of claims.
    """
    path = place(machine_dir) / FILE
    try:
        text = path.read_text(encoding="utf-8") if path.exists() else to_csv([])
        if not text.endswith("\n"):
            raise ValueError("its last line is not whole: the file was cut off")
        # Only the empty field is null: a reason may well read "None" or "n/a".
        frame = pd.read_csv(io.StringIO(text), dtype="string", keep_default_na=False, na_values=[""])
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise StoreError(f"{path} is not a table: {error}", next_step=_anew(path)) from None
    if tuple(frame.columns) != COLUMNS:
        raise StoreError(
            f"{path} has the columns {', '.join(frame.columns)}.",
            cause="it was edited by hand, or made by another version",
            next_step=f"the columns are: {', '.join(COLUMNS)}",
        )
    return _typed(frame, path)


def _anew(path: Path) -> str:
    if path.parent.name == "article":
        return "restore it from git, or let it be made anew from the published values: python -m kvlab.article"
    again = f"kvlab report --mode replay --machine {path.parent.name}"
    return f"restore it from git, or let all claims be written anew, from their runs: {again}"


def _typed(frame: pd.DataFrame, path: Path) -> pd.DataFrame:
    for name in NUMBERS:
        try:
            frame[name] = pd.to_numeric(frame[name]).astype("Float64")
        except ValueError as error:
            what = f"{path}: the column {name} holds something else than numbers: {error}"
            raise StoreError(what, next_step=_anew(path)) from None
    for nth, row in enumerate(frame.to_dict("records"), 1):
        values = {name: None if pd.isna(value) else value for name, value in row.items()}
        if problem := _problem(values):
            told = f"{path}, row {nth} ({values['id'] or 'without an id'}): {problem}."
            raise StoreError(told, "it was edited by hand, or the file is damaged", _anew(path))
    if (twice := frame["id"].duplicated()).any():
        what = f"{path}: the claim {frame['id'][twice].iloc[0]} stands there twice."
        raise StoreError(what, "two files were put together, or a line was copied", _anew(path))
    return frame


def _problem(row: Mapping[str, Any]) -> str | None:
    """What is wrong with a row that no program of this project writes; None where nothing is."""
    lacks = [name for name in ("id", "section", "quantity", "unit", "state") if row[name] is None]
    if lacks:
        return f"it has no {lacks[0]}"
    if row["state"] not in STATES:
        return f"the state {row['state']!r} is unknown; known: {', '.join(STATES)}"
    if row["id"] != "/".join(part for part in (row["section"], row["quantity"], row["conditions"]) if part):
        return "its id is not made of its section, quantity and conditions"
    if endless := [name for name in NUMBERS if row[name] is not None and not math.isfinite(row[name])]:
        return f"{endless[0]} is {row[endless[0]]}, which is no number"
    if (row["state"] == "measured") != (row["measured"] is not None):
        return f"its state is {row['state']!r}, and its measured value {row['measured']}"
    if None not in (low := row["ci_low"], high := row["ci_high"]) and low > high:
        return f"its interval begins at {low:g} and ends at {high:g}"
    return _wrong_residual(row["residual"], _residual(row["computed"], row["measured"]))


def _wrong_residual(said: float | None, due: float | None) -> str | None:
    if said is None and due is None:
        return None
    # Both come from numbers of 12 digits, and their difference may cancel most of them.
    if None not in (said, due) and math.isclose(said, due, rel_tol=1e-6, abs_tol=1e-9):
        return None
    return f"its residual is {said}, and computed and measured give {due}"


def from_frame(frame: pd.DataFrame) -> list[Claim]:
    """The claims of a table that `read` returned."""
    claims = []
    for row in frame.to_dict("records"):
        values = {name: None if pd.isna(value) else value for name, value in row.items()}
        values["conditions"] = values["conditions"] or ""
        values["runs"] = tuple((values["runs"] or "").split(";")) if values["runs"] else ()
        claims.append(Claim(**values))
    return claims


def side_by_side(machines: Sequence[str]) -> pd.DataFrame:
    """Claims of several machines joined by id: for each machine M the columns `M.computed`, `.measured`, `.ci_low`,
    `.ci_high`, `.state`; null where a machine has no such claim. Raises StoreError where the units differ.
    """
    shared = ["id", "section", "quantity", "conditions", "unit"]
    tables = {machine: read(store.machine_dir(machine)) for machine in machines}
    every = pd.concat([table[shared] for table in tables.values()], ignore_index=True)
    heads = every.drop_duplicates("id").set_index("id")
    units = every.groupby("id")["unit"].nunique()
    if (units > 1).any():
        raise StoreError(f"{units[units > 1].index[0]} has another unit on another machine.")
    for machine, table in tables.items():
        own = table.set_index("id")[["computed", "measured", "ci_low", "ci_high", "state"]]
        heads = heads.join(own.add_prefix(f"{machine}."))
    return heads.reset_index()
