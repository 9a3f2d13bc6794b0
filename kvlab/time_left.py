"""How long a section takes, going by the stored runs of a machine that has finished it with the same profile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlab import claims, gpu_time, store
from kvlab.errors import StoreError
from kvlab.profile import Profile

NO_RUNS = "no runs of its own"
NO_GRID = "not in this profile"
NEVER = "not measured before"
UNFINISHED = "not finished before"
WANTED = (NEVER, UNFINISHED)  # what a sum leaves out; the other two take no time
NO_TIME = (NO_RUNS, NO_GRID)


class Took(NamedTuple):
    """`seconds` of a section's starts and loads on `machine`; both null where `why` says why that is not known.

    What ran at once counts once; drawing and the time between two sittings are not in it. `gpu_minutes` counts each
    GPU, and is null where the runs saw none.
    """

    seconds: float | None
    machine: str | None = None
    why: str | None = None
    gpu_minutes: float | None = None


def of_sections(sections: Sequence[str], profile: Profile, machine: str) -> dict[str, Took]:
    """For each section what it took on the machine itself, else on the first other one that finished it."""
    places = sorted(store.machines(), key=lambda name: (name != machine, name))
    cited = {name: _cited(name) for name in places}
    return {section: _of_section(section, profile, cited) for section in sections}


def _of_section(section: str, profile: Profile, cited: dict[str, set[str]]) -> Took:
    known = section in type(profile).model_fields
    if known and getattr(profile, section) is None:
        return Took(None, why=NO_GRID)
    why = NEVER if known else NO_RUNS  # a section of one's own may have runs without a grid in the profile
    for machine, ids in cited.items():
        runs = [run for run in store.list_runs(machine, section) if run.manifest.get("profile") == profile.name]
        if any(run.id in ids for run in runs):
            manifests = [run.manifest for run in runs]
            seconds = gpu_time.union_s(span for manifest in manifests for span in gpu_time.spans(manifest))
            return Took(seconds, machine, gpu_minutes=gpu_time.minutes(manifests))
        why = UNFINISHED if runs else why
    return Took(None, why=why)


def _cited(machine: str) -> set[str]:
    """The runs that claims name: claims are stated at the end of a section, so one that was broken off has none."""
    try:
        named = claims.read(store.machine_dir(machine))["runs"].dropna()
    except StoreError:  # whoever writes claims says so
        return set()
    return {run for text in named for run in text.split(";")}


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


def gpu_told(took: dict[str, Took], engine: str) -> str:
    """The GPU minutes that measuring these sections takes at most, in words; "" for an engine without a GPU."""
    if engine == "cpu":
        return ""
    known = [found for found in took.values() if found.gpu_minutes is not None]
    unknown = ", ".join(name for name, found in took.items() if found.gpu_minutes is None and found.why not in NO_TIME)
    if not known:
        return "GPU minutes: not measured before" if unknown else ""
    where = ", ".join(dict.fromkeys(found.machine for found in known))
    without = f"; not in it: {unknown}" if unknown else ""
    total = sum(found.gpu_minutes for found in known)
    return f"GPU minutes: about {total:.1f} at most, going by runs of this profile on {where}{without}"
