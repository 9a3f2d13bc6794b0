"""What a preemption looks like from the client: a pause in the middle of an answer. Seconds on the run's clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from kvlab.rows import content_events

ALONE = 4  # steps that one other request makes in the meantime


class Pause(NamedTuple):
    """The longest gap of one request: between the events at `start_s` and `end_s`."""

    request: int
    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


def longest_pauses(rows: pd.DataFrame) -> list[Pause]:
    """The longest gap of each request with two events or more, in the order of the rows."""
    found = []
    for i in range(len(rows)):
        for times, _ in content_events(rows.iloc[[i]]):
            if len(times) > 1:
                k = int(np.diff(times).argmax())
                found.append(Pause(int(rows["request"].iloc[i]), float(times[k]), float(times[k + 1])))
    return found


def resume_s(rows: pd.DataFrame) -> tuple[Pause, float] | None:
    """Of two requests, the one that was preempted, and its seconds from the other's end to its own next token.

    It can only come back when the other one has given its blocks free. Null where the pause does not span that end.
    """
    pauses = longest_pauses(rows)
    if len(rows) != 2 or len(pauses) != 2:
        return None
    pause = max(pauses, key=lambda p: p.seconds)
    freed = float(rows.loc[rows["request"] != pause.request, "last_content_s"].iloc[0])
    return (pause, pause.end_s - freed) if pause.start_s < freed <= pause.end_s else None


def preempted(rows: pd.DataFrame) -> list[Pause]:
    """Every pause in which most other requests received tokens again and again: a preempted one stands still alone.

    A long prefill, or a stall of the whole machine, stops all requests at once.
    """
    streams = [times for times, _ in content_events(rows)]
    gaps = np.concatenate([np.diff(times) for times in streams]) if streams else np.empty(0)
    step_s = float(np.median(gaps)) if len(gaps) else 0.0
    long = [np.flatnonzero(np.diff(times) > ALONE * step_s) for times in streams]
    if not sum(map(len, long)):
        return []
    owner = np.repeat(np.arange(len(streams)), [len(places) for places in long])
    starts = np.concatenate([times[places] for times, places in zip(streams, long, strict=True)])
    ends = np.concatenate([times[places + 1] for times, places in zip(streams, long, strict=True)])
    others, going = _others(streams, owner, starts, ends, step_s)
    names = rows["request"].to_numpy()
    alone = np.flatnonzero((others > 0) & (going >= others / 2))
    return [Pause(int(names[owner[k]]), float(starts[k]), float(ends[k])) for k in alone]


def _others(
    streams: list[np.ndarray], owner: np.ndarray, starts: np.ndarray, ends: np.ndarray, step_s: float
) -> tuple[np.ndarray, np.ndarray]:
    """For each gap, the other streams under way in it, and how many of these go on: events at their usual pace.

    After a stall of all of them they come together, at its end.
    """
    others, going = np.zeros(len(starts), dtype=int), np.zeros(len(starts), dtype=int)
    for j, times in enumerate(streams):
        if len(times) == 0:
            continue
        under_way = (owner != j) & (times[0] < ends) & (times[-1] > starts)
        paced = np.concatenate([[0], np.cumsum(np.diff(times) >= step_s / 2)])  # paced[k]: gaps before event k
        first, after = np.searchsorted(times, starts, "right"), np.searchsorted(times, ends, "left")
        last = np.clip(after - 1, 0, None)
        paces = np.where(after > first, paced[last] - paced[np.minimum(first, last)], 0)
        others += under_way
        going += under_way & (paces >= ALONE)
    return others, going


def paused_s(rows: pd.DataFrame) -> float | None:
    """Seconds that a request stands still after preemptions, averaged over requests; null without requests."""
    return sum(pause.seconds for pause in preempted(rows)) / len(rows) if len(rows) else None
