"""Pictures of starts and of what they buy: stacked phases, gains of graphs or compilation, ready times, capacities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes

from kvlab import claims, plot, store
from kvlab.startup import GROUPS

ORDINALS = ("first", "second", "third")
COLOURS = ("#999999", "#56B4E9", "#E69F00", "#D55E00", "#009E73", "#CC79A7", "#F0E442", "#0072B2")


def stacked_bar(axis: Axes, y: float, seconds: Mapping[str, float], *, label: bool = False) -> None:
    """One start as a bar of its phases, with the total at its end."""
    left = 0.0
    for name, colour in zip(GROUPS, COLOURS, strict=True):
        width = seconds.get(name, 0.0)
        axis.barh(y, width, left=left, height=0.62, color=colour, label=name if label else None, zorder=3)
        left += width
    axis.annotate(f"{left:.0f} s", (left, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=9)


def stated(machine: str, section: str, quantity: str) -> list[dict[str, Any]]:
    """Conditions and measured value of each claim of that quantity that has one."""
    table = claims.read(store.machine_dir(machine))
    table = table[(table["section"] == section) & (table["quantity"] == quantity)].dropna(subset="measured")
    conditions = table["conditions"].fillna("")
    pairs = zip(conditions, table["measured"], strict=True)
    return [claims.parse_conditions(text) | {"value": float(value)} for text, value in pairs]


def stated_bars(machine: str) -> list[tuple[str, dict[str, float]]]:
    """(label, seconds by phase) of each start that a machine's claims hold."""
    bars: dict[str, dict[str, float]] = {}
    names = {name.replace(" ", "-"): name for name in GROUPS}
    for found in stated(machine, "startup", "phase_s"):
        start = f" {found['start']}" if "start" in found else ""
        bar = bars.setdefault(f"{machine} {found['server']}, {found['caches']}{start}", {})
        bar[names[found["phase"]]] = found["value"]
    return list(bars.items())


def gains(machine: str) -> list[dict[str, Any]]:
    """machine, model, c and gain (on / off - 1) of throughput by graphs or compilation.

    The claim of the gain, which pairs the runs; where there is none, from the throughput of both arms.
    """
    found = pd.DataFrame(stated(machine, "cuda_graphs", "throughput_tok_s"))
    said = {(g["model"], int(g["c"])): g["value"] for g in stated(machine, "cuda_graphs", "gain_throughput")}
    rows = []
    for switch in ("graphs", "compile"):
        if switch not in found:
            continue
        table = found.pivot_table(index=["model", "c"], columns=switch, values="value").reset_index()
        if {"on", "off"} <= set(table):
            table = table.dropna(subset=["on", "off"])
            table = table.assign(machine=machine, c=table["c"].astype(int), gain=table["on"] / table["off"] - 1)
            rows += table[["machine", "model", "c", "gain"]].to_dict("records")
    rows = [row | {"gain": said.get((row["model"], row["c"]), row["gain"])} for row in rows]
    return sorted(rows, key=lambda row: (row["model"], row["c"]))


def foretold(machine: str) -> list[tuple[float, dict[str, str]]]:
    """(computed gain, conditions) of each gain that a machine's claims foretell."""
    table = claims.read(store.machine_dir(machine))
    table = table[(table["section"] == "cuda_graphs") & (table["quantity"] == "gain_throughput")]
    table = table.dropna(subset=["computed", "measured"])
    pairs = zip(table["computed"], table["conditions"], strict=True)
    return [(float(computed), claims.parse_conditions(text)) for computed, text in pairs]


def draw_gains(axis: Axes, machines: Sequence[str]) -> None:
    """Throughput as a multiple of eager's on a logarithmic axis, the gain in words; a row a machine, model and load."""
    rows = [row for machine in machines for row in gains(machine)]
    for y, row in enumerate(rows):
        ratio, style = 1 + row["gain"], {"xytext": (8, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
        axis.plot([1, ratio], [y, y], color="#bbbbbb", lw=2, zorder=2)
        axis.plot([ratio], [y], **plot.machine_style(row["machine"]))
        axis.annotate(f"{row['gain']:+.0%}", (ratio, y), **style)
    _rows(axis, [f"{row['machine']}, {row['model']}, c={row['c']}" for row in rows])
    if rows:
        ratios = [1.0, *(1 + row["gain"] for row in rows)]
        axis.set_xlim(0.85 * min(ratios), 2.4 * max(ratios))  # room for the words on the right
    plot.plain_log_x(axis)
    if rows:
        axis.axvline(1, color=plot.COMPUTED, lw=1)
    axis.set_xlabel("throughput ÷ eager's")


def draw_ready(axis: Axes, machines: Sequence[str]) -> None:
    """Ready times with and without graphs or compilation, one row a machine, model and start."""
    rows: dict[str, dict[str, float]] = {}
    for machine in machines:
        for found in stated(machine, "cuda_graphs", "ready_s"):
            start = f", start {found['start']}" if "start" in found else ""
            arm = found.get("graphs") or found.get("compile")
            rows.setdefault(f"{machine}, {found['model']}{start}", {})[arm] = found["value"]
    for y, ready in enumerate(rows.values()):
        axis.plot(list(ready.values()), [y] * len(ready), color="#bbbbbb", lw=2, zorder=2)
        for arm, colour, name in (("off", plot.OTHER, "eager"), ("on", plot.MEASURED, "graphs or compiled")):
            if arm in ready:
                axis.plot([ready[arm]], [y], "o", color=colour, label=name if y == 0 else None, zorder=3)
    _rows(axis, list(rows))
    axis.set_xlabel("seconds")
    axis.set_xlim(left=0)
    if rows:
        axis.legend(loc="upper left", bbox_to_anchor=(0, -0.16), ncols=2)


def draw_capacity(axis: Axes, series: Mapping[str, Sequence[float]]) -> None:
    """KV capacity of each start as a multiple of the first one's; one line a server. Says so where there is none."""
    for name, values in series.items():
        style = plot.machine_style(name.partition(",")[0])
        x = range(1, len(values) + 1)
        line = axis.plot(x, [v / values[0] for v in values], lw=1.2, **style)[0]
        end = (len(values), line.get_ydata()[-1])
        axis.annotate(name, end, xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    longest = max((len(values) for values in series.values()), default=2)
    axis.axhline(1, color=plot.COMPUTED, lw=1)
    said = "computed: caches change nothing"
    style = {"ha": "right", "va": "top", "fontsize": 8}
    axis.annotate(said, (longest + 1.3, 1), xytext=(-4, -4), textcoords="offset points", **style)
    axis.margins(y=0.12)
    axis.set_xticks(range(1, longest + 1), [*ORDINALS, *(f"{n}th" for n in range(4, longest + 1))][:longest])
    axis.set_xlim(0.7, longest + 1.3)
    axis.set_xlabel("start")
    axis.set_ylabel("capacity ÷ first start's")


def _rows(axis: Axes, labels: list[str]) -> None:
    plot.named_rows(axis, labels)
