"""How far a load can be trusted: was the client in time, was the asked load delivered, do both sides count the same?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from kvlab.config import LoadConfig
from kvlab.driver import SERVER_GONE
from kvlab.errors import ScrapeError
from kvlab.rows import littles_law_residual, over_workers
from kvlab.scrape import counter_delta

LATE_S = 0.010  # a loop that wakes up later than this in 1 of 100 cases delays the stamps of the slowest events
BUSY_SHARE = 0.8  # of one core
LITTLE_TOLERANCE = 0.05
DELIVERED_SHARE = 0.9
TTFT_SLACK_S, TTFT_SLACK_SHARE = 0.020, 0.2
UNEQUAL = "The rows hold"
WORST = (
    *("loop_lag_p50_s", "loop_lag_p99_s", "schedule_delay_p99_s", "added_ttft_p99_s", "added_itl_p99_s"),
    *("littles_law_residual", "ttft_client_minus_server_s"),
)


@dataclass
class Evidence:
    """What a load left behind. `lags_s`: how late the event loops woke up; `cpu_s`: (CPU, wall) of each phase."""

    load: LoadConfig
    rows: pd.DataFrame
    samples: pd.DataFrame
    window: tuple[float, float] | None
    scrape_trouble: str | None = None
    open_loop: bool = False
    lags_s: list[float] = field(default_factory=list)
    cpu_s: list[tuple[float, float]] = field(default_factory=list)
    exact: bool = True


def plateau(rows: list[dict[str, Any]], concurrency: int) -> tuple[float, float] | None:
    """From the moment when `concurrency` requests are under way until the first completion after the last start, in s.

    None when there are fewer than two rounds of requests, or when the target was never held. Completion is the last
    content event, not the usage event. With several processes every one must hold its share.
    """
    if len(rows) < 2 * concurrency:
        return None
    processes = sorted({row["process"] for row in rows})
    spans = [_held([r for r in rows if r["process"] == p], concurrency, p, len(processes)) for p in processes]
    if None in spans:
        return None
    start, end = max(s for s, _ in spans), min(e for _, e in spans)
    return (start, end) if end > start else None


def _held(rows, concurrency: int, process: int, processes: int) -> tuple[float, float] | None:
    share = concurrency // processes + (process < concurrency % processes)
    starts = sorted(row["start_s"] for row in rows if row.get("start_s") is not None)
    if len(starts) <= share:
        return None
    after = [end for row in rows if (end := _completion(row)) is not None and end > starts[-1]]
    return (starts[share - 1], min(after)) if after else None


def _completion(row: dict[str, Any]) -> float | None:
    return row["last_content_s"] if row["ok"] else row.get("end_s")


def certify(evidence: Evidence) -> dict[str, Any]:
    """Numbers (None where unknown), `late`, `failures` (they make the run invalid) and `problems` (failures too)."""
    failures: list[str] = []
    problems: list[str] = []
    certificate = _client_side(evidence, problems)
    certificate |= _delivery(evidence, failures, problems)
    certificate |= _accounts(evidence, failures, problems)
    return certificate | {"failures": failures, "problems": failures + problems}


def over_limits(certificate: Mapping[str, Any]) -> bool:
    """Whether the client's own delay may stand in the times of a run: they do not belong in a headline."""
    added = [certificate.get(f"added_{what}_p99_s") or 0.0 for what in ("ttft", "itl")]
    busy = (certificate.get("client_cpu_share") or 0.0) > BUSY_SHARE
    return bool(certificate.get("late")) or busy or max(added) > LATE_S


def worst(certificates: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """The largest value of each number over many runs (s; a residual is a share), None where no run tells it.

    Beside: `runs` that tell anything, how many are `over` their limits, whose token counts are `unequal`, and the sum
    of `unexplained_prefix_hits`.
    """
    told = [c for c in certificates if "late" in c]
    known = {name: [abs(c[name]) for c in told if c.get(name) is not None] for name in WORST}
    return {name: max(values, default=None) for name, values in known.items()} | {
        "runs": len(told),
        "over": sum(map(over_limits, told)),
        "unequal": sum(any(str(problem).startswith(UNEQUAL) for problem in c.get("problems", ())) for c in told),
        "unexplained_prefix_hits": sum(c.get("unexplained_prefix_hits") or 0 for c in told),
    }


def _client_side(e: Evidence, problems: list[str]) -> dict[str, Any]:
    lag, delay = _quantiles(e.lags_s), _quantiles(_measured(e)["wait_s"].dropna() if e.open_loop else [])
    busiest = max((cpu / wall for cpu, wall in e.cpu_s if wall > 0), default=None)
    late = max(lag[1] or 0.0, delay[1] or 0.0) > LATE_S
    if late:
        problems.append(
            f"The client was late (p99 of wake-ups {_ms(lag[1])}, of starts {_ms(delay[1])}; limit {_ms(LATE_S)}): "
            "its latencies contain its own delay. Give it a free core, use more processes, or lower the load."
        )
    if busiest is not None and busiest > BUSY_SHARE:
        problems.append(f"The client used {busiest:.0%} of a core: it may be the bottleneck. Use more processes.")
    if not e.exact:
        problems.append("The server does not say how many tokens an event holds: they are spread evenly over events.")
    return {
        "loop_lag_p50_s": lag[0],
        "loop_lag_p99_s": lag[1],
        "loop_lag_max_s": lag[2],
        "schedule_delay_p50_s": delay[0],
        "schedule_delay_p99_s": delay[1],
        "client_cpu_s": sum(cpu for cpu, _ in e.cpu_s),
        "client_cpu_share": busiest,
        "tokens_per_event": "exact" if e.exact else "spread",
        "late": late,
    }


def _delivery(e: Evidence, failures: list[str], problems: list[str]) -> dict[str, Any]:
    rows, target = _measured(e), None if e.open_loop else e.load.concurrency
    gone = int((rows["error"] == SERVER_GONE).fillna(False).sum())
    if gone:
        failures.append(f"The server went away: {gone} requests were not sent. Look into its log.")
    residual = littles_law_residual(rows, e.window, target) if target and e.window else None
    if residual is not None and abs(residual) > LITTLE_TOLERANCE:
        problems.append(f"{target} requests in flight were asked for, {target * (1 + residual):.1f} were delivered.")
    if target and e.window is None:
        problems.append(
            f"There is no plateau: {target} requests in flight were never held. Send at least {2 * target} requests."
        )
    seen = _most_in_server(e)
    if target and seen is not None and seen < DELIVERED_SHARE * target:
        problems.append(
            f"The server never saw more than {seen:.0f} of {target} requests at once: something in between limits them."
        )
    running = over_workers(e.samples, "running")
    return {
        "target_concurrency": target,
        "running_max": float(running.max()) if len(running) else None,
        "littles_law_residual": residual,
    }


def _most_in_server(e: Evidence) -> float | None:
    """Most requests, running and waiting, in all workers at once inside the plateau; None for fewer than 4 scrapes.

    Each row of the samples is one worker's. None too where requests are over before the next scrape: a gauge cannot
    show them.
    """
    rows = _measured(e)
    if e.window is None or (rows["end_s"] - rows["start_s"]).median() < 2 * e.load.sample_interval_s:
        return None
    both = e.samples.assign(both=e.samples["running"] + e.samples["waiting"])
    totals = over_workers(both, "both")
    inside = totals[(totals.index >= e.window[0]) & (totals.index <= e.window[1])]
    return None if len(inside) < 4 else float(inside.max())


def _accounts(e: Evidence, failures: list[str], problems: list[str]) -> dict[str, Any]:
    """Tokens by the rows against the server's counters, from before the first request to after the last."""
    if e.scrape_trouble:
        problems.append(e.scrape_trouble[:1].upper() + e.scrape_trouble[1:])
    try:
        counted = ("prefix_hits", "prompt_tokens", "generation_tokens")
        hits, prompt, produced = (counter_delta(e.samples, column) for column in counted)
        ttft = _server_ttft(e.samples)
    except ScrapeError as error:
        failures.append(str(error))
        hits = prompt = produced = ttft = None
    own = {name: _total(e.rows[name]) for name in ("prompt_tokens", "output_tokens", "cached_tokens")}
    client_ttft = _number(e.rows["ttft_s"].mean())
    gap = None if client_ttft is None or ttft is None else client_ttft - ttft
    if gap is not None and gap > max(TTFT_SLACK_S, TTFT_SLACK_SHARE * client_ttft):
        problems.append(
            f"The client's mean TTFT is {1000 * gap:.0f} ms longer than the server's own: "
            "the time goes into the HTTP layer, the network or the client."
        )
    unexplained = _unexplained_hits(e, hits, failures)
    if _hidden_hits(e):
        failures.append(
            "No answer tells its cached tokens: every request would look like a miss. The workers run without "
            "--enable-prompt-tokens-details, or what stands before them leaves that out of its answers."
        )
    for name, rows, counter in (("prompt", own["prompt_tokens"], prompt), ("output", own["output_tokens"], produced)):
        _compare(e, name, rows, counter, problems)
    return {
        "ttft_client_minus_server_s": gap,
        "prompt_tokens_rows": own["prompt_tokens"],
        "prompt_tokens_counter": prompt,
        "output_tokens_rows": own["output_tokens"],
        "output_tokens_counter": produced,
        "cached_tokens_rows": own["cached_tokens"],
        "prefix_hits_counter": hits,
        "unexplained_prefix_hits": unexplained,
    }


def _unexplained_hits(e: Evidence, hits: float | None, failures: list[str]) -> float | None:
    """Cached tokens beyond what the workload shares on purpose; any at all fails the run."""
    if hits is None:
        return None
    if _looked_up_again(e):
        hits = float(_total(e.rows["cached_tokens"]) or 0)
    again = e.rows[e.rows["prefix"].notna() & e.rows.duplicated(["prefix"])]
    shared = (e.load.prefix_tokens + e.load.prefix_step_tokens) * len(again) or int(again["input_tokens_asked"].sum())
    unexplained = max(0.0, hits - shared)
    if unexplained:
        failures.append(
            f"The prefix cache served {unexplained:.0f} tokens that this workload does not share: prompts were sent "
            "before, or somebody else uses the server. Measure again with another nonce on a server of its own."
        )
    return unexplained


def _hidden_hits(e: Evidence) -> bool:
    """Whether prefixes were shared by several workers and no answer says what was cached: hits are counted there."""
    answered = e.rows[e.rows["ok"].fillna(False) & e.rows["prefix"].notna()]
    several = e.samples["worker"].nunique() > 1
    return bool(several and len(answered) and answered["cached_tokens"].isna().all())


def _looked_up_again(e: Evidence) -> bool:
    """Whether the counters count more lookups than prompts, and every answer tells its own hits.

    A request that waits for blocks is looked up, and counted, again each time that the scheduler tries it.
    """
    queries, prompt = (counter_delta(e.samples, column) for column in ("prefix_queries", "prompt_tokens"))
    told = e.rows["ok"].all() and e.rows["cached_tokens"].notna().all()
    return bool(told and queries is not None and prompt is not None and queries > prompt)


def _compare(e: Evidence, name: str, rows: int | None, counter: float | None, problems: list[str]) -> None:
    """Both sides must agree where every request succeeded; failed ones may have done work that no row knows."""
    if counter is None or rows is None or rows == counter or not e.rows["ok"].all():
        return
    problems.append(
        f"{UNEQUAL} {rows} {name} tokens, the server counted {counter:.0f}: somebody else uses it, or a count is wrong."
    )


def _server_ttft(samples: pd.DataFrame) -> float | None:
    total, count = counter_delta(samples, "ttft_sum_s"), counter_delta(samples, "ttft_count")
    return None if not count or total is None else total / count


def _measured(e: Evidence) -> pd.DataFrame:
    return e.rows[e.rows["phase"] == "measure"]


def _quantiles(values) -> tuple[float | None, float | None, float | None]:
    """(p50, p99, max); None where there are no values."""
    values = np.asarray(values, dtype=float)
    if not len(values):
        return None, None, None
    return float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99)), float(values.max())


def _ms(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:.1f} ms"


def _total(column: pd.Series) -> int | None:
    known = column.dropna()
    return int(known.sum()) if len(known) else None


def _number(value: Any) -> float | None:
    return None if pd.isna(value) else float(value)
