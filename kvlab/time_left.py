"""How long a section takes, going by the stored runs of a machine that has finished it with the same profile."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from kvlab import claims, store
from kvlab.errors import StoreError
from kvlab.profile import Profile

NO_RUNS = "no runs of its own"
NO_GRID = "not in this profile"
NEVER = "not measured before"
UNFINISHED = "not finished before"
WANTED = (NEVER, UNFINISHED)  # what a sum leaves out; the other two take no time


class Took(NamedTuple):
    """`seconds` of a section's starts and loads on `machine`; both null where `why` says why that is not known."""

    seconds: float | None
    machine: str | None = None
    why: str | None = None


def of_sections(sections: Sequence[str], profile: Profile, machine: str) -> dict[str, Took]:
    """For each section what it took on the machine itself, else on the first other one that finished it."""
    places = sorted(store.machines(), key=lambda name: (name != machine, name))
    cited = {name: _cited(name) for name in places}
    return {section: _of_section(section, profile, cited) for section in sections}


def _of_section(section: str, profile: Profile, cited: dict[str, set[str]]) -> Took:
    if section not in type(profile).model_fields:
        return Took(None, why=NO_RUNS)
    if getattr(profile, section) is None:
        return Took(None, why=NO_GRID)
    why = NEVER
    for machine, ids in cited.items():
        runs = [run for run in store.list_runs(machine, section) if run.manifest.get("profile") == profile.name]
        if any(run.id in ids for run in runs):
            return Took(busy_s(run.manifest for run in runs), machine)
        why = UNFINISHED if runs else why
    return Took(None, why=why)


def _cited(machine: str) -> set[str]:
    """The runs that claims name: claims are stated at the end of a section, so one that was broken off has none."""
    try:
        named = claims.read(store.machine_dir(machine))["runs"].dropna()
    except StoreError:  # whoever writes claims says so
        return set()
    return {run for text in named for run in text.split(";")}


def busy_s(manifests: Iterable[dict[str, Any]]) -> float:
    """Seconds in which a server started or a load ran; what ran at once counts once.

    Drawing, and the time between two sittings, are not in it.
    """
    spans, end, total = sorted(span for manifest in manifests for span in _spans(manifest)), float("-inf"), 0.0
    for start, stop in spans:
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total


def _spans(manifest: dict[str, Any]) -> list[tuple[float, float]]:
    server = manifest.get("server") or {}
    times = ((server.get("started_utc"), server.get("ready_s")), (manifest["created_utc"], manifest.get("duration_s")))
    return [(began, began + took) for utc, took in times if utc and took for began in [_seconds(utc)]]


def _seconds(utc: str) -> float:
    return datetime.fromisoformat(utc).timestamp()


def told(took: dict[str, Took]) -> str:
    """What a measurement of these sections may take yet, in words; "" where nothing is known."""
    known = [found for found in took.values() if found.seconds is not None]
    if not known:
        return ""
    where = ", ".join(dict.fromkeys(found.machine for found in known))
    unknown = ", ".join(name for name, found in took.items() if found.why in WANTED)
    without = f", without {unknown}" if unknown else ""
    minutes = sum(found.seconds for found in known) / 60
    return f"; about {minutes:.1f} minutes left at most{without}, going by runs of this profile on {where}"
