"""One server split over several GPUs against one on each: what their runs say, and what splitting does to a step.

Units: seconds, bytes, bytes a second; `ranks` GPUs share one server.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvlab import stats
from kvlab.geometry import Geometry
from kvlab.measure import Result, rows
from kvlab.stats import Estimate


def most_in_one_worker(results: Iterable[Result]) -> float | None:
    """Requests running and waiting in one worker at once: the most in any sample after the warm-up, over all runs."""
    found = []
    for result in results:
        if result.run is None:
            continue
        samples = result.run.samples()
        inside = samples[samples["t_s"] >= rows(result)["start_s"].min()]
        found += (inside["running"] + inside["waiting"]).dropna().tolist()
    return float(max(found)) if found else None


def first_wave_ttft_s(results: Iterable[Result]) -> Estimate | None:
    """Mean TTFT of the requests that a closed loop sends at its start, one a client: the same arrivals in every layout.

    The mean over runs with its t interval, from three runs on.
    """
    found = []
    for result in results:
        wave = rows(result).sort_values("start_s").head(result.cell.load.concurrency)
        found += [float(wave["ttft_s"].mean())] if wave["ttft_s"].notna().any() else []
    return _few(found, "repeats") if found else None


def starts(results: Iterable[Result]) -> list[Result]:
    """One result for each start of its server: the first that was measured on it."""
    first: dict[str, Result] = {}
    for result in results:
        if result.run is not None:
            first.setdefault(str(result.run.manifest["server"].get("started_utc")), result)
    return list(first.values())


def ready_s(started: Iterable[Result]) -> Estimate | None:
    """Seconds until a server was ready, the mean over its starts (`starts`), with an interval from three on."""
    found = [result.run.manifest["server"].get("ready_s") for result in started if result.run is not None]
    found = [value for value in found if value is not None]
    return _few(found, "starts") if found else None


def _few(values: list[float], what: str) -> Estimate:
    """As measure.across: two values have a t interval that says nothing."""
    mean = stats.mean_interval(values)
    return Estimate(mean.value, None, None, 2, f"two {what}: too few for an interval") if mean.n == 2 else mean


def workers_on_one_gpu(result: Result) -> int | None:
    """The most workers of a fleet that stood on one GPU; None where the run does not say where they stood."""
    workers = (result.run.manifest["server"].get("workers") or []) if result.run is not None else []
    gpus = [worker.get("gpu") for worker in workers]
    return max(map(gpus.count, gpus)) if gpus and None not in gpus else None


# -- the step of a split server ---------------------------------------------------------------------------------------


def possible_ranks(geometry: Geometry, asked: Iterable[int]) -> list[int]:
    """Those numbers of ranks, sorted, over which vLLM splits the model: its query heads and KV heads must divide."""
    query, kv = geometry.query_heads or 1, geometry.kv_heads or 1
    return [n for n in sorted(asked) if query % n == 0 and (kv % n == 0 or n % kv == 0)]


def split_saves_s(read_bytes: float, bytes_per_s: float, ranks: int) -> float:
    """Seconds of a step at most: each rank reads an n-th of the weights and of the KV, (1 - 1 / n) is left out."""
    return read_bytes / bytes_per_s * (1 - 1 / ranks)


def exchange_s(one: Iterable[Result], split: Iterable[Result], saved_s: float) -> Estimate | None:
    """Seconds of a split server's step that reading does not explain: split - (one - saved), over paired repeats."""
    pairs = [(a.value("itl_p50_s"), b.value("itl_p50_s")) for a, b in zip(one, split, strict=True)]
    found = [b - a + saved_s for a, b in pairs if a is not None and b is not None]
    return _few(found, "repeats") if found else None


def split_wins_above_bytes(exchange: float, bytes_per_s: float, ranks: int, kv_bytes: float = 0.0) -> float:
    """Weights' bytes above which splitting shortens a step: what it saves is then more than what its ranks exchange.

    (weights + kv) / bandwidth x (1 - 1 / n) > exchange, so weights > exchange x bandwidth x n / (n - 1) - kv. A model
    of more layers exchanges more, so that its own border lies higher.
    """
    return max(0.0, exchange * bytes_per_s * ranks / (ranks - 1) - kv_bytes)
