"""The workers of a cluster for one laboratory: the read side of a deployment that somebody else runs.

Before each cell the ready pods are found anew; during it they are followed, and what changed makes the cell invalid.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any
from urllib.parse import urlsplit

from kvlab import control, existing, k8s, k8s_api, service
from kvlab.client import Endpoint
from kvlab.config import Cell
from kvlab.control import Capacity
from kvlab.errors import ConfigError, KvlabError, ServerDied, ServerError
from kvlab.k8s import Target, Worker
from kvlab.service import Service

FOLLOW_S = 2.0  # between two looks at the pods
COME_BACK_S = 300.0  # for which a cell waits where a pod is missing
REACH_S = 3.0


class Cluster:
    """A Service and the pods behind it. Opening raises ConfigError or ServerError for what cannot be measured."""

    pid = log_path = started_utc = ready_s = None

    def __init__(self, target: Target, api: k8s_api.Api | None = None, come_back_s: float = COME_BACK_S):
        self.target, self._come_back_s = target, come_back_s
        self._api = api or k8s_api.Api(target.context)
        self._object = self._api.service(target)
        k8s.check_service(self._object, target)
        self.workers = self._found()
        k8s_api.refuse_none(self.workers, target)
        self.count = len(self.workers)
        self._entrance = _reachable(self._entrances(), target)
        self._follower: Follower | None = None
        self._check()

    def _found(self) -> list[Worker]:
        return self._api.workers(self.target, self._object)

    def _entrances(self) -> list[str]:
        if self.target.entrance:
            return [self.target.entrance]
        return k8s.entrances(self._object, k8s.service_port(self._object, self.target))

    def _check(self) -> None:
        """The endpoints of the pods, after they were found to belong together."""
        refuse_unreachable(self.workers, self.target)
        key = os.environ.get(existing.KEY_VARIABLE) or None
        first = existing.attach(self.workers[0].base_url, _model_of(self.workers[0], key), api_key=key)
        self._endpoints = [
            replace(first.endpoint, base_url=worker.base_url, worker=f"w{i}") for i, worker in enumerate(self.workers)
        ]
        self._capacities = service.check_workers(self._endpoints)
        self._version = first.version

    # -- for the laboratory -----------------------------------------------------------------------------------------

    def use(self, cell: Cell) -> Cluster:
        """Finds the pods again and empties their caches. Raises ServerError; nothing was sent then."""
        self._end_following()
        self._wait_for_all()
        self._check()
        _check_pool(cell, self._capacities[0])
        self._reset = [_emptied(*pair) for pair in zip(self._endpoints, self._capacities, strict=True)]
        self.endpoint.check_load(cell.load)
        self._follower = Follower(self._found, self.workers, FOLLOW_S)
        return self

    @property
    def endpoint(self) -> Service:
        """Where the load goes."""
        entrance = replace(self._endpoints[0], base_url=self._entrance, worker=None)
        return Service(self._endpoints, k8s.SCHEME, entrance=entrance)

    @property
    def capacity(self) -> Capacity:
        """The KV pool of one worker: they are alike."""
        return self._capacities[0]

    def changes(self) -> list[str]:
        """What happened to the pods since `use`, in words; it makes the cell invalid."""
        told = self._end_following()
        return [f"{what} inside this cell" for what in told]

    def check_alive(self) -> None:
        """ServerDied where the Service has no ready pod any more."""
        try:
            k8s_api.refuse_none(self._found(), self.target)
        except ServerError as error:
            raise ServerDied(error.what, error.cause, error.next_step) from None

    def describe(self) -> dict[str, Any]:
        """What a stored run says: the Service and each pod. Nodes are numbered, and addresses stay private."""
        nodes = {node: f"n{i}" for i, node in enumerate(dict.fromkeys(w.node for w in self.workers if w.node))}
        told = zip(self.workers, self._capacities, self._reset, strict=True)
        rows = [
            {"worker": f"w{i}", "node": nodes.get(w.node), "restarts": w.restarts, "started": w.started}
            | {"image": w.image, "capacity": asdict(capacity), "cache_emptied": emptied}
            for i, (w, capacity, emptied) in enumerate(told)
        ]
        spec = self._object["spec"]
        names = ("type", "sessionAffinity", "internalTrafficPolicy", "trafficDistribution")
        about = {"how": k8s.SCHEME} | {name: spec.get(name) for name in names}
        return {"version": self._version, "capacity": asdict(self.capacity), "service": about, "workers": rows}

    # -- pods that come and go ----------------------------------------------------------------------------------------

    def _wait_for_all(self) -> None:
        """ServerError where a pod that was there is not back in time."""
        until = time.monotonic() + self._come_back_s
        while len(found := self._found()) != self.count:
            if time.monotonic() > until:
                raise ServerError(
                    f"The Service {self.target} has {len(found)} ready pods; it had {self.count} at first.",
                    "a pod failed or was evicted, or somebody scaled the Deployment",
                    f"kubectl -n {self.target.namespace} get pods; the same command resumes",
                )
            time.sleep(min(FOLLOW_S, self._come_back_s))
        self.workers = found

    def _end_following(self) -> list[str]:
        follower, self._follower = self._follower, None
        return follower.stop() if follower else []

    def stop(self) -> None:
        """Ends the following; the pods are somebody else's."""
        self._end_following()


class Follower:
    """Looks at the pods every FOLLOW_S from a thread, so that one that went and came back in between is seen."""

    def __init__(self, look, first: list[Worker], every_s: float):
        self._look, self._last, self._every_s = look, first, every_s
        self._seen: list[str] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvlab-pods", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            self._once()

    def _once(self) -> None:
        try:
            now = self._look()
        except KvlabError:
            return  # the API may be away for a moment; the last look says what came of it
        self._seen += k8s.changes(self._last, now)
        self._last = now

    def stop(self) -> list[str]:
        """All changes, after a last look."""
        self._end.set()
        self._thread.join()
        self._once()
        return list(dict.fromkeys(self._seen))


# -- what cannot be measured ----------------------------------------------------------------------------------------


def refuse_unreachable(workers: Iterable[Worker], target: Target) -> None:
    """ServerError where a pod's address leads nowhere from here: its counters could not be read."""
    away = [worker for worker in workers if not _connects(worker.base_url)]
    if away:
        raise ServerError(
            f"{len(away)} of the pods behind {target} cannot be reached from here, such as {away[0].pod}.",
            "pod addresses are known inside the cluster only",
            "run the load inside: add --in-cluster IMAGE, or run this command on a node",
        )


def _reachable(urls: list[str], target: Target) -> str:
    found = next((url for url in urls if _connects(url)), None)
    if found is None:
        raise ServerError(
            f"The Service {target} cannot be reached from here: {', '.join(urls) or 'it has no address'}.",
            "a cluster IP is known inside the cluster only",
            "run the load inside: add --in-cluster IMAGE; or name an address that leads to it with --base-url",
        )
    return found


def _connects(url: str) -> bool:
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        with socket.create_connection((parts.hostname, port), timeout=REACH_S):
            return True
    except OSError:
        return False


def _model_of(worker: Worker, key: str | None) -> str | None:
    """The first model that a worker serves: aliases and adapters stand behind it."""
    try:
        models = control.served_models(Endpoint(worker.base_url, "", key))
    except OSError:
        return None
    return next((model["id"] for model in models if model.get("id")), None)


def _check_pool(cell: Cell, capacity: Capacity) -> None:
    """ConfigError where the pods have other blocks than the cell's server: what is computed would be another's."""
    asked = {"block_size": cell.server.block_size, "blocks": cell.server.num_gpu_blocks_override}
    have = {"block_size": capacity.metric_block_size, "blocks": capacity.metric_blocks}
    wrong = [f"{name} is {have[name]}, not {value}" for name, value in asked.items() if value not in (None, have[name])]
    if wrong:
        raise ConfigError(
            f"The pods are not those of the profile: {'; '.join(wrong)}.",
            "they were started with other flags",
            "write a profile with the pods' flags, or start them with: kvlab k8s render",
        )


def _emptied(endpoint: Endpoint, capacity: Capacity) -> bool:
    """Whether the prefix cache was emptied. Without developer mode it cannot: old blocks are then evicted first."""
    try:
        control.reset_prefix_cache(endpoint, capacity)
    except ServerError:
        return False
    return True
