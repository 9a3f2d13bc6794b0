"""Gaps between the events of the null server, as its clients read them."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvlab.rows import content_events


def later_gaps_s(rows: pd.DataFrame) -> np.ndarray:
    """Gap / tokens in the event that ends it, pooled over requests; without each request's first gap.

    The null server sends the second event later by a share of the gap, so that streams do not run in step: among 75
    events a stream these gaps alone would be the 99th percentile.
    """
    parts = [np.diff(times)[1:] / tokens[2:] for times, tokens in content_events(rows)]
    return np.concatenate(parts) if parts else np.empty(0)
