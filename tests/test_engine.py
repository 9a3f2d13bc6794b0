"""Command line and environment of the server, and what is refused before a start."""

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from kvlab import engine, gpu, privacy
from kvlab.config import ServerConfig
from kvlab.errors import ConfigError, EngineMissing, StoreError

CPU = {"model": "tiny", "engine": "cpu", "kv_cache_memory_bytes": 2**26, "enforce_eager": True}


@pytest.fixture
def installed(monkeypatch):
    """installed(vllm="0.31.0", gpus=0): pretends these distributions and this many GPUs."""

    def pretend(gpus=0, **versions):
        def version(name):
            if name.replace("-", "_") not in versions:
                raise importlib.metadata.PackageNotFoundError(name)
            return versions[name.replace("-", "_")]

        monkeypatch.setattr(importlib.metadata, "version", version)
        spec = SimpleNamespace(origin="vllm/__init__.py") if versions else None
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
        monkeypatch.setattr(gpu, "gpus", lambda: [{}] * gpus)

    return pretend


def flags(**fields):
    return engine.to_argv(ServerConfig(**{"model": "m"} | fields), "folder", 8000)[5:]


def test_only_what_is_set_becomes_a_flag():
    always = "--host 127.0.0.1 --port 8000 --served-model-name kvlab --enable-prompt-tokens-details"
    assert " ".join(flags()) == always
    argv = engine.to_argv(ServerConfig(model="m"), "folder", 8000)
    assert argv[:5] == [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", "folder"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"max_model_len": 4096}, "--max-model-len 4096"),
        ({"block_size": 32}, "--block-size 32"),
        ({"kv_cache_memory_bytes": 20971520}, "--kv-cache-memory-bytes 20971520"),
        ({"gpu_memory_utilization": 0.5}, "--gpu-memory-utilization 0.5"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
        ({"num_gpu_blocks_override": 24}, "--num-gpu-blocks-override 24"),
        ({"max_num_seqs": 8}, "--max-num-seqs 8"),
        ({"max_num_batched_tokens": 512}, "--max-num-batched-tokens 512"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size 2"),
        ({"attention_backend": "FLASH_ATTN"}, "--attention-backend FLASH_ATTN"),
        ({"load_format": "dummy"}, "--load-format dummy"),
        ({"dtype": "float32"}, "--dtype float32"),
        ({"enable_prefix_caching": True}, "--enable-prefix-caching"),
        ({"enable_prefix_caching": False}, "--no-enable-prefix-caching"),
        ({"enable_chunked_prefill": True}, "--enable-chunked-prefill"),
        ({"enable_chunked_prefill": False}, "--no-enable-chunked-prefill"),
        ({"enforce_eager": True}, "--enforce-eager"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"quantization": "fp8"}, "--quantization fp8"),
        ({"extra_args": ("--swap-space", "0")}, "--swap-space 0"),
    ],
)
def test_each_field_becomes_its_flag(fields, expected):  # pitfall 20
    assert " ".join(flags(**fields)).endswith("--enable-prompt-tokens-details " + expected)


def test_every_field_that_vllm_must_hear_of_is_passed_on():
    own = {"model", "engine", "served_name", "env", "caches", "preload"}
    for name in ServerConfig.model_fields.keys() - own:
        example = {"load_format": "dummy", "gpu_memory_utilization": 0.5, "extra_args": ("--x",)}.get(name)
        kind = str(ServerConfig.model_fields[name].annotation)
        example = example or ("x" if "str" in kind else True if "bool" in kind else 2)
        assert flags(**{name: example}) != flags(), name


def test_cpu_environment(monkeypatch):
    monkeypatch.setattr(engine, "metadata_stub", lambda: None)
    for name, value in {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_API_KEY": "x", "OMP_NUM_THREADS": "8"}.items():
        monkeypatch.setenv(name, value)
    env = engine.environment(ServerConfig(**CPU), local_model=True)
    assert (env["OMP_NUM_THREADS"], env["VLLM_ENABLE_V1_MULTIPROCESSING"], env["TORCH_COMPILE_DISABLE"]) == (
        "1",
        "0",
        "1",
    )
    assert (env["HF_HUB_OFFLINE"], env["VLLM_SERVER_DEV_MODE"], env["VLLM_NO_USAGE_STATS"]) == ("1", "1", "1")
    assert env["PATH"] == os.environ["PATH"]
    assert "VLLM_CPU_KVCACHE_SPACE" not in env  # it would win over --kv-cache-memory-bytes  # pitfall 20
    assert "VLLM_API_KEY" not in env


def test_a_compiled_cpu_server_compiles_and_a_hub_model_may_be_fetched(monkeypatch):
    monkeypatch.setattr(engine, "metadata_stub", lambda: None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    env = engine.environment(ServerConfig(**CPU | {"enforce_eager": False}), local_model=False)
    assert "TORCH_COMPILE_DISABLE" not in env and "HF_HUB_OFFLINE" not in env


def test_cuda_environment_and_the_order_of_precedence(monkeypatch):
    monkeypatch.setattr(engine, "metadata_stub", lambda: None)
    monkeypatch.setattr(gpu, "on_host", lambda: 1)
    for name in engine.MULTI_GPU_ENV:
        monkeypatch.delenv(name, raising=False)
    one = engine.environment(ServerConfig(model="m"), local_model=False)
    assert "NCCL_NVLS_ENABLE" not in one and "VLLM_ENABLE_V1_MULTIPROCESSING" not in one
    two = engine.environment(ServerConfig(model="m", tensor_parallel_size=2), local_model=False)
    assert (two["NCCL_NVLS_ENABLE"], two["TORCH_SYMM_MEM_DISABLE_MULTICAST"], two["NVSHMEM_DISABLE_NVLS"]) == (
        "0",
        "1",
        "1",
    )
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    config = ServerConfig(model="m", tensor_parallel_size=2, env={"VLLM_SERVER_DEV_MODE": "0"})
    env = engine.environment(config, local_model=False)
    assert (env["NCCL_NVLS_ENABLE"], env["VLLM_SERVER_DEV_MODE"]) == ("1", "0")


@pytest.mark.parametrize(("there", "visible"), [(1, None), (2, None), (2, "1")])
def test_a_lone_server_has_no_multicast_where_there_are_several_gpus(monkeypatch, there, visible):
    monkeypatch.setattr(engine, "metadata_stub", lambda: None)
    for name in (*engine.MULTI_GPU_ENV, "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    count = {"nvmlInit": lambda: None, "nvmlShutdown": lambda: None, "nvmlDeviceGetCount": lambda: there}
    ids = {"nvmlDeviceGetHandleByIndex": lambda i: i, "nvmlDeviceGetUUID": lambda i: f"GPU-{i}"}
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=OSError, **count, **ids))
    config = ServerConfig(model="m")
    env = engine.environment(config, local_model=False)
    off = there > 1
    assert {name: env.get(name) for name in engine.MULTI_GPU_ENV} == {
        name: value if off else None for name, value in engine.MULTI_GPU_ENV.items()
    }
    assert engine.gpu_settings(config, env) == {"gpu": visible, "multicast": "off" if off else None}
    on_cpu = ServerConfig(**CPU)
    env = engine.environment(on_cpu, local_model=False)
    assert "NCCL_NVLS_ENABLE" not in env
    assert engine.gpu_settings(on_cpu, env) == {"gpu": None, "multicast": None}


def check(**changes):
    engine.check(ServerConfig(**CPU | changes))


def test_what_fails_on_the_cpu_is_refused_before_the_start(installed, monkeypatch):
    installed(vllm_cpu="0.31.0")
    check()
    with pytest.raises(ConfigError, match="needs kv_cache_memory_bytes"):
        check(kv_cache_memory_bytes=None)
    with pytest.raises(ConfigError, match="block_size = 16 does not work"):
        check(block_size=16)
    with pytest.raises(ConfigError, match="--port"):
        check(extra_args=("--port=1",))
    monkeypatch.setenv("PATH", "")
    check()
    with pytest.raises(ConfigError, match="C\\+\\+ compiler"):
        check(enforce_eager=False)


def test_cuda_without_enough_gpus_is_refused(installed):
    installed(vllm="0.31.0")
    with pytest.raises(ConfigError, match="no NVIDIA GPU is visible"):
        engine.check(ServerConfig(model="m"))
    installed(vllm="0.31.0", gpus=1)
    engine.check(ServerConfig(model="m"))
    with pytest.raises(ConfigError, match="1 NVIDIA GPU is visible"):
        engine.check(ServerConfig(model="m", tensor_parallel_size=2))


def test_no_vllm_names_the_next_command(installed):
    installed()
    with pytest.raises(EngineMissing, match="make install") as caught:
        check()
    assert 'MODE = "replay"' in str(caught.value)  # what is stored can be looked at without any vLLM


def test_a_folder_named_vllm_is_no_vllm(tmp_path, monkeypatch):
    (tmp_path / "vllm").mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    importlib.invalidate_caches()
    with pytest.raises(EngineMissing):
        check()


@pytest.mark.parametrize(
    ("versions", "build"),
    [({"vllm_cpu": "0.31.0"}, "cpu"), ({"vllm": "0.31.0+cpu"}, "cpu"), ({"vllm": "0.26.0"}, "cuda")],
)
def test_the_build_is_told_by_its_distribution(installed, versions, build):
    installed(gpus=1, **versions)
    assert engine.installed_build()[0] == build
    config = ServerConfig(model="m") if build == "cpu" else ServerConfig(**CPU)
    with pytest.raises(EngineMissing, match=f"{build.upper()} build"):
        engine.check(config)


def test_the_stub_names_the_distribution_vllm(installed, tmp_path, monkeypatch):
    installed(vllm_cpu="0.31.0")
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", "already/there")
    env = engine.environment(ServerConfig(**CPU), local_model=True)
    stub, rest = env["PYTHONPATH"].split(os.pathsep)
    assert rest == "already/there"
    code = f"import sys, importlib.metadata as m; sys.path = [{stub!r}] + sys.path; print(m.version('vllm'))"
    assert subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True).strip() == "0.31.0+cpu"
    installed(vllm="0.31.0")
    assert engine.metadata_stub() is None


def test_vllm_is_not_imported_to_look_at_it():
    code = "import sys, kvlab.server, kvlab.engine\ntry: kvlab.engine.installed_build()\nexcept Exception: pass\n"
    code += "print('vllm' in sys.modules, 'torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["False", "False"]


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch, tmp_path):
    """In a container whose user is a number."""

    def homeless():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("KVLAB_CACHE", raising=False)
    monkeypatch.setattr("pathlib.Path.home", homeless)
    with pytest.raises(StoreError, match=r"no home folder(.|\n)*set KVLAB_CACHE"):
        engine.cache_dir()
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    assert engine.cache_dir() == tmp_path
    assert privacy.scrub("a text") == "a text"
