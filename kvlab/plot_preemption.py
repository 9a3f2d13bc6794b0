"""Pictures of the KV pool under pressure: over time, as a map, and what a resumed request costs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes

from kvlab import beside, plot, store

PER_100 = (1e-9, 5, 10, 20, 40, 80, 1e9)  # classes of preemptions per 100 requests


def load_over_time(axes: Sequence[Axes], run: store.Run | None, computed: dict[str, Sequence[float]] | None) -> None:
    """Running and waiting requests; KV use; preemptions so far. Points are scrapes, lines the computed account.

    `computed` holds t_s, running, waiting, kv_usage and preemptions, one value a step.
    """
    for axis, names in zip(axes, (("running", "waiting"), ("kv_usage",), ("preemptions",)), strict=True):
        axis.set_xlabel("seconds")
        for name in names:
            color = {"waiting": plot.MISS, "preemptions": plot.ARTICLE}.get(name, plot.MEASURED)
            if computed is not None:
                label = f"{name}, computed" if len(names) > 1 else "computed"
                style = {"color": color, "lw": 1.1, "alpha": 0.55, "drawstyle": "steps-post"}
                plot.computed_line(axis, computed["t_s"], computed[name], label, **style)
            if run is not None:
                t, values = _since_start(run, name)
                label = f"{name}, measured" if len(names) > 1 else "measured"
                axis.plot(t, values, "o", ms=2.6, color=color, label=label)
        axis.set_ylim(bottom=0)
        say_empty(axis)


def counted_points(axis: Axes, rates: pd.DataFrame, machine: str, *, own: str) -> None:
    """Computed and measured evictions of a machine's loads; the label says how many of them evict nobody."""
    if not len(rates):
        return
    none = int((rates == 0).all(axis=1).sum())
    said = f"{machine}, {len(rates)} loads" + (f" ({none} without eviction)" if none else "")
    line = plot.machine_points(axis, rates["computed"], rates["measured"], machine, own=own)[0]
    line.set(linestyle="", markersize=8, label=said, clip_on=False)


def counted_line(axis: Axes) -> None:
    """The line on which the count was exact, axes and legend; without points "not measured"."""
    highest = max((max(*line.get_xdata(), *line.get_ydata()) for line in axis.lines), default=0.0)
    if axis.lines:
        top = 1.1 * max(highest, 1.0)
        axis.plot([0, top], [0, top], "--", color=plot.LIMIT, lw=1.8, zorder=1, label="measured as computed")
        axis.set(xlim=(0, top), ylim=(0, top))
        axis.legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    say_empty(axis)
    axis.set_xlabel("computed: blocks counted")
    axis.set_ylabel("measured")


def say_empty(axis: Axes) -> None:
    """An axis without lines says "not measured"."""
    if not any(len(line.get_xdata()) for line in axis.lines):
        axis.text(0.5, 0.5, "not measured", transform=axis.transAxes, ha="center", color=plot.COMPUTED)


def _since_start(run: store.Run, name: str) -> tuple[np.ndarray, np.ndarray]:
    """A column of the samples during the measured phase; a counter counts from there."""
    requests, samples = run.requests(), run.samples()
    began = requests.loc[requests["phase"] == "measure", "start_s"].min()
    inside = samples[samples["t_s"] >= began]
    values = inside[name].to_numpy(dtype=float, na_value=np.nan)
    before = samples.loc[samples["t_s"] < began, name]
    zero = float(before.iloc[-1]) if name == "preemptions" and len(before) else 0.0
    return inside["t_s"].to_numpy(dtype=float) - float(began), values - zero


def map_panel(axis: Axes, inputs: Sequence[int], clients: Sequence[int], table: np.ndarray, border: Sequence[float]):
    """One map: computed preemptions per 100 requests as colour; hatched where requests only queue.

    `table` [clients, inputs]; null where a request does not fit at all, -1 where nobody waits. `border` is the clients
    per input up to which every request fits to its end; it is drawn at the edges of the cells, which stand for points.
    """
    colors = mpl.colors.ListedColormap(mpl.colormaps["YlOrRd"](np.linspace(0.12, 0.95, len(PER_100) - 1)))
    norm = mpl.colors.BoundaryNorm(PER_100, colors.N)
    shown = np.ma.masked_where(~(table > 0), table)
    mesh = axis.pcolormesh(np.arange(len(inputs) + 1), np.arange(len(clients) + 1), shown, cmap=colors, norm=norm)
    for row, column in np.argwhere(table == 0):
        axis.add_patch(mpl.patches.Rectangle((column, row), 1, 1, hatch="////", ec="#c9c9c9", fc="none", lw=0))
    for row, column in np.argwhere(np.isnan(table)):
        axis.text(column + 0.5, row + 0.5, "×", ha="center", va="center", fontsize=9, color="#bbbbbb")
    heights = [sum(n <= value for n in clients) for value in border]
    line = axis.step([0, *range(1, len(inputs) + 1)], [heights[0], *heights], where="pre", color=plot.COMPUTED, lw=2)
    line[0].set(label="below: all fit to their end", clip_on=False, zorder=4)
    axis.set_xticks(np.arange(len(inputs)) + 0.5, [f"{value:,}" for value in inputs])
    axis.set_yticks(np.arange(len(clients)) + 0.5, [f"{value}" for value in clients])
    axis.set_ylim(0, len(clients))
    axis.grid(False)
    axis.set_xlabel("input tokens")
    return mesh


def cap_notes(axis: Axes, machine: str, points: Iterable[tuple[float, float, int]]) -> None:
    """Says at each point (x, y, cap) whose cap exceeds its largest full graph how many requests that graph holds."""
    for x, y, cap in points:
        graph = beside.value(machine, "max_num_seqs", "largest_full_graph", max_num_seqs=cap)
        if graph is not None and graph < cap:
            said, style = f"{machine}, cap {cap}: largest\nfull graph holds {graph:.0f}", {"va": "top", "fontsize": 8.5}
            axis.annotate(said, (x, y), xytext=(0, -9), textcoords="offset points", ha="center", **style)


def map_point(axis: Axes, x: int, y: int, inputs: Sequence[int], clients: Sequence[int], per_100: float) -> None:
    """A measured point: filled where requests were preempted, open where none was; preemptions per 100 requests."""
    where = (_position(x, inputs), _position(y, clients))
    inside, ink = (plot.MEASURED, "white") if per_100 > 0 else ("white", plot.MEASURED)
    axis.plot(*where, "o", ms=15, mec=plot.MEASURED, mfc=inside, mew=1.8, zorder=5)
    axis.text(*where, f"{per_100:.2g}", ha="center", va="center_baseline", fontsize=8, zorder=6, color=ink)


def map_legend(figure, mesh, axes: Sequence[Axes]) -> None:
    """The colour scale of all map panels."""
    bar = figure.colorbar(mesh, ax=list(axes), ticks=PER_100[:-1], shrink=0.9, pad=0.02)
    bar.ax.set_yticklabels(["0", *(f"{edge:g}" for edge in PER_100[1:-1])])
    bar.set_label("preemptions per 100 requests", fontsize=9)
    queue = mpl.patches.Patch(hatch="////", ec="#c9c9c9", fc="none", lw=0, label="queue only")
    handles = [*axes[0].get_legend_handles_labels()[0], queue]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)


def _position(value: float, grid: Sequence[int]) -> float:
    """Where a value lies between cells of a grid that is drawn evenly: cell k is centred at k + 0.5."""
    logs = np.log2(np.asarray(grid, dtype=float))
    steps = np.arange(len(grid)) + 0.5
    at = np.log2(max(value, 1e-9))
    if at <= logs[0]:
        return float(max(0.0, steps[0] + (at - logs[0]) / (logs[1] - logs[0])))
    if at >= logs[-1]:
        return float(min(len(grid), steps[-1] + (at - logs[-1]) / (logs[-1] - logs[-2])))
    return float(np.interp(at, logs, steps))


def paired_bars(axis: Axes, arms: dict[str, tuple[float | None, Sequence[float]]], unit: str) -> None:
    """Computed as a wide bar, each measured pair as a dot, their mean in words beside them: one place for each arm."""
    for x, (computed, measured) in enumerate(arms.values()):
        first = x == 0
        if computed is not None:
            ends = [x - 0.3, x + 0.3]
            axis.plot(ends, [computed] * 2, color=plot.COMPUTED, lw=2.2, label="computed" if first else None)
        dots = np.linspace(-0.12, 0.12, len(measured)) if len(measured) > 1 else [0.0] * len(measured)
        axis.plot(
            [x + d for d in dots],
            measured,
            "o",
            color=plot.MEASURED,
            label="measured" if first and len(measured) else None,
            zorder=4,
        )
        if len(measured):
            mean = float(np.mean(measured))
            axis.text(x + 0.33, mean, f"mean {mean:,.0f}", va="center", color=plot.MEASURED, fontsize=9)
    axis.set_xticks(range(len(arms)), list(arms))
    axis.set_xlim(-0.6, len(arms) - 0.2)
    axis.set_ylim(bottom=0)
    tops = [max([*measured, computed or 0]) for computed, measured in arms.values()]
    if max(tops):
        axis.set_ylim(0, 1.25 * max(tops))
    axis.set_ylabel(unit)


TIME_COLORS = {
    "in front of the server": "#999999",
    "engine queue": plot.MISS,
    "preempted": plot.ARTICLE,
    "served": plot.HIT,
}


def time_bars(axis: Axes, bars: dict[str, dict[str, float | None]]) -> None:
    """A stacked bar of seconds for each arm; an arm without numbers says "not measured"."""
    labelled = set()
    for x, parts in enumerate(bars.values()):
        base = 0.0
        for name, color in TIME_COLORS.items():
            if value := parts.get(name):
                axis.bar(x, value, 0.6, base, color=color, label=None if name in labelled else name)
                base += value
                labelled.add(name)
        if not base:
            axis.text(x, 0.02, "not\nmeasured", ha="center", fontsize=8, color=plot.COMPUTED)
    axis.set_xticks(range(len(bars)), list(bars))
    axis.set_xlim(-0.6, len(bars) - 0.4)
    axis.set_ylabel("s, mean of a request")
    if labelled:
        axis.set_ylim(0, axis.get_ylim()[1] * 1.35)
        axis.legend(loc="upper center", ncols=2, fontsize=8.5)
