"""A measurement from inside a cluster: what a Job holds, how it is fetched, and what can keep it from ending."""

import io
import socket
import tarfile
import threading
import urllib.error
import urllib.request

import pytest
from recorded_api import RecordedApi

from kvlab import k8s, k8s_job, k8s_render, model_files
from kvlab.config import ServerConfig
from kvlab.errors import ConfigError, ServerError, StoreError

OPTIONS = k8s_render.Options(image="vllm:1", load_image="kvlab:1", profile="cpu-tiny")
BASE = "/api/v1/namespaces/kvlab"
JOBS = "/apis/batch/v1/namespaces/kvlab/jobs"
RUNNING = {"phase": "Running", "containerStatuses": [{"state": {"running": {}}}]}


def _packed(*names, kind=tarfile.REGTYPE):
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as tar:
        for name in names:
            member = tarfile.TarInfo(name)
            member.type, member.size = kind, 2 if kind == tarfile.REGTYPE else 0
            tar.addfile(member, io.BytesIO(b"ab"))
    return made.getvalue()


# -- inside -----------------------------------------------------------------------------------------------------------


def test_the_results_are_offered_until_they_are_fetched(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    (tmp_path / "mine" / "load").mkdir(parents=True)
    (tmp_path / "mine" / "load" / "run.json").write_text("{}")
    (tmp_path / "mine" / ".lock").write_text("")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "claims.csv").write_text("")
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    codes = []
    words = ["no-such-command"]  # ends with exit code 2
    holding = threading.Thread(target=lambda: codes.append(k8s_job.hold("mine", words, port=port, hold_s=60)))
    holding.start()
    answer = _get(port, "results.tar.gz")
    holding.join(60)
    assert codes == [2] and answer.headers[k8s_job.CODE] == "2"
    with tarfile.open(fileobj=io.BytesIO(answer.read()), mode="r:gz") as tar:
        assert tar.getnames() == ["mine/load/run.json"]  # one machine, and no lock
    assert "held for 1 minutes" in capfd.readouterr().out


def _get(port, path, tries=200):
    for _ in range(tries):
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{port}/{path}")
        except (ConnectionError, urllib.error.URLError):
            threading.Event().wait(0.1)
    raise AssertionError("nothing was offered")


def test_results_that_nobody_fetches_are_given_up(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    assert k8s_job.hold("mine", ["--help"], port=0, hold_s=0.1) == 0


def test_a_model_is_put_onto_a_volume_once(tmp_path):
    folder = tmp_path / "models" / "tiny"
    for _ in range(2):
        k8s_job.put_model("tiny", folder)
    made, _ = model_files.resolve_model(ServerConfig(model="tiny"))
    assert {p.name for p in folder.iterdir()} == {p.name for p in model_files.Path(made).iterdir()}
    assert [p.name for p in folder.parent.iterdir()] == ["tiny"]  # no draft is left
    k8s_job.put_model("geometry:Qwen3-0.6B", tmp_path / "other")
    assert (tmp_path / "other" / "config.json").is_file()
    with pytest.raises(ConfigError):
        k8s_job.put_model("geometry:none-such", tmp_path / "third")


# -- unpacking --------------------------------------------------------------------------------------------------------


def test_results_are_put_into_the_machines_folder(tmp_path):
    assert k8s_job.unpack(_packed("mine/load/run/run.json", "mine/claims.csv"), tmp_path, "mine") == 2
    assert (tmp_path / "mine/load/run/run.json").read_bytes() == b"ab"
    assert not list(tmp_path.rglob("*.part"))


@pytest.mark.parametrize("name", ["other/claims.csv", "mine/../x", "/mine/x", "mine/.hidden", "../mine/x", "mine/a b"])
def test_results_for_another_place_are_refused(tmp_path, name):
    with pytest.raises(StoreError, match="another place"):
        k8s_job.unpack(_packed(name), tmp_path, "mine")
    assert not list(tmp_path.rglob("*"))


def test_links_are_refused(tmp_path):
    with pytest.raises(StoreError):
        k8s_job.unpack(_packed("mine/x", kind=tarfile.SYMTYPE), tmp_path, "mine")


# -- outside ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def api(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(k8s_job, "POLL_S", 0.01)
    with RecordedApi(tmp_path) as recorded:
        monkeypatch.setenv("KUBECONFIG", str(recorded.kubeconfig))
        recorded.answers |= {
            f"{BASE}/serviceaccounts/kvlab-load": (200, {"metadata": {"name": "kvlab-load"}}),
            JOBS: (201, {}),
        }
        yield recorded


def _job(api, status, results=None, log=b"measured\n"):
    """The Job's pod has this status, and its results can be fetched if they are given."""
    api.answers[f"{BASE}/pods"] = (200, {"items": [{"metadata": {"name": "p"}, "status": status}]})
    api.answers[f"{BASE}/pods/p:8080/proxy/results.tar.gz"] = (200, results) if results else (503, {})
    api.answers[f"{BASE}/pods/p/log"] = (200, log)


def test_a_job_is_created_fetched_and_removed(api, tmp_path):
    _job(api, RUNNING, _packed("mine/claims.csv"))
    told = []
    k8s_job.run(OPTIONS, "mine", told=told.append)
    assert (tmp_path / "data/mine/claims.csv").is_file()
    (created,) = [body for method, path, body in api.asked if method == "POST" and path == JOBS]
    assert b'"kvlab:1"' in created and b"service_hit_rate" in created
    assert any(method == "DELETE" and path.startswith(JOBS) for method, path, _ in api.asked)
    assert "1 files fetched" in told and any("| measured" in text for text in told)


@pytest.mark.parametrize(
    ("status", "told"),
    [
        (
            {"phase": "Pending", "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ErrImagePull",
        ),
        (
            {"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"reason": "OOMKilled"}}}]},
            "OOMKilled(.|\n)*measured",
        ),
        ({"phase": "Failed", "reason": "Evicted"}, "Evicted"),
    ],
)
def test_a_job_that_cannot_end_well_is_told_and_removed(api, status, told):
    _job(api, status)
    with pytest.raises(ServerError, match=told):
        k8s_job.run(OPTIONS, "mine", told=lambda text: None)
    assert any(method == "DELETE" for method, _, _ in api.asked)


def test_a_pod_that_finds_no_room_is_given_up(api, monkeypatch):
    monkeypatch.setattr(k8s_job, "STUCK_S", 0.0)
    unmet = {"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 Insufficient cpu."}
    _job(api, {"phase": "Pending", "conditions": [unmet]})
    with pytest.raises(ServerError, match="Insufficient cpu"):
        k8s_job.run(OPTIONS, "mine", told=lambda text: None)


def test_results_that_may_not_be_fetched_are_told(api):
    _job(api, RUNNING)
    api.answers[f"{BASE}/pods/p:8080/proxy/results.tar.gz"] = api.of("stranger service")
    with pytest.raises(ServerError, match="pods/proxy"):
        k8s_job.run(OPTIONS, "mine", told=lambda text: None)


def test_a_missing_account_is_told_before_anything_is_created(api):
    api.answers[f"{BASE}/serviceaccounts/kvlab-load"] = api.of("no-service")
    with pytest.raises(ServerError, match="no service account(.|\n)*kvlab k8s render"):
        k8s_job.run(OPTIONS, "mine")
    assert not any(method == "POST" for method, _, _ in api.asked)


def test_from_inside_names_the_service_and_the_parameters(monkeypatch):
    ran = {}
    monkeypatch.setattr(k8s_job, "run", lambda options, machine, **_: ran.update(options=options, machine=machine))
    monkeypatch.setattr(k8s_job.k8s_api, "Api", lambda context: None)
    url = k8s_job.address("lab/six-workers:http", "")
    machine = k8s_job.from_inside(url, "kvlab:2", ["prefix_cache"], "cpu-tiny", "", ["X=1"], print)
    assert machine == ran["machine"] and machine.startswith("server-")
    args = k8s_render.load_job(ran["options"], machine)["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[args.index("--kubernetes") + 1] == "lab/six-workers:http"
    assert args[args.index("measure") + 1] == "prefix_cache" and "--param=X=1" in args
    assert ran["options"].load_name == "six-load" and ran["options"].load_image == "kvlab:2"


def test_an_address_that_leads_to_the_service_goes_along():
    target = k8s.parse_target(k8s_job.address("lab/six", "http://h:30080"))
    assert target.entrance == "http://h:30080" and str(target) == "lab/six"
    with pytest.raises(ConfigError, match="--kubernetes"):
        k8s_job.address("", "")
