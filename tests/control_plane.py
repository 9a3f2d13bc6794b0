"""A real control plane in this network namespace, and what stands in for a kubelet.

etcd, kube-apiserver, kube-controller-manager, kube-scheduler and kube-proxy run on addresses of the loopback device.
The one node is an object; `Kubelet` gives its pods an address, a fake vLLM worker or a Job's command, and their status.
"""

from __future__ import annotations

import base64
import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import control_plane_build as built
import yaml
from kubernetes import client, config, utils

from kvlab import engine, k8s_job, router_packages
from kvlab.fake_server import Behaviour, FakeServer

HOST, SERVICES, NODE = "10.77.255.1", "10.96.0.0/16", "node-1"
API, API_SERVICE = f"https://{HOST}:6443", "10.96.0.1"
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ETCD = "http://127.0.0.1:2379"


def needs() -> list[str]:
    """What is missing to run it here, in words."""
    missing = [] if os.geteuid() == 0 else ["root (for a network namespace)"]
    missing += [f"the program {name}" for name in ("ip", "openssl", "unshare", "mount") if not shutil.which(name)]
    return missing + ([] if built.ready() else built.needs())


def alone() -> bool:
    """Whether this network namespace holds nothing but the loopback device."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


class ControlPlane:
    """`with ControlPlane(folder) as plane:` runs until the block ends; `plane.api` is the administrator's client."""

    def __init__(self, folder: Path):
        self.folder, self.bin = folder, built.build() / "bin"
        self.kubeconfig = folder / "admin.conf"
        self._running: list[subprocess.Popen] = []

    def __enter__(self) -> ControlPlane:
        try:
            return self._start()
        except BaseException:
            self.__exit__()
            raise

    def _start(self) -> ControlPlane:
        self.folder.mkdir(parents=True, exist_ok=True)
        _addresses()
        self._certificates()
        self._run("etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync", *_etcd_urls())
        self._run("kube-apiserver", *self._api_flags())
        self.kubeconfig.write_text(kubeconfig(self.folder / "ca.crt", "admin-token"))
        self.api = client.ApiClient(_configuration(self.kubeconfig))
        self._wait(lambda: client.CoreV1Api(self.api).list_namespace(), "the API")
        common = ("--kubeconfig", str(self.kubeconfig))
        keys = ("--service-account-private-key-file", str(self.folder / "sa.key"))
        keys += ("--root-ca-file", str(self.folder / "ca.crt"))
        # Without a kubelet's heartbeats the node would count as lost.
        controllers = "--controllers=*,-nodelifecycle,-attachdetach,-persistentvolume-binder"
        self._run("kube-controller-manager", *common, *keys, controllers, "--leader-elect=false")
        self._run("kube-scheduler", *common, "--leader-elect=false")
        flags = ("--hostname-override", NODE, "--proxy-mode", "iptables", "--conntrack-max-per-core", "0")
        self._run("kube-proxy", *common, *flags, "--iptables-min-sync-period", "0s", "--iptables-sync-period", "5s")
        self._node()
        return self

    def __exit__(self, *_) -> None:
        for process in reversed(self._running):
            process.terminate()
        for process in reversed(self._running):
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._running = []

    def _run(self, name: str, *flags: str) -> None:
        net = built.folder() / "net"
        libraries = next((net / "usr/lib").glob("*-linux-gnu"))
        env = os.environ | {
            "PATH": f"{net}/usr/sbin:{net}/sbin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": str(libraries),
            "XTABLES_LIBDIR": str(libraries / "xtables"),
        }
        with (self.folder / f"{name}.log").open("wb") as log:
            command = [str(self.bin / name), *flags]
            self._running.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))

    def _certificates(self) -> None:
        """An authority and a server's certificate apart: some clients take no authority for a server."""
        names = f"IP:{HOST},IP:{API_SERVICE},IP:127.0.0.1,DNS:kubernetes.default.svc"
        (self.folder / "names").write_text(f"subjectAltName={names}\n")
        for command in (
            "req -x509 -newkey rsa:2048 -nodes -days 30 -keyout ca.key -out ca.crt -subj /CN=ca",
            "req -newkey rsa:2048 -nodes -keyout api.key -out api.csr -subj /CN=api",
            "x509 -req -in api.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 30 -extfile names -out api.crt",
            "genrsa -out sa.key 2048",
        ):
            _quietly("openssl", *command.split(), cwd=self.folder)
        tokens = "admin-token,admin,1,system:masters\nstranger-token,stranger,2,visitors\n"
        (self.folder / "tokens.csv").write_text(tokens)

    def _api_flags(self) -> list[str]:
        key = str(self.folder / "sa.key")
        return [
            *("--etcd-servers", ETCD, "--service-cluster-ip-range", SERVICES, "--advertise-address", HOST),
            *("--tls-cert-file", str(self.folder / "api.crt"), "--tls-private-key-file", str(self.folder / "api.key")),
            *("--token-auth-file", str(self.folder / "tokens.csv"), "--authorization-mode", "RBAC"),
            *("--service-account-issuer", "https://kubernetes.default.svc", "--service-account-key-file", key),
            *("--service-account-signing-key-file", key, "--cert-dir", str(self.folder / "certs")),
        ]

    def _node(self) -> None:
        core = client.CoreV1Api(self.api)
        core.create_node({"metadata": {"name": NODE, "labels": {"kubernetes.io/hostname": NODE}}})
        room = {"cpu": "64", "memory": "512Gi", "pods": "100", "nvidia.com/gpu": "8"}
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady"}
        core.patch_node_status(NODE, {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}})
        taints = core.read_node(NODE).spec.taints or []
        if taints:
            core.patch_node(NODE, {"spec": {"taints": None}})

    def apply(self, *objects: dict) -> None:
        """Creates the objects, as kubectl apply would."""
        for one in objects:
            utils.create_from_dict(self.api, one)

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")[-3000:]

    def _wait(self, look, what: str, seconds: float = 60) -> None:
        until = time.monotonic() + seconds
        while True:
            try:
                look()
                return
            except Exception as error:
                dead = [p.args[0] for p in self._running if p.poll() is not None]
                if dead or time.monotonic() > until:
                    name = Path(dead[0]).name if dead else "kube-apiserver"
                    raise RuntimeError(f"{what} did not come up: {error}\n{self.log(name)}") from None
                time.sleep(0.3)


def kubeconfig(certificate: Path, token: str) -> str:
    """The text of a kubeconfig for this control plane."""
    cluster = {"server": API, "certificate-authority": str(certificate)}
    context = {"cluster": "test", "user": "test"}
    return yaml.safe_dump(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": context}],
            "current-context": "test",
        }
    )


def _configuration(path: Path):
    made = client.Configuration()
    made.retries = False
    config.load_kube_config(str(path), client_configuration=made)
    return made


def _addresses() -> None:
    _quietly("ip", "link", "set", "lo", "up")
    _quietly("ip", "address", "replace", f"{HOST}/32", "dev", "lo")
    _quietly("ip", "route", "replace", SERVICES, "dev", "lo", "src", HOST)


def _etcd_urls() -> list[str]:
    peer = "http://127.0.0.1:2380"
    urls = {"listen-client-urls": ETCD, "advertise-client-urls": ETCD, "listen-peer-urls": peer}
    urls |= {"initial-advertise-peer-urls": peer, "initial-cluster": f"default={peer}"}
    return [word for name, url in urls.items() for word in (f"--{name}", url)]


def _quietly(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")


# -- in place of a kubelet -------------------------------------------------------------------------------------------


@dataclass
class Kubelet:
    """Runs the pods of the one node: `vllm` containers as fake workers, any other as a process of this Python.

    With a `cache` folder in place of /cache the workers are real: vLLM's CPU build with the container's own arguments.
    """

    plane: ControlPlane
    blocks: int = 51
    block_size: int = 32  # that of the profile cpu-tiny
    cache: Path | None = None
    cwd: Path | None = None  # where a Job's command runs, as in the image's working folder
    env: dict[str, str] = field(default_factory=dict)
    pods: dict[str, dict] = field(default_factory=dict)  # name -> {ip, server or process, restarts}

    def __post_init__(self):
        self._core = client.CoreV1Api(self.plane.api)
        self._next, self._end = 1, threading.Event()

    def __enter__(self) -> Kubelet:
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._end.set()
        self._thread.join()
        for name in list(self.pods):
            self._kill(name)

    def restart(self, name: str) -> None:
        """What happens when a container crashes and comes back: an empty cache, counters from 0, one restart more."""
        pod = self.pods[name]
        self._status(name, ready=False)
        time.sleep(1.0)
        pod["server"].__exit__()
        pod["server"] = self._worker(pod["ip"])
        pod["restarts"] += 1
        pod["started"] = _now()
        self._status(name)

    def unready(self, name: str) -> None:
        """A pod whose readiness probe fails."""
        self._status(name, ready=False)

    def _loop(self) -> None:
        while not self._end.wait(0.3):
            there = {pod.metadata.name: pod for pod in self._core.list_pod_for_all_namespaces().items}
            for name, pod in there.items():
                if pod.metadata.deletion_timestamp and name in self.pods:
                    self._kill(name)
                    self._forget(pod)
                elif pod.spec.node_name == NODE and name not in self.pods and not pod.metadata.deletion_timestamp:
                    self._begin(pod)
            for name in set(self.pods) - set(there):
                self._kill(name)
            self._reap()

    def _forget(self, pod) -> None:
        with contextlib.suppress(client.ApiException):
            self._core.delete_namespaced_pod(pod.metadata.name, pod.metadata.namespace, grace_period_seconds=0)

    def _begin(self, pod) -> None:
        ip, self._next = f"10.77.0.{self._next}", self._next + 1
        _quietly("ip", "address", "replace", f"{ip}/32", "dev", "lo")
        container = pod.spec.containers[0]
        about = {"ip": ip, "restarts": 0, "started": _now(), "namespace": pod.metadata.namespace}
        about |= {"container": container.name, "image": container.image}
        self.pods[pod.metadata.name] = about
        if container.name == "vllm":
            about["server"] = self._worker(ip) if self.cache is None else self._vllm(pod, ip)
        else:
            about["log"] = self.plane.folder / f"{pod.metadata.name}.log"
            about["process"] = self._process(pod, ip, about["log"])
        self._status(pod.metadata.name, ready=self.cache is None or container.name != "vllm")

    def _vllm(self, pod, ip: str) -> VllmProcess:
        """The container as it is written, but for the address and the place of the cache volume."""
        container = pod.spec.containers[0]
        for init in pod.spec.init_containers or []:
            k8s_job.put_model(init.args[2], Path(init.args[3].replace("/cache", str(self.cache), 1)))
        words = [ip if word == "0.0.0.0" else word.replace("/cache/", f"{self.cache}/", 1) for word in container.args]
        env = {e.name: e.value.replace("/cache/", f"{self.cache}/", 1) for e in container.env if e.value is not None}
        log = self.plane.folder / f"{pod.metadata.name}.log"
        return VllmProcess([*container.command[1:], *words], env, f"http://{ip}:8000", log)

    def _worker(self, ip: str) -> FakeServer:
        behaviour = Behaviour(cache_blocks=self.blocks, block_size=self.block_size, ttft_s=0.002, itl_s=0.0)
        return FakeServer(behaviour, port=8000, host=ip).__enter__()

    def _process(self, pod, ip: str, log: Path) -> subprocess.Popen:
        """The container's command, `kvlab` where it has none, and its service account where pods have it."""
        self._mount_account(pod)
        container = pod.spec.containers[0]
        env = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
        env |= {
            "KUBERNETES_SERVICE_HOST": API_SERVICE,
            "KUBERNETES_SERVICE_PORT": "443",
            "HOME": str(self.plane.folder),
        }
        command = [sys.executable, "-m", "kvlab.cli"]
        if container.command == ["vllm-router"]:
            command = [sys.executable, str(router_packages.place("vllm-router") / "bin" / "vllm-router")]
            env = router_packages.environment("vllm-router", env)
        command += [ip if word == "0.0.0.0" else word for word in container.args]
        with log.open("wb") as out:
            return subprocess.Popen(command, env=env | self.env, cwd=self.cwd, stdout=out, stderr=subprocess.STDOUT)

    def _mount_account(self, pod) -> None:
        account = self._core.read_namespaced_service_account(pod.spec.service_account_name, pod.metadata.namespace)
        secret = self._core.read_namespaced_secret(account.secrets[0].name, pod.metadata.namespace)
        ACCOUNT.mkdir(parents=True, exist_ok=True)
        for name, value in secret.data.items():
            (ACCOUNT / name).write_bytes(base64.b64decode(value))

    def _reap(self) -> None:
        for name, pod in self.pods.items():
            if isinstance(server := pod.get("server"), VllmProcess) and not server.ready and server.healthy():
                self._status(name)
            process = pod.get("process")
            if process is not None and process.poll() is not None and "code" not in pod:
                pod["code"] = process.returncode
                self._status(name)

    def _status(self, name: str, ready: bool = True) -> None:
        pod = self.pods[name]
        phase, state = "Running", {"running": {"startedAt": pod["started"]}}
        if "code" in pod:
            phase, ready = ("Failed" if pod["code"] else "Succeeded"), False
            state = {"terminated": {"exitCode": pod["code"], "reason": "Error" if pod["code"] else "Completed"}}
        container = {"name": pod["container"], "image": pod["image"], "imageID": "", "ready": ready, "state": state}
        container |= {"restartCount": pod["restarts"], "lastState": {}}
        kinds = ("Initialized", "Ready", "ContainersReady", "PodScheduled")
        conditions = [
            {"type": kind, "status": "True" if ready or kind in ("Initialized", "PodScheduled") else "False"}
            for kind in kinds
        ]
        status = {"phase": phase, "podIP": pod["ip"], "podIPs": [{"ip": pod["ip"]}], "conditions": conditions}
        status |= {"containerStatuses": [container], "startTime": pod["started"], "hostIP": HOST}
        with contextlib.suppress(client.ApiException):
            self._core.patch_namespaced_pod_status(name, pod["namespace"], {"status": status})

    def _kill(self, name: str) -> None:
        pod = self.pods.pop(name)
        if "server" in pod:
            pod["server"].__exit__()
        process = pod.get("process")
        if process is not None and process.poll() is None:
            process.terminate()
            process.wait(10)


class VllmProcess:
    """Real vLLM in place of a container, and its readiness probe."""

    def __init__(self, words: list[str], env: dict[str, str], base_url: str, log: Path):
        self.base_url, self.ready = base_url, False
        stub = engine.metadata_stub()
        own = {"PYTHONPATH": str(stub)} if stub else {}
        own |= {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}  # this namespace has no other network
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words]
        with log.open("wb") as out:
            self._process = subprocess.Popen(command, env=os.environ | own | env, stdout=out, stderr=subprocess.STDOUT)

    def healthy(self) -> bool:
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.base_url}/health", timeout=1) as answer:
            self.ready = answer.status == 200
        return self.ready

    def __exit__(self, *_) -> None:
        self._process.terminate()
        self._process.wait(30)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def main(arguments: list[str]) -> int:
    """Builds what is missing, then runs the tests in namespaces of their own; says what it needs where it cannot."""
    if missing := needs():
        print(f"The control plane cannot run here; missing: {', '.join(missing)}.", file=sys.stderr)
        print("It needs root and Debian's packages, such as a container of debian:bookworm.", file=sys.stderr)
        return 1
    print(f"control plane: {built.build()}", flush=True)
    tests = [sys.executable, "-m", "pytest", str(Path(__file__).with_name("test_control_plane.py")), *arguments]
    # /run of its own: a pod's service account is read from there.
    script = 'mount -t tmpfs tmpfs /run && ip link set lo up && exec "$@"'
    inside = ["unshare", "--net", "--mount", "sh", "-c", script, "sh", *tests]
    return subprocess.run(inside, env=os.environ | {"KVLAB_TEST_K8S": "1"}).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
