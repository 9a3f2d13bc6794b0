"""What the server counts itself: /metrics -> tidy samples, counter deltas, the capacity it reports."""

from __future__ import annotations

import asyncio
import re
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from typing import Any

import aiohttp
import pandas as pd
from prometheus_client.parser import text_string_to_metric_families

from kvlab.client import Endpoint, clock
from kvlab.errors import ScrapeError
from kvlab.records import SAMPLE_COLUMNS

SETTLE_LIMIT_S = 10.0  # for an engine on a slow machine
SETTLE_STEP_S = 0.05
SCRAPE_TIMEOUT_S = 30.0

# Column -> sample names of vLLM's releases, newest first; the first one that is there counts. Released versions
# carried an old and a new name side by side, so they are never added up.
ALIASES: dict[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_queries": (
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_queries",
        "vllm:gpu_prefix_cache_queries_total",
        "vllm:gpu_prefix_cache_queries",
    ),
    "prefix_hits": (
        "vllm:prefix_cache_hits_total",
        "vllm:prefix_cache_hits",
        "vllm:gpu_prefix_cache_hits_total",
        "vllm:gpu_prefix_cache_hits",
    ),
    "prompt_tokens": ("vllm:prompt_tokens_total", "vllm:prompt_tokens"),
    "generation_tokens": ("vllm:generation_tokens_total", "vllm:generation_tokens"),
    "requests_finished": ("vllm:request_success_total", "vllm:request_success"),
    "ttft": ("vllm:time_to_first_token_seconds",),
    "itl": ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"),
    "queue": ("vllm:request_queue_time_seconds",),
    "prefill": ("vllm:request_prefill_time_seconds",),
}
HISTOGRAMS = ("ttft", "itl", "queue", "prefill")
GAUGES = ("running", "waiting", "kv_usage")
SHARES = ("kv_usage",)  # averaged over engines, everything else is added up
BY_SOURCE = ("vllm:prompt_tokens_by_source_total", "vllm:prompt_tokens_by_source")
CACHED = ("vllm:prompt_tokens_cached_total", "vllm:prompt_tokens_cached")
CACHE_INFO = "vllm:cache_config_info"
COLUMNS = tuple(c for c in SAMPLE_COLUMNS if c not in ("t_s", "worker"))
COUNTERS = tuple(c for c in COLUMNS if c not in GAUGES)


def _sample_names() -> set[str]:
    names = {name for column, names in ALIASES.items() if column not in HISTOGRAMS for name in names}
    names |= {f"{name}_{part}" for c in HISTOGRAMS for name in ALIASES[c] for part in ("sum", "count")}
    return names | set(BY_SOURCE) | set(CACHED)


_WANTED = frozenset(name.encode() for name in _sample_names())


def wanted_lines(text: bytes) -> bytes:
    """The lines of a /metrics text that SAMPLE_COLUMNS need: 2 of 48 kB, most of the rest is histogram buckets."""
    vllm = [line for line in text.split(b"\n") if line.startswith(b"vllm:") and b"_bucket{" not in line]
    return b"\n".join(line for line in vllm if line.partition(b"{")[0].partition(b" ")[0] in _WANTED) + b"\n"


def parse_metrics(text: str) -> dict[str, float | None]:
    """Sample columns (without t_s and worker) of one /metrics text; summed over engines, None where absent.

    Raises ScrapeError that lists what was found when none of vLLM's metrics is there.
    """
    found = _by_name(wanted_lines(text.encode()).decode())
    values = {column: _first(found, names, column in SHARES) for column, names in ALIASES.items()}
    for column in HISTOGRAMS:
        values.pop(column)
        values[f"{column}_sum_s"] = _first(found, [f"{name}_sum" for name in ALIASES[column]])
        values[f"{column}_count"] = _first(found, [f"{name}_count" for name in ALIASES[column]])
    values["prompt_tokens_computed"] = _computed(found, values["prompt_tokens"])
    if all(value is None for value in values.values()):
        raise ScrapeError(
            f"None of vLLM's metrics is in this /metrics text. Found: {_names_in(text)}",
            cause="another kind of server, a router, or a release that renamed its metrics",
            next_step="point at the vLLM server itself; for a new release add its names to the alias table",
        )
    return {column: values[column] for column in COLUMNS}


def capacity_info(text: str) -> dict[str, Any]:
    """The KV cache as the server describes it in /metrics; each None where it does not say.

    num_gpu_blocks and kv_cache_size_tokens (summed over engines), block_size, cache_dtype, enable_prefix_caching.
    """
    lines = [line for line in text.splitlines() if line.startswith(CACHE_INFO + "{")]
    engines = [s.labels for family in text_string_to_metric_families("\n".join(lines) + "\n") for s in family.samples]
    caching = engines[0].get("enable_prefix_caching") if engines else None
    return {
        "num_gpu_blocks": _total(engines, "num_gpu_blocks"),
        "block_size": _int(engines[0].get("block_size")) if engines else None,
        "kv_cache_size_tokens": _total(engines, "kv_cache_size_tokens"),
        "cache_dtype": engines[0].get("cache_dtype") if engines else None,
        "enable_prefix_caching": {"True": True, "False": False}.get(caching),
    }


def fetch_text(endpoint: Endpoint) -> str:
    """The whole /metrics text; raises ScrapeError when it cannot be read."""
    request = urllib.request.Request(str(endpoint.url("/metrics")), headers=endpoint.headers)
    try:
        with urllib.request.urlopen(request, timeout=SCRAPE_TIMEOUT_S) as response:
            return response.read().decode()
    except (OSError, urllib.error.URLError) as error:
        raise ScrapeError(
            f"{request.full_url} could not be read: {error}",
            cause="the server is gone, or it offers no metrics",
            next_step=f"curl {request.full_url}",
        ) from None


def fetch(endpoint: Endpoint) -> dict[str, float | None]:
    """The sample columns of this moment; raises ScrapeError."""
    return parse_metrics(fetch_text(endpoint))


def counter_delta(samples: pd.DataFrame, column: str) -> float | None:
    """Rise of a counter from the first to the last sample, summed over workers; None where it was not reported.

    Raises ScrapeError when the counter fell: the server restarted, so a difference would be meaningless.
    """
    total = None
    for worker, rows in samples.groupby(samples["worker"].fillna(""), sort=False):
        values = rows.sort_values("t_s")[column].dropna()
        if len(values) < 2:
            continue
        if (values.diff() < 0).any():
            raise ScrapeError(
                f"The counter {column} of {worker or 'the server'} fell while it was watched.",
                cause="the server was restarted in the middle of the run",
                next_step="measure again on a server that stays up; look into its log",
            )
        total = (total or 0.0) + float(values.iloc[-1] - values.iloc[0])
    return total


class Poller:
    """Samples /metrics of each endpoint while a load runs. Texts are only filtered then, and parsed in `frame`.

    Use: `await poller.sample()` before the load, `start()`, `await stop()`, `await settle(...)` after it has drained.
    """

    def __init__(self, endpoints: Sequence[Endpoint], interval_s: float, zero: float):
        self.endpoints, self.interval_s, self.zero = list(endpoints), interval_s, zero
        self.texts: list[tuple[float, str | None, bytes]] = []
        self.failures = 0
        self.last_failure: str | None = None
        self._session: aiohttp.ClientSession | None = None
        self._task: asyncio.Task | None = None

    async def sample(self) -> None:
        """Takes one sample of every endpoint; a failure is counted and leaves no sample."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S))
        await asyncio.gather(*(self._sample_one(endpoint) for endpoint in self.endpoints))

    async def _sample_one(self, endpoint: Endpoint) -> None:
        try:
            async with self._session.get(endpoint.url("/metrics"), headers=endpoint.headers) as response:
                text = await response.read()
                t = clock() - self.zero
                if response.status != 200:
                    raise OSError(f"HTTP {response.status}")
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            self.failures += 1
            self.last_failure = str(error) or type(error).__name__
            return
        kept = wanted_lines(text)
        self.texts.append((t, endpoint.worker, kept if kept.strip() else text))

    def start(self) -> None:
        """Samples from now on, each `interval_s`."""
        self._task = asyncio.create_task(self._poll())

    async def _poll(self) -> None:
        due = clock()
        while True:
            await self.sample()
            due = max(due + self.interval_s, clock())
            await asyncio.sleep(due - clock())

    async def stop(self) -> None:
        """Ends the periodic sampling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def settle(self, ended: int) -> None:
        """Samples until the servers are idle and have counted `ended` more finished requests than in the first sample.

        Engines publish their counters a moment after the answer has left, so one sample could miss the last requests.
        Gives up after SETTLE_LIMIT_S, and at once when a server does not say or does not answer.
        """
        limit, missed = clock() + SETTLE_LIMIT_S, self.failures
        before = self._sum(self.texts[: len(self.endpoints)], "requests_finished")
        while True:
            kept = len(self.texts)
            await self.sample()
            last = self.texts[kept:]
            finished, busy = self._sum(last, "requests_finished"), self._sum(last, "running", "waiting")
            if None in (before, finished) or self.failures > missed or clock() >= limit:
                return
            if finished - before >= ended and not busy:
                return
            del self.texts[kept:]  # only the last one of these is a sample of its own
            await asyncio.sleep(SETTLE_STEP_S)

    def _sum(self, texts: list[tuple[float, str | None, bytes]], *columns: str) -> float | None:
        found = [_by_name(text.decode()) for _, _, text in texts]
        values = [_first(names, ALIASES[column]) for names in found for column in columns]
        return sum(values) if values and None not in values else None

    async def close(self) -> None:
        """Stops and closes the connections."""
        await self.stop()
        if self._session is not None:
            await self._session.close()
            self._session = None

    def frame(self) -> pd.DataFrame:
        """One row a sample (SAMPLE_COLUMNS); raises ScrapeError when the texts hold none of vLLM's metrics."""
        rows = [{"t_s": t, "worker": worker} | parse_metrics(text.decode()) for t, worker, text in self.texts]
        return sample_frame(rows)


def sample_frame(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a frame with exactly SAMPLE_COLUMNS and their types."""
    frame = pd.DataFrame(list(rows), columns=list(SAMPLE_COLUMNS))
    return frame.astype({name: kind for name, (kind, _) in SAMPLE_COLUMNS.items()})


def _by_name(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def _first(found: dict, names: Iterable[str], mean: bool = False) -> float | None:
    for name in names:
        if name in found:
            values = [value for _, value in found[name]]
            return sum(values) / len(values) if mean else sum(values)
    return None


def _computed(found: dict, prompt_tokens: float | None) -> float | None:
    """Prompt tokens that were computed: by source where the release says so, else all minus the cached ones."""
    for name in BY_SOURCE:
        if name in found:
            return sum(value for labels, value in found[name] if labels.get("source") == "local_compute")
    cached = _first(found, CACHED)
    return None if cached is None or prompt_tokens is None else prompt_tokens - cached


def _names_in(text: str) -> str:
    names = sorted({re.split(r"[{ ]", line, maxsplit=1)[0] for line in text.splitlines() if line and line[0] != "#"})
    shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
    return shown or "nothing"


def _int(value: str | None) -> int | None:
    return int(value) if value is not None and value.isdigit() else None


def _total(engines: list[dict[str, str]], label: str) -> int | None:
    values = [_int(labels.get(label)) for labels in engines]
    return sum(values) if values and None not in values else None
