"""A measurement from inside a cluster: a Job that measures and holds its results, and the fetching of them."""

from __future__ import annotations

import contextlib
import io
import os
import re
import secrets
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path, PurePosixPath
from typing import Any

from kvlab import k8s, k8s_api, k8s_render, model_files, privacy, provenance, store
from kvlab import run as run_module
from kvlab.config import ServerConfig, build
from kvlab.errors import ConfigError, ServerError, StoreError
from kvlab.k8s_render import HOLD_PORT

HOLD_S = 3600.0
POLL_S = 3.0
STUCK_S = 600.0  # a pod that is not started by then will not be: no room, no such image
RESULTS, CODE = "results.tar.gz", "x-kvlab-exit-code"
STUCK = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "CreateContainerConfigError", "CreateContainerError")


# -- inside the cluster ----------------------------------------------------------------------------------------------


def hold(machine: str, arguments: list[str], *, port: int = HOLD_PORT, hold_s: float = HOLD_S) -> int:
    """Runs `kvlab ARGUMENTS`, then offers the data of `machine` until it is fetched. Returns the exit code."""
    code = subprocess.run([sys.executable, "-m", "kvlab.cli", *arguments]).returncode
    print(f"exit code {code}; the results are held for {hold_s / 60:.0f} minutes", flush=True)
    with HTTPServer(("", port), _handler(pack(store.root(), machine), code)) as server:
        server.timeout, server.fetched = 1.0, False
        until = time.monotonic() + hold_s
        while not server.fetched and time.monotonic() < until:
            server.handle_request()
    return code


def pack(root: Path, machine: str) -> bytes:
    """Everything that is stored of a machine, as a gzipped tar."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as tar:
        for path in sorted((root / machine).rglob("[!.]*")):
            if path.is_file() and not path.is_symlink():
                tar.add(path, arcname=str(path.relative_to(root)))
    return packed.getvalue()


def _handler(body: bytes, code: int) -> type[BaseHTTPRequestHandler]:
    class Results(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            there = self.path.strip("/") == RESULTS
            self.send_response(200 if there else 404)
            self.send_header("Content-Length", str(len(body) if there else 0))
            self.send_header(CODE, str(code))
            self.end_headers()
            if there:
                self.wfile.write(body)
                self.server.fetched = True

        def log_message(self, *_) -> None:
            pass

    return Results


def put_model(name: str, folder: Path) -> None:
    """The files of a model that kvlab makes, all or nothing; several pods may do it at once."""
    made, _ = model_files.resolve_model(ServerConfig(model=name))
    if folder.is_dir():
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    shutil.copytree(made, draft, dirs_exist_ok=True)
    draft.chmod(0o755)
    try:
        draft.rename(folder)
    except OSError:  # another pod was faster
        shutil.rmtree(draft)


# -- outside ---------------------------------------------------------------------------------------------------------


def address(kubernetes: str, base_url: str) -> str:
    """What BASE_URL of a notebook is for a Service; `base_url` is then an address that leads to it. ConfigError."""
    if not kubernetes:
        raise ConfigError(
            "--in-cluster needs the Service that is measured.", next_step="add --kubernetes NAMESPACE/SERVICE"
        )
    target = k8s.parse_target(kubernetes)
    return replace(target, entrance=base_url or target.entrance).url


def from_inside(
    base_url: str, image: str, sections: list[str], profile: str, machine: str, param: list[str], told
) -> str:
    """Measures one section by a Job with this image; returns the machine whose data folder it filled."""
    if len(sections) != 1 or profile == "auto":
        raise ConfigError(
            "A Job measures one section with one profile.",
            next_step="name the section, and --profile NAME or --profile mine.toml",
        )
    target = k8s.parse_target(base_url)
    name = target.service.removesuffix("-workers") if target.service.endswith("-workers") else "kvlab"
    section = run_module.notebook_of(sections[0]).stem[3:]
    given = {"image": image, "load_image": image, "profile": profile, "namespace": target.namespace, "name": name}
    given |= {"measured": str(target) + (f":{target.port}" if target.port else ""), "section": section, "params": param}
    options = build(k8s_render.Options, given, "the request for a Job")
    machine = machine or provenance.external_name(base_url)
    run(options, machine, api=k8s_api.Api(target.context), told=told)
    return machine


def run(
    options: k8s_render.Options,
    machine: str,
    *,
    api: k8s_api.Api | None = None,
    told: Callable[[str], None] = print,
) -> None:
    """Creates the Job, waits, and puts its results into the data folder of `machine`.

    The service account of `kvlab k8s render` must be there. Raises ServerError where the Job cannot run or failed;
    what it measured until then is kept here. The Job is removed at the end.
    """
    api = api or k8s_api.Api()
    namespace, name = options.namespace, f"{options.load_name}-{secrets.token_hex(3)}"
    _check_account(api, options)
    if k8s_render.own_profile(options.profile):
        _put_profile(api, options)
    job = k8s_render.load_job(options, machine, name)
    api.call(api.batch.create_namespaced_job, namespace, job, what=f"the Job {name}")
    told(f"Job {name} in {namespace}: {' '.join(job['spec']['template']['spec']['containers'][0]['args'])}")
    try:
        fetch(namespace, name, machine, api=api, told=told)
    finally:
        with contextlib.suppress(ServerError):
            background = {"propagation_policy": "Background"}
            api.call(api.batch.delete_namespaced_job, name, namespace, what=f"the Job {name}", **background)


def fetch(namespace: str, job: str, machine: str, *, api: k8s_api.Api | None = None, told=print) -> None:
    """Waits until a Job holds its results, and puts them into the data folder of `machine`. Raises ServerError."""
    api = api or k8s_api.Api()
    packed, code = _await(api, namespace, job, told)
    told(f"{unpack(packed, store.root(), machine)} files fetched")
    if code:
        raise ServerError(
            f"The measurement inside the cluster failed with exit code {code}.",
            "its own message stands in the lines of its log above",
            "what it measured until then was fetched",
        )


def _check_account(api: k8s_api.Api, options: k8s_render.Options) -> None:
    what = f"the service account {options.load_name} in the namespace {options.namespace}"
    try:
        api.call(api.core.read_namespaced_service_account, options.load_name, options.namespace, what=what)
    except k8s_api.NotFound:
        raise ServerError(
            f"There is no service account {options.load_name} in the namespace {options.namespace}.",
            "the Job reads services and pods with its rights",
            "kvlab k8s render ... && kubectl apply -f the files *-load-*.yaml",
        ) from None
    except k8s_api.Forbidden:
        pass  # the Job itself will tell


def _put_profile(api: k8s_api.Api, options: k8s_render.Options) -> None:
    made = k8s_render.profile_map(options)
    name, what = made["metadata"]["name"], "the profile's ConfigMap"
    try:
        api.call(api.core.replace_namespaced_config_map, name, options.namespace, made, what=what)
    except k8s_api.NotFound:
        api.call(api.core.create_namespaced_config_map, options.namespace, made, what=what)


def _await(api: k8s_api.Api, namespace: str, name: str, told: Callable[[str], None]) -> tuple[bytes, int]:
    """(results, exit code) as soon as the Job's pod offers them; ServerError where it never will."""
    began, last = time.monotonic(), ""
    while True:
        pods = api.call(
            api.core.list_namespaced_pod, namespace, label_selector=f"job-name={name}", what="the Job's pod"
        )["items"]
        phase, why = pod_state(pods[0]) if pods else ("Pending", None)
        if phase != last:
            told(f"  {phase}" + (f": {why}" if why else ""))
            last = phase
        if phase in ("Failed", "Succeeded"):
            raise ServerError(
                f"The Job {name} ended ({phase}) before its results were fetched: {why or 'no reason is given'}\n"
                + _log(api, namespace, pods[0]),
                next_step=f"kubectl -n {namespace} describe job {name}",
            )
        if phase == "Running":
            found = _fetch(api, namespace, pods[0]["metadata"]["name"])
            if found is not None:
                told(_log(api, namespace, pods[0]))
                return found
        elif why in STUCK or time.monotonic() - began > STUCK_S:
            raise ServerError(
                f"The pod of the Job {name} does not start: {why or 'no reason is given'}.",
                "no node has room, or the image cannot be pulled",
                f"kubectl -n {namespace} describe pods -l job-name={name}",
            )
        time.sleep(POLL_S)


def pod_state(pod: dict[str, Any]) -> tuple[str, str | None]:
    """(phase, why) of a pod: what holds it up, or how it ended."""
    status = pod.get("status") or {}
    for container in status.get("containerStatuses") or []:
        state = container.get("state") or {}
        for kind in ("waiting", "terminated"):
            if kind in state:
                return status.get("phase", "Pending"), state[kind].get("reason")
    unmet = [c.get("message") or c.get("reason") for c in status.get("conditions") or [] if c.get("status") == "False"]
    return status.get("phase", "Pending"), status.get("reason") or next(filter(None, unmet), None)


def _fetch(api: k8s_api.Api, namespace: str, pod: str) -> tuple[bytes, int] | None:
    """Through the API's way to the pod, as it works from anywhere; None while it measures."""
    get = api.core.connect_get_namespaced_pod_proxy_with_path
    try:
        answer = api.call(get, f"{pod}:{HOLD_PORT}", namespace, RESULTS, what="the Job's results", raw=True)
    except k8s_api.Forbidden as error:
        raise ServerError(
            f"The results cannot be fetched: {error.what}",
            "this account may not use pods/proxy",
            "ask for the right `get` on pods/proxy, or run this command on a node",
        ) from None
    except ServerError:
        return None
    return answer.data, int(answer.headers.get(CODE) or 0)


def _log(api: k8s_api.Api, namespace: str, pod: dict[str, Any]) -> str:
    """The last lines of the pod's log; nothing where they cannot be read."""
    name, read = pod["metadata"]["name"], api.core.read_namespaced_pod_log
    try:
        text = api.call(read, name, namespace, tail_lines=15, what="the Job's log", raw=True).data
    except ServerError:
        return ""
    return "\n".join(f"  | {line}" for line in privacy.scrub(text.decode(errors="replace")).splitlines())


def unpack(packed: bytes, root: Path, machine: str) -> int:
    """Puts a packed data folder of `machine` below `root`; returns how many files. StoreError where it holds others."""
    n = 0
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        for member in tar:
            parts = PurePosixPath(member.name).parts
            plain = member.isfile() and all(re.fullmatch(r"\w[\w.-]*", part) for part in parts)
            if not plain or parts[0] != machine:
                raise StoreError(
                    f"The Job's results hold {member.name!r}, which belongs to another place than {machine}.",
                    next_step="use an image of the same version of kvlab",
                )
            _put(root.joinpath(*parts), tar.extractfile(member).read())
            n += 1
    return n


def _put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.part")
    draft.write_bytes(data)
    os.replace(draft, path)
