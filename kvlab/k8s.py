"""The workers behind a Kubernetes Service, from what the API answers: pure functions over its JSON.

Addresses come from EndpointSlices, or from Endpoints where a cluster has no slices of version 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from kvlab.config import Cell
from kvlab.errors import ConfigError, ServerError

SCHEME = "kubernetes"
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """A Service of a cluster. `entrance`: an address that leads to it, where its own cannot be reached from here."""

    namespace: str
    service: str
    port: str | None = None  # of the Service, by name or number; null where it has one only
    entrance: str | None = None
    context: str | None = None  # of the kubeconfig; null: the current one

    @property
    def url(self) -> str:
        """In the form that BASE_URL of a notebook takes."""
        options = {"port": self.port, "entrance": self.entrance, "context": self.context}
        query = "&".join(f"{name}={quote(value, safe='')}" for name, value in options.items() if value)
        return f"{SCHEME}://{self.namespace}/{self.service}" + (f"?{query}" if query else "")

    def __str__(self) -> str:
        return f"{self.namespace}/{self.service}"


@dataclass(frozen=True)
class Worker:
    """A ready pod behind the Service. Null where the API does not tell; `restarts`: of all its containers."""

    pod: str
    address: str
    port: int
    uid: str | None = None
    node: str | None = None
    restarts: int | None = None
    started: str | None = None
    image: str | None = None

    @property
    def base_url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"


def is_target(base_url: str) -> bool:
    """Whether an address names a Service of a cluster."""
    return base_url.startswith(f"{SCHEME}://")


def parse_target(text: str) -> Target:
    """NAMESPACE/SERVICE, with :PORT where it has several; or what `Target.url` gives. ConfigError where it is neither.

    `kubernetes://ns/service?entrance=http://10.0.0.1:30080&context=lab`
    """
    parts = urlsplit(text if is_target(text) else f"{SCHEME}://{text}")
    words = [parts.netloc, *parts.path.strip("/").split("/")]
    options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    service, _, port = words[-1].partition(":")
    if len(words) != 2 or not all((parts.netloc, service)) or set(options) - {"port", "entrance", "context"}:
        raise ConfigError(
            f"{text!r} names no Service of a cluster.", next_step="write NAMESPACE/SERVICE, such as kvlab/kvlab-workers"
        )
    options = {"port": port or None} | options
    return Target(parts.netloc, service, **options)


# -- the Service ----------------------------------------------------------------------------------------------------


def check_service(service: Json, target: Target) -> None:
    """ServerError for a Service that does not pick a pod for each connection."""
    spec = service.get("spec", {})
    if spec.get("type") == "ExternalName":
        raise ServerError(f"The Service {target} is only a name for {spec.get('externalName')}: it has no pods.")
    if spec.get("clusterIP") in (None, "", "None"):
        raise ServerError(
            f"The Service {target} is headless: it has no address of its own.",
            "its DNS name gives the addresses of all pods, and the client picks one",
            "measure a Service with a cluster IP in front of the same pods",
        )
    if spec.get("sessionAffinity", "None") != "None":
        raise ServerError(
            f"The Service {target} has sessionAffinity {spec['sessionAffinity']}.",
            "all connections of this client would go to one pod, and the hit ratio would be that of one worker",
            "set sessionAffinity: None, or measure another Service in front of the same pods",
        )


def service_port(service: Json, target: Target) -> Json:
    """The entry of spec.ports that is measured: the one asked for, or the only one. ServerError names the others."""
    ports = service.get("spec", {}).get("ports") or []
    if target.port is None and len(ports) == 1:
        return ports[0]
    found = [port for port in ports if target.port in (port.get("name"), str(port.get("port")))]
    if target.port is not None and found:
        return found[0]
    named = ", ".join(port.get("name") or str(port.get("port")) for port in ports)
    raise ServerError(
        f"The Service {target} has no port {target.port!r}."
        if target.port
        else f"The Service {target} has {len(ports)} ports.",
        next_step=f"choose one: {target}:PORT, of {named or '(none)'}",
    )


def entrances(service: Json, port: Json) -> list[str]:
    """Addresses that lead to the Service, the cluster's own first, then those of load balancers."""
    spec, status = service.get("spec", {}), service.get("status", {})
    balancers = (status.get("loadBalancer") or {}).get("ingress") or []
    hosts = [spec.get("clusterIP"), *(spec.get("externalIPs") or [])]
    hosts += [entry.get("ip") or entry.get("hostname") for entry in balancers]
    return [f"http://[{h}]:{port['port']}" if ":" in h else f"http://{h}:{port['port']}" for h in hosts if h]


# -- its pods ---------------------------------------------------------------------------------------------------------


def of_slices(slices: Iterable[Json], port: Json, family: str) -> list[Worker]:
    """The ready endpoints of EndpointSlices, without doubles; `family`: IPv4 or IPv6, the Service's own."""
    found: dict[str, Worker] = {}
    for one in slices:
        number = _number(one.get("ports"), port)
        if one.get("addressType") != family or number is None:
            continue
        for endpoint in one.get("endpoints") or []:
            conditions = endpoint.get("conditions") or {}
            # By the API's own rule an unknown readiness counts as ready.
            if conditions.get("ready") is False or conditions.get("terminating"):
                continue
            for address in endpoint.get("addresses") or []:
                found.setdefault(address, _worker(endpoint, address, number))
    return sorted(found.values(), key=lambda worker: worker.pod)


def of_endpoints(endpoints: Json, port: Json) -> list[Worker]:
    """The same from an Endpoints object, as every cluster has it."""
    found: dict[str, Worker] = {}
    for subset in endpoints.get("subsets") or []:
        number = _number(subset.get("ports"), port)
        for endpoint in (subset.get("addresses") or []) if number is not None else []:
            found.setdefault(endpoint["ip"], _worker(endpoint, endpoint["ip"], number))
    return sorted(found.values(), key=lambda worker: worker.pod)


def _number(ports: Iterable[Json] | None, port: Json) -> int | None:
    """The pods' port behind the Service's port, which is joined by its name."""
    wanted = port.get("name") or ""
    return next((p["port"] for p in ports or [] if (p.get("name") or "") == wanted and p.get("port")), None)


def _worker(endpoint: Json, address: str, port: int) -> Worker:
    pod = endpoint.get("targetRef") or {}
    return Worker(pod.get("name") or address, address, port, uid=pod.get("uid"), node=endpoint.get("nodeName"))


def with_pods(workers: Iterable[Worker], pods: Iterable[Json]) -> list[Worker]:
    """The workers with what their pods tell: restarts, the last start, the image. Pods that are being deleted go."""
    by_name = {pod["metadata"]["name"]: pod for pod in pods}
    known = [(worker, by_name.get(worker.pod)) for worker in workers]
    return [_told(w, pod) for w, pod in known if pod is None or not pod["metadata"].get("deletionTimestamp")]


def _told(worker: Worker, pod: Json | None) -> Worker:
    if pod is None:
        return worker
    states = pod.get("status", {}).get("containerStatuses") or []
    started = [((state.get("state") or {}).get("running") or {}).get("startedAt") for state in states]
    return Worker(
        worker.pod,
        worker.address,
        worker.port,
        uid=pod["metadata"].get("uid"),
        node=pod.get("spec", {}).get("nodeName") or worker.node,
        restarts=sum(state.get("restartCount", 0) for state in states) if states else None,
        started=max(filter(None, started), default=None),
        image=next((state.get("image") for state in states), None),
    )


def changes(before: Iterable[Worker], after: Iterable[Worker]) -> list[str]:
    """What happened to the workers in between, in words; empty where they are the same processes as before."""
    old, new = ({worker.pod: worker for worker in side} for side in (before, after))
    told = [f"the worker {name} came" for name in new if name not in old]
    for name, was in old.items():
        now = new.get(name)
        if now is None:
            told.append(f"the worker {name} went, or was not ready")
        elif (was.uid, was.address) != (now.uid, now.address):
            told.append(f"the worker {name} was replaced")
        elif (was.restarts, was.started) != (now.restarts, now.started):
            told.append(f"the worker {name} restarted: its cache and its counters began anew")
    return told


def cannot_serve(cell: Cell, workers: int | None) -> str | None:
    """Why a cell of a grid cannot be measured behind a Service of so many ready pods (null: unknown); None: it can."""
    from kvlab.service import PER_CONNECTION  # slow to import, and not needed in a replay

    if not cell.service:
        return "it measures one server, and a Service has several pods: give the address of one with --base-url"
    if cell.service.partition(":")[0] not in PER_CONNECTION:
        return f"a Kubernetes Service picks by connection, and not by {cell.service}"
    if workers is not None and cell.workers != workers:
        return f"the Service has {workers} ready pods, and not {cell.workers}"
    return None
