"""What prose may quote: claims of every machine, and what runs say of their machine. Nothing is computed anew here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import pandas as pd

from kvlab import certificate, gpu_time, hardware, provenance, store
from kvlab.claims import parse_conditions
from kvlab.measure import EXISTING

COMMITTED = ("article", "h200", "cpu-tiny")
HERE = "here"  # the report's own machine, whatever its name
STAMPED = (
    "ttft",
    "itl",
    "tpot",
    "latency",
    "throughput",
    "resume",
    "requests_per_s",
    "paused_s",
    "client_queue",
    "wall",
)
FIELDS = ("hardware", "engine", "model", "weights", "dates", "runs", "kvlab", "gpu_minutes")


@dataclass(frozen=True)
class Facts:
    """Claims by machine, and the machine that the report is about. `claims[machine]` holds a machine's rows.

    `folders[machine]`: the section in whose folder each of its runs lies; a section may read the runs of another one.
    """

    own: str
    claims: Mapping[str, tuple[dict[str, Any], ...]]
    folders: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def find(self, machine: str, section: str, quantity: str, conditions: str = "") -> dict[str, Any] | None:
        """The claim whose conditions hold all of these and say least beyond them; one with a number comes first."""
        wanted = parse_conditions(conditions).items()
        found = []
        for row in self.claims.get(self.own if machine == HERE else machine, ()):
            if (row["section"], row["quantity"]) == (section, quantity):
                stated = parse_conditions(row["conditions"] or "")
                if wanted <= stated.items():
                    empty = row["measured"] is None and row["computed"] is None
                    found.append((empty, row["measured"] is None, len(stated), row))
        return min(found, key=lambda entry: entry[:3])[3] if found else None

    def complete(self) -> bool:
        """Whether the committed machines are all here: only then a name that nobody has is a slip of the pen."""
        return all(self.claims.get(machine) for machine in COMMITTED)

    def known(self, section: str, quantity: str) -> bool:
        """Whether any machine has such a claim, or nobody but the article has measured that section yet."""
        rows = [row | {"of": name} for name, table in self.claims.items() for row in table if row["section"] == section]
        measured = any(row["of"] != "article" for row in rows)
        return not measured or not self.complete() or any(row["quantity"] == quantity for row in rows)

    @cached_property
    def conditions(self) -> Mapping[str, set[str]]:
        """The values of each condition, over all claims."""
        found: dict[str, set[str]] = {}
        for text in {row["conditions"] or "" for table in self.claims.values() for row in table}:
            for key, value in parse_conditions(text).items():
                found.setdefault(key, set()).add(value)
        return found

    @cached_property
    def settings(self) -> set[str]:
        """Every value of a condition, and the parts of its lists: what a setting in prose may be."""
        values = {value for values in self.conditions.values() for value in values}
        return values | {part for value in values for part in value.split("-")}

    @cached_property
    def names(self) -> set[str]:
        """Words with digits that are names: machines, and values of conditions."""
        return {*self.claims, *COMMITTED, self.own, *(v for v in self.settings if not v[:1].isdigit())}


def facts(own: str, tables: Mapping[str, pd.DataFrame]) -> Facts:
    """Facts from the tables that `claims.read` gives; null is None. `late` of a row: see `by_late_client`."""
    rows, folders = {}, {}
    for machine, table in tables.items():
        runs = stored_runs(machine)
        late = {run.id for run in runs if certificate.over_limits(run.manifest["certificate"] or {})}
        plain = table.astype(object).where(table.notna(), None)
        rows[machine] = tuple(row | {"late": by_late_client(row, late)} for row in plain.to_dict("records"))
        folders[machine] = {run.id: run.path.parent.name for run in runs}
    return Facts(own, rows, folders)


def stored_runs(machine: str) -> list[store.Run]:
    """The runs of a machine; the article has none."""
    return [] if machine == "article" else store.list_runs(machine)


def by_late_client(row: Mapping[str, Any], late: set[str]) -> bool:
    """Whether a claim is made of the client's stamps, and one of the late runs is behind it.

    A section may read the runs of another one, so a run counts wherever it lies.
    """
    stamped = any(word in row["quantity"] for word in STAMPED)
    return stamped and not late.isdisjoint(str(row["runs"] or "").split(";"))


# -- what runs say of their machine ---------------------------------------------------------------------------------


def about(machine: str) -> dict[str, Any]:
    """Provenance of a machine: hardware, engine, model, dates, number of runs, GPU minutes; unknown is None."""
    if machine == "article":
        return {"machine": machine, "published": True}
    stored = [run.manifest for run in store.list_runs(machine)]
    manifests = [manifest for manifest in stored if manifest.get("valid")]
    own = [m for m in manifests if not _is_existing(m)]  # of the others only the client's hardware is known
    return {
        "machine": machine,
        "published": False,
        "runs": len(manifests),
        "hardware": _one(provenance.hardware_line(m["provenance"] or {}) for m in own),
        "engine": _one(provenance.engine_line(m | {"cell": None} if _is_existing(m) else m) for m in manifests),
        "model": _one(m["cell"]["server"]["model"] for m in manifests if _has_model(m)),
        "weights": _one(_weights(m["cell"]["server"]) for m in own if _has_model(m)),
        "dates": _dates([m["created_utc"][:10] for m in manifests]),
        "kvlab": _one(m["kvlab_version"] for m in manifests),
        "gpu_minutes": gpu_time.minutes(m for m in stored if not _is_existing(m)),  # an invalid run took its time too
        "certificates": certificate.worst(m["certificate"] or {} for m in own),
        "software": _one(_software(m["provenance"] or {}) for m in own),
    }


def _software(known: Mapping[str, Any]) -> str | None:
    versions = {"python": known.get("python")} | dict(known.get("versions") or {})
    driver = next((gpu.get("driver") for gpu in known.get("gpus") or ()), None)
    told = [f"{name} {version}" for name, version in (versions | {"driver": driver}).items() if version]
    return ", ".join(told) or None


def _is_existing(manifest: Mapping[str, Any]) -> bool:
    return manifest["cell"]["server"]["model"].startswith(EXISTING)


def _has_model(manifest: Mapping[str, Any]) -> bool:
    return manifest["cell"]["server"]["model"] != hardware.NAME  # the ceilings of the hardware need none


def _weights(server: Mapping[str, Any]) -> str:
    dummy = server["load_format"] == "dummy" or server["model"].startswith("geometry:")
    note = "dummy (timing, capacity and caching do not depend on weight values, text quality does)"
    return note if dummy else "loaded"


def _one(values: Iterable[str | None]) -> str | None:
    known = sorted({str(value) for value in values if value})
    return "; ".join(known) if known else None


def _dates(days: list[str]) -> str | None:
    return None if not days else min(days) if min(days) == max(days) else f"{min(days)} to {max(days)}"
