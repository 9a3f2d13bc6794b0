"""Pictures of comparisons and repeats: each turn as a point, means with intervals, deviations from the mean."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib as mpl
import matplotlib.transforms
from matplotlib.axes import Axes

from kvlab import plot
from kvlab.claims import Claim

GROUPS = ("repeats on one server", "fresh starts")


def effect_row(axis: Axes, y: float, each: Sequence[float], c: Claim, published: float | None, *, first: bool) -> None:
    """Relative differences in percent: `each` turn, the claim's mean and interval, the article's value (a ratio)."""
    label = (lambda text: text) if first else (lambda text: None)
    axis.plot(each, [y + 0.16] * len(each), "o", ms=4, color=plot.OTHER, label=label("one turn") if each else None)
    if c.measured is not None:
        if c.ci_low is not None and c.ci_high is not None:
            axis.plot([100 * c.ci_low, 100 * c.ci_high], [y, y], color=plot.MEASURED, lw=2)
        axis.plot([100 * c.measured], [y], "o", color=plot.MEASURED, zorder=4, label=label("mean, 95% interval"))
    if published is not None:
        plot.article_points(axis, [100 * published], [y], label=label("article"))


def repeat_points(axis: Axes, by_x: Mapping[float, Sequence[float | None]]) -> None:
    """Each repeat as a small point just right of its x, where the mean with its interval stands; a single one is it."""
    beside = mpl.transforms.offset_copy(axis.transData, axis.figure, x=7, units="points")
    known = {x: [value for value in values if value is not None] for x, values in by_x.items()}
    pairs = [(x, value) for x, values in known.items() if len(values) > 1 for value in values]
    if pairs:
        style = {"ms": 3.5, "color": plot.OTHER, "zorder": 3, "label": "one repeat"}
        axis.plot([x for x, _ in pairs], [y for _, y in pairs], "o", transform=beside, **style)


def effect_axis(axis: Axes, names: Sequence[str], what: str) -> None:
    """The rows' names, zero as a line, percent on the x axis."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axis.axvline(0, color=plot.COMPUTED, lw=0.8, zorder=0)
    axis.set_xlabel(what)


def deviations(axis: Axes, groups: Mapping[str, Sequence[Sequence[float | None]]], published: Sequence[float]) -> None:
    """Each measurement in percent of its group's mean: for each load, the repeats on one server and the fresh starts.

    `published`: the article's repeats, in a column of their own.
    """
    axis.axhline(0, color=plot.COMPUTED, lw=0.8, zorder=0)
    ticks = []
    for k, pair in enumerate(groups.values()):
        ticks.append(2.6 * k + 0.5)
        for j, (values, color, label) in enumerate(zip(pair, (plot.MEASURED, plot.LIMIT), GROUPS, strict=True)):
            x, y = _spread_out(values, 2.6 * k + j)
            plot.measured_points(axis, x, y, label=label if k == 0 else None, color=color)
    names = list(groups)
    if published:
        ticks.append(2.6 * len(groups))
        names.append("article")
        plot.article_points(axis, *_spread_out(published, ticks[-1]), label=None)
    axis.set_xticks(ticks, names)
    axis.set_xlim(-0.8, ticks[-1] + 1.1)
    axis.set_ylabel("% from the mean")


def _spread_out(values: Sequence[float | None], centre: float) -> tuple[list[float], list[float]]:
    known = [v for v in values if v is not None]
    mean = sum(known) / len(known) if known else 1.0
    return [centre + 0.1 * (i - (len(known) - 1) / 2) for i in range(len(known))], [100 * (v / mean - 1) for v in known]
