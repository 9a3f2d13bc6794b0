"""How far several client processes carry the load generator: `python tools/bench_processes.py [--seconds 90]`.

1, 2, 4 and 8 processes against null servers of their own, every process and server on a core of its own: paced (256
streams a process, 50 events/s each, delays known) and as fast as they can. What the machine has no cores for stays a
row with that reason. Writes data/client/processes.csv, and processes.json with every repeat, after each turn.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "bench"))

import pandas as pd
import psutil
from arguments import above_zero
from bench_client import OUT as PEERS
from bench_client import QUIET_SHARE, SCENARIOS, Scenario, about, rates
from null import NullServer
from peers import HERE
from watch import Watch, machine_cpu_s

from kvlab import provenance
from kvlab.errors import KvlabError
from kvlab.files import check_writable, write_text

OUT = PEERS.with_name("processes.csv")
PROCESSES = (1, 2, 4, 8)
STREAMS = 256  # of each process
# Short rounds: everything is over within the given time. The first and the last round count for no rate.
LOADS = {
    "paced": replace(SCENARIOS["paced"], tokens=75, rounds=4),
    "saturation": replace(SCENARIOS["saturation"], rounds=8),
}
SERVER_BUSY = 0.9  # of its core: from here on the null server may be what is measured
LIMIT_S = 120
MEASURED = (
    *("events_per_s", "events_per_cpu_s", "ttft_added_p50_s", "ttft_added_p99_s", "itl_added_p99_s"),
    *("server_late_p99_s", "server_core_share", "others_cpu_share", "failures", "rows"),
)
COLUMNS = (
    *("scenario", "processes", "servers", "cores", "streams", *MEASURED),
    *("rows_of_processes", "repeats", "quiet", "cpu", "measured_utc", "reason"),
)


def servers_of(processes: int, cores: int) -> int:
    """One null server a process where that leaves a core, else one for two processes."""
    return processes if 2 * processes < cores else max(1, processes // 2)


def why_not(processes: int, cores: int) -> str | None:
    """Why this machine cannot show so many processes; None where it can."""
    needed = processes + servers_of(processes, cores)
    return None if needed <= cores else f"not measured: {cores} cores ({processes} processes need {needed})"


def measure(processes: int, s: Scenario, cores: list[int]) -> dict[str, Any]:
    """One repeat on these cores, the processes on the first ones; rates are of the steady part, as in bench_client."""
    n = servers_of(processes, len(cores))
    s = replace(s, streams=STREAMS * processes)
    mine, theirs = cores[:processes], [cores[(processes + i) % len(cores)] for i in range(n)]
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        servers = [_started(stack, s, core) for core in theirs]
        out = Path(folder) / "kvlab.json"
        busy, began = machine_cpu_s(), time.monotonic()
        watch = _run([server.base_url for server in servers], s, processes, out, mine)
        stats = [server.stats() for server in servers]
        used = watch.cpu[-1] + sum(found["cpu_s"] for found in stats)
        others = (machine_cpu_s() - busy - used) / ((time.monotonic() - began) * os.cpu_count())
        arrivals = sorted(at for server in servers for at in server.arrivals_s())[-s.streams * s.rounds :]
        result = json.loads(out.read_text(encoding="utf-8"))
    found = rates(arrivals, watch, s) | {"server_late_p99_s": max(one["late_p99_s"] for one in stats)}
    found["server_core_share"] = max(one["cpu_s"] for one in stats) / (arrivals[-1] - arrivals[0])
    if s.known:
        for name, q in (("ttft", "p50"), ("ttft", "p99"), ("itl", "p99")):
            found[f"{name}_added_{q}_s"] = result[f"{name}_{q}_s"] - (s.ttft_s if name == "ttft" else s.itl_s)
    else:
        del found["server_late_p99_s"]
    found |= {"others_cpu_share": max(0.0, others), "failures": result["failures"], "rows": result["requests"]}
    return _checked(found | {"rows_of_processes": result["rows_of_processes"], "result": result}, s, processes)


def _checked(found: dict[str, Any], s: Scenario, processes: int) -> dict[str, Any]:
    """The repeat, with the reason where it says nothing about the client, or where rows are missing or twice."""
    rows = found["rows_of_processes"]
    if not sum(rows) == found["rows"] == found["result"]["distinct"] == s.streams * s.rounds or len(rows) != processes:
        return found | {"reason": f"the merged rows are wrong: {found['rows']} of {s.streams * s.rounds}, {rows}"}
    if found["server_core_share"] > SERVER_BUSY:
        return found | {"reason": f"the null server used {found['server_core_share']:.0%} of its core: it is the limit"}
    return found


@contextlib.contextmanager
def _on(cores: list[int]) -> Iterator[None]:
    """What is started in here runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _started(stack: contextlib.ExitStack, s: Scenario, core: int) -> NullServer:
    with _on([core]):
        return stack.enter_context(NullServer(s.ttft_s, s.itl_s, s.events_per_write))


def _run(urls: list[str], s: Scenario, processes: int, out: Path, cores: list[int]) -> Watch:
    """Runs kvlab to its end on these cores. Raises KvlabError where it fails."""
    numbers = [str(n) for n in (s.streams, s.streams * s.rounds, s.tokens)]
    command = [sys.executable, str(HERE / "run_kvlab.py"), ",".join(urls), *numbers, str(out), str(processes)]
    with _on(cores):
        process = subprocess.Popen(command)
    watch = Watch(process.pid)
    try:
        if processes > 1:
            _pin_workers(process, cores)
        status = process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        status = f"not done after {LIMIT_S} s"
    finally:  # its workers end with it
        process.kill()
        process.wait()
        watch.stop()
    if status:
        raise KvlabError(f"kvlab failed with {processes} processes: {status}")
    return watch


def _pin_workers(process: subprocess.Popen, cores: list[int]) -> None:
    """Each worker onto a core of its own, as soon as all are there."""
    while process.poll() is None:
        with contextlib.suppress(psutil.NoSuchProcess):
            workers = psutil.Process(process.pid).children()
            if len(workers) == len(cores):
                for worker, core in zip(workers, cores, strict=True):
                    worker.cpu_affinity([core])
                return
        time.sleep(0.02)


def row(name: str, processes: int, cores: int, repeats: list[dict[str, Any]], told: dict[str, Any]) -> dict[str, Any]:
    """One line of the table: medians of the repeats that count, or why there is none."""
    line = {"scenario": name, "processes": processes, "servers": servers_of(processes, cores), "cores": told["cores"]}
    line |= {"streams": STREAMS * processes, "cpu": told["cpu"], "measured_utc": told["measured_utc"]}
    good = [r for r in repeats if "reason" not in r]
    line["repeats"] = len(good)
    if not good:
        return line | {"reason": repeats[-1]["reason"] if repeats else "not measured: the time was over"}
    for key in MEASURED:
        values = [r[key] for r in good if r.get(key) is not None]
        line[key] = median(values) if values else None
    line["failures"] = sum(r["failures"] for r in good)
    line["quiet"] = max(r["others_cpu_share"] for r in good) <= QUIET_SHARE
    return line | {"rows_of_processes": "+".join(map(str, good[-1]["rows_of_processes"]))}


def main() -> None:
    """Measures, prints and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=above_zero, default=90.0, help="everything is over within this time")
    parser.add_argument("--share-cores", action="store_true", help="for a try: also where the cores do not suffice")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    try:
        _require(options)
        _measure_all(options)
    except KvlabError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit(f"Interrupted. The turns that were over are kept in {options.out}.")


def _usable() -> list[int]:
    """Cores that may be used: no more than the control group's limit; none where programs cannot be kept on a core."""
    return sorted(os.sched_getaffinity(0))[: provenance.cores()] if sys.platform.startswith("linux") else []


def _require(options: argparse.Namespace) -> None:
    """Raises KvlabError for what would fail or lose something, before anything is measured."""
    cores = len(_usable())
    if cores < 2:
        raise KvlabError("This needs Linux and two cores: one for the null server, one for the client.")
    if options.share_cores and options.out == OUT:
        raise KvlabError("A try on shared cores shows nothing.", next_step="give another file: --out FILE")
    check_writable(options.out.parent)
    if not options.out.is_file():
        return
    stored = pd.read_csv(options.out)
    most = int(stored.loc[stored["repeats"] > 0, "processes"].max() if (stored["repeats"] > 0).any() else 0)
    if not options.share_cores and why_not(max(most, 1), cores):
        raise KvlabError(
            f"{options.out} holds a measurement with {most} processes; this machine has {cores} cores.",
            "a smaller table would take its place",
            "give another file: --out FILE",
        )


def _measure_all(options: argparse.Namespace) -> None:
    """In turns, each repeat with all numbers of processes, as long as one more turn fits into the time."""
    began, cores = time.monotonic(), _usable()
    told = about(datetime.now(UTC).isoformat(timespec="seconds")) | {"cores": len(cores)}
    turns = [(name, n) for n in PROCESSES for name in LOADS]
    found, took = {turn: [] for turn in turns}, dict.fromkeys(turns, 0.0)
    possible = [(name, n) for name, n in turns if options.share_cores or not why_not(n, len(cores))]
    for name, n in turns:
        if (name, n) not in possible:
            found[name, n].append({"reason": why_not(n, len(cores))})
    more = True
    while more:
        more = False
        for turn in possible:
            start = time.monotonic()
            needed = took[turn] or 2 * max(took.values())  # the first of its kind may be the longest until then
            if start - began + needed > options.seconds:
                continue
            result = _measured(*turn, cores)
            found[turn].append(result)
            took[turn], more = time.monotonic() - start, True
            print(*turn, _short(result), f"({took[turn]:.1f} s)", flush=True)
            _write(options.out, found, told)
    _write(options.out, found, told)
    print(pd.read_csv(options.out).to_string())


def _measured(name: str, processes: int, cores: list[int]) -> dict[str, Any]:
    """One repeat; where it cannot be used, the reason: the others go on."""
    try:
        return measure(processes, LOADS[name], cores)
    except (KvlabError, OSError, ValueError, LookupError) as error:
        return {"reason": f"not measured: {type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def _write(out: Path, found: dict[tuple[str, int], list[dict[str, Any]]], told: dict[str, Any]) -> None:
    rows = [row(name, n, told["cores"], repeats, told) for (name, n), repeats in found.items()]
    rows.sort(key=lambda line: (list(LOADS).index(line["scenario"]), line["processes"]))
    write_text(out, pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(index=False, float_format="%.6g"))
    repeats = {f"{name}, {n}": results for (name, n), results in found.items()}
    written = told | {"scenarios": [vars(s) for s in LOADS.values()], "repeats": repeats}
    write_text(out.with_suffix(".json"), json.dumps(written, indent=1) + "\n")


def _short(result: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v:.6g}" for k, v in result.items() if isinstance(v, float | int)) or str(result["reason"])


if __name__ == "__main__":
    main()
