"""The discovery, the load and the Job against a real Kubernetes control plane: `make test-k8s`, and not `make test`.

Real: etcd, API server with RBAC, controllers, scheduler, kube-proxy's rules in this namespace. Not real: the kubelet,
and the workers, which are fakes with a real prefix cache each.
"""

import contextlib
import json
import os
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

if not os.environ.get("KVLAB_TEST_K8S"):
    pytest.skip("needs root and Debian's packages; run: make test-k8s", allow_module_level=True)

import control_plane
from control_plane import ControlPlane, Kubelet, kubeconfig
from kubernetes import client, utils
from notebooks_for_tests import COMMON, notebook, printed
from typer.testing import CliRunner
from waiting_for_tests import until

from kvlab import claims, control, k8s, k8s_api, k8s_job, k8s_render, router_packages, store
from kvlab.cli import app
from kvlab.client import Endpoint
from kvlab.config import Cell, LoadConfig
from kvlab.errors import ServerDied, ServerError
from kvlab.k8s_cluster import Cluster
from kvlab.load import run_load
from kvlab.profile import FOLDER, load_profile

ASKED = {"image": "vllm:test", "profile": "cpu-tiny", "replicas": 3, "cpu": "1", "memory": "1Gi"}
OPTIONS = k8s_render.Options(**ASKED, cache_path="/var/cache/kvlab")  # nothing here provides volumes
TARGET = k8s.parse_target("kvlab/kvlab-workers")
PROFILE = load_profile("cpu-tiny")
LOAD = {"workload": "shared_prefix", "prefixes": 2, "prefix_tokens": 64, "input_tokens": 96, "output_tokens": 4}
LOAD |= {"concurrency": 4, "new_connection": True, "warmup_requests": 2}
RECORD = os.environ.get("KVLAB_RECORD")  # a folder: what the API answers is kept there, for the tests without it


@pytest.fixture(scope="module")
def plane(tmp_path_factory):
    if missing := control_plane.needs():
        pytest.fail(f"missing: {', '.join(missing)}")
    if not control_plane.alone():
        pytest.fail("this is not a network namespace of its own; run: make test-k8s")
    with ControlPlane(tmp_path_factory.mktemp("plane")) as running:
        os.environ["KUBECONFIG"] = str(running.kubeconfig)
        yield running


@pytest.fixture(scope="module")
def kubelet(plane, tmp_path_factory):
    project = _project(tmp_path_factory.mktemp("project"))
    with Kubelet(plane, cwd=project) as running:
        for name, one in k8s_render.render(OPTIONS).items():
            if not name.endswith("load-job.yaml"):
                plane.apply(one)
        until(lambda: len(_found()) == 3, 60)
        yield running


def _project(folder):
    """A small project: one section, whose notebook measures one cell on three workers."""
    (folder / "data").mkdir()
    notebook(folder / "notebooks" / "00_start_here.ipynb", "1", parameters=COMMON)
    code = (
        "from kvlab.config import Cell, LoadConfig\n"
        "from kvlab.measure import open_lab\n"
        "lab = open_lab('prefix_cache', profile_name=PROFILE, machine=MACHINE, mode=MODE, base_url=BASE_URL)\n"
        f"load = LoadConfig(requests=40, **{LOAD!r})\n"
        "server = lab.profile.section_server(lab.section)\n"
        "cell = Cell(name='three', server=server, load=load, workers=3, service='random_connection')\n"
        "print(lab.measure([cell])[0].reason)\n"
        "lab.close()"
    )
    notebook(folder / "notebooks" / "06_prefix_cache.ipynb", code, parameters=COMMON)
    return folder


def _found(target=TARGET):
    try:
        api = k8s_api.Api()
        return api.workers(target, api.service(target))
    except ServerError:
        return []


def _cell(requests=60, **changes):
    load = LoadConfig(requests=requests, **(LOAD | changes))
    return Cell(name="c", server=PROFILE.server, load=load, workers=3, service="random_connection")


@pytest.mark.parametrize("more", [{}, {"router": "cache_aware", "token_secret": "hub", "pull_secret": "registry"}])
def test_the_api_accepts_every_manifest(kubelet, more):
    """A dry run, in which the API server's own validation and admission speak."""
    options = k8s_render.Options(**ASKED | {"name": "dry", "storage_class": "nfs"} | more)
    for name, one in k8s_render.render(options).items():
        if not name.endswith("namespace.yaml"):
            utils.create_from_dict(kubelet.plane.api, one, dry_run="All")


# -- finding and measuring ------------------------------------------------------------------------------------------


def test_the_ready_pods_are_found_with_their_processes(kubelet):
    workers = _found()
    assert sorted(w.pod for w in workers) == sorted(kubelet.pods)
    for worker in workers:
        assert worker.address == kubelet.pods[worker.pod]["ip"] and worker.port == 8000
        assert worker.restarts == 0 and worker.uid and worker.started and worker.image == "vllm:test"
        assert worker.node == control_plane.NODE


def test_a_load_through_the_service_reaches_every_worker(kubelet):
    cluster = Cluster(TARGET).use(_cell())
    assert cluster.endpoint.entrance.base_url.startswith("http://10.96.")  # kube-proxy's rules pick
    result = run_load(cluster.endpoint, _cell().load, nonce=1, progress=False)
    assert result.requests["ok"].all()
    assert not result.certificate["failures"], result.certificate["failures"]
    finished = result.samples.groupby("worker")["requests_finished"].agg(lambda s: s.max() - s.min())
    assert set(finished.index) == {"w0", "w1", "w2"} and (finished > 0).all()
    assert finished.sum() == len(result.requests)
    hits = result.samples.groupby("worker")["prefix_hits"].agg(lambda s: s.max() - s.min()).sum()
    assert hits == result.requests["cached_tokens"].sum() > 0  # both sides count the same
    assert cluster.changes() == []
    cluster.check_alive()
    told = cluster.describe()
    assert [row["worker"] for row in told["workers"]] == ["w0", "w1", "w2"]
    assert all(row["node"] == "n0" and row["cache_emptied"] for row in told["workers"])
    assert "10.77" not in json.dumps(told) and "kvlab-workers" not in json.dumps(told)  # addresses stay private


def test_the_counts_are_the_laws(kubelet):
    """Two prefixes, three workers, all fitting: first touches are the only misses."""
    cluster = Cluster(TARGET).use(_cell(200))
    result = run_load(cluster.endpoint, _cell(200).load, nonce=2, progress=False)
    measured = result.requests[result.requests["phase"] == "measure"]
    assert (measured["cached_tokens"] > 0).sum() == 196
    assert cluster.changes() == []


@pytest.mark.parametrize("what", ["restart", "replace", "unready"])
def test_a_worker_that_changes_inside_a_cell_marks_it(kubelet, what):
    cluster = Cluster(TARGET).use(_cell())
    victim = cluster.workers[0].pod
    core = client.CoreV1Api(kubelet.plane.api)
    act = {
        "restart": lambda: kubelet.restart(victim),
        "replace": lambda: core.delete_namespaced_pod(victim, "kvlab"),
        "unready": lambda: kubelet.unready(victim),
    }[what]
    timer = threading.Timer(0.5, act)
    timer.start()
    run_load(cluster.endpoint, _cell(400).load, nonce=3, progress=False)
    timer.join()
    time.sleep(2.5)
    told = cluster.changes()
    assert any(victim in text for text in told), told
    if what == "restart":
        assert any("restarted" in text or "not ready" in text for text in told)
    if what == "unready":
        kubelet._status(victim)
    until(lambda: len(_found()) == 3, 60)
    assert cluster.use(_cell()).changes() == []  # the next cell finds the new ones


def test_no_ready_pod_is_an_error_and_a_cell_waits_for_one_that_is_missing(kubelet):
    cluster = Cluster(TARGET, come_back_s=1.0)
    for name in list(kubelet.pods):
        kubelet.unready(name)
    until(lambda: not _found())
    with pytest.raises(ServerDied, match="no ready pod"):
        cluster.check_alive()
    with pytest.raises(ServerError, match="no ready pod"):
        Cluster(TARGET)
    with pytest.raises(ServerError, match="0 ready pods; it had 3"):
        cluster.use(_cell())
    for name in list(kubelet.pods):
        kubelet._status(name)
    until(lambda: len(_found()) == 3)
    cluster.use(_cell()).changes()


# -- what cannot be measured ------------------------------------------------------------------------------------------


def test_what_is_not_there_is_named(kubelet):
    with pytest.raises(ServerError, match="no Service other.*\n.*kvlab-workers"):
        Cluster(k8s.parse_target("kvlab/other"))
    with pytest.raises(ServerError, match="that namespace has none"):
        Cluster(k8s.parse_target("nowhere/kvlab-workers"))


def test_an_account_without_rights_is_told_so(kubelet, monkeypatch, tmp_path):
    path = tmp_path / "stranger.conf"
    path.write_text(kubeconfig(kubelet.plane.folder / "ca.crt", "stranger-token"))
    monkeypatch.setenv("KUBECONFIG", str(path))
    with pytest.raises(ServerError, match="No permission.*services.*forbidden"):
        Cluster(TARGET)
    path.write_text(kubeconfig(kubelet.plane.folder / "ca.crt", "no-such-token"))
    with pytest.raises(ServerError, match="does not know who asks"):
        Cluster(TARGET)


def test_a_headless_service_and_one_with_affinity_are_refused(kubelet):
    spec = {"selector": {"app": "kvlab-workers"}, "ports": [{"port": 8000}]}
    for name, more in {"headless": {"clusterIP": "None"}, "sticky": {"sessionAffinity": "ClientIP"}}.items():
        about = {"name": name, "namespace": "kvlab"}
        kubelet.plane.apply({"apiVersion": "v1", "kind": "Service", "metadata": about, "spec": spec | more})
        with pytest.raises(ServerError, match="headless|sessionAffinity"):
            Cluster(k8s.parse_target(f"kvlab/{name}"))


def test_the_command_lists_the_pods(kubelet):
    done = CliRunner().invoke(app, ["k8s", "pods", "kvlab/kvlab-workers"])
    assert done.exit_code == 0 and all(name in done.stdout for name in kubelet.pods)


# -- from inside ------------------------------------------------------------------------------------------------------


def test_a_job_measures_inside_and_its_results_are_fetched(kubelet, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    told = []
    options = OPTIONS.model_copy(update={"section": "prefix_cache"})
    k8s_job.run(options, "fake", told=told.append)
    (run,) = list(store.list_runs("fake"))
    assert run.manifest["cell"]["service"] == "kubernetes" and run.manifest["cell"]["workers"] == 3
    assert run.manifest["valid"], run.manifest["problems"]
    assert len(run.manifest["server"]["workers"]) == 3
    assert run.requests()["ok"].all()
    assert any("files fetched" in line for line in told)
    assert not client.BatchV1Api(kubelet.plane.api).list_namespaced_job("kvlab").items  # the Job was removed


def test_the_command_measures_by_a_job_and_renders_here(kubelet, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    words = ["measure", "prefix_cache", "--kubernetes", str(TARGET), "--profile", "cpu-tiny", "--machine", "fake"]
    command = [sys.executable, "-m", "kvlab.cli", *words, "--in-cluster", "kvlab:test"]
    done = subprocess.run(command, cwd=kubelet.cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Running" in done.stdout and "files fetched" in done.stdout and "mode replay" in done.stdout
    assert len(list(store.list_runs("fake"))) == 1
    assert "None" in printed(kubelet.cwd / "_build" / "notebooks" / "06_prefix_cache.ipynb")


def test_a_job_that_fails_says_what_it_printed(kubelet, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    options = OPTIONS.model_copy(update={"section": "no_such_section"})
    with pytest.raises(ServerError, match="failed with exit code 2"):
        k8s_job.run(options, "fake", told=lambda text: None)


def test_a_job_without_its_account_is_refused(kubelet):
    options = OPTIONS.model_copy(update={"name": "other"})
    with pytest.raises(ServerError, match="no service account other-load"):
        k8s_job.run(options, "fake")


# -- a router ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not router_packages.version("vllm-router"), reason="kvlab router install vllm-router")
def test_the_router_finds_the_workers_with_the_rights_it_has(kubelet):
    rendered = k8s_render.render(OPTIONS.model_copy(update={"router": "round_robin"}))
    kubelet.plane.apply(*(one for one in rendered.values() if one["metadata"]["name"] == "kvlab-router"))
    api, target = k8s_api.Api(), k8s.parse_target("kvlab/kvlab-router")
    until(lambda: api.workers(target, api.service(target)))
    before = {name: len(pod["server"].bodies) for name, pod in kubelet.pods.items() if "server" in pod}
    (url,) = k8s.entrances(api.service(target), {"port": 8000})
    until(lambda: _completes(url), 60)
    for _ in range(11):
        assert _completes(url)
    assert all(len(kubelet.pods[name]["server"].bodies) > n for name, n in before.items())


def _completes(base_url):
    status, asked = None, {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 2, "stream": True}
    with contextlib.suppress(OSError):
        status, _ = control.call(Endpoint(base_url, "fake"), "/v1/completions", asked)
    return status == 200


# -- real workers -----------------------------------------------------------------------------------------------------

POINTS = """
[[service_hit_rate.points]]
workers = 3
concurrency = 8
prefixes = [2, 12]
"""


@pytest.mark.vllm
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not os.environ.get("KVLAB_TEST_K8S_VLLM"), reason="KVLAB_TEST_K8S_VLLM=1 takes minutes more")
def test_real_vllm_behind_the_service_has_the_hits_of_the_law(plane, tmp_path, monkeypatch):
    """The section as a person runs it, with the pods' own arguments, through kube-proxy's rules."""
    mine = tmp_path / "mine.toml"
    text = (FOLDER / "cpu-tiny.toml").read_text()
    begin, end = text.index("[[service_hit_rate.points]]"), text.index("[service_hit_rate.limits]")
    rest = text[end:]
    rest = rest[re.search(r"^\[(?!\[?service_hit_rate)", rest, re.M).start() :]
    mine.write_text(text[:begin] + POINTS.lstrip() + "\n" + rest)
    options = k8s_render.Options(**ASKED | {"profile": str(mine), "namespace": "real"}, cache_path="/cache")
    with Kubelet(plane, cache=tmp_path / "cache") as kubelet:
        for name, one in k8s_render.render(options).items():
            if not name.endswith("load-job.yaml"):
                plane.apply(one)
        target = k8s.parse_target("real/kvlab-workers")
        until(lambda: len(_found(target)) == 3, 600)
        monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
        words = [
            "measure",
            "service_hit_rate",
            "--kubernetes",
            str(target),
            "--profile",
            str(mine),
            "--machine",
            "real",
        ]
        done = subprocess.run([sys.executable, "-m", "kvlab.cli", *words], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:] + kubelet.plane.log("kube-proxy")
    stated = claims.read(tmp_path / "data" / "real").set_index("id")
    found = stated[(stated["quantity"] == "requests_with_hit") & stated["measured"].notna()]
    two = [float(row["measured"]) for name, row in found.iterrows() if "prefixes=2;" in f"{name};"]
    assert two == [196.0], found  # 200 less the first touches of two prefixes on two more workers
    runs = list(store.list_runs("real", "service_hit_rate"))
    assert {run.manifest["cell"]["service"] for run in runs} == {"kubernetes"} and all(
        r.manifest["valid"] for r in runs
    )


# -- a recording ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not RECORD, reason="KVLAB_RECORD names no folder")
def test_record_what_the_api_answers(kubelet):
    """Runs last: it keeps the answers that tests without a control plane are served."""
    names = {
        "service": "/api/v1/namespaces/kvlab/services/kvlab-workers",
        "services": "/api/v1/namespaces/kvlab/services",
        "endpoints": "/api/v1/namespaces/kvlab/endpoints/kvlab-workers",
        "pods": "/api/v1/namespaces/kvlab/pods?labelSelector=app%3Dkvlab-workers",
        "slices-v1beta1": "/apis/discovery.k8s.io/v1beta1/namespaces/kvlab/endpointslices",
        "slices": "/apis/discovery.k8s.io/v1/namespaces/kvlab/endpointslices",
        "no-service": "/api/v1/namespaces/kvlab/services/other",
        "no-namespace": "/api/v1/namespaces/nowhere/services",
    }
    tokens = {"admin": "admin-token", "stranger": "stranger-token", "unknown": "no-such-token"}
    answers = {}
    for who, token in tokens.items():
        for name, path in names.items() if who == "admin" else [("service", names["service"])]:
            answers[name if who == "admin" else f"{who} {name}"] = _get(path, token)
    Path(RECORD).mkdir(parents=True, exist_ok=True)
    (Path(RECORD) / "answers.json").write_text(json.dumps(_trimmed(answers), indent=1) + "\n")


def _trimmed(value):
    """Without what nobody reads: who wrote which field, and a pod's specification beyond its node."""
    if isinstance(value, list):
        return [_trimmed(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "containers" in value:
        return {"nodeName": value.get("nodeName")}
    dropped = ("managedFields", "resourceVersion", "ownerReferences", "generateName", "selfLink")
    return {name: _trimmed(item) for name, item in value.items() if name not in dropped}


def _get(path, token):
    context = ssl._create_unverified_context()
    request = urllib.request.Request(control_plane.API + path, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, context=context) as answer:
            return {"path": path, "status": answer.status, "body": json.loads(answer.read())}
    except urllib.error.HTTPError as error:
        text = error.read().decode()
        return {"path": path, "status": error.code, "body": json.loads(text) if text.startswith("{") else text}
