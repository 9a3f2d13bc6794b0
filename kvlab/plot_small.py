"""Small pictures for the first screen: one panel each, from the claims of every machine, readable at 260 pixels."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence

import matplotlib as mpl
import matplotlib.pyplot as plt
import pandas as pd
from matplotlib.axes import Axes

from kvlab import beside, formats, plot, plot_empty, plot_start, pressure
from kvlab.claims import parse_conditions

SIZE = (3.3, 1.9)  # inches; at 260 pixels wide a letter of 9 points stays 7 pixels high

ROOM_AND_SPEED = ((plot.HIT, "o"), (plot.MISS, "s"))

ONE_OF_TWO = "h200-x2"  # one server on one of its GPUs took the load, with nothing beside it


def draw(key: str, own: str, machines: Sequence[str]) -> str:
    """The picture of a finding as base64 of an SVG; "not measured" where no machine has its claims."""
    plot.use_style()
    with mpl.rc_context({"font.size": 9, "axes.labelsize": 9, "legend.fontsize": 8, "axes.titlesize": 9}):
        figure, axis = plt.subplots(figsize=SIZE)
        plt.close(figure)
        DRAWN[key](axis, own, machines)
        plot.separate_thousands(figure)
        plot_empty.say(figure, None)
        out = io.BytesIO()
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": "kvlab"})
    return base64.b64encode(out.getvalue()).decode()


def _rows(axis: Axes, names: Sequence[str], xlabel: str) -> None:
    plot.named_rows(axis, names)
    axis.set_xlabel(xlabel)


def _pairs(axis: Axes, machines: Sequence[str], values: Callable[[str], tuple | None], labels: Sequence[str]) -> None:
    """A row a machine with two ends in ms and their ratio; `labels` name the ends."""
    names = []
    for machine in machines:
        ends = values(machine)
        if ends and all(ends):
            slow, fast = (end * 1e3 for end in ends)
            y = len(names)
            axis.plot([fast, slow], [y, y], color="#bbbbbb", lw=2)
            axis.plot([slow], [y], "o", color=plot.MISS, label=labels[0] if y == 0 else None)
            axis.plot([fast], [y], "o", color=plot.HIT, label=labels[1] if y == 0 else None)
            axis.annotate(
                f"{slow / fast:.1f}×", ((slow * fast) ** 0.5, y), xytext=(0, 4), textcoords="offset points", ha="center"
            )
            names.append(machine)
    _rows(axis, names, "ms")
    plot.plain_log_x(axis)
    if names:
        axis.figure.legend(loc="outside upper center", ncols=2)


def _capacity(axis: Axes, own: str, machines: Sequence[str]) -> None:
    names = []
    for machine in machines:
        points = beside.points(machine, "kv_capacity", "capacity_tokens", "block").dropna(subset="measured")
        for row in points.head(2).to_dict("records"):
            plot.dumbbell(
                axis, len(names), row["computed"], row["measured"], color=plot.machine_style(machine)["color"]
            )
            server = parse_conditions(row["conditions"]).get("server", "").removesuffix("-first-start")
            names.append(f"{machine} {server}")
    axis.margins(x=0.4)
    for line in axis.lines:
        line.set_markersize(12 if line.get_marker() == "|" else 5)
    _rows(axis, names, "tokens")
    axis.xaxis.set_major_locator(mpl.ticker.MaxNLocator(3))


def _points(machine: str, section: str, **where):
    points = beside.points(machine, section, "throughput_tok_s", "c", **{"in": 512, "out": 128}, **where)
    return points.dropna(subset="measured").groupby("x", as_index=False)["measured"].mean()


def _fit(machine: str) -> float | None:
    where = {"in": 512, "out": 128}
    low = beside.value(machine, "load", "requests_that_fit_low", "computed", **where)
    return low or beside.article_fit(machine, **where)


def _load(axis: Axes, own: str, machines: Sequence[str]) -> None:
    curves = [(machine, _points(machine, "load"), _fit(machine)) for machine in machines]
    tokens = beside.value(ONE_OF_TWO, "several_gpus", "capacity_tokens", "computed", arm="one")
    curves.append((ONE_OF_TWO, _points(ONE_OF_TWO, "several_gpus", arm="one"), tokens and tokens / (512 + 128)))
    for machine, points, fit in curves:
        if fit and len(points):
            share = points["measured"] / points["measured"].max()
            plot.machine_points(axis, points["x"] / fit, share, machine, own=own)[0].set_markersize(4)
    if axis.lines:
        axis.axvline(1, color=plot.LIMIT, lw=2, zorder=0)
        axis.set_ylim(bottom=0)
        axis.legend(loc="lower right")
    axis.set_xlabel("clients ÷ requests that fit")
    axis.set_ylabel("share of peak")
    plot.plain_log_x(axis)


def _preemption(axis: Axes, own: str, machines: Sequence[str]) -> None:
    highest = 0.0
    for machine in machines:
        counted = _published([own, *machines]) if machine == "article" else pressure.counted(machine)
        if len(counted):
            line = plot.machine_points(axis, counted["computed"], counted["measured"], machine, own=own)[0]
            line.set(linestyle="", markersize=6, zorder=3)
            highest = max(highest, counted.to_numpy().max())
    if axis.lines:
        axis.plot([0, highest], [0, highest], "--", color=plot.LIMIT, lw=1.5, label="as counted")
        axis.legend(loc="lower right")
    axis.set_xlabel("computed, of 100 requests")
    axis.set_ylabel("evicted")


def _published(machines: Sequence[str]) -> pd.DataFrame:
    """The article's loads as the first of the machines counts them that has: the count is the same on all."""
    counts = (pressure.published(machine) for machine in machines)
    return next((table for table in counts if len(table)), pressure.counted("article"))


def _fp8(axis: Axes, own: str, machines: Sequence[str]) -> None:
    names = []
    for machine in machines:
        speeds = formats.base_and_fp8(machine, "throughput_tok_s", input="short")
        found = {"room": formats.capacity_ratio(machine), "speed": speeds and speeds[1] / speeds[0]}
        if found["room"] is None:
            continue
        y = len(names)
        for (name, ratio), (colour, marker) in zip(found.items(), ROOM_AND_SPEED, strict=True):
            if ratio is not None:
                label = None if axis.get_legend_handles_labels()[1].count(name) else name
                axis.plot([ratio], [y], marker, color=colour, label=label, zorder=3)
        axis.annotate(
            f"{found['room']:.1f}×", (found["room"], y), xytext=(6, 0), textcoords="offset points", va="center"
        )
        names.append(machine)
    if names:
        axis.axvline(1, color=plot.LIMIT, lw=1.5, zorder=0)
        axis.figure.legend(loc="outside upper center", ncols=2)
        axis.set_xlim(0, axis.get_xlim()[1] * 1.15)
    _rows(axis, names, "fp8 ÷ base")


def _prefix(axis: Axes, own: str, machines: Sequence[str]) -> None:
    def ends(machine: str) -> tuple[float | None, float | None]:
        return tuple(beside.value(machine, "prefix_cache", f"ttft_{kind}_s", prefix=3000) for kind in ("miss", "hit"))

    _pairs(axis, machines, ends, ("miss", "hit"))


def _chunk(axis: Axes, own: str, machines: Sequence[str]) -> None:
    for machine in machines:
        points = beside.points(machine, "chunked_prefill", "itl_max_s", "chunk").dropna(subset="measured")
        inputs = [int(parse_conditions(text)["in"]) for text in points["conditions"]]
        if inputs:  # the longest input of a machine: where the effect is largest
            points = points[[tokens == max(inputs) for tokens in inputs]]
            line = plot.machine_points(axis, points["x"], points["measured"] * 1e3, machine, own=own)[0]
            line.set(markersize=4, label=f"{machine}, {max(inputs):,} in")
    if axis.lines:
        plot.log2_axis(axis, sorted({float(x) for line in axis.lines for x in line.get_xdata()})[::2])
        plot.plain_log_y(axis)
        axis.set_ylim(bottom=3)  # room for the legend
        axis.legend(loc="lower right")
    axis.set_xlabel("chunk, tokens")
    axis.set_ylabel("longest gap, ms")


def _graphs(axis: Axes, own: str, machines: Sequence[str]) -> None:
    rows: dict[str, dict[int, float]] = {}
    for found in [found for machine in machines for found in plot_start.gains(machine)]:
        rows.setdefault(f"{found['machine']} {found['model']}", {})[found["c"]] = 1 + found["gain"]
    counts = sorted({c for row in rows.values() for c in row})
    for c, colour, marker in zip((counts[:1] + counts[1:][-1:]), (plot.MEASURED, plot.HIT), "os", strict=False):
        points = [(row[c], y) for y, row in enumerate(rows.values()) if c in row]
        axis.plot(*zip(*points, strict=True), marker, ls="", color=colour, ms=5, label=f"{c} client{'s' * (c > 1)}")
    computed = [(1 + g, f"{machine} {at['model']}") for machine in machines for g, at in plot_start.foretold(machine)]
    marks = [(ratio, list(rows).index(name)) for ratio, name in computed if name in rows]
    if marks:
        axis.plot(*zip(*marks, strict=True), "|", ls="", ms=11, mew=2, color=plot.COMPUTED, label="computed")
    if rows:
        axis.axvline(1, color=plot.LIMIT, lw=1.5, zorder=0)
        axis.figure.legend(loc="outside upper center", ncols=3, columnspacing=1, handletextpad=0.2)
    _rows(axis, list(rows), "throughput ÷ eager's")
    plot.plain_log_x(axis)


def _service(axis: Axes, own: str, machines: Sequence[str]) -> None:
    line = beside.points("article", "service_hit_rate", "hit_ratio", "prefixes").dropna(subset="computed")
    line = line.groupby("x", as_index=False)["computed"].mean()
    if len(line):
        plot.computed_line(axis, line["x"], 100 * line["computed"], "capacity ÷ prefixes")
    for step, machine in enumerate(machines):
        points = beside.points(machine, "service_hit_rate", "hit_ratio", "prefixes").dropna(subset="measured")
        if len(points):
            apart = points["x"] + 0.6 * (step - (len(machines) - 1) / 2)  # equal points would hide each other
            dots = plot.machine_points(axis, apart, 100 * points["measured"], machine, own=own)[0]
            dots.set(linestyle="", markersize=4)
    axis.set_xlabel("prefixes in use")
    axis.set_ylabel("requests that hit, %")
    if axis.lines:
        axis.legend(loc="upper right")


DRAWN = {
    "capacity": _capacity,
    "load": _load,
    "preemption": _preemption,
    "fp8": _fp8,
    "prefix": _prefix,
    "chunk": _chunk,
    "graphs": _graphs,
    "service": _service,
}
