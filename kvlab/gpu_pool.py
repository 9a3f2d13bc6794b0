"""From a GPU's memory to the KV pool that vLLM will find: an estimate before a start, of which one part is a guess.

vLLM takes its share of the memory, subtracts the weights, what lies outside of torch and the peak of the activations,
and gives the rest to the pool (`startup.kv_bytes_from_parts` checks that against a start's own account).
"""

from __future__ import annotations

from typing import NamedTuple

from kvlab import claims, geometry, predict, provenance, store
from kvlab.errors import ConfigError

GIB = 2**30
UTILIZATION = 0.92  # what vLLM 0.31 takes by itself: vllm/config/cache.py
OVERHEAD = ("peak_activation", "non_torch")


class Gpu(NamedTuple):
    """One GPU and what is known of the start: GiB, the share of it, and null for what is to be computed or assumed."""

    gib: float
    utilization: float = UTILIZATION
    weights_gib: float | None = None
    overhead_gib: float | None = None


class Pool(NamedTuple):
    """The estimate for each GPU: bytes of the pool, and the lines (name, value) and words that say how it came."""

    bytes: float
    rows: list[tuple[str, str]]
    notes: list[str]


def estimate(shape: geometry.Geometry, gpu: Gpu, tensor_parallel: int = 1) -> Pool:
    """memory x utilization - weights / tensor parallel - overhead. ConfigError where a part is unknown or none is left.

    Source: determine_available_memory in vLLM's gpu_worker.py. Graphs are captured after the pool is sized.
    """
    weights, how = _weights(shape, gpu, tensor_parallel)
    overhead, whose = (gpu.overhead_gib, "as given") if gpu.overhead_gib is not None else _measured_overhead()
    left = gpu.gib * gpu.utilization - weights - overhead
    rows = [
        (f"GPU memory x {gpu.utilization:g}, vLLM's share", f"{gpu.gib:g} x {gpu.utilization:g} GiB"),
        ("weights on each GPU", f"{weights:.2f} GiB, {how}"),
        ("activations, CUDA: not known before a start", f"{overhead:.2f} GiB, {whose}"),
    ]
    if left <= 0:
        parts = "; ".join(f"{name}: {value}" for name, value in rows)
        raise ConfigError(
            f"{gpu.gib:g} GiB leave no KV pool for {shape.name}.",
            cause=parts,
            next_step="take a smaller model, more GPUs (--tensor-parallel), or fewer bits (--weights-gib)",
        )
    notes = [
        "The pool is an estimate. What a start takes beside the weights depends on the model, on",
        "max_num_batched_tokens and on whether it compiles; --overhead-gib gives another value. The start's log",
        'states the real pool as "Available KV cache memory". Memory that others hold on the GPU is not counted.',
    ]
    return Pool(left * GIB, rows, notes)


def _weights(shape: geometry.Geometry, gpu: Gpu, tensor_parallel: int) -> tuple[float, str]:
    if gpu.weights_gib is not None:
        return gpu.weights_gib, "as given"
    found = predict.weight_bytes(shape)
    if found is None:
        raise ConfigError(
            f"The weights of {shape.name} are not computed: its architecture is not modelled.",
            next_step="give what one GPU holds of them: --weights-gib",
        )
    return found / tensor_parallel / GIB, "computed in 16 bits"


def _measured_overhead() -> tuple[float, str]:
    """The most GiB that a start of one machine held beside its weights: this one's if it was measured, else a stored.

    Without any it is 0, in words.
    """
    for machine in (provenance.machine_name(), *store.REPLAY_FIRST):
        table = claims.read(store.machine_dir(machine))
        table = table[(table["section"] == "startup") & (table["quantity"] == "memory_bytes")]
        found = [_largest(table, part) for part in OVERHEAD]
        if None not in found:
            return sum(found) / GIB, f"the most that a start on {machine} took"
    return 0.0, "not counted: no start is stored; --overhead-gib"


def _largest(table, part: str) -> float | None:
    rows = table[table["conditions"].str.endswith(f"part={part}").astype(bool) & table["measured"].notna()]
    return float(rows["measured"].max()) if len(rows) else None
