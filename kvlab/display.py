"""Claims for human eyes: milliseconds, GiB and percent, three or four significant digits, nothing for null."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvlab import predict

if TYPE_CHECKING:
    from kvlab.claims import Claim

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))  # of rates: 4.22 Tbytes/s


def show(claims: Iterable[Claim] | pd.DataFrame) -> pd.DataFrame:
    """A table of texts, one row a claim: quantity, conditions, computed, measured, interval, residual, remark."""
    rows = claims.to_dict("records") if isinstance(claims, pd.DataFrame) else [asdict(c) for c in claims]
    names = ("quantity", "conditions", "computed", "measured", "interval", "residual", "remark")
    table = pd.DataFrame([_line(row) for row in rows], columns=list(names))
    return table.set_index("quantity")


def _line(row: Mapping[str, Any]) -> dict[str, str]:
    texts = cells(row)
    state, reason = row["state"], texts["reason"]
    return texts | {"remark": f"{state}: {reason}" if state in ("not measured", "failed") else reason}


def cells(row: Mapping[str, Any]) -> dict[str, str]:
    """The texts of one claim: quantity, conditions, computed, measured, interval, residual, reason.

    A relative change has no text of a residual: see `is_change`.
    """
    unit = row["unit"]
    compares = not _null(row["residual"]) and not is_change(row["quantity"], unit)
    said = partial(number, unit=unit, signed=is_signed(row["quantity"], unit))
    low, high = said(row["ci_low"]), said(row["ci_high"])
    return {
        "quantity": str(row["quantity"]),
        "conditions": _text(row["conditions"]).replace(";", ", "),
        "computed": said(row["computed"]),
        "measured": said(row["measured"]),
        "interval": f"{low} … {high}" if low and high else "",
        "residual": percent(row["residual"]) if compares else "",
        "reason": _text(row["reason"]),
    }


def is_change(quantity: str, unit: str) -> bool:
    """Whether a claim is a relative change, which is compared with another by the difference, in points.

    Near zero the quotient of two changes is huge, or has the wrong sign, and says nothing.
    """
    return unit == "ratio" and (quantity.endswith("_change") or "_changes_" in quantity)


def is_signed(quantity: str, unit: str) -> bool:
    """Whether a claim says by how much something grows or shrinks: such a percentage has its sign."""
    return is_change(quantity, unit) or unit == "ratio" and "gain" in quantity.split("_")


def percent(value: float) -> str:
    """A share with its sign and one decimal; what rounds to nothing has no minus."""
    return f"{round(value, 3) + 0.0:+,.1%}"


def number(value: Any, unit: str, *, signed: bool = False) -> str:
    """A value with its unit as it is drawn: 0.6681 s is `668.1 ms`, 1073741824 bytes is `1 GiB`, null is nothing.

    `signed`: a percentage has its sign, `+9.03%`.
    """
    if _null(value):
        return ""
    value = float(value)
    if unit == "s" and abs(value) < 10:
        return f"{digits(value * 1e9)} ns" if 0 < abs(value) < 1e-5 else f"{digits(value * 1e3)} ms"
    if unit == "bytes" and abs(value) >= 2**20:
        return f"{digits(value / 2**30)} GiB" if abs(value) >= 2**27 else f"{digits(value / 2**20)} MiB"
    if unit in ("bytes/s", "FLOP/s"):
        factor, prefix = next((pair for pair in PREFIXES if abs(value) >= pair[0]), (1, ""))
        return f"{digits(value / factor)} {prefix}{unit}"
    if unit == "ratio":
        return f"{'+' if signed and value > 0 else ''}{digits(value * 100)}%"
    if unit == "x":
        return f"{digits(value)}×"
    return digits(value) if unit == "count" else f"{digits(value)} {unit}"


def usable_tokens(blocks: int, block_size: int) -> str:
    """What requests can hold of a pool, beside what vLLM's log counts: `9,344 of 9,360 tokens; one block is ...`."""
    usable = predict.capacity_tokens(blocks, block_size)
    return f"{usable:,} of {blocks * block_size:,} tokens; one block is vLLM's null block"


def digits(value: float) -> str:
    """Four significant digits, whole from 1000 on, thousands separated, no trailing zeros."""
    if value == 0:
        return "0"
    places = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{round(value, places):,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def span(low: float, high: float) -> str:
    """Both ends with one decimal; one number where they do not differ so far."""
    ends = dict.fromkeys((f"{low:,.1f}", f"{high:,.1f}"))
    return " to ".join(ends)


def fit(low: float, high: float) -> str:
    """How many requests fit: where not even one reaches its end, so in words."""
    return f"none to its end ({span(low, high)})" if low < 1 else span(low, high)


def _null(value: Any) -> bool:
    return value is None or value is pd.NA or value != value


def _text(value: Any) -> str:
    return "" if _null(value) else str(value)
