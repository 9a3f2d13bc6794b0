"""What a preemption looks like from the client: a pause in the middle of an answer. Seconds on the run's clock."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd

from kvlab.rows import content_events


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


def paused_s(rows: pd.DataFrame, longer_than_s: float) -> float | None:
    """Seconds that a request spends in gaps longer than a given one, averaged over requests; null without requests."""
    gaps = [np.diff(times) for times, _ in content_events(rows)]
    return float(sum(gap[gap > longer_than_s].sum() for gap in gaps) / len(gaps)) if gaps else None
