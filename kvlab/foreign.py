"""Result files of other load generators as rows: `vllm bench serve --save-detailed`, guidellm, aiperf.

What a file does not hold is null in the rows. Times count from the first start in the file.
"""

from __future__ import annotations

import gzip
import json
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from kvlab.answer import spread
from kvlab.config import LoadConfig
from kvlab.errors import ConfigError
from kvlab.load import request_frame

CUT_OFF = "incomplete: cut off when the benchmark ended"
TOOLS = "vllm bench serve --save-result --save-detailed (JSON), guidellm (JSON), aiperf (profile_export.jsonl)"


@dataclass
class Foreign:
    """One measurement of another tool. `concurrency`: requests in flight as asked for, None where the file is silent.

    `rate_per_s` and `arrival` describe an open loop; `notes` say what the file leaves open.
    """

    tool: str
    version: str | None
    model: str | None
    rows: list[dict[str, Any]]
    concurrency: int | None = None
    rate_per_s: float | None = None
    arrival: str = "closed"
    created_utc: str | None = None
    notes: list[str] = field(default_factory=list)

    def requests(self) -> pd.DataFrame:
        """One row a request (REQUEST_COLUMNS), in the order of starting."""
        return request_frame(self.rows)

    def load(self) -> LoadConfig:
        """The load in kvlab's words; lengths are the medians of the requests."""
        return LoadConfig(
            arrival=self.arrival,
            rate_per_s=self.rate_per_s if self.arrival != "closed" else None,
            concurrency=self.concurrency or most_in_flight(self.rows) or 1,
            requests=len(self.rows),
            input_tokens=_middle(self.rows, "prompt_tokens", "input_tokens_asked"),
            output_tokens=_middle(self.rows, "output_tokens_asked", "output_tokens"),
        )


def read(path: Path) -> list[Foreign]:
    """The measurements in a file (guidellm stores several), also gzipped. Raises ConfigError for any other file."""
    try:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", next_step=f"give a result file of: {TOOLS}") from None
    try:
        documents = _documents(text)
    except ValueError:
        raise ConfigError(f"{path} is no JSON.", next_step=f"give a result file of: {TOOLS}") from None
    try:
        found = _recognised(path, documents)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise ConfigError(
            f"{path} is damaged or of a release that is not known here: {type(error).__name__}: {error}",
            cause="a field is missing, or has another type than in the releases that are read",
            next_step=f"compare it with a file of: {TOOLS}",
        ) from None
    for one in found:
        if not one.rows:
            raise ConfigError(f"{path} holds no request.", next_step="measure again and import that file")
        _settle(one)
    return found


def _documents(text: str) -> list[Any]:
    """The JSON values of a file: one, or one a line."""
    try:
        return [json.loads(text)]
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        return [json.loads(line) for line in text.splitlines() if line.strip()]


def _recognised(path: Path, documents: list[Any]) -> list[Foreign]:
    first = documents[0] if documents and isinstance(documents[0], dict) else {}
    if "benchmarks" in first and "metadata" in first:
        return [_guidellm(first, benchmark) for benchmark in first["benchmarks"]]
    if "metadata" in first and "metrics" in first:
        return [_aiperf(path, documents)]
    if "aiperf_version" in first:
        raise ConfigError(
            f"{path} holds aiperf's sums only.", next_step=f"import {path.with_name('profile_export.jsonl')} beside it"
        )
    if "ttfts" in first and "itls" in first:
        return [_vllm_bench(document) for document in documents]
    if "mean_ttft_ms" in first:
        raise ConfigError(
            f"{path} holds no single requests.",
            cause="vllm bench serve ran without --save-detailed",
            next_step="measure again with: vllm bench serve --save-result --save-detailed",
        )
    raise ConfigError(f"{path} is not a known result file.", next_step=f"give one of: {TOOLS}")


# -- vllm bench serve ---------------------------------------------------------------------------------------------


def _vllm_bench(d: dict[str, Any]) -> Foreign:
    n, rate = len(d["ttfts"]), d.get("request_rate")
    starts = d.get("start_times") or [None] * n
    waits = d.get("queue_times") or [None] * n
    columns = [d["ttfts"], d["itls"], starts, waits, d["input_lens"], d["output_lens"], d["errors"]]
    rows = [_vllm_row(*values) for values in zip(*columns, strict=True)]
    open_loop = rate not in (None, "inf") and not d.get("max_concurrency")
    return Foreign(
        tool="vllm bench serve",
        version=d.get("vllm_version"),
        model=d.get("model_id"),
        rows=rows,
        concurrency=d.get("max_concurrency") or (None if open_loop else d.get("num_prompts")),
        arrival="poisson" if open_loop else "closed",
        rate_per_s=float(rate) if open_loop else None,
        created_utc=_vllm_date(d.get("date")),
        notes=[] if d.get("start_times") else ["The file holds no start times: there are no rates and no plateau."],
    )


def _vllm_row(ttft_s, itls_s, start_s, wait_s, prompt, output, error) -> dict[str, Any]:
    ok = not error
    first = None if start_s is None or not ok else start_s + ttft_s
    times = None if first is None else list(accumulate(itls_s, initial=first))
    return {
        "start_s": start_s,
        "wait_s": wait_s,
        "ttft_s": ttft_s if ok else None,  # the file has 0 for a failure
        "latency_s": ttft_s + sum(itls_s) if ok else None,
        "event_times_s": times,
        "event_tokens": spread(output, len(times)) if times else None,
        "prompt_tokens": prompt,
        "output_tokens": output if ok else None,
        "ok": ok,
        "error": error.strip().splitlines()[-1] if error else None,
    }


def _vllm_date(text: str | None) -> str | None:
    if not text or len(text) != 15:
        return None
    d = text
    return f"{d[:4]}-{d[4:6]}-{d[6:8]}T{d[9:11]}:{d[11:13]}:{d[13:]}"  # the local time of the measuring machine


# -- guidellm -----------------------------------------------------------------------------------------------------


def _guidellm(report: dict[str, Any], benchmark: dict[str, Any]) -> Foreign:
    requests, strategy = benchmark["requests"], benchmark["config"]["strategy"]
    rows = [_guidellm_row(r, None) for r in requests["successful"]]
    rows += [_guidellm_row(r, _guidellm_error(r)) for r in requests["errored"]]
    rows += [_guidellm_row(r, CUT_OFF) for r in requests["incomplete"]]
    rate = strategy.get("rate")
    return Foreign(
        tool="guidellm",
        version=report["metadata"].get("guidellm_version"),
        model=(benchmark["config"].get("backend") or {}).get("model"),
        rows=rows,
        concurrency=strategy.get("streams"),
        arrival={"constant": "constant", "poisson": "poisson"}.get(strategy["type_"], "closed") if rate else "closed",
        rate_per_s=rate,
        notes=["The file holds no gaps between single events: there is no ITL distribution."],
    )


def _guidellm_error(r: dict[str, Any]) -> str:
    return str((r.get("info") or {}).get("error") or "failed, no reason given")


def _guidellm_row(r: dict[str, Any], error: str | None) -> dict[str, Any]:
    timings = r["info"]["timings"]
    start, first, last = (timings.get(k) for k in ("request_start", "first_token_iteration", "last_token_iteration"))
    dispatched, ok = timings.get("dequeued"), error is None
    return {
        "start_s": start,
        "wait_s": None if start is None or dispatched is None else max(0.0, start - dispatched),
        "first_content_s": first,
        "last_content_s": last,
        "end_s": timings.get("request_end"),
        "ttft_s": first - start if ok and first is not None else None,
        "latency_s": last - start if ok and last is not None else None,
        "prompt_tokens": r.get("prompt_tokens"),
        "output_tokens": r.get("output_tokens"),
        "cached_tokens": r.get("cached_tokens"),
        "ok": ok,
        "error": error,
    }


# -- aiperf -------------------------------------------------------------------------------------------------------


def _aiperf(path: Path, records: list[dict[str, Any]]) -> Foreign:
    sums = _aiperf_sums(path)
    profiled = [r for r in records if r["metadata"].get("benchmark_phase", "profiling") == "profiling"]
    phases = (sums.get("input_config") or {}).get("phases") or [{}]
    phase = next((p for p in phases if p.get("name") == "profiling"), phases[-1])
    rate = phase.get("request_rate") or phase.get("rate")
    models = (sums.get("input_config") or {}).get("models") or {}
    names = models.get("items") if isinstance(models, dict) else models
    return Foreign(
        tool="aiperf",
        version=sums.get("aiperf_version"),
        model=next((m.get("name") if isinstance(m, dict) else m for m in names or []), None),
        rows=[_aiperf_row(r) for r in profiled],
        concurrency=phase.get("concurrency"),
        arrival="poisson" if rate else "closed",
        rate_per_s=rate,
        created_utc=sums.get("start_time"),
        notes=[] if sums else ["profile_export_aiperf.json is not beside it: release and asked load are unknown."],
    )


def _aiperf_sums(path: Path) -> dict[str, Any]:
    for name in ("profile_export_aiperf.json", "profile_export_aiperf.json.gz"):
        beside = path.with_name(name)
        if beside.is_file():
            data = beside.read_bytes()
            return json.loads(gzip.decompress(data) if beside.suffix == ".gz" else data)
    return {}


def _aiperf_row(r: dict[str, Any]) -> dict[str, Any]:
    about, metrics = r["metadata"], r["metrics"]
    value = {name: metric["value"] for name, metric in metrics.items()}
    error = r.get("error")
    ok = not error and not about.get("was_cancelled")
    start, ttft = about["request_start_ns"] / 1e9, _seconds(value.get("time_to_first_token"))
    gaps = [gap / 1e3 for gap in value.get("inter_chunk_latency") or []]
    times = list(accumulate(gaps, initial=start + ttft)) if ok and ttft is not None else None
    produced = value.get("usage_completion_tokens", value.get("output_sequence_length"))
    return {
        "start_s": start,
        "connect_s": _seconds(value.get("http_req_connecting")),
        "ttft_s": ttft if ok else None,
        "latency_s": ttft + sum(gaps) if ok and ttft is not None else None,
        "end_s": about["request_end_ns"] / 1e9,
        "event_times_s": times,
        "event_tokens": spread(produced, len(times)) if times and produced else None,
        "prompt_tokens": value.get("usage_prompt_tokens", value.get("input_sequence_length")),
        "output_tokens": produced,
        "cached_tokens": value.get("usage_prompt_cache_read_tokens"),
        "ok": ok,
        "error": None if ok else _aiperf_error(error),
    }


def _aiperf_error(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error.get("type") or error)
    return str(error or "cancelled")


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


# -- all ----------------------------------------------------------------------------------------------------------


def _settle(one: Foreign) -> None:
    """Orders the rows, counts times from the first start and fills in what follows from other columns."""
    one.rows.sort(key=lambda row: row.get("start_s") or 0.0)
    zero = min((row["start_s"] for row in one.rows if row.get("start_s") is not None), default=0.0)
    for index, row in enumerate(one.rows):
        row |= {"request": index, "phase": "measure", "process": 0}
        times = row.get("event_times_s")
        if times:
            row |= {"first_content_s": times[0], "last_content_s": times[-1]}
        for name in ("start_s", "first_content_s", "last_content_s", "end_s"):
            row[name] = None if row.get(name) is None else row[name] - zero
        row["event_times_s"] = None if times is None else [t - zero for t in times]
        produced = row["output_tokens"]
        first, last = row["first_content_s"], row["last_content_s"]
        if row["ok"] and first is not None and last is not None and produced and produced > 1:
            row["tpot_s"] = (last - first) / (produced - 1)
    if one.arrival == "closed" and one.concurrency is None:
        one.notes.append("The file does not say how many requests were to be in flight; the most that were are taken.")


def most_in_flight(rows: list[dict[str, Any]]) -> int:
    """Most requests under way at once, by start and last content; 0 without start times."""
    ended = [(row.get("last_content_s") or row.get("end_s"), -1) for row in rows if row.get("start_s") is not None]
    steps = sorted([(row["start_s"], 1) for row in rows if row.get("start_s") is not None] + [e for e in ended if e[0]])
    return max(accumulate(step for _, step in steps), default=0)


def _middle(rows: list[dict[str, Any]], *names: str) -> int:
    for name in names:
        known = [row[name] for row in rows if row.get(name)]
        if known:
            return max(1, round(median(known)))
    return 1
