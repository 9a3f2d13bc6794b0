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
    found = []
    for i, (request, times) in enumerate(zip(rows["request"], streams, strict=True)):
        for k in np.flatnonzero(np.diff(times) > ALONE * step_s):
            ends = float(times[k]), float(times[k + 1])
            others = [other for j, other in enumerate(streams) if j != i and _under_way(other, *ends)]
            if others and sum(_goes_on(other, *ends, step_s) for other in others) >= len(others) / 2:
                found.append(Pause(int(request), *ends))
    return found


def _under_way(times: np.ndarray, start_s: float, end_s: float) -> bool:
    return len(times) > 0 and times[0] < end_s and times[-1] > start_s


def _goes_on(times: np.ndarray, start_s: float, end_s: float, step_s: float) -> bool:
    """Whether events come at their usual pace in between: after a stall they come together, at its end."""
    inside = times[np.searchsorted(times, start_s, "right") : np.searchsorted(times, end_s, "left")]
    return int(np.sum(np.diff(inside) >= step_s / 2)) >= ALONE


def paused_s(rows: pd.DataFrame) -> float | None:
    """Seconds that a request stands still after preemptions, averaged over requests; null without requests."""
    return sum(pause.seconds for pause in preempted(rows)) / len(rows) if len(rows) else None
