"""A fleet with a service in front of it, for one laboratory: the read side of VllmServer over several workers."""

from __future__ import annotations

import contextlib
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvlab import service
from kvlab.config import Cell, ServerConfig
from kvlab.errors import ConfigError
from kvlab.fleet import Fleet
from kvlab.service import CLIENT_PICKS, Service

PROXIES = ("l4:nginx", "kube_proxy")
HEAD, TAIL = 110, 30  # lines of each worker's log that a run keeps: the start, and what came last
ACCESS = re.compile(r"^INFO:\s+[\d.]+:\d+ - ")  # one line a request and scrape: nothing that a run's log is read for


def start_front(kind: str, endpoints: list, args: tuple[str, ...], log_dir: Path) -> Any:
    """What stands between client and workers, as a context manager with .endpoint, .version, .argv and .check().

    l4:nginx (a proxy of connections), kube_proxy (the kernel's rules, as a Kubernetes node has them), router:<kind>.
    """
    family, _, name = kind.partition(":")
    if family == "router":
        from kvlab.router import Router

        return Router(name, endpoints, args, log_dir)
    if family == "l4":
        from kvlab.l4 import NginxProxy

        return NginxProxy(endpoints, log_dir)
    if family == "kube_proxy":
        from kvlab.kube_rules import KubeRules

        return KubeRules(endpoints, log_dir)
    raise _unknown(kind)


def check_kind(kind: str) -> None:
    """Raises ConfigError where no service has this name, before any server is started for it; "" is none."""
    from kvlab import dynamo, router

    family, _, name = kind.partition(":")
    routers = (*router.KINDS, *dynamo.MODES)
    if family == "router" and name not in routers:
        raise ConfigError(f"There is no router {name!r}.", next_step=f"use one of: {', '.join(routers)}")
    if family != "router" and kind not in ("", *CLIENT_PICKS, *PROXIES):
        raise _unknown(kind)


def _unknown(kind: str) -> ConfigError:
    known = (*CLIENT_PICKS, *PROXIES, "router:<kind>")
    return ConfigError(f"There is no service {kind!r}.", next_step=f"use one of: {', '.join(known)}")


class Deployment:
    """`workers` servers of one configuration that stay up between cells; a cell may use the first few of them.

    Before each cell the prefix caches are emptied and the service is made anew, so that no cell inherits what an
    earlier one left in a cache or in a router's memory.
    """

    def __init__(self, config: ServerConfig, workers: int, log_dir: Path, placement: str = "spread"):
        self.config, self.workers, self._log_dir, self.placement = config, workers, Path(log_dir), placement
        self.fleet = Fleet(config, workers=workers, log_dir=self._log_dir, placement=placement)
        self.log_path = self._log_dir / f"fleet-{id(self):x}.log"
        self._front: Any = None
        self._service: Service | None = None
        self._used = workers
        self._known: list[dict[str, Any]] = []  # the workers as they were before the load: one that dies tells nothing
        self._logs: list[tuple[str, Path]] = []

    def start(self) -> Deployment:
        """Raises what Fleet.start raises."""
        self.fleet.start()
        self.capacity = self.fleet.capacities[0]  # they are alike
        return self

    def serves(self, cell: Cell) -> bool:
        """Whether these workers are what the cell asks for."""
        alike = cell.server == self.config and cell.placement == self.placement
        return alike and cell.workers <= self.workers

    def use(self, cell: Cell) -> Deployment:
        """Puts the cell's service in front of its workers. Raises ConfigError or ServerError; nothing was sent then."""
        self._close_front()
        self.fleet.check_alive()
        endpoints = self.fleet.endpoints[: cell.workers]
        self._used = cell.workers
        service.check_workers(endpoints)
        self.fleet.reset_prefix_caches()
        self._known = self.fleet.describe(self._used)
        self._logs = [(e.worker, one.log_path) for e, one in zip(endpoints, self.fleet.servers, strict=False)]
        if cell.service in CLIENT_PICKS:
            self._service = Service(endpoints, cell.service, seed=cell.load.pick_seed)
        else:
            self._front = start_front(cell.service, endpoints, cell.service_args, self._log_dir)
            self._front.__enter__()
            entrance = replace(self._front.endpoint, worker=None)
            self._service = Service(endpoints, cell.service, seed=cell.load.pick_seed, entrance=entrance)
        self._service.check_load(cell.load)
        return self

    @property
    def endpoint(self) -> Service:
        """Where the load goes."""
        return self._service

    def check_alive(self) -> None:
        """ServerDied where a worker, ServerError where the proxy or router has ended or does not do what it says."""
        self.fleet.check_alive()
        if self._front is not None:
            self._front.check()

    def describe(self) -> dict[str, Any]:
        """What a stored run says: the service, and each worker with its place, command, versions and capacity."""
        workers = self.fleet.describe(self._used) or self._known
        told = {"how": self._service.how, "pick_seed": self._service.seed}
        if self._front is not None:
            told |= {"version": self._front.version, "command": shlex.join(self._front.argv or [])}
            if hasattr(self._front, "picks"):  # connections by worker, those before the load included
                told["picks"] = dict(sorted(self._front.picks().items()))
            told |= self._front.report() if hasattr(self._front, "report") else {}
        self._write_log()
        first = {name: workers[0].get(name) for name in ("version", "command", "capacity", "started_utc")}
        slowest = max((w["ready_s"] for w in workers if w.get("ready_s") is not None), default=None)
        idle = self.workers - self._used
        return first | {"ready_s": slowest, "service": told, "workers": workers, "idle_workers": idle}

    def _write_log(self) -> None:
        parts = []
        for worker, path in self._logs:
            lines = path.read_text(encoding="utf-8", errors="replace").splitlines() if path else []
            lines = [line for line in lines if not ACCESS.match(line)]
            cut = [f"[{len(lines) - HEAD - TAIL} lines]"] if len(lines) > HEAD + TAIL else []
            parts += [f"== {worker}", *lines[:HEAD], *cut, *lines[HEAD:][-TAIL:]]
        self.log_path.write_text("\n".join(parts) + "\n", encoding="utf-8")

    def _close_front(self) -> None:
        front, self._front = self._front, None
        if front is not None:
            front.__exit__(None, None, None)

    def stop(self) -> None:
        """Ends the proxy or router and every worker. Safe to call twice."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.fleet.stop)
            self._close_front()
