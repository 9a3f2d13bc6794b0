"""The report: the write-up and every section's claims and figures, the machines side by side, as one HTML file.

It reads claims, figures, manifests, the write-up's texts and the notebooks' first words; it never computes a result.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import pandas as pd

from kvlab import (
    __version__,
    behind,
    claims,
    client_processes,
    display,
    explain,
    facts,
    findings,
    instrument,
    pages,
    phrases,
    prose,
    prose_check,
    run,
    store,
    stored_figures,
)
from kvlab.errors import StoreError
from kvlab.facts import about as about

HEADLINE = 6  # claims shown before a section's full table is unfolded: first those that compare
TOLERANCE = prose.TOLERANCE  # a prediction farther off is named below its section
PX_PER_PT = 1.13  # every figure is shown at this scale of its own size: letters are equally high in all of them
TEMPLATES = ("report.html", "report_parts.html")


def build(
    machine: str,
    out: Path,
    *,
    timings: Mapping[str, float],
    failures: Mapping[str, str],
    language: str = "en",
    pictures: Mapping[str, str] | None = None,
) -> Path:
    """Writes the report of `machine` beside the other measured machines and returns its path.

    `timings`: seconds a section took; `failures`: section -> why its notebook failed. Raises StoreError where a
    stored run is stamped as fake, ProseError where a number in a text comes from no claim.
    """
    told = content(machine, language, timings=timings, failures=failures, pictures=pictures)
    page = told | {
        "first": True,
        "shown": told["contents"],
        "style": style(),
        "style_url": None,
        "home": None,
        "link": lambda name: f"#{name}",
        "picture": lambda figure: f"data:image/svg+xml;base64,{figure['svg']}",
        "other_language": other_file(out, language),
    }
    store.write_text(out, render(page))
    return out


def build_all(machine: str, out: Path, *, timings: Mapping[str, float], failures: Mapping[str, str]) -> list[Path]:
    """The report in every language: report.html, and report.zh.html beside it."""
    files = {language: out if language == "en" else other_file_path(out, "en") for language in pages.LANGUAGES}
    told = {"timings": timings, "failures": failures, "pictures": small_pictures(machine)}
    return [build(machine, path, language=language, **told) for language, path in files.items()]


def other_file_path(out: Path, language: str) -> Path:
    """The file of the other language: report.html has report.zh.html, and the other way round."""
    stem = out.name.removesuffix(".html").removesuffix(".zh")
    return out.with_name(f"{stem}.zh.html" if language == "en" else f"{stem}.html")


def other_file(out: Path, language: str) -> str:
    """Its name, as a link."""
    return other_file_path(out, language).name


def content(
    machine: str,
    language: str,
    *,
    timings: Mapping[str, float] | None = None,
    failures: Mapping[str, str] | None = None,
    pictures: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything a page may show, for one machine in one language. `pictures`: those of the findings, drawn before."""
    timings, failures = timings or {}, failures or {}
    others = [name for name in store.machines() if name != machine]
    for name in (machine, *others):
        refuse_fake(name)
    tables = {name: claims.read(store.machine_dir(name)) for name in (machine, *others)}
    writer = prose.Writer(facts.facts(machine, tables), pages.words(language), pages.sources(), _once(about))
    pages.check_all(writer, language)
    sections = {
        name: section(name, path, writer, tables, timings.get(name), failures.get(name))
        for name, path in run.notebooks().items()
    }
    marks = prose.Notes("findings")
    cards = findings.build(writer, language, marks, pictures or small_pictures(machine))
    contents = _contents(sections, tables[machine], writer, language)
    failed = (tables[machine]["state"] == "failed").any()
    return {
        "w": writer.words,
        "say": lambda text: phrases.said(text, language) if text else text,
        "version": __version__,
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine,
        "others": others,
        "about": [writer.about(name) for name in (machine, *others)],
        "client": instrument.page(writer.words["instrument"]),
        "client_processes": client_processes.page(writer.words["client_processes"], language),
        "overview": pages.page("overview", writer, language),
        "findings": cards,
        "findings_late": any(prose.LATE in card.body for card in cards),
        "late_mark": prose.late_mark(writer.words),
        "findings_why": marks.reasons,
        "contents": contents,
        "failed_in": [page for page in contents if page["name"] == "limits"] if failed else [],
        "counts": _counts(tables[machine]),
    }


def small_pictures(machine: str) -> dict[str, str]:
    """The pictures of the first screen."""
    return findings.pictures(machine, pages.machines(machine))


def _once(function: Callable[[str], dict]) -> Callable[[str], dict]:
    seen: dict[str, dict] = {}
    return lambda name: seen[name] if name in seen else seen.setdefault(name, function(name))


def _contents(sections: dict[str, dict], own: pd.DataFrame, writer, language: str) -> list[dict[str, Any]]:
    """Every page in order: the texts, and for a section its figures and claims below its text."""
    blank = {"figures": [], "headline": [], "rest": [], "notes": [], "columns": [], "took": None, "failure": None}
    found = []
    for number, name in enumerate(pages.order(list(sections), language), 1):
        base = sections.get(name, blank)
        text = pages.page(name, writer, language)
        if text is None:  # a section that nobody has written about: its notebook's first words
            prose_check.refuse(base["sentence"], f"the first sentence of {base['notebook']}", writer, "en")
            told = {"title": base["title"], "lead": _escape(base["sentence"]), "body": "", "why": ()}
        else:
            told = {"title": text.title, "lead": text.lead, "body": text.body, "why": text.why}
        missing = _missing(own, list(sections), language) if name == "limits" else []
        shown = [told["lead"], told["body"], *(prose.LATE * row["late"] for row in base["headline"] + base["rest"])]
        told["late"] = any(prose.LATE in text for text in shown)
        found.append(blank | base | told | {"name": name, "number": number, "missing": missing})
    return found


def _missing(own: pd.DataFrame, sections: list[str], language: str) -> list[dict[str, str]]:
    rows = {name: claims.from_frame(own[own["section"] == name]) for name in sections}
    said = {name: explain.not_measured(stated, language=language) for name, stated in rows.items()}
    return [{"section": name, "text": text} for name, text in said.items() if text]


def refuse_fake(machine: str) -> None:
    """Raises StoreError where any run of the machine was measured on the fake server of the unit tests."""
    fakes = [run.path for run in store.list_runs(machine) if run.manifest.get("fake")]
    if fakes:
        raise StoreError(
            f"{fakes[0]} was measured on the fake server; the report shows real measurements only.",
            next_step=f"remove that folder and run `kvlab measure` again ({len(fakes)} such runs)",
        )


def section(
    name: str,
    path: Path,
    writer: prose.Writer,
    tables: dict[str, pd.DataFrame],
    took_s: float | None,
    failure: str | None,
) -> dict[str, Any]:
    """What the page shows of one section, in the writer's language."""
    title, sentence = first_words(path)
    machine, language = writer.facts.own, writer.language
    own = tables[machine][tables[machine]["section"] == name]
    others = {name: table.set_index("id")["measured"].to_dict() for name, table in tables.items() if name != machine}
    rows = [_row(row, others, language) for row in writer.facts.claims[machine] if row["section"] == name]
    said = [row for row in rows if row["state"] in ("measured", "computed")]
    order = sorted(said, key=lambda row: (not (row["computed"] and row["measured"]), not row["measured"]))
    alike = likest_first(machine, tables, writer.about)
    headline = order[:HEADLINE]  # sorted is stable: within each kind the notebook's order
    return {
        "name": name,
        "notebook": path.name,
        "title": title,
        "sentence": sentence,
        "figures": _figures(
            [measured_figure(file, alike) for file in stored_figures.of_section(machine, name)], writer
        ),
        "headline": headline,
        "rest": [row for row in rows if row not in headline],
        "notes": notes(own, language),
        "columns": [other for other in tables if other != machine and _has(tables[other], own)],
        "took": None if took_s is None else f"{took_s:.0f} s",
        "failure": failure,
    }


def notes(own: pd.DataFrame, language: str = "en") -> list[str]:
    """What did not match and what was not measured, in words that come from the claims."""
    stated = claims.from_frame(own)
    if not stated:
        return []
    off = explain.residuals(stated, tolerance=TOLERANCE, language=language)
    return [sentence for sentence in (off, explain.not_measured(stated, language=language)) if sentence]


def first_words(path: Path) -> tuple[str, str]:
    """Title and first sentence of a notebook, from its first markdown cell."""
    notebook = nbformat.read(path, as_version=4)
    text = next((cell.source for cell in notebook.cells if cell.cell_type == "markdown"), path.stem)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    title = lines[0].lstrip("# ") if lines else path.stem
    body = lines[1] if len(lines) > 1 else ""
    return title, re.sub(r"[*`]", "", body)


def _row(row: dict[str, Any], others: Mapping[str, Mapping[str, Any]], language: str) -> dict[str, Any]:
    unit, texts = row["unit"], display.cells(row)
    numbers = {name: phrases.with_unit(texts[name], unit, language) for name in ("computed", "measured", "interval")}
    beside = {
        name: phrases.with_unit(display.number(known[row["id"]], unit), unit, language)
        for name, known in others.items()
        if row["id"] in known
    }
    reason = phrases.said(texts["reason"], language) if texts["reason"] else ""
    late = bool(texts["measured"]) and row["late"]
    return texts | numbers | {"beside": beside, "state": row["state"], "reason": reason, "late": late}


def _has(table: pd.DataFrame, own: pd.DataFrame) -> bool:
    return bool(set(table["id"]) & set(own["id"]))


def likest_first(own: str, machines: Iterable[str], about: Callable[[str], Mapping[str, Any]]) -> list[str]:
    """Machines with the engine of `own` before the others: whose figure stands in where `own` measured nothing."""
    engine = about(own).get("engine")
    return sorted(machines, key=lambda name: about(name).get("engine") != engine)


def measured_figure(file: Path, machines: Iterable[str]) -> Path:
    """The figure, or where none of its runs is of this machine the same one of another machine that measured it."""
    others = [store.figures_dir(machine) / file.name for machine in machines]
    drawn = (one for one in (file, *others) if one.is_file() and (told := stored_figures.told(one)) and told["runs"])
    return next(drawn, file)


def _figures(files: Iterable[Path], writer: prose.Writer) -> list[dict[str, Any]]:
    pictures = [(file, stored_figures.picture(file)) for file in files]
    return [_figure(file, svg, writer) for file, svg in pictures if svg is not None]


def _figure(file: Path, picture: bytes, writer: prose.Writer) -> dict[str, Any]:
    info = stored_figures.told(file)
    width, height = (round(PX_PER_PT * float(pt)) for pt in _size_pt(picture))
    text = base64.b64encode(picture).decode()
    told = {"name": file.stem, "alt": _caption(info["alt"], file.stem, writer)}
    told["of"] = info["machine"] if info["machine"] != writer.facts.own else None
    facts_there = replace(writer.facts, own=info["machine"])
    told["behind"] = behind.of_figure(file.stem, info["notebook"], info["runs"], picture, facts_there)
    told["elsewhere"] = behind.listed().get(file.stem, {}).get("elsewhere")
    return told | {"svg": text, "file": file.with_suffix(".svg"), "width": width, "height": height}


def _caption(english: str, name: str, writer: prose.Writer) -> str:
    """A figure's words in the writer's language; ProseError where a number in them is no condition of a claim."""
    for text, language in ((english, "en"), (phrases.known(english, writer.language) or "", writer.language)):
        prose_check.refuse(text, f"the words of figure {name}", writer, language, writer.facts.settings)
    return phrases.said(english, writer.language)


def _size_pt(svg: bytes) -> tuple[str, str]:
    found = re.search(rb'<svg[^>]*?width="([\d.]+)pt"[^>]*?height="([\d.]+)pt"', svg, re.S)
    if not found:
        found = re.search(rb'<svg[^>]*?height="([\d.]+)pt"[^>]*?width="([\d.]+)pt"', svg, re.S)
        return (found[2].decode(), found[1].decode()) if found else ("600", "300")
    return found[1].decode(), found[2].decode()


def _counts(table: pd.DataFrame) -> dict[str, int]:
    return {str(state): int(n) for state, n in table["state"].value_counts().items()}


def _escape(text: str) -> str:
    return jinja2.filters.escape(text)


def style() -> str:
    """The style sheet."""
    return (resources.files("kvlab") / "report.css").read_text(encoding="utf-8")


def render(page: Mapping[str, Any]) -> str:
    """The HTML of a page. A value that the template needs and nobody gave is an error, not an empty place."""
    return _template().render(page).lstrip()


@cache
def _template() -> jinja2.Template:
    sources = {name: (resources.files("kvlab") / name).read_text(encoding="utf-8") for name in TEMPLATES}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(sources),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html")
