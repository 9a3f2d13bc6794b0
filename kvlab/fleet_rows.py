"""What the runs of several workers say: hits in three readings, each worker's counters, the load of the busiest."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pandas as pd

from kvlab import hits, service, stats, workload
from kvlab.hits import HitRatios
from kvlab.measure import Result, rows
from kvlab.stats import Estimate

NO_TOKENS = pd.Series([], dtype="float64")


class Counted(NamedTuple):
    """Requests of one or several runs; `any`, `full`: those with a part, with all of the prefix from the cache."""

    requests: int
    any: int
    full: int
    cached_tokens: int
    prefix_tokens: int  # what could have been cached

    def estimates(self) -> dict[str, Estimate]:
        """Shares of requests with Wilson's interval, and the share of the prefixes' tokens without one."""
        token = Estimate(
            self.cached_tokens / self.prefix_tokens, None, None, self.requests, "tokens of a request go together"
        )
        return {
            "any": stats.share(self.any, self.requests),
            "token": token,
            "full": stats.share(self.full, self.requests),
        }


def hit_table(result: Result) -> pd.DataFrame:
    """The measured requests in order of sending; `whole`: tokens of the prefix that can be cached."""
    found = rows(result).sort_values("request", ignore_index=True)
    load, size = result.cell.load, result.cell.server.block_size
    lengths = np.array(workload.prefix_lengths(load)) // size * size
    prefix = found["prefix"].fillna(0).to_numpy(dtype=int)
    columns = ["request", "prefix", "worker", "start_s", "ttft_s", "cached_tokens"]
    return found[columns].assign(whole=lengths[prefix] if len(found) else [])


def counted(results: Iterable[Result]) -> Counted | None:
    """Hits of all the runs together; None where none is stored."""
    tables = [hit_table(result) for result in results if result.run is not None]
    if not tables:
        return None
    table = pd.concat(tables)
    cached = table["cached_tokens"].to_numpy(dtype=float)
    whole = table["whole"].to_numpy(dtype=float)
    return Counted(
        len(table), int((cached > 0).sum()), int((cached >= whole).sum()), int(cached.sum()), int(whole.sum())
    )


def estimates(results: Iterable[Result]) -> dict[str, Estimate | None]:
    """`Counted.estimates`, each None where nothing is measured."""
    found = counted(results)
    return found.estimates() if found else dict.fromkeys(HitRatios._fields)


def prompt_tokens(results: Iterable[Result]) -> float | None:
    """Mean length of the measured requests' prompts; None where nothing is measured."""
    lengths = pd.concat([NO_TOKENS, *(rows(r)["prompt_tokens"] for r in results if r.run is not None)]).dropna()
    return float(lengths.mean()) if len(lengths) else None


def cached_on_a_hit(results: Iterable[Result]) -> float | None:
    """Tokens from the cache of a request that hits anything: the median of all; None where none does."""
    cached = pd.concat([NO_TOKENS, *(hit_table(r)["cached_tokens"] for r in results if r.run is not None)])
    return float(cached[cached > 0].median()) if (cached > 0).any() else None


def capacity_tokens(results: Iterable[Result]) -> int | None:
    """Tokens in the pool of a worker, as its server states them; None where runs differ or none is stored."""
    servers = [r.run.manifest.get("server") or {} for r in results if r.run is not None]
    found = {(server.get("capacity") or {}).get("metric_tokens") for server in servers}
    return found.pop() if len(found) == 1 else None


def by_worker(results: Iterable[Result]) -> pd.DataFrame:
    """One row a run and worker (see service.by_worker); no rows where nothing is measured."""
    tables = [
        service.by_worker(r.run.requests(), r.run.samples()).assign(run=r.run.id) for r in results if r.run is not None
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def lookups(results: Iterable[Result]) -> float | None:
    """Prefix-cache lookups a request: prefix_cache_queries / prompt tokens, over runs and workers.

    More than one where requests wait for blocks: each attempt to schedule one looks it up, and counts it, again.
    """
    table = by_worker(results)
    prompts = table["prompt_tokens"].sum() if len(table) and table["prompt_tokens"].notna().all() else 0
    return float(table["prefix_queries"].sum() / prompts) if prompts else None


def disagreement(results: Iterable[Result]) -> dict[str, float | None]:
    """Tokens by which answers and counters differ, summed over the runs in which nothing was looked up twice.

    hits: usage's cached tokens against prefix_cache_hits, of every worker where the rows name it, else of all of them;
    queries: prompt tokens against prefix_cache_queries. runs: how many those were.
    """
    found, runs = {"hits": [], "queries": []}, 0
    for result in results:
        if result.run is None:
            continue
        requests = result.run.requests()
        table = service.by_worker(requests, result.run.samples())
        if table["prefix_queries"].sum() > requests["prompt_tokens"].sum():
            continue
        runs += 1
        for name, column in (("hits", "cached_tokens"), ("queries", "prompt_tokens")):
            own, counter = table[column], table[f"prefix_{name}"]
            pairs = zip(own, counter, strict=True) if own.notna().all() else [(requests[column].sum(), counter.sum())]
            found[name] += [abs(float(a) - float(b)) for a, b in pairs]
    return {name: sum(values) if values else None for name, values in found.items()} | {"runs": runs}


def busiest_share(results: Iterable[Result]) -> float | None:
    """Requests of the busiest worker / those of a worker on average, the mean over runs; by the counters."""
    table = by_worker(results)
    if table.empty:
        return None
    per_run = table.groupby("run")["requests_finished"]
    return float((per_run.max() / per_run.mean()).mean())


def expected_busiest_share(requests: int, workers: int, draws: int = 2000) -> float:
    """The same for requests dealt out at random: the mean over simulated multinomial draws."""
    dealt = np.random.default_rng(0).multinomial(requests, [1 / workers] * workers, size=draws)
    return float(dealt.max(axis=1).mean() * workers / requests)


def first_hits(result: Result, bins: int = 8) -> pd.DataFrame:
    """The share of hits over the run: middle of the bin (requests sent before), share, low, high."""
    if result.run is None:
        return pd.DataFrame({name: pd.Series(dtype=float) for name in ("sent", "share", "low", "high")})
    hit = (hit_table(result)["cached_tokens"] > 0).to_numpy(dtype=bool)
    parts = np.array_split(np.arange(len(hit)), bins)
    shares = [stats.share(int(hit[part].sum()), len(part)) for part in parts]
    values = [(float(part.mean()), s.value, s.low, s.high) for part, s in zip(parts, shares, strict=True)]
    return pd.DataFrame(values, columns=["sent", "share", "low", "high"])


def first_and_last(result: Result, bins: int = 8) -> list[tuple[str, float, Estimate | None]]:
    """First and last part of a run in which everything fits: (first-30, the share of hits computed, and measured)."""
    load = result.cell.load
    sent = np.array_split(np.arange(load.requests), bins)
    found = first_hits(result, bins)
    ends = []
    for name, i in (("first", 0), ("last", -1)):
        computed = float(hits.first_hit_share(load.prefixes, result.cell.workers, sent[i]).mean())
        measured = None
        if len(found):
            measured = Estimate(*(float(found[column].iloc[i]) for column in ("share", "low", "high")), len(sent[i]))
        ends.append((f"{name}-{len(sent[i])}", computed, measured))
    return ends
