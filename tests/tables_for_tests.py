"""Small tables of requests and samples, spelled out so that a test can say what must come out."""

from __future__ import annotations

import pandas as pd

from kvlab.records import REQUEST_COLUMNS, SAMPLE_COLUMNS


def request(start_s: float = 0.0, events=((0.5, 1), (0.6, 1), (0.7, 1)), **changes) -> dict:
    """A successful row with these (time, tokens) content events; a failed one with ok=False."""
    row = dict.fromkeys(REQUEST_COLUMNS)
    times, tokens = [t for t, _ in events], [n for _, n in events]
    n = sum(tokens)
    row |= {
        "request": 0,
        "phase": "measure",
        "kind": "unique",
        "start_s": start_s,
        "first_content_s": times[0],
        "last_content_s": times[-1],
        "end_s": times[-1] + 0.01,
        "ttft_s": times[0] - start_s,
        "latency_s": times[-1] - start_s,
        "tpot_s": (times[-1] - times[0]) / (n - 1) if n > 1 else None,
        "prompt_tokens": 100,
        "output_tokens": n,
        "cached_tokens": 0,
        "finish_reason": "length",
        "http_status": 200,
        "ok": True,
        "event_times_s": times,
        "event_tokens": tokens,
    }
    return row | changes


def failure(start_s: float, end_s: float, error: str = "timeout", **changes) -> dict:
    """A failed row that received nothing."""
    nothing = dict.fromkeys(
        ("first_content_s", "last_content_s", "ttft_s", "latency_s", "tpot_s", "prompt_tokens", "output_tokens")
    )
    empty = {"cached_tokens": None, "event_times_s": None, "event_tokens": None, "finish_reason": None}
    return request(start_s) | nothing | empty | {"end_s": end_s, "ok": False, "error": error} | changes


def requests(*rows: dict) -> pd.DataFrame:
    """The rows as the load hands them over."""
    frame = pd.DataFrame(list(rows), columns=list(REQUEST_COLUMNS))
    return frame.astype({name: kind for name, (kind, _) in REQUEST_COLUMNS.items()})


def samples(*rows: dict) -> pd.DataFrame:
    """Scrapes; what is not given is null."""
    frame = pd.DataFrame(list(rows), columns=list(SAMPLE_COLUMNS))
    return frame.astype({name: kind for name, (kind, _) in SAMPLE_COLUMNS.items()})
