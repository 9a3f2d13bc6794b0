"""The first screen: eight findings, each with one claim a machine and a small picture drawn from the claims."""

from __future__ import annotations

import html
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from kvlab import certificate, pages, phrases, plot_small, store
from kvlab.display import cells
from kvlab.pages import Writer
from kvlab.prose import Notes, fill_one, missing, no_claim

BY_STAMPS = ("ttft", "itl", "tpot", "latency", "throughput", "resume")
OVER = "the load generator was over the limits of its certificate: give it a free core, or measure a smaller load"


@dataclass(frozen=True)
class Finding:
    """A card: `rows` hold machine, conditions, computed, measured, residual as HTML, and whether it is the reader's.

    `table`: what picture and table show, in words; `differ`: whether the rows have different conditions.
    """

    key: str
    section: str
    title: str
    body: str
    table: str
    differ: bool
    rows: tuple[dict[str, Any], ...]
    picture: str


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
        found.append(Finding(key, spec["section"], title, text, table, differ, rows, drawn[key]))
    return found


def _row(machine: str, spec: Mapping[str, Any], writer: Writer, notes: Notes) -> dict[str, Any]:
    where = spec["conditions"].get(machine, spec["conditions"]["any"])
    section = spec.get("further", {}).get(machine, spec["section"])
    blank = {"machine": machine, "own": machine == writer.facts.own, "computed": "", "residual": ""}
    blank["conditions"] = html.escape(where.replace(";", ", "))
    if place := spec.get("places", {}).get(machine):
        return blank | {"measured": fill_one(place, writer, notes)}
    row = writer.facts.find(machine, section, spec["quantity"], where)
    if row is None:
        return blank | {"measured": missing(no_claim(machine, section, writer), writer, notes)}
    said = {name: html.escape(_short(text)) for name, text in cells(row).items()}
    if over_limits(machine, row):
        return blank | {
            "computed": said["computed"],
            "measured": missing(phrases.said(OVER, writer.language), writer, notes),
        }
    if row["measured"] is None:
        reason = phrases.said(row["reason"], writer.language) if row["reason"] else writer.words["only_computed"]
        said["measured"] = missing(reason, writer, notes)
    return blank | {name: said[name] for name in ("computed", "measured", "residual", "conditions")}


def over_limits(machine: str, row: Mapping[str, Any]) -> bool:
    """Whether a claim is made of the client's stamps, and a run behind it is over the limits of its certificate."""
    if not str(row["quantity"]).startswith(BY_STAMPS):
        return False
    folder = store.machine_dir(machine) / row["section"]
    paths = [folder / run for run in str(row["runs"] or "").split(";") if run]
    stored = [store.load_run(path) for path in paths if (path / store.MANIFEST).is_file()]
    return any(certificate.over_limits(run.manifest["certificate"] or {}) for run in stored)


def _short(text: str) -> str:
    return text.replace(" tokens", " tok").replace(" x", "×")
