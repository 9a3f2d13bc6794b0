"""What a grid gave: a cell with its run, and the numbers that claims, tables and fits take from several of them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from kvlab import stats, steptime, store
from kvlab.config import Cell
from kvlab.errors import ServerError
from kvlab.records import REQUEST_COLUMNS, SAMPLE_COLUMNS

NO_ROWS, NO_SAMPLES = (
    pd.DataFrame({name: pd.Series(dtype=dtype) for name, (dtype, _) in columns.items()})
    for columns in (REQUEST_COLUMNS, SAMPLE_COLUMNS)
)
EMPTY = (NO_ROWS, NO_SAMPLES)  # the tables of a run in which nothing was sent
LOG_SAYS = "Its log says: "
# An error's name and nothing else, or with the marks below the statement in place of the statement.
WORDLESS = re.compile(r"(\w+(?:Error|Exception))(?: at `[\^~ ]*`)?$")


@dataclass(frozen=True)
class Result:
    """A cell and its run; `run` is None where it is not measured, and `reason` says why.

    `failed`: it was tried, and the run that is stored is not valid.
    """

    cell: Cell
    run: store.Run | None
    reason: str | None = None
    failed: bool = False

    def value(self, name: str) -> float | None:
        """A number of the run's summary; None where it is missing."""
        return None if self.run is None else self.run.manifest["summary"].get(name)

    def estimate(self, name: str) -> stats.Estimate | None:
        """The number with its interval (`name_low`, `name_high` of the summary, where they are stored)."""
        value = self.value(name)
        if value is None:
            return None
        low, high, note = (self.value(f"{name}_{part}") for part in ("low", "high", "note"))
        return stats.Estimate(value, low, high, self.value("n") or 0, note or "")


def frame(results: list[Result], *names: str) -> pd.DataFrame:
    """One row a result: c, in, out, repeat, and the named numbers of the summary (missing where not measured)."""
    rows = []
    for result in results:
        load = result.cell.load
        row = {"c": load.concurrency, "in": load.input_tokens, "out": load.output_tokens, "repeat": result.cell.repeat}
        rows.append(row | {name: result.value(name) for name in names})
    return pd.DataFrame(rows)


def across(results: list[Result], name: str) -> stats.Estimate | None:
    """Mean of the repeats with its t interval, from three repeats on; the run's own interval where there is one run.

    Two repeats have a t interval too, thirteen times as wide as their standard error: it says nothing.
    """
    found = [result for result in results if result.value(name) is not None]
    if len(found) <= 1:
        return found[0].estimate(name) if found else None
    mean = stats.mean_interval([result.value(name) for result in found])
    return mean if mean.n > 2 else replace(mean, low=None, high=None, note="two repeats: too few for an interval")


def turns(arms: Iterable[str], repeats: int) -> list[tuple[str, int]]:
    """(arm, repeat) in the order of measuring: every arm once a turn, the order reversed in every other turn.

    What drifts with time meets all arms alike.
    """
    names = list(arms)
    return [(arm, r) for r in range(repeats) for arm in (names if r % 2 == 0 else names[::-1])]


def running_while_waiting(result: Result) -> float | None:
    """Median over time of the requests running while others wait: what the server fits, without ramp and drain."""
    if result.run is None:
        return None
    samples = result.run.samples()
    full = samples[(samples["waiting"] > 0).fillna(False)]
    return float(full["running"].median()) if len(full) else None


def rows(result: Result) -> pd.DataFrame:
    """The successful measured requests of a run, one a row; no rows but the same columns where there is no run."""
    if result.run is None:
        return NO_ROWS.copy()
    requests = result.run.requests()
    return requests[(requests["phase"] == "measure") & requests["ok"].fillna(False)].reset_index(drop=True)


def relative_difference(changed: list[Result], base: list[Result], name: str) -> stats.Estimate | None:
    """Mean of (changed - base) / base over repeats that both sides have, with its t interval."""
    pairs = [(a.value(name), b.value(name)) for a, b in zip(changed, base, strict=True)]
    found = [a / b - 1 for a, b in pairs if a is not None and b]
    return stats.mean_interval(found) if found else None


def single_or_mean(results: list[Result], name: str) -> stats.Estimate | None:
    """As `across`; a single run without an interval of its own says that it is one value."""
    found = across(results, name)
    alone = found is not None and found.low is None and not found.note
    return stats.mean_interval([found.value]) if alone else found


def fit_step_model(results: list[Result]) -> tuple[steptime.StepModel | None, dict[int, float]]:
    """The step-time model, and the prefill speed in tok/s by prompt length, from runs at low concurrency.

    A step is the median gap between tokens; the KV tokens are those of requests spread evenly over their lives. The
    prefill of a request is what its tokens cost beyond the steps, at the highest of the low concurrencies:
    (running / throughput - step) x output / running. TTFT alone would count what does not hold others up, such as the
    way through the API server. None, and no speed, for what the runs do not give.
    """
    points, speeds = [], {}
    for result in sorted(results, key=lambda r: r.cell.load.concurrency):
        load, step_s = result.cell.load, result.value("itl_p50_s")
        if not step_s:
            continue
        held = load.concurrency * steptime.Shape(load.input_tokens, load.output_tokens).mean_kv_tokens()
        points.append(steptime.StepPoint(load.concurrency, held, step_s))
        throughput = result.value("throughput_tok_s") or result.value("throughput_whole_tok_s")
        paused_s = load.concurrency / throughput - step_s if throughput else 0.0
        if paused_s > 0:  # later ones, of more clients, replace the earlier
            speeds[load.input_tokens] = load.input_tokens * load.concurrency / (paused_s * load.output_tokens)
    enough = len(points) >= 3 and len({point.running for point in points}) >= 2
    return (steptime.fit(points) if enough else None), speeds


def refusal(error: ServerError) -> dict[str, Any]:
    """What a run says where no server came up for it: the decisive line of the log, or what happened."""
    lines = error.what.splitlines()
    decisive = next((line.removeprefix(LOG_SAYS) for line in lines if line.startswith(LOG_SAYS)), lines[0])
    return {"valid": False, "problems": [f"no server with these flags: {decisive}"], "summary": {}, "certificate": {}}


def readable(problem: str) -> str:
    """A stored problem in words: where an engine ended with an error that says nothing, that this is all there is."""
    return WORDLESS.sub(r"the engine ended with \1 and no message; the statement that failed is not stored", problem)
