"""The phases of a start as a reader tells them apart, and the memory it found in use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Name -> phases of `startup_log.PHASES`, in the order of a start. Tracing for the compiler begins in "profile run".
GROUPS = {
    "imports": ("imports", "engine imports", "engine start"),
    "model inspection": ("model inspection",),
    "weights": ("weights",),
    "compile": ("profile run", "compile"),
    "KV profiling": ("kv profiling", "kv cache"),
    "graph capture": ("graph capture",),
    "JIT and warm-up": ("warm-up",),
    "first answer": ("API start", "first answer"),
}
GIB = 2**30


def phase_seconds(server: Mapping[str, Any] | None) -> dict[str, float]:
    """Seconds by group from a manifest's `server`; together they are `ready_s`. Groups that a start lacks are left out.

    Imports happen twice: in the API server and again in the engine process that it starts.
    """
    timeline = ((server or {}).get("startup") or {}).get("timeline") or {}
    found = {name: [timeline[p] for p in phases if p in timeline] for name, phases in GROUPS.items()}
    return {name: round(sum(seconds), 3) for name, seconds in found.items() if seconds}


def saved_by_eager_s(seconds: Mapping[str, float]) -> float | None:
    """What a start without compilation and graphs saves at most: the phases that it does not have."""
    parts = [seconds[name] for name in ("compile", "graph capture", "JIT and warm-up") if name in seconds]
    return sum(parts) if parts else None


def cached_s(cold: Mapping[str, float]) -> float:
    """Seconds of the phases that leave something in a cache: the most that filled caches can save."""
    return sum(cold.get(name, 0.0) for name in ("model inspection", "compile", "JIT and warm-up"))


def warm_ready_s(cold: Mapping[str, float]) -> float | None:
    """The start with filled caches at its best, from the phases of a cold one."""
    return sum(cold.values()) - cached_s(cold) if cold else None


def memory_bytes(server: Mapping[str, Any] | None) -> dict[str, float]:
    """Parts of the GPU's memory that the start found in use, in bytes; the KV pool as `kv`. Logged to 0.01 GiB."""
    startup = (server or {}).get("startup") or {}
    parts = {name: gib * GIB for name, gib in (startup.get("memory_gib") or {}).items()}
    kv = startup.get("available_kv_gib")
    return parts | ({"kv": kv * GIB} if parts and kv is not None else {})


def kv_bytes_from_parts(parts: Mapping[str, float]) -> float | None:
    """What is left for the KV pool: requested - weights - other memory - peak activation; null where a part is missing.

    The graphs are captured after the pool is sized and are no part of it, unless a release estimates them before.
    """
    fixed = parts.get("weights_and_non_torch")
    if fixed is None and {"weights", "non_torch"} <= parts.keys():
        fixed = parts["weights"] + parts["non_torch"]
    if fixed is None or not {"requested", "peak_activation"} <= parts.keys():
        return None
    return parts["requested"] - fixed - parts["peak_activation"]


def tokens_given_back(
    before: Mapping[str, float], after: Mapping[str, float], kv_bytes_per_token: float
) -> float | None:
    """Tokens that fit into what a later start's profiling no longer holds back as peak activation; None if unknown.

    A start that compiles does so within the run that measures the peak, and what that took for a moment stays reserved.
    """
    peaks = [parts.get("peak_activation") for parts in (before, after)]
    return None if None in peaks else (peaks[0] - peaks[1]) / kv_bytes_per_token


def moved_most(before: Mapping[str, float], after: Mapping[str, float]) -> tuple[str, float] | None:
    """The part of memory that changed most between two starts, and by how many bytes; the pool itself left out."""
    changes = {name: after[name] - before[name] for name in before.keys() & after.keys() - {"kv", "requested"}}
    if not changes:
        return None
    name = max(sorted(changes), key=lambda part: abs(changes[part]))
    return name, changes[name]
