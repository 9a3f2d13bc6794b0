"""The CPU time and the memory of a program with everything below it, sampled while it runs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


def tree(root: int) -> tuple[float, int]:
    """(CPU time in s, resident bytes) of a process and all its descendants; children that have ended are included."""
    parents, used = {}, {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        except OSError:
            continue
        parents[int(entry.name)] = int(fields[1])
        used[int(entry.name)] = (sum(map(int, fields[11:15])) * TICK_S, int(fields[21]) * PAGE)
    family, found = {root}, True
    while found:
        found = {pid for pid, parent in parents.items() if parent in family} - family
        family |= found
    known = [used[pid] for pid in family if pid in used]
    return sum(cpu for cpu, _ in known), sum(rss for _, rss in known)


class Watch(threading.Thread):
    """Samples `tree(pid)` every `every_s` until `stop`."""

    def __init__(self, pid: int, every_s: float = 0.1):
        super().__init__(daemon=True)
        self.pid, self.every_s = pid, every_s
        self.times, self.cpu, self.rss = [], [], []
        self._over = threading.Event()
        self.start()

    def run(self) -> None:
        """Until stopped."""
        while not self._over.wait(self.every_s):
            cpu, rss = tree(self.pid)
            self.times.append(time.clock_gettime(time.CLOCK_MONOTONIC))
            self.cpu.append(cpu)
            self.rss.append(rss)

    def stop(self) -> None:
        """Ends the sampling."""
        self._over.set()
        self.join()

    def cpu_s(self, start: float, end: float) -> float:
        """CPU time between two times on CLOCK_MONOTONIC."""
        first, last = np.interp([start, end], self.times, self.cpu)
        return float(last - first)


def machine_cpu_s() -> float:
    """CPU time that the whole machine has used since its start, in s."""
    fields = Path("/proc/stat").read_text(encoding="utf-8").split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = map(int, fields[:7])
    return (user + nice + system + irq + softirq) * TICK_S
