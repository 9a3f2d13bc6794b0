"""Numbers from rows: order-statistic intervals with a minimum n, and the summary of a run.

TTFT: start to first content. Gap: time between two content events. ITL: gap / tokens in the event that ends it, pooled
over requests. Throughput: output tokens of successful requests / wall time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts load where they are used: a second of every start

from kvlab.config import LoadConfig
from kvlab.errors import KvlabError
from kvlab.rows import (
    counter_growth,
    gaps_s,
    gauge_max,
    gauge_mean,
    itl_s,
    known,
    littles_law,
    littles_law_residual,
    measured_rows,
    positive,
    ratio,
    succeeded_mask,
    token_hit_ratio,
    tokens_in_window,
    whole_span_s,
)

PERCENTILES = {"ttft": (0.5, 0.9, 0.95, 0.99), "tpot": (0.5,), "latency": (0.5,)}
HISTOGRAMS = {"queue_mean_s": "queue", "prefill_mean_s": "prefill", "server_ttft_mean_s": "ttft"}  # name -> columns
COUNTERS = ("preemptions", "prefix_queries", "prefix_hits")
COUNTERS += tuple(f"{name}_{part}" for name in HISTOGRAMS.values() for part in ("sum_s", "count"))


@dataclass(frozen=True)
class Estimate:
    """A value with its interval; `low` and `high` are null where the interval is not finite, and `note` says why."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    note: str = ""


# -- estimates ----------------------------------------------------------------------------------------------------


def minimum_n(q: float, confidence: float = 0.95) -> int:
    """Fewest values with a finite two-sided interval for quantile `q` (0..1): 72 for p95, 368 for p99."""
    _check_share("q", q)
    _check_share("confidence", confidence)
    # Finite means: with the wanted confidence the extreme value lies beyond the quantile, on the harder side.
    return math.ceil(math.log((1 - confidence) / 2) / math.log(max(q, 1 - q)))


def percentile(values: Iterable[Any], q: float, confidence: float = 0.95) -> Estimate:
    """Quantile `q` (0..1) of independent values, nulls left out, with its order-statistic interval."""
    needed = minimum_n(q, confidence)
    numbers = known(values)
    if not len(numbers):
        return Estimate(None, None, None, 0, "no values")
    value = float(np.quantile(numbers, q))
    if len(numbers) < needed:
        return Estimate(value, None, None, len(numbers), f"n too small ({len(numbers)}, needs {needed})")
    test = scipy.stats.quantile_test(numbers, q=value, p=q)
    interval = test.confidence_interval(confidence_level=confidence)
    return Estimate(value, float(interval.low), float(interval.high), len(numbers))


def mean_interval(values: Iterable[Any], confidence: float = 0.95) -> Estimate:
    """Mean of repeats with its t interval; one value has none."""
    numbers = known(values)
    n = len(numbers)
    if n < 2:
        note = "one value (needs 2)" if n else "no values"
        return Estimate(float(numbers[0]) if n else None, None, None, n, note)
    half = float(scipy.stats.t.ppf((1 + confidence) / 2, n - 1) * numbers.std(ddof=1) / math.sqrt(n))
    mean = float(numbers.mean())
    return Estimate(mean, mean - half, mean + half, n)


def spread(values: Iterable[Any]) -> float | None:
    """(largest - smallest) / mean of repeats; null below two values or around a mean of 0."""
    numbers = known(values)
    return float(np.ptp(numbers) / numbers.mean()) if len(numbers) > 1 and numbers.mean() else None


def paired_difference(a: Sequence[Any], b: Sequence[Any], confidence: float = 0.95) -> Estimate:
    """Mean of b - a over pairs, with its t interval; a pair with a null is left out."""
    if len(a) != len(b):
        raise KvlabError(f"Pairs need equal lengths; there are {len(a)} and {len(b)} values.")
    differences = pd.array(list(b), dtype="Float64") - pd.array(list(a), dtype="Float64")
    return mean_interval(differences, confidence)


def share(successes: int, n: int, confidence: float = 0.95) -> Estimate:
    """successes / n of independent trials, with Wilson's interval."""
    if n == 0:
        return Estimate(None, None, None, 0, "no values")
    interval = scipy.stats.binomtest(int(successes), int(n)).proportion_ci(confidence, method="wilson")
    return Estimate(successes / n, float(interval.low), float(interval.high), int(n))


def _check_share(name: str, value: float) -> None:
    if not 0 < value < 1:
        raise KvlabError(f"{name} is {value}; it must lie between 0 and 1.", next_step="p95 is 0.95, not 95")


def request_hits(rows: pd.DataFrame, at_least: int) -> Estimate:
    """Share of requests with at least so many cached tokens, over the rows that report them."""
    cached = known(rows["cached_tokens"])
    return share(int((cached >= at_least).sum()), len(cached))


# -- the summary of a run -----------------------------------------------------------------------------------------


def summarise(
    requests: pd.DataFrame,
    samples: pd.DataFrame,
    window: tuple[float, float] | None,
    load: LoadConfig,
    block_size: int | None = None,
) -> dict[str, Any]:
    """The numbers of one run, from its measured rows; null where one cannot be said.

    `n` counts successes. `NAME_low`, `NAME_high` are 95% intervals and `NAME_note` says why one is missing; a tail
    percentile of too few requests is null. Pooled ITL has no interval, as the gaps of one request depend on each other.
    `window` (s): the plateau. `block_size` (tokens) is needed for `request_hit_ratio` only.
    """
    rows = measured_rows(requests)
    ok = rows[succeeded_mask(rows)]
    span, closed = whole_span_s(rows), load.arrival == "closed"
    return {
        "requests": len(rows),
        "n": len(ok),
        "failures": len(rows) - len(ok),
        "failure_reasons": _reasons(rows),
        **_rates(ok, span, window),
        **_latencies(ok),
        **_itl(ok),
        **_hits(ok, load, block_size),
        **_server_side(samples, requests, span, window),
        "concurrency_delivered": littles_law(rows, window),
        "littles_law_residual": littles_law_residual(rows, window, load.concurrency) if closed else None,
    }


def _reasons(rows: pd.DataFrame) -> dict[str, int]:
    failed = rows.loc[~succeeded_mask(rows), "error"].fillna("no reason given")
    return {str(reason): int(count) for reason, count in failed.value_counts().items()}


def _rates(ok: pd.DataFrame, span: tuple[float, float] | None, window: tuple[float, float] | None) -> dict[str, Any]:
    wall_s = span[1] - span[0] if positive(span) else None
    tokens = ok["output_tokens"].sum() if len(ok) and ok["output_tokens"].notna().all() else None
    in_window = tokens_in_window(ok, window) if positive(window) and len(ok) else None
    return {
        "throughput_tok_s": ratio(in_window, window[1] - window[0]) if in_window is not None else None,
        "throughput_whole_tok_s": ratio(tokens, wall_s),
        "requests_per_s": ratio(len(ok), wall_s),
        "wall_s": wall_s,
        "window_s": window[1] - window[0] if positive(window) else None,
    }


def _latencies(ok: pd.DataFrame) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, quantiles in PERCENTILES.items():
        for q in quantiles:
            found = percentile(ok[f"{name}_s"], q)
            label = f"{name}_p{round(q * 100)}_s"
            # The tail of a few requests is just their slowest one; a median of a few still is their middle.
            value = found.value if q == 0.5 or found.low is not None else None
            out |= {label: value, f"{label}_low": found.low, f"{label}_high": found.high}
            out[f"{label}_note"] = found.note or None
    return out


def _itl(ok: pd.DataFrame) -> dict[str, Any]:
    itl, gaps = itl_s(ok), gaps_s(ok)
    return {
        "itl_n": len(itl),
        "itl_p50_s": float(np.quantile(itl, 0.5)) if len(itl) else None,
        "itl_p99_s": float(np.quantile(itl, 0.99)) if len(itl) >= minimum_n(0.99) else None,
        "itl_max_s": float(gaps.max()) if len(gaps) else None,
    }


def _hits(ok: pd.DataFrame, load: LoadConfig, block_size: int | None) -> dict[str, Any]:
    cached = known(ok["cached_tokens"])
    whole = load.prefix_tokens // block_size * block_size if block_size and load.workload == "shared_prefix" else None
    return {
        "token_hit_ratio": token_hit_ratio(ok),
        "requests_with_hit": int((cached > 0).sum()) if len(cached) else None,
        "request_hit_ratio": request_hits(ok, whole).value if whole else None,
    }


def _server_side(
    samples: pd.DataFrame,
    requests: pd.DataFrame,
    span: tuple[float, float] | None,
    window: tuple[float, float] | None,
) -> dict[str, Any]:
    names = (
        "running_max",
        "running_mean",
        "waiting_max",
        "kv_usage_max",
        "preemptions",
        "prefix_queries",
        "prefix_hits",
    )
    names += ("token_hit_ratio_counters", *HISTOGRAMS)
    if span is None or samples.empty:
        return dict.fromkeys(names)
    warm_end = known(requests.loc[(requests["phase"] == "warmup").fillna(False), "end_s"]).max(initial=-math.inf)
    growth = {name: counter_growth(samples, name, *span, float(warm_end)) for name in COUNTERS}
    return {
        "running_max": gauge_max(samples, "running", *span, add=True),
        "running_mean": gauge_mean(samples, "running", window),
        "waiting_max": gauge_max(samples, "waiting", *span, add=True),
        "kv_usage_max": gauge_max(samples, "kv_usage", *span, add=False),
        "preemptions": growth["preemptions"],
        "prefix_queries": growth["prefix_queries"],
        "prefix_hits": growth["prefix_hits"],
        "token_hit_ratio_counters": ratio(growth["prefix_hits"], growth["prefix_queries"]),
        **{name: ratio(growth[f"{part}_sum_s"], growth[f"{part}_count"]) for name, part in HISTOGRAMS.items()},
    }
