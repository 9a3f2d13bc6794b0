"""Plain numbers from the tables of a run. Null where a number cannot be said; times in seconds on the run's clock."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from kvlab.errors import KvlabError


def known(values: Iterable[Any]) -> np.ndarray:
    """The values that are not null, as floats. Infinity is refused."""
    numbers = pd.array(list(values), dtype="Float64").to_numpy(dtype=float, na_value=np.nan)
    numbers = numbers[~np.isnan(numbers)]
    if np.isinf(numbers).any():
        raise KvlabError("A measured value is infinite.", cause="a division by zero before the statistics")
    return numbers


def measured_rows(requests: pd.DataFrame) -> pd.DataFrame:
    """The rows of the measurement, without the warm-up."""
    return requests[(requests["phase"] == "measure").fillna(False)]


def succeeded_mask(rows: pd.DataFrame) -> pd.Series:
    """True on successes by the strict definition."""
    return rows["ok"].fillna(False).astype(bool)


def content_events(rows: pd.DataFrame) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    """(times_s, tokens) of each row's events that hold tokens; rows without stamps are left out."""
    for times, tokens in zip(rows["event_times_s"], rows["event_tokens"], strict=True):
        if times is not None and tokens is not None:
            times, tokens = np.asarray(times, dtype=float), np.asarray(tokens, dtype=float)
            yield times[tokens > 0], tokens[tokens > 0]


def gaps_s(rows: pd.DataFrame) -> np.ndarray:
    """Raw gaps between content events, pooled over requests."""
    return _pool([np.diff(times) for times, _ in content_events(rows)])


def itl_s(rows: pd.DataFrame) -> np.ndarray:
    """Gap / tokens in the event that ends it, one value an event, pooled over requests."""
    return _pool([np.diff(times) / tokens[1:] for times, tokens in content_events(rows)])


def _pool(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.empty(0)


def tokens_in_window(rows: pd.DataFrame, window: tuple[float, float]) -> int | None:
    """Tokens whose event was received in (t0, t1]; null where a row with tokens has no stamps."""
    events = list(content_events(rows))
    if len(events) != len(rows):
        return None
    return int(sum(tokens[(times > window[0]) & (times <= window[1])].sum() for times, tokens in events))


def whole_span_s(rows: pd.DataFrame) -> tuple[float, float] | None:
    """First start to last content; a failed request counts until it ended. Null without a start."""
    starts = known(rows["start_s"])
    ends = known(_ended_s(rows))
    return (float(starts.min()), float(ends.max())) if len(starts) and len(ends) else None


def _ended_s(rows: pd.DataFrame) -> pd.Series:
    # A failed request held its place until its response ended, whatever it had received by then.
    return rows["last_content_s"].where(succeeded_mask(rows), rows["end_s"].fillna(rows["last_content_s"]))


def littles_law(rows: pd.DataFrame, window: tuple[float, float] | None) -> float | None:
    """Mean requests in flight in the window: the sum of latencies (the part inside it) / its length."""
    if not positive(window):
        return None
    start = rows["start_s"].to_numpy(dtype=float, na_value=np.nan)
    last = _ended_s(rows).to_numpy(dtype=float, na_value=np.nan)
    inside = np.minimum(last, window[1]) - np.maximum(start, window[0])
    return float(np.nansum(np.clip(inside, 0, None)) / (window[1] - window[0])) if len(rows) else None


def littles_law_residual(rows: pd.DataFrame, window: tuple[float, float] | None, concurrency: int) -> float | None:
    """(delivered - asked concurrency) / asked."""
    delivered = littles_law(rows, window)
    return None if delivered is None else delivered / concurrency - 1


def positive(window: tuple[float, float] | None) -> bool:
    """Whether a window (t0, t1) has a length."""
    return window is not None and window[1] > window[0]


# -- hits ---------------------------------------------------------------------------------------------------------


def token_hit_ratio(rows: pd.DataFrame) -> float | None:
    """Cached / prompt tokens over the rows that report both."""
    both = rows[rows["cached_tokens"].notna() & rows["prompt_tokens"].notna()]
    return ratio(both["cached_tokens"].sum(), both["prompt_tokens"].sum()) if len(both) else None


def ratio(part: float | None, whole: float | None) -> float | None:
    """part / whole; null where either is missing or the whole is 0."""
    return None if part is None or not whole else float(part / whole)


# -- samples ------------------------------------------------------------------------------------------------------


def counter_growth(
    samples: pd.DataFrame, column: str, start_s: float, end_s: float, not_before_s: float
) -> float | None:
    """Growth of a counter over [start_s, end_s], summed over workers.

    Read from the last scrape at or before start_s, but not before not_before_s (the end of a warm-up), to the last
    scrape of all, which must not be before end_s: a server counts a request a moment after its answer has left. Null
    where a worker lacks either or a value, or where the counter went down (a restart).
    """
    total = 0.0
    for _, worker in _by_worker(samples):
        before = worker[(worker["t_s"] <= start_s) & (worker["t_s"] >= not_before_s)]
        after = worker[worker["t_s"] >= end_s]
        if before.empty or after.empty:
            return None
        values = worker.loc[before.index[-1] :, column]
        if values.isna().any() or (values.diff() < 0).any():
            return None
        total += float(values.iloc[-1] - values.iloc[0])
    return total if len(samples) else None


def _by_worker(samples: pd.DataFrame):
    ordered = samples.sort_values("t_s", kind="stable").reset_index(drop=True)
    for name, rows in ordered.groupby(ordered["worker"].fillna("")):
        yield name, rows.reset_index(drop=True)


def gauge_max(samples: pd.DataFrame, column: str, start_s: float, end_s: float, *, add: bool) -> float | None:
    """Largest value within [start_s, end_s]: of the sum over workers (`add`), or of any one worker."""
    values = over_workers(samples, column) if add else samples.set_index("t_s")[column].dropna()
    inside = values[(values.index >= start_s) & (values.index <= end_s)]
    return float(inside.max()) if len(inside) else None


def gauge_mean(samples: pd.DataFrame, column: str, window: tuple[float, float] | None) -> float | None:
    """Mean over time within the window of the sum over workers; a value holds until the next scrape."""
    wide = None if window is None else _gauge(samples, column, *window)
    if wide is None or len(wide) < 2:
        return None
    values = wide.sum(axis=1, min_count=1)
    spans = np.diff([*values.index, window[1]])
    return float(np.average(values, weights=spans))


def _gauge(samples: pd.DataFrame, column: str, start_s: float, end_s: float) -> pd.DataFrame | None:
    """t_s x worker. Workers are not scraped in the same instant: each keeps its last value until its next one."""
    inside = samples[(samples["t_s"] >= start_s) & (samples["t_s"] <= end_s)]
    if not inside[column].notna().any():
        return None
    wide = inside.assign(worker=inside["worker"].fillna("")).pivot_table(
        index="t_s", columns="worker", values=column, aggfunc="last"
    )
    return wide.ffill()


def over_workers(samples: pd.DataFrame, column: str) -> pd.Series:
    """t_s -> a gauge summed over workers at each scrape of all of them; empty where there is none.

    Not of new values beside old ones: a request that went from one worker to another would count twice.
    """
    reported = samples[samples[column].notna()].sort_values("t_s", kind="stable")
    names = reported["worker"].fillna("")
    scrapes = reported.assign(scrape=_scrapes(names)).groupby("scrape")
    found = scrapes.agg(t_s=("t_s", "last"), total=(column, "sum"), workers=(column, "size"))
    return found[found["workers"] == names.nunique()].set_index("t_s")["total"]


def _scrapes(workers: Iterable[str]) -> list[int]:
    """The number of each sample's scrape, in order of time: the next one begins where a worker comes again."""
    numbers: list[int] = []
    seen: set[str] = set()
    for worker in workers:
        again = worker in seen
        seen = {worker} if again else seen | {worker}
        numbers.append((numbers[-1] if numbers else 0) + again)
    return numbers
