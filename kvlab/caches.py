"""The compile caches that a server starts with: the user's own, or a folder that kvlab empties or keeps."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from kvlab import engine
from kvlab.config import ServerConfig

# Everything that a start of vLLM writes so that the next one is faster. Model files are not among it.
VARIABLES = {
    "VLLM_CACHE_ROOT": "vllm",  # compiled graphs, model inspection
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",  # the driver's own translations
    "FLASHINFER_WORKSPACE_BASE": "flashinfer",
}


def folder(config: ServerConfig) -> Path | None:
    """Where the caches of this configuration lie, the same for "cold" and "kept"; None for the user's own."""
    if config.caches == "user":
        return None
    values = config.model_copy(update={"caches": "user"}).model_dump(mode="json")
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]
    return engine.cache_dir() / "compile" / digest


def environment(config: ServerConfig) -> dict[str, str]:
    """The variables that lead vLLM, torch and Triton to that folder; none for the user's own."""
    place = folder(config)
    return {} if place is None else {name: str(place / part) for name, part in VARIABLES.items()}


def prepare(config: ServerConfig) -> int | None:
    """Empties the folder for a cold start. Returns how many files the start finds; None for the user's own caches."""
    place = folder(config)
    if place is None:
        return None
    if config.caches == "cold":
        shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True, exist_ok=True)
    return sum(path.is_file() for path in place.rglob("*"))
