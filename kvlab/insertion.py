"""What a decoding request feels while long inputs are inserted beside it: the gaps between its tokens, by insertion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlab.rows import known, measured_rows, succeeded_mask


@dataclass(frozen=True)
class Insertion:
    """One long input. `gaps_s`: raw gaps of the decoding request from its start to its first token, in order."""

    start_s: float
    ttft_s: float
    gaps_s: tuple[float, ...]

    @property
    def longest_s(self) -> float:
        return max(self.gaps_s)


@dataclass(frozen=True)
class Schedule:
    """When long inputs come, and how many tokens the decoding request needs to outlast them all."""

    every_s: float
    output_tokens: int


def schedule(ttft_s: float | None, step_s: float | None, inserts: int) -> Schedule:
    """From the long input's TTFT and the decode step, both measured alone: no overlap, and decoding until the end.

    Half as long again as the TTFT alone leaves room for small chunks; two digits, so that it prints and hashes well.
    Without measurements a schedule that no run was made with: the cells then say that they are not measured.
    """
    if not ttft_s or not step_s:
        return Schedule(1.0, 300)
    every_s = float(f"{1.5 * ttft_s + 10 * step_s:.2g}")
    decoding_s = (inserts + 1) * every_s - inserts * ttft_s
    return Schedule(every_s, 50 * math.ceil(1.1 * decoding_s / step_s / 50))


def insertions(requests: pd.DataFrame) -> tuple[list[Insertion], str | None]:
    """The insertions of a run in order of time, or none and the reason why they cannot be read.

    A gap belongs to an insertion when its middle lies between the start of the long request and its first token: the
    last prefill step gives both requests a token at once, in either order.
    """
    decode, long, why = _parts(requests)
    if why:
        return [], why
    times = np.asarray(decode["event_times_s"], dtype=float)
    middles, gaps = (times[1:] + times[:-1]) / 2, np.diff(times)
    found = []
    for row in long.to_dict("records"):
        inside = (middles >= row["start_s"]) & (middles <= row["first_content_s"])
        if not inside.any():
            return [], "no gap of the decoding request lies inside an insertion"
        found.append(Insertion(row["start_s"], row["ttft_s"], tuple(gaps[inside].tolist())))
    return found, None


def quiet_gaps_s(requests: pd.DataFrame) -> np.ndarray:
    """Gaps of the decoding request that touch no insertion; empty where the insertions cannot be read."""
    decode, long, why = _parts(requests)
    if why:
        return np.empty(0)
    times = np.asarray(decode["event_times_s"], dtype=float)
    touched = np.zeros(len(times) - 1, dtype=bool)
    for row in long.to_dict("records"):
        touched |= (times[1:] >= row["start_s"]) & (times[:-1] <= row["first_content_s"])
    return np.diff(times)[~touched]


def _parts(requests: pd.DataFrame) -> tuple[pd.Series | None, pd.DataFrame, str | None]:
    """(decoding request, long requests by time, why they cannot be read together)."""
    rows = measured_rows(requests)
    rows = rows[succeeded_mask(rows)]
    decodes, long = rows[rows["kind"] == "decode"], rows[rows["kind"] == "insert"].sort_values("start_s")
    if len(decodes) != 1 or long.empty:
        return None, long, "the decoding request or every long input failed"
    decode = decodes.iloc[0]
    starts, ends = known(long["start_s"]), known(long["first_content_s"])
    if starts[0] < decode["first_content_s"]:
        return None, long, "a long input came before the decoding request's first token; insert later"
    if ends[-1] > decode["last_content_s"]:
        return None, long, "the decoding request ended before the last long input's first token; let it decode longer"
    if (starts[1:] < ends[:-1]).any():
        return None, long, "two long inputs overlapped; insert them further apart"
    return decode, long, None


def gaps_over_time(axis, run, label: str, color: str) -> None:
    """The decoding request's gaps in ms over the run's time, one stem a gap; nothing where there is no run."""
    rows = measured_rows(run.requests()) if run is not None else None
    if rows is None or rows[rows["kind"] == "decode"].empty:
        return
    times = np.asarray(rows[rows["kind"] == "decode"].iloc[0]["event_times_s"], dtype=float)
    if len(times) > 1:
        axis.vlines(times[1:] - times[0], 0, np.diff(times) * 1e3, color=color, lw=1.6, label=label)
        axis.set_ylim(bottom=0)
