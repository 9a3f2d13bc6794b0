"""The report: every section's claims and figures, the machines side by side, as one HTML file that opens anywhere.

It reads claims, figures, manifests and the notebooks' first words; it never computes a result.
"""

from __future__ import annotations

import base64
import json
import re
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import pandas as pd

from kvlab import __version__, claims, display, explain, plot, provenance, run, store
from kvlab.errors import StoreError
from kvlab.measure import EXISTING

HEADLINE = 6  # claims shown before a section's full table is unfolded: first those that compare
TOLERANCE = 0.15  # a prediction farther off is named below its section


def build(machine: str, out: Path, *, timings: dict[str, float], failures: dict[str, str]) -> Path:
    """Writes the report of `machine` beside the other measured machines and returns its path.

    `timings`: seconds a section took; `failures`: section -> why its notebook failed. Raises StoreError where a
    stored run is stamped as fake.
    """
    others = [name for name in store.machines() if name != machine]
    shown = [machine, *others]
    for name in shown:
        refuse_fake(name)
    tables = {name: claims.read(store.machine_dir(name)) for name in shown}
    page = (
        _environment()
        .get_template("report.html")
        .render(
            version=__version__,
            made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            machine=machine,
            others=others,
            about=[about(name) for name in shown],
            sections=[
                section(name, path, machine, tables, timings.get(name), failures.get(name))
                for name, path in run.notebooks().items()
            ],
            counts=_counts(tables[machine]),
        )
    )
    store.write_text(out, page)
    return out


def refuse_fake(machine: str) -> None:
    """Raises StoreError where any run of the machine was measured on the fake server of the unit tests."""
    fakes = [run.path for run in store.list_runs(machine) if run.manifest.get("fake")]
    if fakes:
        raise StoreError(
            f"{fakes[0]} was measured on the fake server; the report shows real measurements only.",
            next_step=f"remove that folder and run `kvlab measure` again ({len(fakes)} such runs)",
        )


def section(
    name: str, path: Path, machine: str, tables: dict[str, pd.DataFrame], took_s: float | None, failure: str | None
) -> dict[str, Any]:
    """What the page shows of one section."""
    title, sentence = first_words(path)
    own = tables[machine][tables[machine]["section"] == name]
    rows = [_row(row, tables, machine) for row in own.to_dict("records")]
    compared = [row for row in rows if row["computed"] and row["measured"]]
    telling = sorted(rows, key=lambda row: (row not in compared, not row["measured"]))  # stable: the notebook's order
    headline = telling[:HEADLINE]
    return {
        "name": name,
        "notebook": path.name,
        "title": title,
        "sentence": sentence,
        "figures": [_figure(file) for file in plot.figure_files(machine, name)],
        "headline": headline,
        "rest": [row for row in rows if row not in headline],
        "notes": notes(own),
        "columns": [other for other in tables if other != machine and _has(tables[other], own)],
        "took": None if took_s is None else f"{took_s:.0f} s",
        "failure": failure,
    }


def notes(own: pd.DataFrame) -> list[str]:
    """What did not match and what was not measured, in words that come from the claims."""
    stated = claims.from_frame(own)
    sentences = (explain.residuals(stated, tolerance=TOLERANCE), explain.not_measured(stated)) if stated else ()
    return [sentence for sentence in sentences if sentence]


def first_words(path: Path) -> tuple[str, str]:
    """Title and first sentence of a notebook, from its first markdown cell."""
    notebook = nbformat.read(path, as_version=4)
    text = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), path.stem)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    title = lines[0].lstrip("# ") if lines else path.stem
    body = lines[1] if len(lines) > 1 else ""
    return title, re.sub(r"[*`]", "", body)


def about(machine: str) -> dict[str, Any]:
    """Provenance of a machine: hardware, engine, model, dates, number of runs; unknown is None."""
    runs = [r for r in store.list_runs(machine) if r.manifest.get("valid")]
    if machine == "article":
        return {"machine": machine, "published": True}
    manifests = [r.manifest for r in runs]
    own = [m for m in manifests if not _is_existing(m)]  # of the others only the client's hardware is known
    return {
        "machine": machine,
        "published": False,
        "runs": len(runs),
        "hardware": _one({provenance.hardware_line(m["provenance"] or {}) for m in own}),
        "engine": _one({provenance.engine_line(m | {"cell": None} if _is_existing(m) else m) for m in manifests}),
        "model": _one({m["cell"]["server"]["model"] for m in manifests}),
        "weights": _one({_weights(m["cell"]["server"]) for m in own}),
        "dates": _dates([m["created_utc"][:10] for m in manifests]),
        "kvlab": _one({m["kvlab_version"] for m in manifests}),
    }


def _is_existing(manifest: dict[str, Any]) -> bool:
    return manifest["cell"]["server"]["model"].startswith(EXISTING)


def _weights(server: dict[str, Any]) -> str:
    dummy = server["load_format"] == "dummy" or server["model"].startswith("geometry:")
    note = "dummy (timing, capacity and caching do not depend on weight values; text quality does)"
    return note if dummy else "loaded"


def _row(row: dict[str, Any], tables: dict[str, pd.DataFrame], machine: str) -> dict[str, Any]:
    beside = {}
    for other, table in tables.items():
        match = table[table["id"] == row["id"]]
        if other != machine and len(match):
            beside[other] = display.number(match.iloc[0]["measured"], row["unit"])
    return display.cells(row) | {"beside": beside, "state": row["state"]}


def _has(table: pd.DataFrame, own: pd.DataFrame) -> bool:
    return bool(set(table["id"]) & set(own["id"]))


def _figure(file: Path) -> dict[str, str]:
    info = json.loads(file.read_text())
    picture = base64.b64encode(file.with_suffix(".svg").read_bytes()).decode()
    return {"name": file.stem, "alt": info["alt"], "runs": len(info["runs"]), "svg": picture}


def _counts(table: pd.DataFrame) -> dict[str, int]:
    return {str(state): int(n) for state, n in table["state"].value_counts().items()}


def _one(values: set[str | None]) -> str | None:
    known = sorted(str(value) for value in values if value)
    return "; ".join(known) if known else None


def _dates(days: list[str]) -> str | None:
    return None if not days else min(days) if min(days) == max(days) else f"{min(days)} to {max(days)}"


def _environment() -> jinja2.Environment:
    source = (resources.files("kvlab") / "report.html").read_text()
    return jinja2.Environment(
        loader=jinja2.DictLoader({"report.html": source}),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
