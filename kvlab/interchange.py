"""Results of other tools into the store, and runs out of it: `kvlab import FILE`, `kvlab export RUN`."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from kvlab import claims as claims_module
from kvlab import config, foreign, stats, store
from kvlab.certificate import plateau
from kvlab.config import Cell, ServerConfig
from kvlab.errors import ConfigError
from kvlab.files import typed
from kvlab.foreign import Foreign, most_in_flight
from kvlab.imported import imported, with_imported
from kvlab.results import NO_SAMPLES
from kvlab.rows import content_events, measured_rows, succeeded_mask, whole_span_s

PUBLISHED = "article"


# -- in -----------------------------------------------------------------------------------------------------------


def import_file(path: Path, machine: str, section: str = "load") -> list[store.Run]:
    """Stores the measurements of a file as runs of that machine and states their claims; the same file replaces itself.

    Raises ConfigError for a file that is none, StoreError where nothing can be stored.
    """
    if machine == PUBLISHED:
        raise ConfigError(f"The machine {PUBLISHED} holds published values only.", next_step="use another name")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else ""
    found = foreign.read(path)
    runs = [_save(one, f"{digest}-{k}", path.name, machine, section) for k, one in enumerate(found)]
    own = [c for c in claims_module.from_frame(claims_module.read(store.machine_dir(machine))) if c.section == section]
    own = [c for c in own if not set(c.runs) & {run.id for run in imported(machine, section)}]
    claims_module.write_section(store.machine_dir(machine), section, with_imported(own, machine, section))
    return runs


def _save(one: Foreign, source: str, file: str, machine: str, section: str) -> store.Run:
    load = one.load()
    name = re.sub(r"[^a-z0-9]+", "-", one.tool)
    name += f"-c{load.concurrency}-in{load.input_tokens}-out{load.output_tokens}"
    server = ServerConfig(model=f"measured by {one.tool}: {one.model or 'model not named'}")
    cell = Cell(name=name, server=server, load=load, repeat=_repeat(machine, section, name, source))
    rows = one.requests()
    held = [row for row in one.rows if row.get("last_content_s") is not None or not row["ok"]]
    window = plateau(held, load.concurrency) if load.arrival == "closed" and held and _timed(rows) else None
    summary = stats.summarise(rows, NO_SAMPLES, window, load)
    manifest = {
        "key": config.key(cell),
        "cell": cell.model_dump(mode="json"),
        "created_utc": one.created_utc,
        "window_s": window,
        "server": {"imported": {"tool": one.tool, "version": one.version, "file": file, "source": source}},
        "summary": summary,
        "certificate": {"tool": one.tool, "failures": [], "problems": one.notes},
        "valid": summary["n"] > 0,
        "problems": [] if summary["n"] else ["no request of the file succeeded"],
    }
    return store.save_run(machine, section, manifest, rows, NO_SAMPLES)


def _timed(rows: pd.DataFrame) -> bool:
    return bool(rows["start_s"].notna().all())


def _repeat(machine: str, section: str, name: str, source: str) -> int:
    """The number of this measurement among those of its kind; the old one where the file was imported before."""
    alike = [run for run in imported(machine, section) if run.manifest["cell"]["name"] == name]
    for run in alike:
        if run.manifest["server"]["imported"]["source"] == source:
            return run.manifest["cell"]["repeat"]
    return max((run.manifest["cell"]["repeat"] for run in alike), default=-1) + 1


# -- out ----------------------------------------------------------------------------------------------------------


def find(text: str) -> store.Run:
    """The run of a folder, of machine/section/run, or of a run's id. Raises ConfigError."""
    for place in (typed(text), store.root() / text):
        if (place / store.MANIFEST).is_file():
            return store.load_run(place)
    found = sorted(store.root().glob(f"*/*/{text}/{store.MANIFEST}")) if text and "/" not in text else []
    if len(found) == 1:
        return store.load_run(found[0].parent)
    raise ConfigError(
        f"{text!r} is no run.",
        cause=f"{len(found)} runs have this id" if found else "no run of that name is stored",
        next_step="give the run's folder, or machine/section/run",
    )


def to_vllm_bench(run: store.Run) -> dict[str, Any]:
    """A run as `vllm bench serve --save-result --save-detailed` would have written it; times in its own units.

    As in its files a failed request has 0 for its latencies and its reason in `errors`. Texts are not kept by kvlab.
    """
    rows, cell = measured_rows(run.requests()), run.manifest["cell"]
    ok = succeeded_mask(rows)
    good, load = rows[ok], cell["load"]
    span = whole_span_s(rows)
    duration = span[1] - span[0] if span else 0.0
    sent, produced = int(good["prompt_tokens"].sum()), int(good["output_tokens"].sum())
    created = re.sub(r"[-:]", "", str(run.manifest["created_utc"])[:19]).replace("T", "-")
    itls = [_gaps(row) if row["ok"] else [] for row in rows.to_dict("records")]
    about = {
        "date": created,
        "endpoint_type": "openai",
        "backend": "openai",
        "label": f"kvlab {run.manifest['kvlab_version']}",
        "model_id": cell["server"]["model"],
        "tokenizer_id": None,
        "num_prompts": len(rows),
        "request_rate": load["rate_per_s"] or "inf",
        "burstiness": 1.0,
        "max_concurrency": load["concurrency"] if load["arrival"] == "closed" else None,
        "duration": duration,
        "completed": int(ok.sum()),
        "failed": int((~ok).sum()),
        "total_input_tokens": sent,
        "total_output_tokens": produced,
        "request_throughput": _per(len(good), duration),
        "request_goodput": None,
        "output_throughput": _per(produced, duration),
        "total_token_throughput": _per(sent + produced, duration),
    }
    each = {
        "input_lens": _whole(rows["prompt_tokens"].fillna(rows["input_tokens_asked"])),
        "output_lens": _whole(rows["output_tokens"].where(ok, 0)),
        "ttfts": _numbers(rows["ttft_s"]),
        "itls": itls,
        "latencies": _numbers(rows["latency_s"]),
        "start_times": _numbers(rows["start_s"]),
        "queue_times": _numbers(rows["wait_s"]),
        "generated_texts": [""] * len(rows),
        "errors": [error if isinstance(error, str) else "" for error in rows["error"]],
        "max_output_tokens_per_s": _busiest_second(rows),
        "max_concurrent_requests": most_in_flight(rows.astype(object).where(rows.notna(), None).to_dict("records")),
        "rtfx": 0.0,
    }
    pooled = {"ttft": good["ttft_s"], "tpot": good["tpot_s"], "itl": [gap for gaps in itls for gap in gaps]}
    return about | each | {name: value for key, values in pooled.items() for name, value in _sums(key, values).items()}


def _gaps(row: dict[str, Any]) -> list[float]:
    return np.diff(row["event_times_s"]).tolist() if row["event_times_s"] is not None else []


def _busiest_second(rows: pd.DataFrame) -> float:
    """Most tokens received within one whole second after the first start."""
    events = [(times, tokens) for times, tokens in content_events(rows) if len(times)]
    if not events or rows["start_s"].isna().all():
        return 0.0
    seconds = np.concatenate([times for times, _ in events]) - float(rows["start_s"].min())
    return float(np.bincount(seconds.astype(int), weights=np.concatenate([tokens for _, tokens in events])).max())


def _sums(name: str, values: Any) -> dict[str, float]:
    values = 1e3 * np.asarray(pd.Series(values, dtype="Float64").dropna(), dtype=float)
    found = (values.mean(), np.median(values), values.std(), np.percentile(values, 99)) if len(values) else (0.0,) * 4
    return {f"{word}_{name}_ms": float(v) for word, v in zip(("mean", "median", "std", "p99"), found, strict=True)}


def _per(amount: float, seconds: float) -> float:
    return amount / seconds if seconds else 0.0


def _numbers(column: pd.Series) -> list[float]:
    return column.fillna(0.0).astype(float).tolist()


def _whole(column: pd.Series) -> list[int]:
    return column.fillna(0).astype(int).tolist()
