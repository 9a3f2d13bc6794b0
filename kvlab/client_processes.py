"""The load generator in 1, 2, 4, 8 processes (`python tools/bench_processes.py`): its table, and what it says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvlab import files, instrument, pages, phrases, store

TIMES_S = ("ttft_added_p50_s", "ttft_added_p99_s", "itl_added_p99_s")
SHOWN = ("events_per_s", "times", "events_per_cpu_s", *TIMES_S, "rows", "failures")


def stored() -> pd.DataFrame | None:
    """data/client/processes.csv, one row a scenario and number of processes; None where nothing was measured."""
    return instrument.table_of("processes", ("scenario", "processes", "streams", "repeats", "reason"))


def page(words: Mapping[str, str], language: str = "en") -> dict[str, Any]:
    """What the report shows: `intro`, `columns` and `rows` of texts, each row with what was measured or `reason`.

    `words`: the language's table `client_processes`. Without a measurement the rows are empty and the intro says so.
    """
    table = stored()
    if table is None or not (table["repeats"] > 0).any():
        return {"intro": words["none"], "columns": [], "rows": []}
    told = files.read_json(store.root() / "client" / "processes.json", instrument.AGAIN)
    known = {"cpu": told["cpu"] or "?", "cores": told["cores"], "date": told["measured_utc"][:10]}
    paced = next(scenario for scenario in told["scenarios"] if scenario["itl_s"])
    known |= {"streams": paced["streams"], "rate": f"{1 / paced['itl_s']:.0f}"}
    rows = [_row(row, table, words, language) for row in table.to_dict("records")]
    intro = words["intro"].format(**known) + _busy(table, words)
    return {"intro": intro, "columns": [words[name] for name in SHOWN], "rows": rows}


def intro() -> str:
    """What was measured where, or that nothing was: for a notebook."""
    return page(pages.words("en")["client_processes"])["intro"]


def frame() -> pd.DataFrame | None:
    """The rows as a table of texts for a notebook; None without a measurement."""
    found = page(pages.words("en")["client_processes"])
    if not found["rows"]:
        return None
    cells = [row["cells"] or [row["reason"], *[""] * (len(SHOWN) - 1)] for row in found["rows"]]
    return pd.DataFrame(cells, columns=found["columns"], index=[row["name"] for row in found["rows"]])


def _busy(table: pd.DataFrame, words: Mapping[str, str]) -> str:
    good = table[table["repeats"] > 0]
    spoiled = not good["quiet"].fillna(True).astype(bool).all()
    return words["busy"].format(share=f"{good['others_cpu_share'].max():.0%}") if spoiled else ""


def _row(row: Mapping[str, Any], table: pd.DataFrame, words: Mapping[str, str], language: str) -> dict[str, Any]:
    name = words[row["scenario"]].format(n=row["processes"], streams=f"{row['streams']:,.0f}")
    if not row["repeats"] > 0:
        return {"name": name, "cells": None, "reason": phrases.said(row["reason"], language)}
    alone = table[(table["scenario"] == row["scenario"]) & (table["processes"] == 1)]["events_per_s"].item()
    values = row | {"times": row["events_per_s"] / alone}
    return {"name": name, "cells": [_text(key, values[key]) for key in SHOWN], "reason": None}


def _text(name: str, value: float) -> str:
    if pd.isna(value):
        return "–"
    if name in TIMES_S:
        return f"{1e3 * value:.2g} ms" if 1e3 * abs(value) < 99.5 else f"{1e3 * value:,.0f} ms"
    return f"{value:.1f}" if name == "times" else f"{value:,.0f}"
