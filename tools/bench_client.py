"""Measures the load generator against others on one null server: `make bench-client`.

    python tools/bench_client.py [--repeats 3] [--tools kvlab,guidellm] [--scenarios paced,saturation] [--out FILE]

Every tool keeps one core, the null server the other one; they take turns. Writes data/client/peers.csv, one row a tool
and scenario, and peers.json beside it with every repeat, after each turn: what was measured stays, whatever ends it.
A row that nobody measures anew stays too, where it is of the same processor. Linux only.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import pandas as pd
from arguments import above_zero, names_of, whole_above_zero
from null import REALTIME, NullServer, pinned
from peers import TOOLS, Ask, Tool, environ, install
from watch import Watch, machine_cpu_s

from kvlab.errors import KvlabError
from kvlab.files import check_writable, write_text

SERVER_CORE, CLIENT_CORE = 0, 1
LIMIT_S = 400
LEAST_CPU_S = 0.2
QUIET_SHARE = 0.05  # of all cores, used by anything else
OUT = Path(__file__).parent.parent / "data" / "client" / "peers.csv"


@dataclass(frozen=True)
class Scenario:
    """What the null server does, and the load. `rounds` of requests; `fast_rounds` for tools of more than 50 k/s."""

    name: str
    ttft_s: float
    itl_s: float
    events_per_write: int
    streams: int
    tokens: int
    rounds: int
    fast_rounds: int

    @property
    def known(self) -> bool:
        """Whether delays are known, so that what a client adds can be told."""
        return self.itl_s > 0


SCENARIOS = {
    "paced": Scenario("paced", 0.1, 0.02, 1, 256, 250, 4, 4),
    "saturation": Scenario("saturation", 0.0, 0.0, 16, 256, 250, 4, 32),
}
FAST = ("kvlab", "null reader")
MEASURED = (
    *("events_per_cpu_s", "events_per_s", "ttft_added_p50_s", "ttft_added_p99_s", "itl_added_p50_s"),
    *("itl_added_p99_s", "server_late_p99_s", "failures", "others_cpu_share"),
)
COLUMNS = (
    *("tool", "version", "scenario", "streams", "events_per_cpu_s", "events_per_cpu_s_low", "events_per_cpu_s_high"),
    *(name for name in MEASURED if name != "events_per_cpu_s"),
    *("repeats", "quiet", "measured_utc", "reason"),
)


def measure(tool: Tool, s: Scenario) -> dict[str, Any]:
    """One repeat. Rates are of the steady part: from the first request of round 2 until the first of the last round."""
    rounds = s.fast_rounds if tool.name in FAST else s.rounds
    with (
        tempfile.TemporaryDirectory() as folder,
        NullServer(s.ttft_s, s.itl_s, s.events_per_write, SERVER_CORE) as server,
    ):
        ask = Ask(server.port, s.streams, s.streams * rounds, s.tokens, Path(folder))
        busy, began = machine_cpu_s(), time.monotonic()
        watch, status = _run(tool, ask)
        if status:
            return {"reason": f"{tool.name} failed: {status}"}
        others = (machine_cpu_s() - busy - watch.cpu[-1] - server.stats()["cpu_s"]) / (
            (time.monotonic() - began) * os.cpu_count()
        )
        found = rates(server.arrivals_s()[-ask.requests :], watch, s)
        result = tool.read(ask)
        if found["events_per_cpu_s"] is None and "cpu_s" in result:  # a tool that tells its own: all of its life
            found["events_per_cpu_s"] = result["events"] / result["cpu_s"]
        if s.known:
            for name, known in (("ttft", s.ttft_s), ("itl", s.itl_s)):
                for q in ("p50", "p99"):
                    value = result.get(f"{name}_{q}_s")
                    found[f"{name}_added_{q}_s"] = None if value is None else value - known
            found["server_late_p99_s"] = server.stats()["late_p99_s"]
        return found | {"failures": result["failures"], "others_cpu_share": max(0.0, others), "result": result}


def _run(tool: Tool, ask: Ask) -> tuple[Watch, str | None]:
    """Runs the tool on its core; why it failed, or None."""
    log = ask.folder / "out.txt"
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            [*pinned(CLIENT_CORE), *tool.command(ask)],
            stdout=file,
            stderr=subprocess.STDOUT if tool.name != "null reader" else None,
            cwd=ask.folder,
            env=environ(tool),
            start_new_session=True,
        )
        watch = Watch(process.pid)
        try:
            status = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            status = f"not done after {LIMIT_S} s"
        finally:  # Ctrl-C too: its own processes go with it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            watch.stop()
    if status:
        tail = " | ".join(log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:])
        return watch, f"{status}: {tail[-300:]}"
    return watch, None


def rates(arrivals: list[float], watch: Watch, s: Scenario) -> dict[str, float]:
    # A request of a closed loop arrives when another one has been read to its end: counted so, nothing that waits in
    # a socket buffer passes for digested.
    first, last = s.streams, len(arrivals) - s.streams
    start, end = arrivals[first], arrivals[last]
    events = (last - first) * s.tokens
    cpu_s = watch.cpu_s(start, end)
    # Below some samples and clock ticks the CPU time is a guess.
    return {"events_per_cpu_s": events / cpu_s if cpu_s > LEAST_CPU_S else None, "events_per_s": events / (end - start)}


def line_of(tool: Tool, s: Scenario, repeats: list[dict[str, Any]], began: str) -> dict[str, Any]:
    """One line of the table: medians of the repeats, with the lowest and highest rate."""
    good = [r for r in repeats if r.get("events_per_cpu_s") is not None]
    line = {"tool": tool.name, "version": tool.version, "scenario": s.name, "streams": s.streams}
    line |= {"repeats": len(good), "measured_utc": began}
    if not good:
        return line | {"reason": repeats[-1].get("reason", "it was over too soon for its CPU time to be told")}
    for name in MEASURED:
        values = [r[name] for r in good if r.get(name) is not None]
        line[name] = median(values) if values else None
    rates = [r["events_per_cpu_s"] for r in good]
    line |= {"events_per_cpu_s_low": min(rates), "events_per_cpu_s_high": max(rates)}
    busiest = max(r["others_cpu_share"] for r in good)
    return line | {"others_cpu_share": busiest, "quiet": busiest <= QUIET_SHARE}


def main() -> None:
    """Measures, prints and writes the table."""
    options = _options()
    if options.realtime:
        os.environ[REALTIME] = "1"
    try:
        _require(options.out)
        _measure_all(options)
    except KvlabError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"Interrupted. The turns that were over are kept in {options.out}.")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tools = [tool.name for tool in TOOLS]
    parser.add_argument("--repeats", type=whole_above_zero, default=3)
    parser.add_argument("--tools", type=names_of(tools), default=tools)
    parser.add_argument("--scenarios", type=names_of(list(SCENARIOS)), default=list(SCENARIOS))
    parser.add_argument("--minutes", type=above_zero, default=60.0, help="start no further turn after this time")
    parser.add_argument("--realtime", action="store_true", help="go before all other programs of a busy machine (root)")
    parser.add_argument("--out", type=Path, default=OUT)
    return parser.parse_args()


def _require(out: Path) -> None:
    """Raises KvlabError for what is known to fail, before anything is installed."""
    cores = os.sched_getaffinity(0) if sys.platform.startswith("linux") else set()
    if not {SERVER_CORE, CLIENT_CORE} <= cores:
        raise KvlabError(
            "The comparison needs Linux and two cores: one for the null server, one for the client.",
            f"cores {SERVER_CORE} and {CLIENT_CORE} are used; this process may use {sorted(cores) or 'no known ones'}",
            "run it where both may be used (taskset -pc $$ shows which)",
        )
    if out.is_dir():
        raise KvlabError(f"{out} is a folder.", next_step="give a file: --out FOLDER/peers.csv")
    check_writable(out.parent)


def _measure_all(options: argparse.Namespace) -> None:
    tools = [tool for tool in TOOLS if tool.name in options.tools]
    scenarios = [SCENARIOS[name] for name in options.scenarios]
    began = datetime.now(UTC).isoformat(timespec="seconds")
    missing = {tool.name: why for tool in tools if (why := install(tool))}
    os.sched_setaffinity(0, {SERVER_CORE})
    found = {(tool.name, s.name): [] for s in scenarios for tool in tools}
    before, told = _before(options.out), about(began)
    limit = time.monotonic() + 60 * options.minutes
    for repeat in range(options.repeats):
        for s in scenarios:
            if repeat and time.monotonic() > limit:
                continue
            for tool in tools if repeat % 2 == 0 else tools[::-1]:
                why = missing.get(tool.name)
                result = {"reason": why} if why else _measured(tool, s)
                found[tool.name, s.name].append(result)
                print(repeat, s.name, tool.name, _short(result), flush=True)
                _write(options.out, tools, scenarios, found, before, told)
    print(pd.read_csv(options.out).to_string())


def _measured(tool: Tool, s: Scenario) -> dict[str, Any]:
    """One repeat; where a tool's result cannot be read, the reason: the others go on."""
    try:
        return measure(tool, s)
    except (KvlabError, OSError, ValueError, LookupError, TypeError) as error:
        return {
            "reason": f"{tool.name}: its result cannot be used: {type(error).__name__}: {' '.join(str(error).split())}"
        }


def _before(out: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(rows, repeats) that are stored there and were measured on this processor."""
    try:
        about = json.loads(out.with_suffix(".json").read_text(encoding="utf-8"))
        same = about["cpu"] == _cpu() and about["cores"] == os.cpu_count()
        return (pd.read_csv(out).to_dict("records"), about["repeats"]) if same else ([], {})
    except (OSError, ValueError, LookupError, TypeError):
        return [], {}


def _write(out: Path, tools, scenarios, found, before, about) -> None:
    """The table and every repeat: what was measured now, and what was before and is not measured anew."""
    stored, repeats = before
    measured = {key for key, results in found.items() if any(r.get("events_per_cpu_s") is not None for r in results)}
    kept = {(row["tool"], row["scenario"]): row for row in stored if row["repeats"] > 0}
    rows = [
        line_of(tool, s, found[tool.name, s.name], about["measured_utc"])
        for s in scenarios
        for tool in tools
        if found[tool.name, s.name] and ((tool.name, s.name) in measured or (tool.name, s.name) not in kept)
    ]
    rows += [row for key, row in kept.items() if key not in measured]
    order = [(scenario, tool.name) for scenario in SCENARIOS for tool in TOOLS]
    rows.sort(
        key=lambda row: (
            order.index((row["scenario"], row["tool"])) if (row["scenario"], row["tool"]) in order else len(order)
        )
    )
    own = {f"{tool}, {scenario}": results for (tool, scenario), results in found.items() if results}
    own = {name: results for name, results in own.items() if name not in repeats or tuple(name.split(", ")) in measured}
    write_text(out, pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(index=False, float_format="%.6g"))
    write_text(out.with_suffix(".json"), json.dumps(about | {"repeats": repeats | own}, indent=1) + "\n")


def _cpu() -> str | None:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if "model name" in line), None)


def about(began: str) -> dict[str, Any]:
    """When and on what it was measured."""
    return {
        "measured_utc": began,
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "realtime": bool(os.environ.get(REALTIME)),
        "quiet_share": QUIET_SHARE,
        "scenarios": [vars(s) for s in SCENARIOS.values()],
    }


def _short(result: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.6g}" for k, v in result.items() if isinstance(v, float | int)) or str(result["reason"])


if __name__ == "__main__":
    main()
