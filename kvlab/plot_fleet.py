"""Pictures of several workers: hit ratios over the number of prefixes, limits of the law, hits and misses apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvlab import plot, plot_empty
from kvlab.stats import Estimate

FLEETS = {6: (plot.MEASURED, "o"), 3: (plot.HIT, "s")}
LIMIT_NAMES = {
    "order=cycle": "one after another",
    "order=runs": "in runs of ten",
    "lengths=mixed": "two prefix lengths",
    "capacity=ample": "all prefixes fit",
    "lengths=scaled": "other lengths, same ratios",
    "service=l4:nginx": "nginx picks",
    "service=kube_proxy": "kube-proxy's rules pick",
}
OTHERS = ((plot.MISS, "^"), (plot.OTHER, "v"), (plot.LIMIT, "P"))


def fleet_style(workers: int, fleets: Sequence[int]) -> tuple[str, str]:
    """Colour and marker of a fleet: the same in every picture."""
    unknown = [n for n in sorted(set(fleets), reverse=True) if n not in FLEETS]
    return FLEETS.get(workers) or OTHERS[unknown.index(workers) % len(OTHERS)]


def percent_axis(axis: Axes, label: str = "hits, % of requests") -> None:
    """0 to 100% on the y axis."""
    axis.set_ylim(0, 105)
    axis.set_ylabel(label)


def shifted(x: Sequence[float], step: float) -> list[float]:
    """Points that would lie on one another, moved apart on a logarithmic axis."""
    return [value * 1.05**step for value in x]


def hit_points(axis: Axes, found: pd.DataFrame, label: str, *, color: str, marker: str, step: float = 0) -> None:
    """`found`: x, measured, ci_low, ci_high as ratios; drawn in percent."""
    percent = found[["measured", "ci_low", "ci_high"]] * 100
    x = shifted(found["x"], step)
    columns = (percent["measured"], percent["ci_low"], percent["ci_high"])
    plot.measured_points(axis, x, *columns, label=label, color=color, marker=marker)


def limit_rows(axis: Axes, rows: Sequence[tuple[str, Mapping[str, float | None], Estimate | None]]) -> None:
    """One row a limit: its name, models by name as marks (ratios), and the measured ratio with its interval."""
    marks = {"this order, simulated": ("|", plot.COMPUTED), "c/K": ("|", plot.LIMIT), "Che": ("x", plot.ARTICLE)}
    told: set[str] = set()
    for y, (_, models, measured) in enumerate(rows):
        for name, value in models.items():
            if value is not None:
                mark, color = marks[name]
                style = {"ms": 17 if mark == "|" else 8, "mew": 2.4, "color": color, "zorder": 3}
                axis.plot([100 * value], [y], mark, label=None if name in told else name, **style)
                told.add(name)
        if measured is not None and measured.value is not None:
            if measured.low is not None:
                axis.plot([100 * measured.low, 100 * measured.high], [y, y], color=plot.MEASURED, lw=1.6, zorder=2)
            label = None if "measured" in told else "measured"
            axis.plot([100 * measured.value], [y], "o", color=plot.MEASURED, zorder=4, label=label)
            told.add("measured")
        elif any(one is not None for _, _, one in rows):
            note = {"ha": "right", "va": "center", "color": plot_empty.SOFT, "fontsize": 9}
            axis.annotate(plot_empty.NOT_MEASURED, (103, y), **note)
    axis.set_yticks(range(len(rows)), [name for name, _, _ in rows])
    axis.set_ylim(max(len(rows), 1) - 0.4, -0.6)
    axis.set_xlim(0, 105)
    axis.set_xlabel("hits, % of requests")


def transient(axis: Axes, found: pd.DataFrame, sent: np.ndarray, computed: np.ndarray, workers: int) -> None:
    """The share of hits over a run in which everything fits; 1/N is where it starts."""
    plot.computed_line(axis, sent, 100 * computed)
    percent = found[["share", "low", "high"]] * 100
    plot.measured_points(axis, found["sent"], percent["share"], percent["low"], percent["high"])
    axis.axhline(100 / workers, color=plot.LIMIT, lw=1.2, ls="--", label=f"1 ÷ {workers}")
    percent_axis(axis)
    axis.set_xlabel("requests sent before")


def median_and_tail(axis: Axes, median: pd.DataFrame, tail: pd.DataFrame, *, label: str, color: str) -> None:
    """Medians in ms as joined points, each with a thin line up to its 90th percentile."""
    upper = dict(zip(tail["x"], tail["measured"], strict=True))
    for x, y in zip(median["x"], median["measured"], strict=True):
        if not (pd.isna(y) or pd.isna(upper.get(x, np.nan))):
            axis.plot([x, x], [1e3 * y, 1e3 * upper[x]], color=color, lw=1.6, alpha=0.6, zorder=3)
    plot.measured_points(
        axis, median["x"], 1e3 * median["measured"], label=f"{label}, p50 to p90", color=color, join=True
    )


def article_rate(axis: Axes, found: pd.DataFrame, color: str, label: str) -> None:
    """The article's values of one fleet, in its colour."""
    kept = found.dropna(subset="measured")
    style = {"marker": "D", "mfc": "white", "mec": color, "mew": 1.6, "color": color, "lw": 0.8, "ls": ":"}
    axis.plot(list(kept["x"]), list(kept["measured"]), label=label if len(kept) else None, zorder=5, **style)


def finish_times(axes: Sequence[Axes], prefixes: Sequence[int]) -> None:
    """Axes of the section on hits and misses: times on a logarithmic scale, rates from 0; a legend under each."""
    for axis in axes:
        plot.log2_axis(axis, prefixes)
        axis.set_xlabel("prefixes in use")
    for axis in axes[:2]:
        axis.set_ylabel("time to first token, ms")
        plot.plain_log_y(axis)
    axes[2].set_ylim(bottom=0)
    axes[2].set_ylabel("requests per second")
    for axis in axes:
        once = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
        if once:
            axis.legend(once.values(), once, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
