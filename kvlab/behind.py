"""Which runs stand behind a picture, machine by machine, and where they lie.

A picture's own JSON names the runs of its machine. Of the other machines it draws claims: which quantities, says
kvlab/text/figures.toml, and their runs stand in the claims.
"""

from __future__ import annotations

import base64
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from kvlab.claims import parse_conditions
from kvlab.facts import Facts

FEW = 4  # names that a caption shows without being unfolded


@dataclass(frozen=True)
class Behind:
    """The runs of one machine behind a picture. `folders`: where they lie; `published`: values of an article."""

    machine: str
    runs: tuple[str, ...]
    folders: tuple[str, ...]
    published: bool = False

    @property
    def long(self) -> bool:
        """Whether its names are too many to stand in the caption itself."""
        return len(self.runs) > FEW


@cache
def listed() -> Mapping[str, Mapping[str, Any]]:
    """By figure: `drawn`, lines "section quantity conditions"; or `elsewhere`, a folder that holds what it shows."""
    return tomllib.loads((resources.files("kvlab") / "text" / "figures.toml").read_text(encoding="utf-8"))


def machines_in(svg: bytes, names: Iterable[str]) -> list[str]:
    """Those of the machines that a picture names in a label, a legend or a row."""
    text = svg.decode()
    return [name for name in names if re.search(rf"<!-- {re.escape(name)}(?![\w-])", text)]


def of_figure(name: str, section: str, own_runs: Sequence[str], svg: bytes, facts: Facts) -> list[Behind]:
    """What is behind a section's figure: the runs that it names itself, and those of the other machines in it."""
    drawn = listed().get(name, {}).get("drawn", [section])
    others = [machine for machine in machines_in(svg, facts.claims) if machine != facts.own]
    found = [_behind(facts.own, own_runs, facts)] if own_runs else []
    return found + _of_claims(others, drawn, facts)


def of_small(drawn: Sequence[str], picture: str, facts: Facts) -> list[Behind]:
    """What is behind a small picture (base64 of an SVG): of each machine in it, the runs of the claims it draws."""
    return _of_claims(machines_in(base64.b64decode(picture), facts.claims), drawn, facts)


def _of_claims(machines: Iterable[str], drawn: Sequence[str], facts: Facts) -> list[Behind]:
    found = [_behind(machine, runs(facts.claims[machine], drawn), facts) for machine in machines]
    return [one for one in found if one.published or one.runs]


def _behind(machine: str, names: Iterable[str], facts: Facts) -> Behind:
    names, known = tuple(sorted(set(names))), facts.folders.get(machine, {})
    folders = {f"data/{machine}/{known[name]}" for name in names if name in known}
    return Behind(machine, names, tuple(sorted(folders)), machine == "article")


def runs(rows: Iterable[Mapping[str, Any]], drawn: Sequence[str]) -> set[str]:
    """The runs behind the measured claims that one of the lines "section quantity conditions" names."""
    found: set[str] = set()
    for row in rows:
        if row["measured"] is not None and any(_names(line, row) for line in drawn):
            found |= {name for name in str(row["runs"] or "").split(";") if name}
    return found


def _names(line: str, row: Mapping[str, Any]) -> bool:
    section, quantity, conditions = (line.split() + ["", ""])[:3]
    stated = parse_conditions(row["conditions"] or "")
    return row["section"] == section and quantity in ("", row["quantity"]) and _within(conditions, stated)


def _within(conditions: str, stated: Mapping[str, str]) -> bool:
    return parse_conditions(conditions).items() <= stated.items()
