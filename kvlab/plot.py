"""One style, one palette, one `save`. Colours belong to concepts; beside others a machine has its colour and marker.

Computed is a line or a band, measured is points with intervals, the article's values are open diamonds.
"""

from __future__ import annotations

import io
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab import files, outcome, plot_empty, store

# Okabe and Ito's palette: told apart with any of the usual colour-vision deficiencies.
COMPUTED = "#333333"
MEASURED = "#0072B2"
ARTICLE = "#D55E00"
HIT = "#009E73"
MISS = "#CC79A7"
LIMIT = "#E69F00"
OTHER = "#56B4E9"

LEGEND_MARKER = 11
MACHINES = {"article": (ARTICLE, "D"), "h200": (MEASURED, "s"), "cpu-tiny": (OTHER, "^"), "h200-x2": (HIT, "v")}
FURTHER = ((MISS, "o"), (COMPUTED, "P"), (LIMIT, "X"))  # a reader's own machines, in the order of their names


def use_style() -> None:
    """Sets the style for every figure of this process. Sets no backend: a notebook keeps its inline one."""
    mpl.style.use(str(resources.files("kvlab") / "kvlab.mplstyle"))


def panels(n: int, *, titles: Sequence[str] = (), height: float = 3.6, width: float = 4.6) -> tuple[Figure, list[Axes]]:
    """A row of `n` axes with their titles."""
    use_style()
    figure, axes = plt.subplots(1, n, figsize=(width * n, height), squeeze=False)
    plt.close(figure)  # it stays usable; a notebook shows an open one at the end of each cell, half drawn
    for axis, title in zip(axes[0], titles, strict=False):
        axis.set_title(title)
    return figure, list(axes[0])


def computed_line(axis: Axes, x: Iterable[float], y: Iterable[float], label: str = "computed", **style):
    """A computed curve."""
    return axis.plot(list(x), list(y), color=style.pop("color", COMPUTED), zorder=2, label=label, **style)[0]


def computed_band(axis: Axes, low: float, high: float, label: str, *, across: str = "x"):
    """A computed interval, shaded over the whole axis."""
    span = axis.axvspan if across == "x" else axis.axhspan
    return span(low, high, color=LIMIT, alpha=0.28, lw=0, zorder=0, label=label)


def measured_points(
    axis: Axes,
    x: Iterable[float],
    y: Iterable[float | None],
    low: Iterable[float | None] | None = None,
    high: Iterable[float | None] | None = None,
    *,
    label: str = "measured",
    color: str = MEASURED,
    marker: str = "o",
    join: bool = False,
):
    """Measured points, with intervals where they are known. Missing points are left out."""
    x, y = list(x), list(y)
    low, high = ([None] * len(x) if ends is None else list(ends) for ends in (low, high))
    keep = [i for i, value in enumerate(y) if not _missing(value)]
    for i in keep:
        if not (_missing(low[i]) or _missing(high[i])):
            axis.plot([x[i], x[i]], [low[i], high[i]], color=color, lw=1.3, alpha=0.7, zorder=3)
    return axis.plot(
        [x[i] for i in keep],
        [y[i] for i in keep],
        marker=marker,
        ls="-" if join else "",
        lw=1,
        color=color,
        label=label if keep else None,
        zorder=4,
    )


def article_points(axis: Axes, x: Iterable[float], y: Iterable[float | None], label: str = "article"):
    """The article's published values: open diamonds."""
    pairs = [(a, b) for a, b in zip(x, y, strict=True) if not _missing(b)]
    return axis.plot(
        [a for a, _ in pairs],
        [b for _, b in pairs],
        marker="D",
        ls="",
        mfc="white",
        mec=ARTICLE,
        mew=1.6,
        label=label if pairs else None,
        zorder=5,
    )


def log2_axis(axis: Axes, values: Sequence[float]) -> None:
    """Concurrency on a base-2 axis with the measured values as plain-number ticks; of close ones the first is named."""
    axis.set_xscale("log", base=2)
    named: list[float] = []
    for value in sorted(values):
        if not named or value / named[-1] > 1.45:
            named.append(value)
    axis.set_xticks(named, [f"{value:,g}" for value in named])
    axis.minorticks_off()


def plain_log_y(axis: Axes) -> None:
    """A logarithmic y axis labelled 1, 10, 100 instead of powers; an axis without points says "not measured"."""
    if _empty(axis):
        return
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())


def save(figure: Figure, lab, name: str, results: Iterable = (), *, alt: str) -> Figure:
    """Writes figures/<machine>/<name>.{svg,png,json} (a what-if: aside) and returns the figure for display.

    The JSON names the notebook and the runs behind the picture; `alt` is its description in words. A panel without
    data says "not measured" and why.
    """
    results = list(results)
    separate_thousands(figure)
    plot_empty.say(figure, plot_empty.why(lab.machine, lab.section, results))
    folder = outcome.figures_dir(lab)
    with files.disk_errors(f"The figure {folder / name}"):
        for form, metadata in (("svg", {"Date": None, "Creator": "kvlab"}), ("png", {"Software": "kvlab"})):
            picture = io.BytesIO()
            figure.savefig(picture, format=form, metadata=metadata)
            files.write_bytes(folder / f"{name}.{form}", picture.getvalue())
    runs = [result.run.id for result in results if result.run is not None]
    about = {"notebook": lab.section, "machine": lab.machine, "runs": sorted(set(runs)), "alt": alt}
    store.write_text(folder / f"{name}.json", json.dumps(about, indent=1, sort_keys=True) + "\n")
    plt.close(figure)  # the cell's value shows it once; an open figure would be drawn a second time
    return figure


def separate_thousands(figure: Figure) -> None:
    """Plain ticks from 1,000 on as in the text."""
    for axis in (side for panel in figure.axes for side in (panel.xaxis, panel.yaxis)):
        plain = isinstance(axis.get_major_formatter(), mpl.ticker.ScalarFormatter)
        if plain and axis.get_scale() == "linear" and max(map(abs, axis.get_view_interval())) >= 1000:
            axis.set_major_formatter("{x:,g}")


def say_where_empty(axis: Axes) -> None:
    """Writes "not measured" into an axis without points."""
    _empty(axis)


def _empty(axis: Axes) -> bool:
    if any(not _missing(y) for line in axis.lines for y in line.get_ydata()):
        return False
    if not axis.texts:
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=COMPUTED)
    return True


def _missing(value) -> bool:
    return bool(pd.isna(value))


def plain_log_x(axis: Axes) -> None:
    """A logarithmic x axis labelled with plain numbers; an axis without points says "not measured"."""
    if _empty(axis):
        return
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
    low, high = axis.get_xlim()
    if high < 10 * low:  # within one decade the logarithmic locator names too many, or not the 1 that a line stands at
        few = mpl.ticker.LogLocator(subs=(1, 2, 3, 5))
        named = [tick for tick in few.tick_values(low, high) if low <= tick <= high]
        axis.xaxis.set_major_locator(few if 3 <= len(named) <= 5 else mpl.ticker.MaxNLocator(4))
    axis.xaxis.set_major_formatter(mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.6g}"))
    axis.xaxis.set_minor_formatter(mpl.ticker.NullFormatter())


def dumbbell(axis: Axes, y: float, computed: float | None, measured: float, *, color: str = MEASURED) -> None:
    """A computed bar and a measured dot in one row, with the residual in words."""
    if not _missing(computed):
        axis.plot([computed], [y], "|", ms=16, mew=2.5, color=COMPUTED, zorder=3)
        residual = f"{measured / computed - 1:+.1%}" if measured != computed else "exact"
        where = {"xytext": (9, 0), "textcoords": "offset points", "ha": "left", "va": "center"}
        axis.annotate(residual, (max(computed, measured), y), fontsize=9, **where)  # to the left stand the rows' names
    axis.plot([measured], [y], "o", color=color, zorder=4)
    axis.margins(x=0.3)  # room for the residual beside the outermost dot


def named_rows(axis: Axes, names: Sequence[str]) -> None:
    """A name a row, the first on top, with room for the bars of the outermost rows."""
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(max(len(names), 1) - 0.3, -0.7)


def running_over_time(axis: Axes, run: store.Run | None) -> None:
    """Requests running and waiting over a run's time; says so where there is no run."""
    axis.set_xlabel("seconds")
    axis.set_ylabel("requests")
    if run is None:
        _empty(axis)
        return
    samples = run.samples()
    t = samples["t_s"] - samples["t_s"].min()
    axis.step(t, samples["running"], where="post", color=MEASURED, label="running")
    axis.step(t, samples["waiting"], where="post", color=MISS, label="waiting", lw=1.2)
    axis.set_ylim(bottom=0)


def machine_style(machine: str) -> dict[str, str]:
    """Colour and marker of a machine, the same in every picture and on every page; the article's are open."""
    further = sorted(set(store.machines()) - set(MACHINES))
    at = further.index(machine) if machine in further else 0
    color, marker = MACHINES.get(machine) or FURTHER[at % len(FURTHER)]
    return {"color": color, "marker": marker, "mfc": "white" if machine == "article" else color}


def machine_points(axis: Axes, x, y, machine: str, *, own: str):
    """One machine's points, joined; the reader's own machine is drawn strongest."""
    width, zorder = (2.4, 5) if machine == own else (1.2, 3)
    return axis.plot(list(x), list(y), lw=width, label=machine, zorder=zorder, **machine_style(machine))


def falls_beyond(x: Iterable[float], y: Iterable[float], at: float = 1.0) -> bool:
    """Whether a curve is somewhere beyond `at` lower than its highest point up to there."""
    points = list(zip(x, y, strict=True))
    before, beyond = [b for a, b in points if a <= at], [b for a, b in points if a > at]
    return bool(before and beyond) and min(beyond) < max(before)


def hit_and_miss(axis: Axes, y: float, miss: float, hit: float) -> None:
    """Miss and hit of one machine in one row, with their ratio."""
    first = y == 0
    axis.plot([hit, miss], [y, y], color="#bbbbbb", lw=2, zorder=2)
    axis.plot([miss], [y], "o", color=MISS, zorder=3, label="miss" if first else None)
    axis.plot([hit], [y], "o", color=HIT, zorder=3, label="hit" if first else None)
    middle = math.sqrt(hit * miss)
    axis.annotate(f"{miss / hit:.1f}×", (middle, y), xytext=(0, 6), textcoords="offset points", ha="center")


def shared_legend(figure: Figure, *axes: Axes) -> None:
    """One legend under all the panels, from the labels of one or several of them."""
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    legend = figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
    for handle in legend.legend_handles:
        if isinstance(handle, mpl.lines.Line2D) and handle.get_markersize() > LEGEND_MARKER:
            handle.set_markersize(LEGEND_MARKER)  # the tall bar of a computed value would reach into the next row


def keyed_legend(figure: Figure, colours: Mapping[str, str], styles: Mapping[str, Mapping[str, Any]]) -> None:
    """A legend of two keys under the panels: what a colour means, and what a line or marker means.

    `styles`: label -> what a `Line2D` takes. One entry a combination would fill a page.
    """
    line = mpl.lines.Line2D
    handles = [line([], [], color=COMPUTED, label=label, **style) for label, style in styles.items()]
    if len(colours) > 1:
        handles = [mpl.patches.Patch(color=colour, label=label) for label, colour in colours.items()] + handles
    figure.legend(handles=handles, loc="outside lower center", ncols=max(len(colours), len(styles)))
