"""The load generator measured beside others (`make bench-client`): the table, its picture, and what it says."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator

from kvlab import files, pages, plot, store
from kvlab.errors import StoreError

AGAIN = "restore it from git, or remove it and measure again: make bench-client"
READER = "null reader"  # the least that a client can do: not a tool, the floor under all of them
PACED = "paced"
KEPT_UP = 0.97  # of the events that were offered
TTFT, ITL = "ttft_added", "itl_added"
RATES = {"vllm bench": 2.0, "guidellm": 6.0, "aiperf": 6.0}  # times their events per CPU-second: the aim
TIMES_S = {"ttft_added_p50_s": 0.001, "ttft_added_p99_s": 0.010, "itl_added_p99_s": 0.001}  # at most: the aim


@dataclass(frozen=True)
class Aim:
    """What was aimed at, what came out, and `bound`: the same of a C program that only reads (None: not measured).

    `of` a tool: kvlab's events per CPU-second over the tool's, at least; `of` a column of times: s added, at most.
    """

    of: str
    value: float
    aim: float
    bound: float | None

    @property
    def is_rate(self) -> bool:
        """Whether it is a ratio of rates, not a time."""
        return self.of in RATES

    @property
    def reached(self) -> bool:
        """Whether the measurement is as good as the aim."""
        return bool(self.value >= self.aim if self.is_rate else self.value <= self.aim)


def peers() -> pd.DataFrame | None:
    """data/client/peers.csv, one row a tool and scenario; None where nothing was measured."""
    return table_of("peers", ("tool", "scenario", "events_per_cpu_s"))


def table_of(name: str, columns: Collection[str]) -> pd.DataFrame | None:
    """data/client/NAME.csv; None where nothing was measured. StoreError where it is no table of these columns."""
    path = store.root() / "client" / f"{name}.csv"
    try:
        table = pd.read_csv(path) if path.is_file() else None
        if table is not None and (missing := [column for column in columns if column not in table]):
            raise ValueError(f"it has no column {missing[0]}")
    except (OSError, ValueError) as error:  # pandas' own errors are ValueErrors
        raise StoreError(f"{path} cannot be read: {error}", "it was cut off, or edited", AGAIN) from None
    return table


def record(name: str) -> dict[str, Any] | None:
    """Another measurement of the load generator: "open" (10,000 streams) or "memory"; None where there is none."""
    path = store.root() / "client" / f"{name}.json"
    return files.read_json(path, AGAIN) if path.is_file() else None


def paced(table: pd.DataFrame) -> pd.DataFrame:
    """The paced rows of tools that were measured, fastest last, as a picture draws them from below."""
    rows = table[(table["scenario"] == PACED) & table["events_per_cpu_s"].notna()]
    return rows.sort_values("events_per_cpu_s", ignore_index=True)


def aims(table: pd.DataFrame) -> list[Aim]:
    """Every aim that the paced rows can judge; none where the load generator itself was not measured."""
    rows = paced(table).set_index("tool")
    if "kvlab" not in rows.index:
        return []
    own, floor = rows.loc["kvlab"], rows.loc[READER] if READER in rows.index else {}
    judged = []
    for tool, aim in RATES.items():
        if tool in rows.index:
            rate = rows.loc[tool, "events_per_cpu_s"]
            bound = _over(_known(floor, "events_per_cpu_s"), rate)
            judged.append(Aim(tool, own["events_per_cpu_s"] / rate, aim, bound))
    for name, aim in TIMES_S.items():
        if (value := _known(own, name)) is not None:
            judged.append(Aim(name, value, aim, _known(floor, name)))
    return judged


def said_of_aim(aim: Aim, words: Mapping[str, str]) -> str:
    """One aim in words: `words["rate"]` or `words["time"]` holds the places of, value, aim and bound."""
    form = words["rate" if aim.is_rate else "time"]
    scale = 1 if aim.is_rate else 1e3
    value, wanted, bound = (None if v is None else _short(v * scale) for v in (aim.value, aim.aim, aim.bound))
    return form.format(of=words.get(aim.of, aim.of), value=value, aim=wanted, bound=bound or words["unknown"])


def page(words: Mapping[str, Any]) -> dict[str, Any] | None:
    """What the report shows: the paced rows with kvlab first and the C reader last, and the aims reached and missed.

    `words`: the language's table `instrument`. None where nothing was measured.
    """
    table = peers()
    if table is None or not len(aims(table)):
        return None
    rows = table[table["scenario"] == PACED].set_index("tool")
    others = [tool for tool in rows.index if tool not in ("kvlab", READER)]
    shown = [_shown(tool, rows) for tool in ("kvlab", *others, READER) if tool in rows.index]
    told = {True: [], False: []}
    for aim in aims(table):
        told[aim.reached].append(said_of_aim(aim, words))
    own, about = rows.loc["kvlab"], record("peers") or {}
    where = {"streams": int(own["streams"]), "date": str(own["measured_utc"])[:10], "cpu": about.get("cpu") or "?"}
    return {"rows": shown, "reached": told[True], "missed": told[False], "intro": words["intro"].format(**where)}


def _shown(tool: str, rows: pd.DataFrame) -> dict[str, Any]:
    row, own = rows.loc[tool], float(rows.loc["kvlab", "events_per_cpu_s"])
    names = ("events_per_cpu_s", "events_per_cpu_s_low", "events_per_cpu_s_high", "events_per_s", *TIMES_S)
    known = {name: _known(row, name) for name in names}
    known |= {name: None if known[name] is None else _milliseconds(known[name] * 1e3) for name in TIMES_S}
    return known | {"tool": tool, "version": row["version"], "times": _over(own, known["events_per_cpu_s"])}


def _known(row: Mapping[str, Any], name: str) -> float | None:
    value = row.get(name)
    return None if value is None or pd.isna(value) else float(value)


def _over(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def draw(axes: list[Axes], table: pd.DataFrame) -> None:
    """Events per CPU-second as bars, and what each tool adds to the time to the first token as p50 and p99 dots."""
    rows = paced(table[table["tool"] != READER])
    speed, added = axes
    for y, row in rows.iterrows():
        color = plot.MEASURED if row["tool"] == "kvlab" else plot.OTHER
        speed.barh(y, row["events_per_cpu_s"] / 1e3, color=color, height=0.6)
        ends = [row["events_per_cpu_s_low"] / 1e3, row["events_per_cpu_s_high"] / 1e3]
        speed.plot(ends, [y, y], color="#333333", lw=1.5)
        speed.annotate(
            f"{row['events_per_cpu_s'] / 1e3:.0f} k", (max(ends), y), (6, 0), va="center", textcoords="offset points"
        )
        times = [max(row[f"{TTFT}_{q}_s"] * 1e3, 0.01) for q in ("p50", "p99")]
        added.plot(times, [y, y], color=color, lw=2)
        added.plot(times[:1], [y], "o", color=color)
        added.plot(times[1:], [y], "o", color=color, mfc="white")
        for value, side in zip(times, (-8, 8), strict=True):
            where = {"xytext": (side, 0), "textcoords": "offset points", "va": "center"}
            added.annotate(_milliseconds(value), (value, y), ha="right" if side < 0 else "left", **where)
    for axis in axes:
        axis.set_yticks(range(len(rows)), [f"{row.tool} {row.version}" for row in rows.itertuples()])
        axis.set_ylim(-0.6, len(rows) - 0.4)
        axis.grid(axis="y", visible=False)
    speed.set_xlim(0, 1.2 * rows["events_per_cpu_s_high"].max() / 1e3)
    speed.set_xlabel("thousand events per CPU-second")
    added.set_xscale("log")
    low, high = added.get_xlim()
    added.set_xlim(low / 60, high * 40)
    added.xaxis.set_major_locator(LogLocator(subs=(1,), numticks=5))
    added.xaxis.set_major_formatter("{x:,g}")
    added.set_xlabel("ms added to TTFT: median ●, p99 ○")


def told(table: pd.DataFrame) -> list[str]:
    """What the table and its companions say; conditions that spoil a number stand in the same list."""
    rows = paced(table).set_index("tool")
    if "kvlab" not in rows.index:
        return ["The load generator itself was not measured."]
    own, said = rows.loc["kvlab"], []
    ratios = [
        f"{own['events_per_cpu_s'] / row['events_per_cpu_s']:.1f} times {tool}"
        for tool, row in rows.iterrows()
        if tool not in ("kvlab", READER)
    ]
    if ratios:
        said.append(f"Per CPU-second, {int(own['streams'])} paced streams: kvlab digests {', '.join(ratios)}.")
    behind = rows[rows["events_per_s"] < KEPT_UP * rows["events_per_s"].max()]
    if len(behind):
        listed = " and ".join(f"{tool} ({rate:,.0f} events/s)" for tool, rate in behind["events_per_s"].items())
        said.append(
            f"{listed} could not keep up with {rows['events_per_s'].max():,.0f} events/s. Who falls behind reads "
            "several events at once, which flatters its rate."
        )
    said.append(
        f"kvlab adds {_ms(own, TTFT, 'p50')} to the median time to the first token and {_ms(own, TTFT, 'p99')} to its "
        f"p99; {_ms(own, ITL, 'p99')} to the p99 of the gaps."
    )
    if READER in rows.index:
        floor = rows.loc[READER]
        said.append(
            f"The floor: a C program that only reads sees {_ms(floor, TTFT, 'p99')} and {_ms(floor, ITL, 'p99')} at "
            f"p99, and takes {own['events_per_cpu_s'] / floor['events_per_cpu_s']:.0%} of kvlab's CPU time an event."
        )
    said += _against_aims(table)
    said += [f"{row.tool} is missing: {row.reason}." for row in table.itertuples() if isinstance(row.reason, str)]
    if not rows["quiet"].fillna(True).astype(bool).all():
        busiest = rows["others_cpu_share"].max()
        said.append(f"The machine was not quiet: other programs used up to {busiest:.0%} of it, which lengthens times.")
    return said + _companions()


def _against_aims(table: pd.DataFrame) -> list[str]:
    """What was aimed at and missed, and what was reached; the C program is the bound of any client on that core."""
    words = pages.words("en")["instrument"]
    said = {"missed": [], "reached": []}
    for aim in aims(table):
        said["reached" if aim.reached else "missed"].append(said_of_aim(aim, words))
    return [f"{words[key]} {words['between'].join(found)}." for key, found in said.items() if found]


def _companions() -> list[str]:
    said = []
    if found := record("open"):
        said.append(
            f"{found['streams']:,} streams were held open at once in {found['processes']} processes on "
            f"{found['cores']} cores; {found['failures']} failed."
        )
    if found := record("memory"):
        hour = found["slope_bytes_per_event"] * found["events"] / found["minutes"] * 60 / 2**20
        said.append(
            f"Memory over {found['minutes']:.0f} minutes and {found['events'] / 1e6:.1f} million events: "
            f"{found['slope_bytes_per_event']:.2f} bytes an event, {hour:.0f} MiB an hour at that rate."
        )
    return said


def _ms(row: pd.Series, name: str, q: str) -> str:
    value = row[f"{name}_{q}_s"]
    return "an unknown time" if pd.isna(value) else _milliseconds(value * 1e3)


def _milliseconds(value: float) -> str:
    return f"{_short(value)} ms"


def _short(value: float) -> str:
    return f"{value:.2g}" if abs(value) < 99.5 else f"{value:,.0f}"
