"""GPU minutes: how long each GPU held servers that started or were measured, from the manifests of stored runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import combinations
from typing import Any

Span = tuple[float, float]  # seconds since 1970
PAUSE_S = 600.0  # nothing at all for so long: what follows may lie on other GPUs
TOLERANCE_S = 0.02  # loads that take turns touch by the rounding of their times


def minutes(manifests: Iterable[Mapping[str, Any]]) -> float | None:
    """Minutes of GPUs, each GPU's starts and loads united and the GPUs added; None where no run saw a GPU.

    A run that names its GPUs counts on those. Of older ones only the number is known. A GPU serves one measured load at
    a time, so sections whose loads overlap were on different GPUs, and a section stays on its own until `PAUSE_S`
    pass without a run. What no overlap tells apart counts as one GPU: less than was used, never more.
    """
    runs = [(manifest, seen) for manifest in manifests if (seen := _seen(manifest))]
    named: dict[str, list[Span]] = {}
    unnamed: dict[int, list[Mapping[str, Any]]] = {}
    for manifest, seen in runs:
        ids = [gpu.get("id") for gpu in seen]
        if all(ids):
            for gpu in ids:
                named.setdefault(gpu, []).extend(spans(manifest))
        else:
            unnamed.setdefault(len(ids), []).append(manifest)
    total = sum(map(union_s, named.values())) + sum(n * _told_apart_s(of) for n, of in unnamed.items())
    return total / 60 if runs else None


def _seen(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list((manifest.get("provenance") or {}).get("gpus") or ())


def _told_apart_s(manifests: list[Mapping[str, Any]]) -> float:
    """Seconds of GPUs whose names are not known, with one for each section that another one's loads overlap."""
    total = 0.0
    for sitting in _sittings(manifests):
        place = _places(sitting)
        for gpu in set(place.values()):
            total += union_s(span for m in sitting if place[m.get("section")] == gpu for span in spans(m))
    return total


def _sittings(manifests: list[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    found: list[list[Mapping[str, Any]]] = []
    end = float("-inf")
    for manifest in sorted(manifests, key=lambda m: min(spans(m))[0]):
        if min(spans(manifest))[0] > end + PAUSE_S:
            found.append([])
        found[-1].append(manifest)
        end = max(end, *(stop for _, stop in spans(manifest)))
    return found


def _places(sitting: list[Mapping[str, Any]]) -> dict[str | None, int]:
    """Section -> the first GPU on which no load of another section overlaps its own; in order of their first load."""
    loads: dict[str | None, list[Span]] = {}
    for manifest in sitting:
        loads.setdefault(manifest.get("section"), []).append(_load(manifest))
    apart = {
        frozenset(pair)
        for pair in combinations(loads, 2)
        if any(_overlap(a, b) for a in loads[pair[0]] for b in loads[pair[1]])
    }
    place: dict[str | None, int] = {}
    for section in sorted(loads, key=lambda name: min(loads[name])):
        taken = {place[other] for other in place if frozenset((section, other)) in apart}
        place[section] = next(n for n in range(len(loads)) if n not in taken)
    return place


def _overlap(a: Span, b: Span) -> bool:
    return min(a[1], b[1]) - max(a[0], b[0]) > TOLERANCE_S


def union_s(times: Iterable[Span]) -> float:
    """Seconds covered by at least one of the spans."""
    end, total = float("-inf"), 0.0
    for start, stop in sorted(times):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def spans(manifest: Mapping[str, Any]) -> list[Span]:
    """When a run's load ran, and its server started where that is known."""
    server = manifest.get("server") or {}
    began, took = server.get("started_utc"), server.get("ready_s")
    start = [_span(began, took)] if began and took else []
    return [_load(manifest), *start]


def _load(manifest: Mapping[str, Any]) -> Span:
    return _span(manifest["created_utc"], manifest.get("duration_s") or 0.0)


def _span(utc: str, took_s: float) -> Span:
    began = datetime.fromisoformat(utc).timestamp()
    return began, began + took_s
