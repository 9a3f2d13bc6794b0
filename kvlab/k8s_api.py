"""A cluster's API through the official Python client: answers as JSON, and each refusal as one clear error."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvlab import k8s
from kvlab.errors import ConfigError, EngineMissing, ServerError
from kvlab.k8s import Target, Worker

TIMEOUT_S = 30
SLICE_LABEL = "kubernetes.io/service-name"


class NotFound(ServerError):
    """The API has no such object, or no such kind of object."""


class Forbidden(ServerError):
    """The API knows who asks, and refuses."""


class Api:
    """One cluster, as the kubeconfig or the pod's service account opens it. Raises ConfigError or ServerError."""

    def __init__(self, context: str | None = None):
        self._kubernetes = _client()
        self._connection = _connect(self._kubernetes, context)
        kinds = ("CoreV1Api", "DiscoveryV1Api", "BatchV1Api")
        self.core, self.discovery, self.batch = (getattr(self._kubernetes.client, k)(self._connection) for k in kinds)

    @property
    def host(self) -> str:
        return self._connection.configuration.host

    def call(self, method, *arguments, what: str, raw: bool = False, **options) -> Any:
        """The JSON (or bytes) that a method of the client answers; `what` names it in an error."""
        from urllib3.exceptions import HTTPError

        options |= {"_preload_content": False, "_request_timeout": TIMEOUT_S}
        try:
            answer = method(*arguments, **options)
            data = answer.data
        except self._kubernetes.client.exceptions.ApiException as error:
            raise _explained(error.status, _message(error.body), what, self.host) from None
        except (HTTPError, OSError) as error:
            raise ServerError(
                f"The Kubernetes API at {self.host} does not answer: {error}",
                "the cluster is down, or not reachable from here (a VPN, a firewall, an old kubeconfig)",
                "kubectl cluster-info",
            ) from None
        return answer if raw else _parsed(data, self.host)

    # -- reading ----------------------------------------------------------------------------------------------------

    def service(self, target: Target) -> dict[str, Any]:
        """The Service; ServerError where there is none, and what there is instead."""
        what = f"the Service {target.service} in the namespace {target.namespace}"
        try:
            return self.call(self.core.read_namespaced_service, target.service, target.namespace, what=what)
        except NotFound:
            there = self._names(self.core.list_namespaced_service, target.namespace)
            listed = f"there are: {', '.join(there)}" if there else "that namespace has none, or does not exist"
            raise ServerError(
                f"There is no Service {target.service} in the namespace {target.namespace}.",
                listed,
                "kubectl get services --all-namespaces",
            ) from None

    def _names(self, method, namespace: str) -> list[str]:
        try:
            return [item["metadata"]["name"] for item in self.call(method, namespace, what="a list")["items"]]
        except ServerError:
            return []

    def workers(self, target: Target, service: dict[str, Any]) -> list[Worker]:
        """The ready pods behind the Service, by name; empty where none is ready."""
        port = k8s.service_port(service, target)
        found = self._addresses(target, port, (service["spec"].get("ipFamilies") or ["IPv4"])[0])
        labels = ",".join(f"{name}={value}" for name, value in (service["spec"].get("selector") or {}).items())
        what = f"the pods of the namespace {target.namespace}"
        pods = self.call(self.core.list_namespaced_pod, target.namespace, label_selector=labels, what=what)["items"]
        return k8s.with_pods(found, pods)

    def _addresses(self, target: Target, port: dict[str, Any], family: str) -> list[Worker]:
        what = f"the endpoint slices of {target}"
        list_slices, label = self.discovery.list_namespaced_endpoint_slice, f"{SLICE_LABEL}={target.service}"
        try:
            slices = self.call(list_slices, target.namespace, label_selector=label, what=what)["items"]
            if slices:
                return k8s.of_slices(slices, port, family)
        except (NotFound, Forbidden):  # older than 1.21, or an account that may read Endpoints only
            pass
        try:
            read = self.core.read_namespaced_endpoints
            return k8s.of_endpoints(self.call(read, target.service, target.namespace, what=what), port)
        except NotFound:
            return []


def refuse_none(workers: Iterable[Worker], target: Target) -> None:
    """ServerError where no pod is ready."""
    if not list(workers):
        raise ServerError(
            f"The Service {target} has no ready pod.",
            "its pods still start, fail, or its selector matches none",
            f"kubectl -n {target.namespace} get pods,endpoints",
        )


# -- connecting -------------------------------------------------------------------------------------------------------


def _client():
    try:
        import kubernetes
    except ImportError:
        raise EngineMissing(
            "The Kubernetes client is not installed.",
            "it is an optional part of kvlab",
            "pip install 'kvlab[k8s]' (from a clone: pip install -e '.[k8s]')",
        ) from None
    return kubernetes


def _connect(kubernetes, context: str | None):
    from yaml import YAMLError

    config, files = kubernetes.config, _kubeconfig()
    configuration = kubernetes.client.Configuration()
    configuration.retries = False  # an error is told at once, and without warnings before it
    try:
        if context is None and files is None and "KUBERNETES_SERVICE_HOST" in os.environ:
            config.load_incluster_config(client_configuration=configuration)
        elif files is None:
            raise ConfigError(
                "No cluster is configured here: there is no kubeconfig.",
                "it is neither named by KUBECONFIG nor at ~/.kube/config",
                "export KUBECONFIG=/path/to/file, and try: kubectl get pods",
            )
        else:
            config.load_kube_config(config_file=files, context=context, client_configuration=configuration)
    except (config.ConfigException, YAMLError, OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"The kubeconfig cannot be used: {error}",
            "it is damaged, has no such context, or names a file that is not there",
            "kubectl config view; kubectl config get-contexts",
        ) from None
    return kubernetes.client.ApiClient(configuration)


def _kubeconfig() -> str | None:
    """The kubeconfig's files, as the client joins them; None where there is none."""
    names = os.environ.get("KUBECONFIG", "").split(os.pathsep)
    places = [Path(os.path.expanduser(name)) for name in [*filter(None, names)] or ["~/.kube/config"]]
    return os.pathsep.join(str(place) for place in places if place.is_file()) or None


def _parsed(data: bytes, host: str) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        raise ServerError(
            f"What answers at {host} speaks no JSON: {data[:80]!r}",
            "a login page or a proxy, and not the Kubernetes API",
            "kubectl cluster-info, and look at the address in the kubeconfig",
        ) from None


def _message(body: Any) -> str:
    """What the API's Status object says."""
    text = body.decode(errors="replace") if isinstance(body, bytes) else str(body or "")
    try:
        return json.loads(text).get("message") or text
    except (ValueError, AttributeError):
        return text.strip()[:300]


def _explained(status: int, message: str, what: str, host: str) -> ServerError:
    if status == 404:
        return NotFound(f"The cluster has no {what.removeprefix('the ')}: {message}")
    if status == 401:
        return ServerError(
            f"The Kubernetes API at {host} does not know who asks (HTTP 401): {message}",
            "the token or certificate has expired",
            "log in to the cluster again, and try: kubectl get pods",
        )
    if status == 403:
        return Forbidden(
            f"No permission to read {what}: {message}",
            "this account may not read services, endpoints, endpoint slices and pods there",
            "apply the Role of `kvlab k8s render`, or ask: kubectl auth can-i list pods -n NAMESPACE",
        )
    return ServerError(f"The Kubernetes API answers HTTP {status} to {what}: {message}")
