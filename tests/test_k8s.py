"""Workers behind a Kubernetes Service: found in recorded answers, followed, measured, and refused where needed."""

import socket
import sys
import time
import urllib.request
from urllib.parse import unquote

import fakes
import pytest
from recorded_api import ENDPOINTS, PODS, SERVICE, SLICES, RecordedApi, answer, slices_v1
from typer.testing import CliRunner
from waiting_for_tests import until

from kvlab import control, existing, k8s, k8s_api, k8s_cluster, measure, store
from kvlab.cli import app
from kvlab.config import Cell, LoadConfig
from kvlab.errors import ConfigError, EngineMissing, ServerDied, ServerError
from kvlab.fake_server import Behaviour, FakeServer
from kvlab.k8s import Target, Worker
from kvlab.k8s_cluster import Cluster
from kvlab.load import run_load
from kvlab.profile import load_profile

TARGET = Target("kvlab", "kvlab-workers")
PORT = {"name": "http", "port": 8000}
SERVER = load_profile("cpu-tiny").section_server("service_hit_rate")
BLOCK = SERVER.block_size


# -- names ------------------------------------------------------------------------------------------------------------


def test_a_target_is_written_and_read():
    assert k8s.parse_target("kvlab/kvlab-workers") == TARGET
    assert k8s.parse_target("kvlab/kvlab-workers:http").port == "http"
    full = Target("a", "b", port="80", entrance="http://h:30080/x?y=1&z=2", context="lab@home")
    assert k8s.parse_target(full.url) == full and k8s.is_target(full.url)
    assert not k8s.is_target("http://kubernetes/")


@pytest.mark.parametrize("text", ["", "one", "a/b/c", "/b", "a/", "kubernetes://a/b?colour=red", "a/:80"])
def test_what_names_no_service_is_refused(text):
    with pytest.raises(ConfigError, match="NAMESPACE/SERVICE"):
        k8s.parse_target(text)
    if text.startswith("kubernetes"):
        with pytest.raises(ConfigError):
            existing.check_address(text)


# -- pods, in what the API answers ------------------------------------------------------------------------------------


def test_slices_and_endpoints_give_the_same_pods():
    from_slices = k8s.of_slices(slices_v1()["items"], PORT, "IPv4")
    from_endpoints = k8s.of_endpoints(answer("endpoints"), PORT)
    assert from_slices == from_endpoints and len(from_slices) == 3
    assert [worker.pod for worker in from_slices] == sorted(worker.pod for worker in from_slices)
    pods = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in answer("pods")["items"]}
    assert {worker.pod: worker.address for worker in from_slices} == pods


def test_pods_that_are_not_ready_or_end_are_left_out():
    slices = slices_v1()["items"]
    first, second, third = slices[0]["endpoints"]
    first["conditions"] = {"ready": False}
    second["conditions"] = {"ready": True, "serving": True, "terminating": True}
    third["conditions"] = {}  # unknown, which counts as ready
    assert [w.address for w in k8s.of_slices(slices, PORT, "IPv4")] == third["addresses"]
    endpoints = answer("endpoints")
    subset = endpoints["subsets"][0]
    subset["notReadyAddresses"] = [subset["addresses"].pop()]
    assert len(k8s.of_endpoints(endpoints, PORT)) == 2
    assert k8s.of_endpoints({"metadata": {}}, PORT) == []  # no pod at all: no subsets


def test_a_pod_in_two_slices_or_of_another_family_counts_once():
    slices = slices_v1()["items"]
    again, six = slices_v1()["items"][0], slices_v1()["items"][0]
    six["addressType"] = "IPv6"
    for endpoint in six["endpoints"]:
        endpoint["addresses"] = ["fd00::1"]
    assert len(k8s.of_slices([*slices, again, six], PORT, "IPv4")) == 3
    (worker,) = k8s.of_slices([six], PORT, "IPv6")
    assert worker.base_url == "http://[fd00::1]:8000"


def test_the_pods_port_is_joined_by_name():
    slices = slices_v1()["items"]
    slices[0]["ports"] = [{"name": "metrics", "port": 9}, {"name": "http", "port": 8123}]
    assert {w.port for w in k8s.of_slices(slices, {"name": "http", "port": 80}, "IPv4")} == {8123}
    assert k8s.of_slices(slices, {"name": "other", "port": 80}, "IPv4") == []
    slices[0]["ports"] = [{"name": "", "port": 8123}]
    assert len(k8s.of_slices(slices, {"port": 80}, "IPv4")) == 3


def test_an_address_without_a_pod_is_a_worker_too():
    subset = {"addresses": [{"ip": "10.0.0.9"}], "ports": [{"port": 8000}]}
    (worker,) = k8s.of_endpoints({"subsets": [subset]}, {"port": 8000})
    assert worker == Worker("10.0.0.9", "10.0.0.9", 8000)
    assert k8s.with_pods([worker], answer("pods")["items"]) == [worker]


def test_pods_tell_their_restarts_and_their_end():
    pods = answer("pods")["items"]
    found = k8s.of_endpoints(answer("endpoints"), PORT)
    told = k8s.with_pods(found, pods)
    assert all(w.restarts == 0 and w.uid and w.started and w.image == "vllm:test" for w in told)
    pods[0]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert len(k8s.with_pods(found, pods)) == 2


def test_changes_are_told():
    one = Worker("a", "10.0.0.1", 8000, uid="u", restarts=0, started="t0")
    two = Worker("b", "10.0.0.2", 8000, uid="v", restarts=0, started="t0")
    changed = Worker("a", "10.0.0.1", 8000, uid="u", restarts=1, started="t1")
    assert k8s.changes([one, two], [two, one]) == []
    assert "a restarted" in k8s.changes([one], [changed])[0]
    assert "a was replaced" in k8s.changes([one], [Worker("a", "10.0.0.3", 8000, uid="w")])[0]
    came, went = k8s.changes([one], [two])
    assert "a went" in went and "b came" in came


# -- the Service ------------------------------------------------------------------------------------------------------


def test_the_recorded_service_can_be_measured():
    service = answer("service")
    k8s.check_service(service, TARGET)
    port = k8s.service_port(service, TARGET)
    assert k8s.entrances(service, port) == [f"http://{service['spec']['clusterIP']}:8000"]


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ({"clusterIP": "None"}, "headless"),
        ({"type": "ExternalName", "externalName": "example.org"}, "example.org"),
        ({"clusterIP": "10.0.0.1", "sessionAffinity": "ClientIP"}, "one pod"),
    ],
)
def test_a_service_that_does_not_pick_by_connection_is_refused(spec, told):
    with pytest.raises(ServerError, match=told):
        k8s.check_service({"spec": spec}, TARGET)


def test_one_of_several_ports_must_be_chosen():
    service = {"spec": {"ports": [{"name": "http", "port": 80}, {"name": "grpc", "port": 81}]}}
    with pytest.raises(ServerError, match="2 ports(.|\n)*http, grpc"):
        k8s.service_port(service, TARGET)
    with pytest.raises(ServerError, match="no port '82'"):
        k8s.service_port(service, Target("a", "b", port="82"))
    assert k8s.service_port(service, Target("a", "b", port="81"))["name"] == "grpc"
    assert k8s.service_port(service, Target("a", "b", port="http"))["port"] == 80


def test_load_balancers_are_entrances_too():
    service = {"spec": {"clusterIP": "10.0.0.1"}, "status": {"loadBalancer": {"ingress": [{"hostname": "lb"}]}}}
    assert k8s.entrances(service, {"port": 80}) == ["http://10.0.0.1:80", "http://lb:80"]


# -- the API ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with RecordedApi(tmp_path) as recorded:
        monkeypatch.setenv("KUBECONFIG", str(recorded.kubeconfig))
        yield recorded


def _workers():
    connected = k8s_api.Api()
    return connected.workers(TARGET, connected.service(TARGET))


def test_without_slices_of_version_1_the_endpoints_are_read(api):
    assert len(_workers()) == 3  # recorded from 1.20, which answers 404
    assert any(path.startswith(ENDPOINTS) for _, path, _ in api.asked)


def test_slices_of_version_1_are_preferred(api):
    api.answers[SLICES] = (200, slices_v1())
    api.body(SLICES)["items"][0]["endpoints"].pop()
    assert len(_workers()) == 2
    assert not any(path.startswith(ENDPOINTS) for _, path, _ in api.asked)
    (asked,) = [path for _, path, _ in api.asked if path.startswith(SLICES)]
    assert unquote(asked).endswith("labelSelector=kubernetes.io/service-name=kvlab-workers")


def test_an_account_that_may_not_read_slices_reads_endpoints(api):
    api.answers[SLICES] = api.of("stranger service")
    assert len(_workers()) == 3


def test_a_missing_service_and_a_missing_namespace_are_told(api):
    with pytest.raises(ServerError, match="no Service other(.|\n)*there are: kvlab-workers"):
        k8s_api.Api().service(Target("kvlab", "other"))
    with pytest.raises(ServerError, match="has none, or does not exist"):
        k8s_api.Api().service(Target("nowhere", "kvlab-workers"))


@pytest.mark.parametrize("path", [SERVICE, PODS])
def test_a_missing_permission_is_told(api, path):
    api.answers[path] = api.of("stranger service")
    with pytest.raises(ServerError, match="No permission(.|\n)*kvlab k8s render"):
        _workers()


def test_an_expired_login_is_told(api):
    api.answers[SERVICE] = api.of("unknown service")
    with pytest.raises(ServerError, match="does not know who asks"):
        _workers()


def test_a_cluster_that_does_not_answer_is_told_at_once(api):
    api.__exit__()
    began = time.monotonic()
    with pytest.raises(ServerError, match="does not answer(.|\n)*kubectl cluster-info"):
        _workers()
    assert time.monotonic() - began < k8s_api.TIMEOUT_S
    api.__enter__()  # for the fixture's own end


def test_another_server_at_that_address_is_told(api):
    api.answers[SERVICE] = (500, b"<html>no json</html>")
    with pytest.raises(ServerError, match="HTTP 500"):
        _workers()
    api.answers[SERVICE] = (200, b"<html>a login page</html>")
    with pytest.raises(ServerError, match="speaks no JSON"):
        _workers()


def test_no_kubeconfig_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match="there is no kubeconfig"):
        k8s_api.Api()
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="there is no kubeconfig"):
        k8s_api.Api()


@pytest.mark.parametrize("text", ["{", "a: b", "", "- 1", "apiVersion: v1\nkind: Config\ncurrent-context: x"])
def test_a_damaged_kubeconfig_is_told(api, text):
    api.kubeconfig.write_text(text)
    with pytest.raises(ConfigError, match="kubeconfig cannot be used"):
        k8s_api.Api()


def test_an_unknown_context_is_told(api):
    with pytest.raises(ConfigError, match="kubeconfig cannot be used(.|\n)*get-contexts"):
        k8s_api.Api("elsewhere")


def test_the_client_is_optional(monkeypatch):
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(EngineMissing, match=r"kvlab\[k8s\]"):
        k8s_api.Api()


# -- a cluster of fake workers ----------------------------------------------------------------------------------------


def _free_port():
    with socket.create_server(("127.0.1.1", 0)) as probe:
        return probe.getsockname()[1]


@pytest.fixture
def workers(api):
    """Three fake workers with a prefix cache each, where the recorded pods are."""
    port = _free_port()
    api.local(port)
    like = {"cache_blocks": 51, "block_size": BLOCK, "ttft_s": 0.001}
    pods = [FakeServer(Behaviour(**like), port, f"127.0.1.{i}") for i in (1, 2, 3)]
    for pod in pods:
        pod.__enter__()
    yield pods
    for pod in pods:
        pod.__exit__()


def _cell(workers=3, requests=12, **changes):
    values = {"service": "random_connection", "server": SERVER} | changes
    lengths = {"workload": "shared_prefix", "prefixes": 2, "prefix_tokens": 64, "input_tokens": 96, "output_tokens": 2}
    load = LoadConfig(requests=requests, warmup_requests=2, concurrency=2, new_connection=True, **lengths)
    return Cell(name="c", load=load, workers=workers, **values)


def _restarted(api):
    pod = api.body(PODS)["items"][1]
    pod["status"]["containerStatuses"][0] |= {"restartCount": 1}
    return pod["metadata"]["name"]


def test_the_pods_are_measured_through_the_service(api, workers):
    cluster = Cluster(TARGET).use(_cell())
    assert [e.worker for e in cluster.endpoint.endpoints] == ["w0", "w1", "w2"]
    assert cluster.endpoint.entrance.base_url.startswith("http://127.0.1.1:")
    result = run_load(cluster.endpoint, _cell().load, nonce=1, progress=False)
    assert result.requests["ok"].all() and set(result.samples["worker"]) == {"w0", "w1", "w2"}
    assert cluster.changes() == []
    assert cluster.describe()["workers"][0]["cache_emptied"]
    assert cluster.capacity.metric_block_size == BLOCK


def test_a_change_inside_a_cell_is_seen_even_if_it_is_over(api, workers, monkeypatch):
    monkeypatch.setattr(k8s_cluster, "FOLLOW_S", 0.05)
    cluster = Cluster(TARGET).use(_cell())
    subset = api.body(ENDPOINTS)["subsets"][0]
    away = subset["addresses"].pop()
    until(lambda: cluster._follower._seen)
    subset["addresses"].append(away)
    told = cluster.changes()
    assert any("went, or was not ready inside this cell" in text for text in told), told


def test_a_cell_waits_for_a_pod_that_is_missing(api, workers, monkeypatch):
    monkeypatch.setattr(k8s_cluster, "FOLLOW_S", 0.05)
    cluster = Cluster(TARGET, come_back_s=0.3)
    api.body(ENDPOINTS)["subsets"][0]["addresses"].pop()
    with pytest.raises(ServerError, match="2 ready pods; it had 3"):
        cluster.use(_cell())
    del api.body(ENDPOINTS)["subsets"]
    with pytest.raises(ServerDied, match="no ready pod"):
        cluster.check_alive()
    with pytest.raises(ServerError, match="no ready pod"):
        Cluster(TARGET)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda pods: setattr(pods[1], "cache", None), "no counters of vLLM"),
        (lambda pods: setattr(pods[1].cache, "block_size", 16), "differ in block_size"),
        (lambda pods: setattr(pods[1].cache, "blocks", 7), "differ in blocks"),
    ],
)
def test_workers_that_do_not_belong_together_are_refused(api, workers, spoil, told):
    spoil(workers)
    with pytest.raises(ServerError, match=told):
        Cluster(TARGET)


def test_a_pod_with_another_model_is_named(api, workers, monkeypatch):
    served, other = control.served_models, workers[1].endpoint.base_url
    monkeypatch.setattr(
        control, "served_models", lambda e, **more: [{"id": "other"}] if e.base_url == other else served(e, **more)
    )
    with pytest.raises(ServerError, match="serves other, not fake"):
        Cluster(TARGET)


def test_pods_that_cannot_be_reached_are_told(api, workers):
    subset = api.body(ENDPOINTS)["subsets"][0]
    subset["addresses"][0]["ip"] = "127.0.9.9"
    with pytest.raises(ServerError, match="1 of the pods(.|\n)*--in-cluster"):
        Cluster(TARGET)


def _text_of(pod):
    with urllib.request.urlopen(f"{pod.endpoint.base_url}/metrics") as answered:
        return answered.read().decode()


def test_workers_that_hide_their_hits_are_refused(api, workers):
    for pod in workers:
        pod.behaviour.metrics_text = _text_of(pod)
        pod.cache, pod.behaviour.cached_tokens = None, None
    with pytest.raises(ServerError, match="--enable-prompt-tokens-details"):
        Cluster(TARGET)


def test_a_service_that_cannot_be_reached_says_what_to_do(api, workers):
    api.body(SERVICE)["spec"]["clusterIP"] = "127.0.9.9"
    with pytest.raises(ServerError, match="127.0.9.9(.|\n)*--in-cluster"):
        Cluster(TARGET)
    entrance = workers[0].endpoint.base_url
    assert Cluster(Target("kvlab", "kvlab-workers", entrance=entrance)).endpoint.entrance.base_url == entrance


def test_pods_with_other_flags_than_the_profiles_are_refused(api, workers):
    server = SERVER.model_copy(update={"block_size": 2 * BLOCK})
    with pytest.raises(ConfigError, match=f"block_size is {BLOCK}, not {2 * BLOCK}"):
        Cluster(TARGET).use(_cell(server=server))


def test_what_a_service_cannot_be_asked_is_told():
    assert k8s.cannot_serve(_cell(), 3) is None and k8s.cannot_serve(_cell(), None) is None
    assert "3 ready pods, and not 6" in k8s.cannot_serve(_cell(workers=6), 3)
    assert "by connection" in k8s.cannot_serve(_cell(service="round_robin"), 3)
    assert "by connection" in k8s.cannot_serve(_cell(service="router:vllm"), 3)
    assert "--base-url" in k8s.cannot_serve(_cell(workers=1, service=""), 3)


# -- in a laboratory --------------------------------------------------------------------------------------------------


@pytest.fixture
def lab(api, workers, tmp_path, monkeypatch):
    fakes.install(monkeypatch, tmp_path)
    opened = fakes.open_lab(section="service_hit_rate", base_url=TARGET.url)
    yield opened
    opened.close()


def test_a_laboratory_measures_a_cluster(lab):
    changed = SERVER.model_copy(update={"max_num_seqs": 3})
    good, other, flags = lab.measure([_cell(), _cell(workers=6), _cell(server=changed)])
    assert good.run is not None and other.run is None and "not 6" in other.reason
    assert flags.run is None and "other flags" in flags.reason
    cell = good.run.manifest["cell"]
    assert cell["service"] == "kubernetes" and cell["server"]["model"].startswith(measure.EXISTING)
    assert lab.measure([_cell()])[0].run.id == good.run.id  # resumed
    text = (good.run.path / "run.json").read_text()
    assert "127.0.1." not in text and "kvlab-workers" not in text


def test_a_cell_with_a_restart_is_stored_as_not_valid_and_the_next_one_goes_on(lab, api, monkeypatch):
    send = measure.send

    def restarting(*arguments):
        _restarted(api)
        return send(*arguments)

    monkeypatch.setattr(measure, "send", restarting)
    spoiled, fine = lab.measure([_cell(), _cell(requests=14)])
    assert spoiled.failed and "restarted" in spoiled.reason and "inside this cell" in spoiled.reason
    assert fine.run is not None  # it had restarted before that cell
    assert [run.manifest["valid"] for run in store.list_runs("fake", "service_hit_rate")] == [False, True]


def test_a_cluster_that_cannot_be_measured_stores_nothing(api, tmp_path, monkeypatch):
    fakes.install(monkeypatch, tmp_path)
    del api.body(ENDPOINTS)["subsets"]
    with pytest.raises(ServerError, match="no ready pod"):
        fakes.open_lab(section="service_hit_rate", base_url=TARGET.url)
    assert not list(store.list_runs("fake"))


# -- commands ---------------------------------------------------------------------------------------------------------


def test_the_command_lists_the_pods(api):
    done = CliRunner().invoke(app, ["k8s", "pods", "kvlab/kvlab-workers"])
    assert done.exit_code == 0 and done.stdout.count("restarts 0") == 3
    bad = CliRunner().invoke(app, ["k8s", "pods", "kvlab-workers"])
    assert bad.exit_code == 2 and "NAMESPACE/SERVICE" in bad.output
    missing = CliRunner().invoke(app, ["k8s", "pods", "kvlab/other"])
    assert missing.exit_code == 1 and "Traceback" not in missing.output


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--in-cluster", "kvlab:1"], "--kubernetes"),
        (["--kubernetes", "kvlab"], "NAMESPACE/SERVICE"),
        (["--kubernetes", "a/b", "--in-cluster", "kvlab:1"], "--profile"),
        (["--kubernetes", "a/b"], "--profile"),
    ],
)
def test_bad_words_of_measure_are_told(words, told):
    done = CliRunner().invoke(app, ["measure", "prefix_cache", *words])
    assert done.exit_code == 2 and told in done.output, done.output


def test_the_archive_of_the_control_plane_is_the_machines_own(monkeypatch):
    import control_plane_build

    monkeypatch.delenv("DEBIAN_MIRROR", raising=False)
    monkeypatch.setattr(control_plane_build, "_run", lambda command, cwd: "http://mirror.example/debian/\n")
    assert control_plane_build.mirror() == "http://mirror.example/debian/"
    monkeypatch.setattr(control_plane_build, "_run", lambda command, cwd: "")
    with pytest.raises(control_plane_build.EngineMissing, match="knows no archive"):
        control_plane_build.mirror()
    monkeypatch.setenv("DEBIAN_MIRROR", "http://chosen.example/debian")
    assert control_plane_build.mirror() == "http://chosen.example/debian"
