"""Manifests: valid by the API's own schemas, and the same server as kvlab starts on one machine."""

import re
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from kvlab import engine, k8s_render, profile
from kvlab.cli import app
from kvlab.errors import ConfigError
from kvlab.k8s_render import Options
from kvlab.profile import load_profile

# The oldest and the newest schemas that the package holds.
VERSIONS = ("1.28", kubernetes_validate.latest_version().rpartition(".")[0])
FULL = {
    "router": "cache_aware",
    "token_secret": "hub",
    "pull_secret": "registry",
    "storage_class": "nfs",
    "gpus": 2,
}


def objects(**changes):
    return k8s_render.render(Options(**{"image": "vllm/vllm-openai:v1", "profile": "cpu-tiny"} | changes))


def by_kind(made, kind):
    return [one for one in made.values() if one["kind"] == kind]


def pod_of(made, kind="Deployment"):
    return by_kind(made, kind)[0]["spec"]["template"]["spec"]


# -- valid --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("changes", [{}, {"profile": "gpu-8gb"}, {"cache_path": "/var/cache/kvlab"}, FULL])
def test_every_object_is_valid(version, changes):
    made = objects(**changes)
    assert {"Deployment", "Service", "Job", "ServiceAccount", "Role", "RoleBinding"} <= {
        o["kind"] for o in made.values()
    }
    for one in made.values():
        kubernetes_validate.validate(one, version, strict=True)


def test_a_wrong_field_would_be_found():
    wrong = by_kind(objects(), "Deployment")[0]
    wrong["spec"]["replica"] = 6
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, VERSIONS[0], strict=True)


def test_one_file_and_a_folder_hold_the_same_objects(tmp_path):
    made = objects(router="random")
    (one,) = k8s_render.write(made, tmp_path / "all.yaml")
    files = k8s_render.write(made, tmp_path / "k8s")
    assert list(yaml.safe_load_all(one.read_text())) == [yaml.safe_load(path.read_text()) for path in files]
    assert list(yaml.safe_load_all(one.read_text())) == list(made.values())
    assert "&id" not in one.read_text()  # plain YAML, without anchors
    assert [path.name for path in files] == sorted(path.name for path in files)  # the order of kubectl apply -f


# -- the workers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu-tiny", "gpu-8gb", "h200"])
def test_a_worker_has_the_flags_of_the_profile(name):
    config = load_profile(name).section_server("service_hit_rate")
    (container,) = pod_of(objects(profile=name))["containers"]
    here = engine.to_argv(config, "MODEL", 8000)
    here = here[here.index("serve") + 2 :]  # after the model's name
    here[here.index("--host") + 1] = "0.0.0.0"
    assert container["command"] == ["vllm", "serve"]
    assert container["args"][1 : len(here) + 1] == here
    assert "--enable-prompt-tokens-details" in container["args"]


def test_the_engines_environment_goes_along():
    env = {e["name"]: e.get("value") for e in pod_of(objects(token_secret="hub"))["containers"][0]["env"]}
    assert env["VLLM_SERVER_DEV_MODE"] == "1"  # a cell begins with an empty prefix cache
    assert env["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert env["HF_HOME"].startswith("/cache/") and env["VLLM_CACHE_ROOT"].startswith("/cache/")
    assert env["HF_TOKEN"] is None  # from the secret


def test_a_model_that_kvlab_makes_is_put_onto_the_volume_first():
    pod = pod_of(objects())
    (init,) = pod["initContainers"]
    assert init["args"] == ["k8s", "model", "tiny", "/cache/models/tiny"]
    assert pod["containers"][0]["args"][0] == "/cache/models/tiny"
    hub = pod_of(objects(profile="gpu-8gb"))
    assert hub["containers"][0]["args"][0] == "Qwen/Qwen3-0.6B" and "initContainers" not in hub


def test_gpus_are_asked_for_where_the_engine_needs_them():
    limits = pod_of(objects(profile="gpu-8gb"))["containers"][0]["resources"]["limits"]
    assert limits["nvidia.com/gpu"] == "1"
    assert "nvidia.com/gpu" not in pod_of(objects())["containers"][0]["resources"]["limits"]
    assert pod_of(objects(gpus=2))["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "2"


def test_all_workers_share_one_volume():
    claim = by_kind(objects(storage_class="nfs"), "PersistentVolumeClaim")[0]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"] and claim["storageClassName"] == "nfs"
    made = objects(cache_path="/var/cache/kvlab")
    assert not by_kind(made, "PersistentVolumeClaim")
    assert pod_of(made)["volumes"][0]["hostPath"]["path"] == "/var/cache/kvlab"


def test_the_service_finds_the_workers_and_keeps_no_client_with_one():
    made = objects()
    (service,) = by_kind(made, "Service")
    deployment = by_kind(made, "Deployment")[0]["spec"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    assert service["spec"]["sessionAffinity"] == "None"
    assert service["spec"]["ports"][0]["targetPort"] == 8000
    assert deployment["strategy"] == {"type": "Recreate"}


# -- the load and its rights ------------------------------------------------------------------------------------------


def test_the_job_measures_through_the_service_and_holds_the_results():
    made = objects(namespace="lab", name="six")
    pod = pod_of(made, "Job")
    args = pod["containers"][0]["args"]
    machine = args[2]
    assert args[:2] == ["k8s", "hold"] and machine.startswith("server-")
    assert args[4:6] == ["measure", "service_hit_rate"]
    assert args[args.index("--kubernetes") + 1] == "lab/six-workers"
    assert args[args.index("--machine") + 1] == machine
    assert by_kind(made, "Job")[0]["spec"]["backoffLimit"] == 0
    assert by_kind(made, "Job")[0]["spec"]["suspend"] is True  # applied with the workers, it must not run at once
    assert "command" not in pod["containers"][0]  # kvlab is the image's entry point


def test_the_load_may_read_what_it_needs_and_nothing_else():
    made = objects()
    (role,) = by_kind(made, "Role")
    allowed = {(group, kind) for rule in role["rules"] for group in rule["apiGroups"] for kind in rule["resources"]}
    wanted = {("", "services"), ("", "endpoints"), ("", "pods"), ("discovery.k8s.io", "endpointslices")}
    assert allowed == wanted
    assert {verb for rule in role["rules"] for verb in rule["verbs"]} == {"get", "list", "watch"}
    account = by_kind(made, "ServiceAccount")[0]["metadata"]["name"]
    assert pod_of(made, "Job")["serviceAccountName"] == account
    assert by_kind(made, "RoleBinding")[0]["subjects"][0]["name"] == account
    assert pod_of(made)["automountServiceAccountToken"] is False  # workers need no rights at all
    assert pod_of(made)["enableServiceLinks"] is False  # nor variables such as VLLM_PORT


def test_a_profile_of_ones_own_goes_along_in_a_config_map(tmp_path):
    mine = tmp_path / "mine.toml"
    mine.write_bytes((profile.FOLDER / "cpu-tiny.toml").read_bytes())
    made = objects(profile=str(mine))
    (config_map,) = by_kind(made, "ConfigMap")
    assert config_map["data"] == {"mine.toml": mine.read_text()}
    container = pod_of(made, "Job")["containers"][0]
    assert container["args"][container["args"].index("--profile") + 1] == "/profile/mine.toml"
    assert container["volumeMounts"][0]["mountPath"] == "/profile"
    for one in made.values():
        kubernetes_validate.validate(one, VERSIONS[1], strict=True)


def test_a_router_finds_the_workers_by_their_label():
    made = objects(router="cache_aware", name="six", namespace="lab")
    workers, router = by_kind(made, "Deployment")
    args = router["spec"]["template"]["spec"]["containers"][0]["args"]
    key, _, value = args[args.index("--selector") + 1].partition("=")
    assert workers["spec"]["template"]["metadata"]["labels"][key] == value
    assert args[args.index("--policy") + 1] == "cache_aware"
    assert [one["metadata"]["name"] for one in by_kind(made, "Service")] == ["six-workers", "six-router"]


# -- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"namespace": "My Space"}, "namespace"),
        ({"name": "-six"}, "name"),
        ({"replicas": 0}, "replicas"),
        ({"image": ""}, "image"),
        ({"image": "two words"}, "image"),
        ({"gpus": -1}, "gpus"),
        ({"memory": "16 GB"}, "memory"),
        ({"cpu": "many"}, "cpu"),
        ({"cache_size": "0"}, "cache_size"),
        ({"cache_path": "relative"}, "cache_path"),
        ({"cache_path": "/c", "storage_class": "nfs"}, "storage_class has no meaning"),
        ({"router": "best"}, "round_robin"),
        ({"profile": "none-such"}, "none-such"),
    ],
)
def test_bad_values_are_told(changes, told):
    with pytest.raises(ConfigError, match=told):
        objects(**changes)


def test_a_model_folder_of_this_machine_is_refused(tmp_path):
    config = load_profile("cpu-tiny").server.model_copy(update={"model": str(tmp_path)})
    with pytest.raises(ConfigError, match="pods do not have it"):
        k8s_render.model_in_pod(config)


def test_a_folder_is_not_written_over_a_file(tmp_path):
    (tmp_path / "k8s").write_text("mine")
    with pytest.raises(ConfigError, match="is a file"):
        k8s_render.write(objects(), tmp_path / "k8s")


def test_the_command_writes_what_is_asked(tmp_path):
    out = tmp_path / "all.yaml"
    words = ["k8s", "render", "--image", "vllm:1", "--profile", "cpu-tiny", "--replicas", "3", "--out", str(out)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    replicas = [one["spec"]["replicas"] for one in yaml.safe_load_all(out.read_text()) if one["kind"] == "Deployment"]
    assert replicas == [3]
    bad = CliRunner().invoke(app, [*words, "--namespace", "My Space"])
    assert bad.exit_code == 2 and "namespace" in bad.output and "Traceback" not in bad.output


# -- the image --------------------------------------------------------------------------------------------------------


def test_the_dockerfile_copies_what_is_there_and_starts_kvlab():
    root = Path(__file__).resolve().parent.parent
    lines = (root / "Dockerfile").read_text().splitlines()
    sources = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert {"kvlab", "notebooks", "data", "pyproject.toml"} <= set(sources)
    assert all((root / source).exists() for source in sources)
    assert 'ENTRYPOINT ["kvlab"]' in lines
    ignored = (root / ".dockerignore").read_text().split()
    assert not set(ignored) & set(sources) and ".venv" in ignored


def test_the_manual_names_commands_and_options_that_exist():
    text = (Path(__file__).resolve().parent.parent / "docs" / "kubernetes.md").read_text()
    used = re.findall(r"^kvlab (k8s [a-z]+|measure)(.*)$", text, re.M)
    assert {command for command, _ in used} == {"k8s pods", "k8s render", "measure"}
    for command, words in used:
        told = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "200"}).stdout
        assert all(option in told for option in re.findall(r"--[a-z-]+", words)), (command, words)
    render = CliRunner().invoke(app, ["k8s", "render", "--help"], env={"COLUMNS": "200"}).stdout
    for option in ("--cache-path", "--storage-class", "--token-secret", "--router"):
        assert option in text and option in render
    made = {name[3:-5] for name in objects(router="random")}
    assert {"cache", "workers", "service", "load-account", "load-role", "load-binding", "load-job"} <= made
