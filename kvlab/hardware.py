"""The two ceilings of the hardware, as plain PyTorch reaches them: bytes moved and arithmetic, each a second.

A decode step has to read the weights and the KV cache once, so bytes / bandwidth is a floor of its time; a prefill has
to do about 2 x parameters operations a token, so matrix rate / (2 x parameters) is the most tokens a second.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from kvlab import provenance, serverless
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import KvlabError
from kvlab.geometry import Geometry
from kvlab.results import Result

NAME = "hardware"
# Large enough to leave the caches and to fill the chip, small enough for a shared one. Elements and matrix rows.
SIZES = {"cuda": (2**31, 8192), "cpu": (2**26, 2048)}
REPEATS = {"cuda": 20, "cpu": 5}


def step_bytes(model: Geometry, dtype_bytes: float, kv_bytes: float) -> float | None:
    """Bytes that one decode step must read: every weight once and `kv_bytes` of KV; null where parameters are unknown.

    `params` counts tied embeddings once, which is what a step reads: the output head (of the inputs a few rows).
    """
    return None if model.params is None else model.params * dtype_bytes + kv_bytes


def floor_s(model: Geometry, dtype_bytes: float, kv_bytes: float, bytes_per_s: float | None) -> float | None:
    """Seconds that reading them takes at `bytes_per_s`, which counts bytes read + written as a copy does."""
    read = step_bytes(model, dtype_bytes, kv_bytes)
    return None if read is None or not bytes_per_s else read / bytes_per_s


def prefill_flop(model: Geometry) -> float | None:
    """Operations a prompt token at least: 2 a parameter outside the embeddings; attention itself is not counted."""
    if model.params is None or not (model.vocab and model.hidden):
        return None
    return 2.0 * (model.params - model.vocab * model.hidden)


def measured(lab) -> Result:
    """The ceilings of this computer, measured once a machine: see `serverless.measured`.

    The summary holds `copy_bytes_per_s` (read + written), `matmul_flop_per_s` and the device's name.
    """
    cell = _cell(lab.server())
    elsewhere = "the hardware of an existing server is elsewhere"
    return serverless.measured(lab, cell, lambda: _summary(cell.server), elsewhere)


def _cell(server: ServerConfig) -> Cell:
    load = LoadConfig(concurrency=1, requests=1, warmup_requests=0, input_tokens=1, output_tokens=1)  # none is sent
    plain = ServerConfig(model=NAME, engine=server.engine, dtype=server.dtype)
    return Cell(name=NAME, server=plain, load=load)


def _summary(server: ServerConfig) -> dict[str, Any]:
    found = _in_a_process(server)
    return found | {"n": REPEATS[found["device_type"]]}


def _in_a_process(server: ServerConfig) -> dict[str, Any]:
    threads = {"OMP_NUM_THREADS": str(provenance.cores())} if server.engine == "cpu" else {}
    try:
        return serverless.in_a_process("kvlab.hardware", server.engine, server.dtype or "auto", env=threads)
    except KvlabError as error:
        raise KvlabError(
            "The hardware's ceilings could not be measured.",
            cause=error.what,
            next_step="see whether PyTorch works: python -c 'import torch; print(torch.ones(2).sum())'",
        ) from None


def ceilings(device: str, dtype: str) -> dict[str, Any]:
    """Best of several: bytes a second of a copy (read + written), operations a second of a square matrix product."""
    import torch

    kind = getattr(torch, dtype if dtype != "auto" else "bfloat16")
    wide, rows = SIZES[device]
    source = torch.empty(wide * 2, dtype=torch.uint8, device=device).random_(0, 256)
    target = torch.empty_like(source)
    copy_s = min(_times(torch, device, lambda: target.copy_(source)))
    moved = 2 * source.numel()
    left, right = (torch.randn(rows, rows, device=device, dtype=torch.float32).to(kind) for _ in range(2))
    product_s = min(_times(torch, device, lambda: torch.mm(left, right)))
    return {
        "device_type": device,
        "device": torch.cuda.get_device_name(0) if device == "cuda" else provenance.cpu_model(),
        "dtype": str(kind).removeprefix("torch."),
        "torch": torch.__version__,
        "copy_bytes_per_s": moved / copy_s,
        "matmul_flop_per_s": 2.0 * rows**3 / product_s,
    }


def _times(torch, device: str, work) -> list[float]:
    """Seconds of each repeat, after three that warm up."""
    wait = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    for _ in range(3):
        work()
    times = []
    for _ in range(REPEATS[device]):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return times


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measure the hardware's ceilings; prints one line of JSON.")
    parser.add_argument("device", choices=sorted(SIZES))
    parser.add_argument("dtype", nargs="?", default="auto")
    given = parser.parse_args()
    print(json.dumps(ceilings(given.device, given.dtype)))
