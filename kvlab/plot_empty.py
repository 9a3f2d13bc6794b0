"""Panels without a measured point say so and why, instead of showing bare axes."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab import claims, store
from kvlab.errors import StoreError

NOT_MEASURED = "not measured"
WIDTH = 34  # characters of a line of the reason
INK, SOFT = "#333333", "#595959"  # black on white, and a grey that is still read by everybody


def say(figure: Figure, reason: str | None) -> None:
    """Replaces every panel without data by "not measured" and the reason."""
    for axis in figure.axes:
        if bare(axis):
            _replace(axis, reason)


def bare(axis: Axes) -> bool:
    """No point, bar or surface in data coordinates: lines over the whole axis and shaded bands are no data."""
    drawn = any(line.get_transform() == axis.transData and _has_points(line) for line in axis.lines)
    texts = [text.get_text() for text in axis.texts if text.get_text() != NOT_MEASURED]
    return not (drawn or axis.containers or axis.collections or texts or axis.images or axis.tables)


def why(machine: str, section: str, results: Iterable) -> str | None:
    """The reason that the runs of a figure give most often, else that of the section's claims; None: nothing says."""
    told = [getattr(result, "reason", None) for result in results if result.run is None]
    reasons = [reason for reason in told if reason]
    if not reasons:
        try:
            stored = claims.read(store.machine_dir(machine))
        except StoreError:
            return None
        missing = stored[(stored["section"] == section) & stored["state"].isin(["not measured", "failed"])]
        reasons = list(missing["reason"].dropna())
    return Counter(reasons).most_common(1)[0][0] if reasons else None


def _has_points(line) -> bool:
    y = np.asarray(line.get_ydata(orig=False), dtype=float)
    return bool(len(y) and np.isfinite(y).any())


def _replace(axis: Axes, reason: str | None) -> None:
    for text in list(axis.texts):
        text.remove()
    for patch in list(axis.patches):
        patch.remove()
    for line in list(axis.lines):
        line.remove()
    if axis.get_legend():
        axis.get_legend().remove()
    axis.grid(False)
    axis.set(xticks=[], yticks=[], xlabel="", ylabel="")
    axis.spines[:].set_visible(False)
    axis.set_facecolor("#f4f4f4")
    axis.text(0.5, 0.56, NOT_MEASURED, transform=axis.transAxes, ha="center", va="bottom", color=INK, weight="bold")
    if reason:
        lines = "\n".join(textwrap.wrap(reason, WIDTH)[:6])
        axis.text(0.5, 0.5, lines, transform=axis.transAxes, ha="center", va="top", color=SOFT, fontsize=8.5)
