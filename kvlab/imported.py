"""Claims of runs that came from result files of other tools (`kvlab import`)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence

from kvlab import claims as claims_module
from kvlab import store
from kvlab.claims import Claim
from kvlab.config import Cell
from kvlab.results import Result, across

UNITS = {
    "throughput_tok_s": "tok/s",
    "throughput_whole_tok_s": "tok/s",
    "ttft_p50_s": "s",
    "ttft_p95_s": "s",
    "itl_p50_s": "s",
    "itl_p99_s": "s",
    "tpot_p50_s": "s",
    "failures": "count",
}
NOT_HELD = "the file of {tool} does not hold it, or too few requests"


def imported(machine: str, section: str) -> list[store.Run]:
    """The runs that came from files of other tools."""
    return [run for run in store.list_runs(machine, section) if "imported" in (run.manifest.get("server") or {})]


def with_imported(own: Iterable[Claim], machine: str, section: str) -> list[Claim]:
    """A section's claims with those of its imported runs; where both state a number, the machine's own stays."""
    found = {claim.id: claim for claim in own}
    for claim in _claims(imported(machine, section), section):
        if claim.id not in found or found[claim.id].measured is None:
            found[claim.id] = claim
    return list(found.values())


def _claims(runs: Sequence[store.Run], section: str) -> list[Claim]:
    points: dict[tuple, list[Result]] = {}
    for run in runs:
        cell = Cell.model_validate_json(json.dumps(run.manifest["cell"]))
        tool = re.sub(r"[^a-z0-9]+", "-", run.manifest["server"]["imported"]["tool"])
        at = (cell.load.concurrency, cell.load.input_tokens, cell.load.output_tokens, tool)
        points.setdefault(at, []).append(Result(cell, run))
    stated = []
    for (c, input_tokens, output_tokens, tool), results in points.items():
        where = {"c": c, "in": input_tokens, "out": output_tokens, "tool": tool}
        for quantity, unit in UNITS.items():
            value = across(results, quantity)
            given = {"reason": NOT_HELD.format(tool=tool)} if value is None else {"measured": value}
            ids = tuple(r.run.id for r in results)
            stated.append(claims_module.claim(section, quantity, where, unit=unit, runs=ids, **given))
    return stated
