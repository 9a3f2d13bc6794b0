"""The NVIDIA GPUs that this process may see, through NVML: no CUDA context is made."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import psutil


def gpus() -> list[dict[str, Any]]:
    """The NVIDIA GPUs this process may see: id, name, memory_bytes, driver, cuda_driver, mig. None at all is [].

    `id` tells GPUs apart and is made from the UUID, which itself would name the host.
    """
    return _nvml(lambda nvml, handles: [_gpu(nvml, handle) for handle in handles]) or []


def on_host() -> int:
    """How many NVIDIA GPUs the driver shows, also those that CUDA_VISIBLE_DEVICES leaves out."""
    return _nvml(lambda nvml, _: nvml.nvmlDeviceGetCount()) or 0


def other_gpu_processes() -> int | None:
    """Processes that compute on the visible GPUs and are not this one's children; null without a GPU."""

    def count(nvml, handles) -> int | None:
        own = {os.getpid(), *(child.pid for child in psutil.Process().children(recursive=True))}
        there = {p.pid for handle in handles for p in nvml.nvmlDeviceGetComputeRunningProcesses(handle)}
        return len(there - own) if handles else None

    return _nvml(count)


def _nvml(read):
    """`read(pynvml, visible handles)` inside an NVML session; None where there is no NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        every = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        ids = [_text(pynvml.nvmlDeviceGetUUID(handle)) for handle in every]
        return read(pynvml, [every[i] for i in visible_devices(ids, os.environ.get("CUDA_VISIBLE_DEVICES"))])
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


def visible_devices(uuids: list[str], setting: str | None) -> list[int]:
    """Indices of the GPUs that CUDA_VISIBLE_DEVICES leaves, by number or UUID; as in CUDA, a wrong entry ends the list.

    A MIG instance is not a whole GPU: its name selects nothing here, and with only such names every GPU is listed.
    """
    if setting is None or setting.startswith("MIG-"):
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in setting.split(",")):
        named = [i for i, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        index = int(entry) if entry.isdigit() else next(iter(named), -1)
        if not 0 <= index < len(uuids):
            break
        found.append(index)
    return found


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpu(nvml, handle) -> dict[str, Any]:
    def ask(function):
        try:
            return function()
        except nvml.NVMLError:
            return None

    cuda = ask(nvml.nvmlSystemGetCudaDriverVersion)
    uuid = ask(lambda: _text(nvml.nvmlDeviceGetUUID(handle)))
    return {
        "id": hashlib.sha256(uuid.encode()).hexdigest()[:8] if uuid else None,
        "name": _text(nvml.nvmlDeviceGetName(handle)),
        "memory_bytes": ask(lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "driver": ask(lambda: _text(nvml.nvmlSystemGetDriverVersion())),
        "cuda_driver": f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else None,
        "mig": ask(lambda: bool(nvml.nvmlDeviceGetMigMode(handle)[0])),
    }
