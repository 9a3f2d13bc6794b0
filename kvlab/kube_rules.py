"""A Service as a node of Kubernetes has it: kube-proxy's chains of iptables, in a network namespace of their own.

The rules of a machine's own network are never touched. As root:

    unshare -n sh -c 'ip link set lo up && kvlab measure service_hit_rate'
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import psutil

from kvlab.client import Endpoint
from kvlab.errors import ServerDied, ServerError

ADDRESS, PORT = "127.96.0.10", 8000  # the Service's virtual address: nobody listens there
ALONE = "unshare -n sh -c 'ip link set lo up && kvlab measure service_hit_rate'"


def why_not() -> str | None:
    """Why the rules cannot be set here; None where they can."""
    if os.geteuid() != 0:
        return "only root may set rules of the network"
    if shutil.which("iptables") is None:
        return "iptables is not installed (Debian, Ubuntu: apt-get install iptables)"
    others = sorted(set(psutil.net_if_addrs()) - {"lo"})
    if others:
        return f"this is a network with other interfaces ({', '.join(others)}), whose rules stay as they are"
    return None


class KubeRules:
    """`with KubeRules(endpoints, log_dir) as service:` each new connection to its address goes to a random worker."""

    def __init__(self, endpoints: Sequence[Endpoint], log_dir: Path):
        self.endpoints = list(endpoints)
        self.argv = ["iptables", "-t", "nat"]
        self.version: str | None = None

    def __enter__(self) -> KubeRules:
        reason = why_not()
        if reason is not None:
            raise ServerError(f"No rules of a Service can be set here: {reason}", next_step=f"as root: {ALONE}")
        self.version = _iptables("--version").strip()
        self._remove()
        for rule in rules(self.endpoints):
            _iptables("-t", "nat", *rule)
        return self

    def __exit__(self, *_) -> None:
        self._remove()

    def _remove(self) -> None:
        """The namespace holds no other rules of this table."""
        _iptables("-t", "nat", "-F")
        _iptables("-t", "nat", "-X")

    @property
    def endpoint(self) -> Endpoint:
        """The virtual address; the worker behind it is not known."""
        return replace(self.endpoints[0], base_url=f"http://{ADDRESS}:{PORT}", worker=None)

    def check(self) -> None:
        """ServerDied where the rules are gone."""
        if sum(self.picks().values()) == 0:
            raise ServerDied("No connection went through the Service's rules", next_step="iptables -t nat -L -v")

    def picks(self) -> Counter:
        """Connections each worker was given so far, by its name: the kernel's own count of each rule."""
        listed = _iptables("-t", "nat", "-v", "-S", "KUBE-SVC-KVLAB")
        found = re.findall(r"-j KUBE-SEP-(\d+) -c (\d+)|-c (\d+) \d+ -j KUBE-SEP-(\d+)", listed)
        pairs = [(a or d, b or c) for a, b, c, d in found]
        return Counter({self.endpoints[int(i)].worker: int(packets) for i, packets in pairs})


def rules(endpoints: Sequence[Endpoint]) -> list[list[str]]:
    """Arguments of iptables -t nat, in kube-proxy's chains: the service, one random choice, one endpoint each.

    Rule i is taken with probability 1 / (N - i) where the ones before it were not: 1 / N for each.
    """
    made = [["-N", "KUBE-SERVICES"], ["-N", "KUBE-SVC-KVLAB"]]
    made += [["-A", "OUTPUT", "-j", "KUBE-SERVICES"]]
    made += [["-A", "KUBE-SERVICES", "-d", f"{ADDRESS}/32", "-p", "tcp", "--dport", str(PORT), "-j", "KUBE-SVC-KVLAB"]]
    n = len(endpoints)
    for i, endpoint in enumerate(endpoints):
        chance = ["-m", "statistic", "--mode", "random", "--probability", f"{1 / (n - i):.11f}"] if i < n - 1 else []
        url, chain = endpoint.url("/"), f"KUBE-SEP-{i}"
        made += [["-N", chain], ["-A", "KUBE-SVC-KVLAB", *chance, "-j", chain]]
        made += [["-A", chain, "-p", "tcp", "-j", "DNAT", "--to-destination", f"{url.host}:{url.port}"]]
    return made


def _iptables(*arguments: str) -> str:
    done = subprocess.run(["iptables", *arguments], capture_output=True, errors="replace", check=False)
    if done.returncode:
        raise ServerError(
            f"iptables {' '.join(arguments)} failed: {done.stderr.strip()[-300:]}",
            "the kernel has no such table, or another program holds it",
            f"try it by hand, in a namespace of its own: {ALONE}",
        )
    return done.stdout


def uniform(picks: Counter, workers: int) -> float:
    """The chance of such unequal picks, or more unequal ones, if every connection was dealt out at random (chi2)."""
    from scipy import stats

    counts = [*picks.values()] + [0] * (workers - len(picks))
    return float(stats.chisquare(counts).pvalue)
