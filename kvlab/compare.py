"""Two machines or two runs, number by number: which of them moved beyond the noise.

A difference is beyond the noise where it exceeds what two measurements of one thing differ by: the joined half-widths
of both intervals, and the machines' stored noise floor of that quantity. Where neither is known nothing is told.
"""

from __future__ import annotations

import difflib
import json
import math
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import claims, display, noise, store
from kvlab.errors import ConfigError, StoreError
from kvlab.files import typed

MOVED, WITHIN, OTHERWISE, UNTOLD = "moved", "within noise", "computed differently", "cannot be told"
COLUMNS = ("id", "unit", "a", "b", "change", "noise", "verdict", "why")
FLOORS = ("throughput_tok_s", "ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p99_s", "itl_max_s")
ENDINGS = {"_tok_s": "tok/s", "_per_s": "req/s", "_s": "s", "_bytes": "bytes", "_ratio": "ratio", "_usage": "ratio"}


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its claims, the relative noise floors of its machine, and for a run its cell."""

    name: str
    claims: dict[str, claims.Claim]
    floors: dict[str, float]
    cell: dict[str, Any] | None = None


def compare(a: str | Path, b: str | Path, section: str = "") -> pd.DataFrame:
    """One row a number that both sides measured: id, unit, a, b, change (b / a - 1), noise (relative), verdict, why.

    A side is a machine, a folder with a claims.csv, or one run (its folder, `machine/section/run`, or its id). Raises
    ConfigError for a side that is not there and for sides that share no measured number.
    """
    return table(open_side(a), open_side(b), section)


def open_side(what: str | Path) -> Side:
    """The machine, claims file or run of that name; ConfigError names what there is."""
    text = str(what)
    if text in store.machines():
        return _of_claims(text, claims.read(store.machine_dir(text)))
    path = typed(text)
    for place in (path, store.root() / text):
        if place.name == claims.FILE and place.is_file():
            place = place.parent
        if (place / store.MANIFEST).is_file():
            return _of_run(store.load_run(place))
        if (place / claims.FILE).is_file():
            return _of_claims(text, claims.read(place))
    found = sorted(store.root().glob(f"*/*/{text}/{store.MANIFEST}")) if "/" not in text else []
    if len(found) == 1:
        return _of_run(store.load_run(found[0].parent))
    close = difflib.get_close_matches(text, store.machines(), n=1)
    raise ConfigError(
        f"{text!r} is neither a machine nor a run" + (f"; did you mean {close[0]}?" if close else "."),
        cause="nothing of that name is stored" if not found else f"{len(found)} runs have this id",
        next_step=f"use one of {', '.join(store.machines()) or '(nothing is stored)'}, or machine/section/run",
    )


def _of_claims(name: str, stated: pd.DataFrame) -> Side:
    measured = {c.id: c for c in claims.from_frame(stated) if c.measured is not None}
    return Side(name, measured, _floors(stated))


def _floors(stated: pd.DataFrame) -> dict[str, float]:
    floors = {quantity: noise.floor_among(stated, quantity) for quantity in FLOORS}
    return {quantity: floor for quantity, floor in floors.items() if floor is not None}


def _of_run(run: store.Run) -> Side:
    """A run by the folder in which it lies: a copied one belongs to the machine whose folder holds it now."""
    manifest, place = run.manifest, run.path.resolve()
    summary = manifest.get("summary") or {}
    stated = {}
    for name, value in summary.items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not name.endswith(("_low", "_high")):
            ci = (summary.get(f"{name}_low"), summary.get(f"{name}_high"))
            made = claims.claim(manifest["section"], name, unit=_unit(name), measured=value, ci=ci, runs=[run.id])
            stated[made.id] = made
    known = _floors(claims.read(place.parent.parent))
    return Side("/".join(place.parts[-3:]), stated, known, manifest.get("cell"))


def _unit(name: str) -> str:
    return next((unit for ending, unit in ENDINGS.items() if name.endswith(ending)), "count")


def table(a: Side, b: Side, section: str = "") -> pd.DataFrame:
    """The comparison of two sides; ConfigError where they share no measured number, StoreError where units differ."""
    shared = [c for c in a.claims.values() if c.id in b.claims and section in ("", c.section)]
    for side in (a, b):
        if not side.claims:
            again = f"kvlab report --mode replay --machine {side.name}" if side.cell is None else "measure it again"
            raise ConfigError(
                f"{side.name} holds no measured number.",
                "nothing was measured there, or its claims were removed",
                f"state its claims anew, from its runs: {again}" if side.cell is None else again,
            )
    if not shared:
        of = f" of the section {section}" if section else ""
        alike = (a.cell is None) == (b.cell is None)
        told = "they measured other sections, lengths or concurrencies: claims are joined by their whole id"
        mixed = "a machine's claims state their conditions, such as c=8; the numbers of one run have none"
        two = "two machines or two runs: kvlab compare MACHINE/SECTION/RUN MACHINE/SECTION/RUN"
        raise ConfigError(
            f"{a.name} and {b.name} share no measured number{of}.",
            cause=told if alike else mixed,
            next_step=f"measure both with the same profile, or compare {two}" if alike else f"compare {two}",
        )
    rows = [_row(c, b.claims[c.id], _floor(a, b, c.quantity)) for c in shared]
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _floor(a: Side, b: Side, quantity: str) -> tuple[float, str] | None:
    """The relative difference that two single measurements reach by chance, and in words whose it is.

    A floor is t sqrt(2) sd: of two machines the variances are averaged; where one is not known the other stands in.
    """
    known = {side.name: side.floors[quantity] for side in (a, b) if quantity in side.floors}
    if not known:
        return None
    whose = f" of {next(iter(known))}" if len(known) == 1 and a.name != b.name else ""
    mean = math.sqrt(sum(floor**2 for floor in known.values()) / len(known))
    return mean, f"the noise floor between starts{whose}"


def _row(a: claims.Claim, b: claims.Claim, floor: tuple[float, str] | None) -> dict[str, Any]:
    if a.unit != b.unit:
        raise StoreError(f"{a.id} has the unit {a.unit} on one side and {b.unit} on the other.")
    change = b.measured / a.measured - 1 if a.measured else None
    verdict, noise_, why = judge(a, b, floor)
    relative = noise_ / abs(a.measured) if noise_ is not None and a.measured else None
    numbers = {"a": a.measured, "b": b.measured, "change": change, "noise": relative}
    return {"id": a.id, "unit": a.unit} | numbers | {"verdict": verdict, "why": why}


def judge(a: claims.Claim, b: claims.Claim, floor: tuple[float, str] | None = None) -> tuple[str, float | None, str]:
    """(verdict, noise in the claim's unit, why) of two measured claims.

    `floor`: a difference relative to the mean of both that is still noise, and its name.
    """
    difference = b.measured - a.measured
    if _exact(a) and _exact(b):
        why = "counted, not sampled: both sides match their formula exactly"
        return (OTHERWISE if difference else WITHIN), 0.0, why
    reasons = {}
    if (width := _joined_half_width(a, b)) is not None:
        reasons["the intervals"] = width
    if floor is not None:
        reasons[floor[1]] = floor[0] * (abs(a.measured) + abs(b.measured)) / 2
    if not reasons:
        if not difference:
            return WITHIN, None, "equal"
        return UNTOLD, None, "one measurement a side, no interval, and no noise floor of this quantity"
    widest = max(reasons, key=reasons.get)
    return (MOVED if abs(difference) > reasons[widest] else WITHIN), reasons[widest], f"against {widest}"


def _exact(c: claims.Claim) -> bool:
    return c.computed is not None and c.computed == c.measured and c.measured != 0 and c.ci_low in (None, c.measured)


def _joined_half_width(a: claims.Claim, b: claims.Claim) -> float | None:
    """Root of the squared half-widths on the sides that face each other; null where one has no interval."""
    low, high = sorted((a, b), key=lambda c: c.measured)
    if low.ci_high is None or high.ci_low is None:
        return None
    return math.hypot(max(0.0, low.ci_high - low.measured), max(0.0, high.measured - high.ci_low))


# -- in words -----------------------------------------------------------------------------------------------------


def differing_fields(a: Side, b: Side) -> list[str]:
    """What two runs were asked differently, such as `server.max_num_seqs: 5 -> 16`."""
    if a.cell is None or b.cell is None:
        return []
    before, after = (dict(_flat(side.cell)) for side in (a, b))
    names = [name for name in before | after if name != "name" and before.get(name) != after.get(name)]
    return [f"{name}: {before.get(name)} -> {after.get(name)}" for name in names]


def _flat(values: dict[str, Any], start: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{start}{name}.")
        else:
            yield start + name, value


def counts(compared: pd.DataFrame) -> dict[str, int]:
    """How many rows have each verdict."""
    return {verdict: int((compared["verdict"] == verdict).sum()) for verdict in (MOVED, WITHIN, OTHERWISE, UNTOLD)}


def summary(a: Side, b: Side, compared: pd.DataFrame) -> str:
    """One sentence: of how many shared numbers how many moved."""
    n = counts(compared)
    counted = f"{n[OTHERWISE]} were computed differently and met exactly, " if n[OTHERWISE] else ""
    return (
        f"a is {a.name}, b is {b.name}: {len(compared)} numbers measured on both sides; "
        f"{n[MOVED]} moved beyond the noise, {n[WITHIN]} did not, {counted}{n[UNTOLD]} cannot be told."
    )


def exit_code(compared: pd.DataFrame) -> int:
    """0: nothing moved; 1: something moved beyond the noise; 3: nothing can be told. (2 is an error, as everywhere.)"""
    n = counts(compared)
    return 1 if n[MOVED] else 0 if n[WITHIN] or n[OTHERWISE] else 3


def show(compared: pd.DataFrame) -> pd.DataFrame:
    """The table for human eyes: values with their units, changes in percent; ordered by how far beyond the noise."""
    far = (compared["change"].abs() / compared["noise"].where(compared["noise"] > 0)).astype(float)
    ordered = compared.assign(far=far.fillna(math.inf)).sort_values("far", ascending=False, kind="stable")
    rows = [
        {
            "claim": row["id"],
            "a": display.number(row["a"], row["unit"]),
            "b": display.number(row["b"], row["unit"]),
            "change": _percent(row["change"]),
            "noise": _percent(row["noise"]).replace("+", "±"),
            "verdict": row["verdict"],
            "why": row["why"],
        }
        for row in ordered.to_dict("records")
    ]
    return pd.DataFrame(rows, columns=["claim", "a", "b", "change", "noise", "verdict", "why"])


def _percent(value: float | None) -> str:
    if pd.isna(value):
        return ""
    return f"{value:+.1%}" if abs(value) < 10 else f"{value + 1:,.0f}×"


def as_json(a: Side, b: Side, compared: pd.DataFrame) -> str:
    """Everything for a program: sides, counts, what the runs were asked differently, and the rows (null = missing)."""
    rows = compared.astype(object).where(compared.notna(), None).to_dict("records")
    said = {"a": a.name, "b": b.name, "counts": counts(compared), "differing": differing_fields(a, b), "rows": rows}
    return json.dumps(said, indent=1, ensure_ascii=False)


def text(a: Side, b: Side, compared: pd.DataFrame, *, everything: bool = False, width: int | None = None) -> str:
    """What the command prints: the sentence, what was asked differently, and what moved (or all rows).

    `width`: columns of the terminal, into which everything fits; null: as wide as it gets.
    """
    lines = [summary(a, b, compared), *(f"  asked differently: {line}" for line in differing_fields(a, b))]
    shown = compared if everything else compared[compared["verdict"] == MOVED]
    if len(shown):
        lines += ["", *_fitted(show(shown), width)]
    if hidden := len(compared) - len(shown):
        others = f"{hidden} numbers that did not move, were computed differently or cannot be told"
        lines += ["", f"{others} are left out; --all adds them."]
    return "\n".join(piece for line in lines for piece in _wrapped(line, width))


def _fitted(table: pd.DataFrame, width: int | None) -> list[str]:
    """The table as wide as it may be: whole, without the reasons, or two lines a number."""
    whole, lean = (part.to_string(index=False).splitlines() for part in (table, table.drop(columns="why")))
    if width is None or max(map(len, whole)) <= width:
        return whole
    if max(map(len, lean)) > width:
        lean = [line for row in table.to_dict("records") for line in (row["claim"], f"    {_short(row)}")]
    return [*lean, "", "Why each is judged so takes a wider terminal; --out FILE writes it too."]


def _short(row: dict[str, str]) -> str:
    beyond = ", ".join(part for part in (row["change"], row["noise"] and f"noise {row['noise']}") if part)
    return f"{row['verdict']}: {row['a']} -> {row['b']}{f' ({beyond})' if beyond else ''}"


def _wrapped(line: str, width: int | None) -> list[str]:
    if width is None or len(line) <= width:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()))
    return textwrap.wrap(line, width, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
