"""What the client adds to times, measured against a null server with known delays at a run's concurrency and rate.

A part of every certificate. It takes about a second, and once a process for loads of the same size.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from kvlab.config import LoadConfig
from kvlab.errors import LoadError
from kvlab.load import run_load
from kvlab.null_server import NullServer
from kvlab.rows import measured_rows

FEWEST = 8  # streams: fewer add less
TTFT_S = 0.05
GAPS_S = (0.002, 0.2)  # gaps that are imitated
LONG_S = 0.5  # of one round
LIMIT_S = 0.010  # as of a late event loop
NAMES = tuple(f"added_{what}_{q}_s" for what in ("ttft", "itl") for q in ("p50", "p99"))
NOTHING = dict.fromkeys(NAMES)


def added(load: LoadConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """added_ttft_p50_s, added_ttft_p99_s, added_itl_p50_s, added_itl_p99_s of a load like this one.

    Null where gaps are unknown, and for loads other than a closed loop. Includes what the null server itself is late.
    """
    gap_s = summary.get("itl_p50_s")
    if load.arrival != "closed" or load.client != "kvlab" or load.workload == "perplexity" or not gap_s:
        return dict(NOTHING)
    gap_s = min(max(gap_s, GAPS_S[0]), GAPS_S[1])
    streams = 2 ** math.ceil(math.log2(max(load.concurrency, FEWEST)))
    return dict(_measured(streams, 2.0 ** math.floor(math.log2(gap_s)), load.processes))


def complete(certificate: dict[str, Any], load: LoadConfig, summary: dict[str, Any]) -> dict[str, Any]:
    """The certificate with what the client adds, and a problem more where that is too much."""
    found = dict(NOTHING) if certificate.get("fake") or certificate.get("failures") else added(load, summary)
    return certificate | found | {"problems": [*certificate.get("problems", []), *_marks(found)]}


def _marks(found: dict[str, Any]) -> list[str]:
    worst = max((found[name] or 0.0 for name in NAMES if name.endswith("p99_s")), default=0.0)
    if worst <= LIMIT_S:
        return []
    return [
        f"Against a server of known delays this client adds {1000 * worst:.1f} ms at p99 (limit {1000 * LIMIT_S:.0f} "
        "ms): give it a free core, use more processes, or lower the load."
    ]


@functools.cache
def _measured(streams: int, gap_s: float, processes: int) -> tuple[tuple[str, float | None], ...]:
    tokens = max(8, round(LONG_S / gap_s))
    load = LoadConfig(
        concurrency=streams, requests=2 * streams, input_tokens=32, output_tokens=tokens, processes=processes
    )
    with NullServer(TTFT_S, gap_s) as server:
        try:
            rows = measured_rows(run_load(server.endpoint, load, nonce=1, progress=False).requests)
        except LoadError:
            return tuple(NOTHING.items())
    ok = rows[rows["ok"]]
    gaps = [np.diff(times)[1:] - gap_s for times in ok["event_times_s"]]  # the first gap is longer on purpose
    values = {"ttft": np.asarray(ok["ttft_s"], dtype=float) - TTFT_S, "itl": np.concatenate(gaps) if gaps else []}
    quantiles = {
        f"added_{name}_p{q}_s": float(np.quantile(v, q / 100)) if len(v) else None
        for name, v in values.items()
        for q in (50, 99)
    }
    return tuple(quantiles.items())
