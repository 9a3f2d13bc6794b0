"""Times to the first token of hits and of misses, and the median that their mixture has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvlab import fleet_rows, stats
from kvlab.measure import Result
from kvlab.stats import Estimate

TAILS = (0.9, 0.99)


class Split(NamedTuple):
    """ttft_s of requests that found a part of their prefix, of those that found nothing, and requests per second."""

    hit: np.ndarray
    miss: np.ndarray
    requests_per_s: Estimate | None

    @property
    def every(self) -> np.ndarray:
        return np.concatenate([self.hit, self.miss])

    @property
    def share(self) -> float | None:
        """Hits / requests; null without requests."""
        return len(self.hit) / len(self.every) if len(self.every) else None


def split(results: Iterable[Result]) -> Split:
    """The runs of one point together."""
    results = list(results)
    tables = [fleet_rows.hit_table(result) for result in results if result.run is not None]
    rates = [result.value("requests_per_s") for result in results if result.value("requests_per_s") is not None]
    rate = (
        stats.mean_interval(rates)
        if len(rates) > 2
        else Estimate(rates[0], None, None, 1, "one run")
        if rates
        else None
    )
    if not tables:
        return Split(np.array([]), np.array([]), None)
    table = pd.concat(tables)
    hit = (table["cached_tokens"] > 0).to_numpy(dtype=bool)
    ttft_s = table["ttft_s"].to_numpy(dtype=float)
    return Split(ttft_s[hit], ttft_s[~hit], rate)


def percentiles(ttft_s: np.ndarray) -> dict[str, Estimate]:
    """p50, p90 and p99 with order-statistic intervals; a tail of too few requests has no value."""
    found = {f"p{round(100 * q)}": stats.percentile(ttft_s, q) for q in (0.5, *TAILS)}
    return {
        name: e if name == "p50" or e.low is not None else Estimate(None, None, None, e.n, e.note)
        for name, e in found.items()
    }


def mixture_quantile(hit: np.ndarray, miss: np.ndarray, share: float, q: float = 0.5) -> float | None:
    """Quantile `q` of times: `share` of them drawn from `hit`, the rest from `miss`; null where a part is empty."""
    if (share > 0 and not len(hit)) or (share < 1 and not len(miss)):
        return None
    values = np.concatenate([hit, miss])
    weights = np.concatenate(
        [np.full(len(hit), share / max(1, len(hit))), np.full(len(miss), (1 - share) / max(1, len(miss)))]
    )
    order = np.argsort(values)
    below = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(below, q * below[-1])])


def mixed_median(of: Split, others: Iterable[Split]) -> float | None:
    """The median that follows from this point's share of hits and other points' times; null without others."""
    others = list(others)
    if of.share is None or not others:
        return None
    hit, miss = (np.concatenate([getattr(other, kind) for other in others]) for kind in ("hit", "miss"))
    return mixture_quantile(hit, miss, of.share)
