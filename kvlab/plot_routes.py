"""Pictures of routes: one row each, with hit ratios in three readings, the bounds, and what it costs or gains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from kvlab import plot, plot_empty
from kvlab.claims import Claim

READINGS = {
    "hit_ratio": ("any part of the prefix", "o", 8),
    "prefix_token_hit_ratio": ("share of its tokens", "s", 5),
    "full_hit_ratio": ("the whole prefix", "v", 6),
}


def rows_axis(axis: Axes, names: Sequence[str], *, labels: bool = True) -> None:
    """The rows' names, the first on top; faint lines lead the eye."""
    axis.set_yticks(range(len(names)), names if labels else [""] * len(names))
    axis.set_ylim(len(names) - 0.4, -0.6)
    for y in range(len(names)):
        axis.axhline(y, color="#eeeeee", lw=0.8, zorder=0)


def hit_row(axis: Axes, y: float, claims: Mapping[str, Claim]) -> None:
    """The three readings of one route (quantity -> claim, ratios) in percent; its own computed value as a bar."""
    first = y == 0
    if all(c.measured is None for c in claims.values()):
        axis.annotate(plot_empty.NOT_MEASURED, (50, y), ha="center", va="center", color=plot_empty.SOFT, fontsize=9)
    for quantity, (label, marker, size) in READINGS.items():
        c = claims.get(quantity)
        if c is None or c.measured is None:
            continue
        if quantity == "hit_ratio" and None not in (c.ci_low, c.ci_high):
            axis.plot([100 * c.ci_low, 100 * c.ci_high], [y, y], color=plot.MEASURED, lw=1.6, zorder=2)
        color = plot.MEASURED if quantity == "hit_ratio" else plot.OTHER
        axis.plot(
            [100 * c.measured], [y], marker, ms=size, color=color, zorder=4, ls="", label=label if first else None
        )
    computed = claims["hit_ratio"].computed if "hit_ratio" in claims else None
    if computed is not None:
        label = "computed for this route" if first else None
        axis.plot([100 * computed], [y], "|", ms=17, mew=2.2, color=plot.COMPUTED, zorder=3, label=label)


def bounds(axis: Axes, affinity: float, hashed: float, random: float) -> None:
    """What no route can pass, what a hash may expect, and what random picks give: ratios, as lines over all rows."""
    marks = (
        (affinity, "-", plot.LIMIT, "bound: perfect placement"),
        (hashed, "--", plot.LIMIT, "bound: placed by a hash"),
        (random, ":", plot.MISS, "c ÷ K: no routing"),
    )
    for value, style, color, label in marks:
        axis.axvline(100 * value, ls=style, color=color, lw=1.6, zorder=1, label=label)
    axis.set_xlim(0, 105)
    axis.set_xlabel("hits, % of requests")


def value_row(axis: Axes, y: float, c: Claim | None, scale: float = 1.0) -> None:
    """One measured number with its interval, where it has one."""
    if c is None or c.measured is None:
        return
    if None not in (c.ci_low, c.ci_high):
        axis.plot([scale * c.ci_low, scale * c.ci_high], [y, y], color=plot.MEASURED, lw=1.6)
    axis.plot([scale * c.measured], [y], "o", color=plot.MEASURED, zorder=4)
