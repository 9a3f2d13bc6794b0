"""Kubernetes manifests for a measurement: workers, their Service, and the rights of the load that runs beside them.

Plain objects, made into YAML by a library; nothing is sent to a cluster from here.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from pydantic import Field, model_validator

from kvlab import caches, engine, provenance
from kvlab.config import ServerConfig, Strict
from kvlab.errors import ConfigError
from kvlab.files import typed
from kvlab.k8s import Target
from kvlab.profile import Profile, load_profile

LABEL = r"^[a-z0-9]([a-z0-9-]{0,40}[a-z0-9])?$"  # a DNS label with room for what is appended
QUANTITY = r"^[1-9][0-9]*(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"
IMAGE = r"^[a-z0-9][\w.\-/:@]*$"
PORT, HOLD_PORT = 8000, 8080
CACHE = "/cache"
START_S, PROBE_S = 1800, 5  # a cold start downloads the model and compiles
OWN_FOLDERS = ("tiny", "geometry:")  # models that kvlab makes: the worker's image does not have them
ROUTER_POLICIES = ("random", "round_robin", "cache_aware", "power_of_two", "consistent_hash")

Manifest = dict[str, Any]


class Options(Strict):
    """What `kvlab k8s render` asks for. Quantities as Kubernetes writes them, such as 8Gi or 500m."""

    image: str = Field(pattern=IMAGE)  # of the workers: it holds vLLM
    load_image: str = Field("kvlab:latest", pattern=IMAGE)  # made from this project's Dockerfile
    profile: str = "gpu-8gb"  # a built-in profile, or the path of a TOML file
    namespace: str = Field("kvlab", pattern=LABEL)
    name: str = Field("kvlab", pattern=LABEL)  # start of every object's name
    replicas: int = Field(6, gt=0)
    gpus: int | None = Field(None, ge=0)  # of each worker; null: its tensor-parallel ranks
    cpu: str = Field("4", pattern=QUANTITY)
    memory: str = Field("16Gi", pattern=QUANTITY)
    storage_class: str | None = Field(None, pattern=LABEL)  # null: the cluster's default
    cache_size: str = Field("50Gi", pattern=QUANTITY)
    cache_path: str | None = Field(None, pattern=r"^/")  # a folder of each node in place of a claim
    token_secret: str | None = Field(None, pattern=LABEL)  # its key HF_TOKEN: for gated models
    pull_secret: str | None = Field(None, pattern=LABEL)
    router: str = ""  # a policy of vllm-router; empty: no router
    measured: str = ""  # NAMESPACE/SERVICE of somebody else's workers; empty: the Service of these
    section: str = "service_hit_rate"
    params: tuple[str, ...] = ()  # NAME=VALUE, for the section's notebook

    @model_validator(mode="after")
    def _consistent(self):
        if self.router and self.router not in ROUTER_POLICIES:
            raise ValueError(f"router is a policy of vllm-router: {', '.join(ROUTER_POLICIES)}")
        if self.cache_path and self.storage_class:
            raise ValueError("cache_path takes a folder of each node, so that storage_class has no meaning beside it")
        return self

    @property
    def workers_name(self) -> str:
        return f"{self.name}-workers"

    @property
    def load_name(self) -> str:
        return f"{self.name}-load"


def render(options: Options) -> dict[str, Manifest]:
    """File name -> object, in the order in which they are applied. ConfigError for a profile that cannot be used."""
    profile = load_profile(options.profile)
    objects = {"namespace": _object("v1", "Namespace", options.namespace)}
    objects |= _cache_claim(options)
    objects["workers"] = workers(options, profile)
    objects["service"] = service(options, options.workers_name, PORT)
    objects |= _rights(options.load_name, options, LOAD_RULES)
    if own_profile(options.profile):
        objects["profile"] = profile_map(options)
    if options.router:
        objects |= _router(options)
    objects["load-job"] = load_job(options, machine_of(options))
    objects["load-job"]["spec"]["suspend"] = True  # applied with the workers, it would come before they are ready
    return {f"{number:02d}-{name}.yaml": one for number, (name, one) in enumerate(objects.items())}


def to_yaml(objects: dict[str, Manifest]) -> str:
    """All objects in one text."""
    return "---\n".join(_text(one) for one in objects.values())


def write(objects: dict[str, Manifest], where: Path) -> list[Path]:
    """One file where the name ends in .yaml or .yml, else a folder with a file for each object."""
    if where.suffix in (".yaml", ".yml"):
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(to_yaml(objects), encoding="utf-8")
        return [where]
    if where.exists() and not where.is_dir():
        raise ConfigError(f"{where} is a file.", next_step="give a folder, or a name that ends in .yaml")
    where.mkdir(parents=True, exist_ok=True)
    for name, one in objects.items():
        (where / name).write_text(_text(one), encoding="utf-8")
    return [where / name for name in objects]


def _text(one: Manifest) -> str:
    import yaml

    class Plain(yaml.SafeDumper):
        """Equal parts are written out: an anchor is hard to read and to edit."""

        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump(one, Dumper=Plain, sort_keys=False, default_flow_style=False, width=120)


def _object(version: str, kind: str, name: str, namespace: str | None = None, **fields) -> Manifest:
    metadata = {"name": name} | ({"namespace": namespace} if namespace else {})
    labels = {"app.kubernetes.io/part-of": "kvlab"}
    return {"apiVersion": version, "kind": kind, "metadata": metadata | {"labels": labels}} | fields


def own_profile(profile: str) -> bool:
    """Whether it is a file that the load's image does not have."""
    return profile.endswith(".toml")


# -- workers --------------------------------------------------------------------------------------------------------


def workers(options: Options, profile: Profile) -> Manifest:
    """The Deployment: the section's server, one in each pod, all with one volume for models and compile caches."""
    config = profile.section_server(options.section)
    label = {"app": options.workers_name}
    container = {
        "name": "vllm",
        "image": options.image,
        "command": ["vllm", "serve"],
        "args": worker_arguments(config),
        "env": [{"name": name, "value": value} for name, value in sorted(worker_environment(config).items())],
        "ports": [{"name": "http", "containerPort": PORT}],
        "startupProbe": _probe(START_S // PROBE_S),
        "readinessProbe": _probe(3),
        "livenessProbe": _probe(24),  # two minutes: a worker that computes a long prompt may be slow to answer
        "resources": _resources(options, config),
        "volumeMounts": [{"name": "cache", "mountPath": CACHE}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    if options.token_secret:
        key = {"name": options.token_secret, "key": "HF_TOKEN"}
        container["env"].append({"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": key}})
    pod = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,  # a Service named vllm would set VLLM_PORT, which vLLM reads as its own
        **_model_maker(options, config),
        "containers": [container],
        "volumes": [_cache_volume(options), {"name": "shm", "emptyDir": {"medium": "Memory"}}],
    } | _pull(options)
    spec = {
        "replicas": options.replicas,
        # A new worker beside an old one would be a seventh that takes part in a measurement.
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": label},
        "template": {"metadata": {"labels": label}, "spec": pod},
    }
    return _object("apps/v1", "Deployment", options.workers_name, options.namespace, spec=spec)


def worker_arguments(config: ServerConfig) -> list[str]:
    """The flags with which kvlab starts the same server here, listening on the pod's address."""
    words = engine.to_argv(config, model_in_pod(config), PORT)
    words = words[words.index("serve") + 1 :]
    words[words.index("--host") + 1] = "0.0.0.0"
    return words + (["--load-format", "dummy"] if config.model.startswith("geometry:") else [])


def worker_environment(config: ServerConfig) -> dict[str, str]:
    """What the engine needs, and where it keeps models and compiled code; `config.env` wins."""
    own = {name: f"{CACHE}/{part}" for name, part in caches.VARIABLES.items()} | {"HF_HOME": f"{CACHE}/huggingface"}
    return own | engine.own_environment(config) | config.env


def model_in_pod(config: ServerConfig) -> str:
    """The model's name or folder as the worker sees it. ConfigError for a folder of this machine."""
    if config.model.startswith(OWN_FOLDERS):
        return f"{CACHE}/models/{config.model.replace(':', '-')}"
    if os.path.exists(typed(config.model)):
        raise ConfigError(
            f"The profile's model {config.model!r} is a folder of this machine; pods do not have it.",
            next_step=f'put it on the cache volume and name it "{CACHE}/...", or use a hub name',
        )
    return config.model


def _model_maker(options: Options, config: ServerConfig) -> Manifest:
    if not config.model.startswith(OWN_FOLDERS):
        return {}
    arguments = ["k8s", "model", config.model, model_in_pod(config)]
    mounts = [{"name": "cache", "mountPath": CACHE}]
    made = {"name": "model", "image": options.load_image, "args": arguments, "volumeMounts": mounts}
    return {"initContainers": [made]}


def _resources(options: Options, config: ServerConfig) -> Manifest:
    default = config.tensor_parallel_size if config.engine == "cuda" else 0
    gpus = default if options.gpus is None else options.gpus
    limits = {"memory": options.memory} | ({"nvidia.com/gpu": str(gpus)} if gpus else {})
    return {"requests": {"cpu": options.cpu, "memory": options.memory}, "limits": limits}


def _probe(failures: int) -> Manifest:
    get = {"path": "/health", "port": "http"}
    return {"httpGet": get, "periodSeconds": PROBE_S, "timeoutSeconds": PROBE_S, "failureThreshold": failures}


def _cache_claim(options: Options) -> dict[str, Manifest]:
    if options.cache_path:
        return {}
    spec = {"accessModes": ["ReadWriteMany"], "resources": {"requests": {"storage": options.cache_size}}}
    spec |= {"storageClassName": options.storage_class} if options.storage_class else {}
    return {"cache": _object("v1", "PersistentVolumeClaim", f"{options.name}-cache", options.namespace, spec=spec)}


def _cache_volume(options: Options) -> Manifest:
    if options.cache_path:
        return {"name": "cache", "hostPath": {"path": options.cache_path, "type": "DirectoryOrCreate"}}
    return {"name": "cache", "persistentVolumeClaim": {"claimName": f"{options.name}-cache"}}


def _pull(options: Options) -> Manifest:
    return {"imagePullSecrets": [{"name": options.pull_secret}]} if options.pull_secret else {}


def service(options: Options, app: str, target: int) -> Manifest:
    """A ClusterIP that picks a worker for each connection; affinity would send one client to one worker only."""
    ports = [{"name": "http", "port": PORT, "targetPort": target}]
    spec = {"type": "ClusterIP", "sessionAffinity": "None", "selector": {"app": app}, "ports": ports}
    return _object("v1", "Service", app, options.namespace, spec=spec)


# -- the load -------------------------------------------------------------------------------------------------------

LOAD_RULES = [
    {"apiGroups": [""], "resources": ["services", "endpoints", "pods"], "verbs": ["get", "list", "watch"]},
    {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]},
]
ROUTER_RULES = [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}]


def _rights(name: str, options: Options, rules: list[Manifest]) -> dict[str, Manifest]:
    """A service account that may read these things in its namespace, and nothing else."""
    at = options.namespace
    subject = {"kind": "ServiceAccount", "name": name, "namespace": at}
    to = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    part = name.removeprefix(f"{options.name}-")
    return {
        f"{part}-account": _object("v1", "ServiceAccount", name, at),
        f"{part}-role": _object("rbac.authorization.k8s.io/v1", "Role", name, at, rules=rules),
        f"{part}-binding": _object(
            "rbac.authorization.k8s.io/v1", "RoleBinding", name, at, roleRef=to, subjects=[subject]
        ),
    }


def machine_of(options: Options) -> str:
    """The data folder of a measurement of these workers; their names stay private."""
    return provenance.external_name(Target(options.namespace, options.workers_name).url)


def load_arguments(options: Options, machine: str) -> list[str]:
    """What the load's container is told: to measure a section through the Service."""
    profile = f"/profile/{Path(options.profile).name}" if own_profile(options.profile) else options.profile
    to = options.measured or f"{options.namespace}/{options.workers_name}"
    measure = ["measure", options.section, "--kubernetes", to, "--profile", profile, "--machine", machine]
    return ["k8s", "hold", machine, "--", *measure, *(f"--param={text}" for text in options.params)]


def load_job(options: Options, machine: str, name: str = "") -> Manifest:
    """A Job that measures once, then holds its results until they are fetched; it is not tried a second time."""
    container = {
        "name": "kvlab",
        "image": options.load_image,
        "args": load_arguments(options, machine),
        "ports": [{"name": "results", "containerPort": HOLD_PORT}],
        "resources": {"requests": {"cpu": "2", "memory": "4Gi"}, "limits": {"memory": "4Gi"}},
    }
    pod = {"serviceAccountName": options.load_name, "restartPolicy": "Never", "containers": [container]}
    if own_profile(options.profile):
        container["volumeMounts"] = [{"name": "profile", "mountPath": "/profile"}]
        pod["volumes"] = [{"name": "profile", "configMap": {"name": f"{options.name}-profile"}}]
    pod |= _pull(options)
    label = {"app": options.load_name}
    spec = {"backoffLimit": 0, "template": {"metadata": {"labels": label}, "spec": pod}}
    return _object("batch/v1", "Job", name or options.load_name, options.namespace, spec=spec)


def profile_map(options: Options) -> Manifest:
    """The profile's file, for the load's container."""
    path = typed(options.profile)
    data = {path.name: path.read_text(encoding="utf-8")}
    return _object("v1", "ConfigMap", f"{options.name}-profile", options.namespace, data=data)


# -- a router ---------------------------------------------------------------------------------------------------------


def _router(options: Options) -> dict[str, Manifest]:
    """vllm-router from the load's image, which finds the workers by their label; a Service of its own in front."""
    name = f"{options.name}-router"
    words = ["--host", "0.0.0.0", "--port", str(PORT), "--policy", options.router, "--service-discovery"]
    words += ["--selector", f"app={options.workers_name}", "--service-discovery-namespace", options.namespace]
    words += ["--service-discovery-port", str(PORT), "--worker-startup-check-interval", "1"]
    container = {
        "name": "router",
        "image": options.load_image,
        "command": ["vllm-router"],
        "args": words,
        "ports": [{"name": "http", "containerPort": PORT}],
        "readinessProbe": _probe(3),
        "resources": {"requests": {"cpu": "2", "memory": "2Gi"}, "limits": {"memory": "2Gi"}},
    }
    pod = {"serviceAccountName": name, "containers": [container]} | _pull(options)
    template = {"metadata": {"labels": {"app": name}}, "spec": pod}
    spec = {"replicas": 1, "selector": {"matchLabels": {"app": name}}, "template": template}
    return _rights(name, options, ROUTER_RULES) | {
        "router": _object("apps/v1", "Deployment", name, options.namespace, spec=spec),
        "router-service": service(options, name, PORT),
    }
