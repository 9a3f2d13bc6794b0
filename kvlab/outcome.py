"""Where a section's claims and figures go: to the machine's own folders, or aside where somebody asks "what if".

A what-if shows what it shows without touching what is stored: data/<machine>/claims.csv and figures/<machine> stay.
A replay is one where parameters or profile are none with which the machine was measured; a measurement where parameters
differ from the notebook's own and nobody has named the machine. Whoever names it decides what is in its folder, and
the parameters are kept there.
"""

from __future__ import annotations

import ast
import difflib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlab import claims as claims_module
from kvlab import imported, parameters, run, store
from kvlab.errors import StoreError
from kvlab.files import disk_errors, near, write_text

if TYPE_CHECKING:
    from kvlab.claims import Claim
    from kvlab.measure import Lab

ASKED = "asked.json"  # in a section's folder: the parameters with which its claims were measured, where not its own


def asked(section: str) -> dict[str, Any]:
    """The parameters that the notebook of this kernel holds for the section, checked; {} outside of such a notebook.

    A cell may hold anything: what is wrong is a ConfigError before anything starts.
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    path, space = run.notebooks().get(section), getattr(shell, "user_ns", {})
    if path is None or not set(parameters.COMMON) <= space.keys():
        return {}
    declared = parameters.parameters(path)
    given = {name: space[name] for name in declared if name in space}
    parameters.check_parameters(path, given | _misspelt(space, declared))
    return given


def _misspelt(space: Mapping[str, Any], declared: Mapping[str, Any]) -> dict[str, Any]:
    """What looks like a parameter and is none: papermill by itself injects whatever name it is given."""
    names = [name for name in space if name.isupper() and name not in declared and not name.startswith("_")]
    return {name: space[name] for name in names if difflib.get_close_matches(name, declared, 1, cutoff=0.8)}


def changes(section: str, given: Mapping[str, Any], machine: str, profile: str, mode: str = "replay") -> list[str]:
    """What makes a run of the notebook a what-if, in words; nothing where its claims are the machine's own.

    `given["MACHINE"]` of a measurement: as it was typed, empty where the hardware names it.
    """
    own, stored = _own(section, given), _stored(machine, section)
    if mode != "replay":
        return [] if given.get("MACHINE") or own == stored else _words(own)
    other = [] if own == stored else _words(own) or [f"the profile's own values, not {'; '.join(_words(stored))}"]
    return other + ([] if _measured_with(machine, profile) else [f"profile {profile}"])


def _own(section: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given parameters that ask for something else than the notebook by itself."""
    path = run.notebooks().get(section)
    declared = parameters.parameters(path) if path else {}
    own = {name: value for name, value in given.items() if name in declared and name not in parameters.COMMON}
    return {name: value for name, value in own.items() if _differs(value, declared[name])}


def _words(own: Mapping[str, Any]) -> list[str]:
    return [f"{name} = {value!r}" for name, value in own.items()]


def _stored(machine: str, section: str) -> dict[str, Any]:
    """The parameters with which the stored claims were measured; {}: the notebook's own."""
    path = store.machine_dir(machine) / section / ASKED
    try:
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}
    except (OSError, ValueError, TypeError) as error:
        raise StoreError(f"{path} cannot be read: {error}", next_step="remove it, and measure again") from None


def _store(lab: Lab) -> None:
    path, own = lab.folder / ASKED, _own(lab.section, lab.asked)
    with disk_errors(str(path)):
        write_text(path, json.dumps(own, indent=1, sort_keys=True) + "\n") if own else path.unlink(missing_ok=True)


def _differs(value: Any, declared: Mapping[str, str]) -> bool:
    """Whether a value asks for something else; "0: the profile's" in the help says that 0 asks for nothing.

    Then the default does not count: an edited cell that was saved has become the default.
    """
    if re.search(r"\b(0|empty): ", declared["help"]):
        return bool(value)
    try:
        return value != ast.literal_eval(declared["default"])
    except ValueError:
        return True


def _measured_with(machine: str, profile: str) -> bool:
    """Whether any run of the machine says so; one without runs, or with imported ones only, has nothing to lose."""
    named = False
    for path in sorted(store.machine_dir(machine).glob("*/[!.]*/run.json")):
        found = re.search(r'^ "profile": "(.*)"', path.read_text(encoding="utf-8", errors="replace"), re.M)
        if found and found[1] == profile:
            return True
        named |= bool(found)
    return not named


def what_if_dir(machine: str, section: str) -> Path:
    """_build/what-if/<machine>/<section>, beside the data folder."""
    return store.root().parent / "_build" / "what-if" / store.machine_dir(machine).name / section


def aside(lab: Lab) -> Path | None:
    """The folder of a what-if; None where claims and figures go to the machine's own folders."""
    return what_if_dir(lab.machine, lab.section) if _changes(lab) else None


def _changes(lab: Lab) -> list[str]:
    return changes(lab.section, lab.asked, lab.machine, lab.profile.name, lab.mode)


def kept(machine: str, mode: str) -> str:
    """What becomes of the runs of a what-if, and how its values become a machine's own."""
    if mode == "replay":
        return f"what is stored of {machine} stays"
    return (
        f"its runs are stored with those of {machine}, whose claims stay. To replace these: --machine {machine} (in a "
        "notebook MACHINE); to keep both: another name, or a profile's TOML file with these values"
    )


def figures_dir(lab: Any) -> Path:
    """Where the laboratory's figures go."""
    return getattr(lab, "aside", None) or store.figures_dir(lab.machine)


def write(lab: Lab, claims: list[Claim]) -> None:
    """Replaces the section's claims of the machine, or those of a copy in the folder of a what-if, which is told."""
    folder = store.machine_dir(lab.machine)
    claims_module.stand_in(folder, lab.aside)
    if lab.aside is not None:
        said = "; ".join(_changes(lab))
        print(f"What if: {said}.\nClaims and figures go to {near(lab.aside)}; {kept(lab.machine, lab.mode)}.")
    elif lab.mode == "replay":
        _keep_measured(lab, claims)
    stated = imported.with_imported(claims, lab.machine, lab.section)
    claims_module.write_section(folder, lab.section, stated)
    if lab.aside is None and lab.mode != "replay":
        _store(lab)


def _keep_measured(lab: Lab, claims: list[Claim]) -> None:
    """StoreError where a replay would unsay what was measured, although the runs are there: they are damaged."""
    unmeasured = {claim.id for claim in claims if claim.measured is None}
    stored = claims_module.from_frame(claims_module.readable(store.machine_dir(lab.machine)))
    lost = [c for c in stored if c.section == lab.section and c.measured is not None and c.id in unmeasured]
    ids = {run for claim in lost for run in claim.runs}
    if not any(c.section == lab.section for c in stored):  # the table was lost too
        ids = {path.name for path in lab.folder.glob("[!.]*")}
    damaged = store.damaged_runs(lab.folder, ids)
    if damaged:
        raise StoreError(
            f"{len(damaged)} runs cannot be read, such as {lab.folder / damaged[0]}; claims stay as they are.",
            cause="files were damaged or changed after the measurement",
            next_step=f"restore them from git, or remove them and run: kvlab measure {lab.section}",
        )
