"""What a decoding request feels while long inputs are inserted beside it: the gaps between its tokens, by insertion."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from kvlab.results import Result
from kvlab.rows import measured_rows, succeeded_mask


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


def schedule(
    ttft_s: float | None, step_s: float | None, inserts: int, expected_ttft_s: float | None = None
) -> Schedule:
    """From the long input's TTFT and the decode step, both measured alone: no overlap, and decoding until the end.

    `expected_ttft_s` of a chunk that slows the input by more than a third gives it more room. Half as long again as the
    TTFT leaves room for scatter; two digits, so that it prints and hashes well.
    Without measurements a schedule that no run was made with: the cells then say that they are not measured.
    """
    if not ttft_s or not step_s:
        return Schedule(1.0, 300)
    if expected_ttft_s and expected_ttft_s > 4 / 3 * ttft_s:
        ttft_s = expected_ttft_s
    every_s = float(f"{1.5 * ttft_s + 10 * step_s:.2g}")
    decoding_s = (inserts + 1) * every_s - inserts * ttft_s
    return Schedule(every_s, 50 * math.ceil(1.1 * decoding_s / step_s / 50))


def insertions(requests: pd.DataFrame) -> tuple[list[Insertion], str | None]:
    """The insertions of a run that can be read, in order of time, and why others (or all) cannot.

    A gap belongs to an insertion when its middle lies between the start of the long request and its first token: the
    last prefill step gives both requests a token at once, in either order.
    """
    decode, long = _parts(requests)
    if decode is None:
        return [], "the decoding request or every long input failed"
    times = np.asarray(decode["event_times_s"], dtype=float)
    middles, gaps = (times[1:] + times[:-1]) / 2, np.diff(times)
    found, reasons = [], []
    for row in long.to_dict("records"):
        inside = (middles >= row["start_s"]) & (middles <= row["first_content_s"])
        why = _why_not(row, decode, long) or (None if inside.any() else "no gap of the decoding request lies inside")
        if why:
            reasons.append(why)
        else:
            found.append(Insertion(row["start_s"], row["ttft_s"], tuple(gaps[inside].tolist())))
    dropped = "; ".join(dict.fromkeys(reasons))
    return found, f"{len(reasons)} of {len(long)} insertions: {dropped}" if reasons else None


def ttfts_s(result: Result) -> list[float]:
    """TTFT of each of a run's long inputs that can be read."""
    return [one.ttft_s for one in insertions(result.run.requests())[0]] if result.run is not None else []


def quiet_gaps_s(requests: pd.DataFrame) -> np.ndarray:
    """Gaps of the decoding request that touch no insertion; empty where it failed."""
    decode, long = _parts(requests)
    if decode is None:
        return np.empty(0)
    times = np.asarray(decode["event_times_s"], dtype=float)
    touched = np.zeros(len(times) - 1, dtype=bool)
    for row in long.to_dict("records"):
        touched |= (times[1:] >= row["start_s"]) & (times[:-1] <= row["first_content_s"])
    return np.diff(times)[~touched]


def _parts(requests: pd.DataFrame) -> tuple[pd.Series | None, pd.DataFrame]:
    """(decoding request or None where it or every long request failed, long requests by time)."""
    rows = measured_rows(requests)
    rows = rows[succeeded_mask(rows)]
    decodes, long = rows[rows["kind"] == "decode"], rows[rows["kind"] == "insert"].sort_values("start_s")
    return (decodes.iloc[0] if len(decodes) == 1 and len(long) else None), long


def _why_not(row: dict, decode: pd.Series, long: pd.DataFrame) -> str | None:
    """Why one long request shows nothing; None where it stands alone beside the decoding one."""
    if row["start_s"] < decode["first_content_s"]:
        return "came before the decoding request's first token"
    if row["first_content_s"] > decode["last_content_s"]:
        return "the decoding request ended before their first token"
    others = long[long["request"] != row["request"]]
    meet = (others["start_s"] < row["first_content_s"]) & (others["first_content_s"] > row["start_s"])
    return "two of them overlapped" if meet.any() else None


def gaps_over_time(axis, run, label: str, color: str) -> None:
    """The decoding request's gaps in ms over the run's time, one stem a gap; nothing where there is no run."""
    rows = measured_rows(run.requests()) if run is not None else None
    if rows is None or rows[rows["kind"] == "decode"].empty:
        return
    times = np.asarray(rows[rows["kind"] == "decode"].iloc[0]["event_times_s"], dtype=float)
    if len(times) > 1:
        axis.vlines(times[1:] - times[0], 0, np.diff(times) * 1e3, color=color, lw=1.6, label=label)
        axis.set_ylim(bottom=0)
