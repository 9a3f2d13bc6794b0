"""The first screen: eight findings, each with one claim a machine and a small picture drawn from the claims."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvlab import behind, pages, phrases, plot_small, run
from kvlab.behind import Behind
from kvlab.display import cells
from kvlab.facts import COMMITTED, Facts
from kvlab.measure import PUBLISHED
from kvlab.pages import Writer
from kvlab.prose import Notes, fill_one, missing, no_claim

OVER = "the load generator was over the limits of its certificate: give it a free core, or measure a smaller load"


@dataclass(frozen=True)
class Finding:
    """A card: `rows` hold machine, conditions, computed, measured, residual as HTML, and whether it is the reader's.

    `table`: what picture and table show, in words; `differ`: whether the rows have different conditions; `behind`: the
    runs that the picture is made of.
    """

    key: str
    section: str
    title: str
    body: str
    table: str
    differ: bool
    rows: tuple[dict[str, Any], ...]
    picture: str
    notebook: str
    behind: tuple[Behind, ...]


def listed() -> Mapping[str, Mapping[str, Any]]:
    """The findings by key: section, quantity, conditions by machine."""
    return tomllib.loads((resources.files("kvlab") / "text" / "findings.toml").read_text(encoding="utf-8"))


def texts(language: str) -> dict[str, tuple[str, str, str]]:
    """(title, body, table) of each finding by key, from findings.md: `## key: title`, then two paragraphs."""
    found = {}
    for part in pages.source("findings", language).split("\n## ")[1:]:
        heading, _, body = part.partition("\n")
        key, _, title = heading.partition(": ")
        said, _, table = body.strip().partition("\n\n")
        found[key.strip()] = (title.strip(), said.strip(), table.strip())
    return found


def pictures(own: str, machines: Sequence[str]) -> dict[str, str]:
    """The small picture of each finding by key, the same in every language: SVG as base64."""
    return {key: plot_small.draw(key, own, machines) for key in listed()}


def build(writer: Writer, language: str, notes: Notes, drawn: Mapping[str, str]) -> list[Finding]:
    """Every finding, with its words filled and its picture; `notes` takes the reasons of what is missing."""
    said, found = texts(language), []
    for key, spec in listed().items():
        title, body, table = said[key]
        *others, own = pages.machines(writer.facts.own)  # the reader's own stands last
        further = [name for name in spec.get("further", ()) if name != own and writer.facts.claims.get(name)]
        shown = [*others, *further, own]
        rows = tuple(_row(machine, spec, writer, notes) for machine in shown)
        differ = len({row["conditions"] for row in rows}) > 1
        text = pages.inline(body, writer, notes)
        table = pages.inline(table, writer, notes)
        sources = tuple(behind.of_small(spec["drawn"], drawn[key], writer.facts))
        notebooks = ", ".join(_notebooks(spec["drawn"]))
        card = Finding(key, spec["section"], title, text, table, differ, rows, drawn[key], notebooks, sources)
        found.append(card)
    return found


def _notebooks(drawn: Sequence[str]) -> list[str]:
    """The notebooks of the sections whose claims a picture draws."""
    known = run.notebooks()
    return [known[section].name for section in dict.fromkeys(line.split()[0] for line in drawn) if section in known]


def _claim(machine: str, section: str, spec: Mapping[str, Any], facts: Facts) -> tuple[str, dict[str, Any] | None]:
    """(conditions, claim) that stand for a machine; (conditions, None) where it has none.

    A reader's machine is not among those that the findings name, and its profile may be that of one of them: the first
    of their conditions under which it measured something, else whatever it measured of the quantity.
    """
    named, quantity = spec["conditions"], spec["quantity"]
    own = named.get(machine, named["any"])
    found = [(own, facts.find(machine, section, quantity, own))]
    if machine not in COMMITTED:
        others = [named[name] for name in named if name in COMMITTED and name != PUBLISHED]
        found += [(where, facts.find(machine, section, quantity, where)) for where in [*others, ""]]
    return next((one for one in found if one[1] and one[1]["measured"] is not None), found[0])


def _row(machine: str, spec: Mapping[str, Any], writer: Writer, notes: Notes) -> dict[str, Any]:
    section = spec.get("further", {}).get(machine, spec["section"])
    where, row = _claim(machine, section, spec, writer.facts)
    blank = {"machine": machine, "own": machine == writer.facts.own, "computed": "", "residual": ""}
    blank["conditions"] = html.escape(where.replace(";", ", "))
    if place := spec.get("places", {}).get(machine):
        return blank | {"measured": fill_one(place, writer, notes)}
    if row is None:
        return blank | {"measured": missing(no_claim(machine, section, writer), writer, notes)}
    texts = cells(row)
    numbers = {name: phrases.with_unit(texts[name], row["unit"], writer.language) for name in ("computed", "measured")}
    said = {name: html.escape(text) for name, text in (texts | numbers).items()}
    if row.get("late"):
        return blank | {
            "computed": said["computed"],
            "measured": missing(phrases.said(OVER, writer.language), writer, notes),
        }
    if row["measured"] is None:
        reason = phrases.said(row["reason"], writer.language) if row["reason"] else writer.words["only_computed"]
        said["measured"] = missing(reason, writer, notes)
    return blank | {name: said[name] for name in ("computed", "measured", "residual", "conditions")}
