"""The write-up's texts: plain Markdown files in one folder a language, filled from claims and turned into HTML.

A fenced block `side SECTION` is a table of machines side by side. Each of its lines is

    words: quantity conditions @other-machine other-conditions

where `@other-machine none` says that there is no such thing on it, and `@other-machine {place}` fills its cell as a
place in a text is filled: a claim that goes by another name there, or a number made of two. An empty fenced block
`article` is every number of the article beside ours: see published.py.
"""

from __future__ import annotations

import html
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

import mistune

from kvlab import prose, prose_check, published
from kvlab.facts import COMMITTED
from kvlab.prose import Notes, ProseError, Writer

LANGUAGES = ("en", "zh")
FRONT = ("question", "method")  # pages before the sections, and after them
BACK = ("differs", "operations", "interview", "evidence", "limits", "versions")
WITHOUT_NOTEBOOK = ("service_hit_rate", "hit_and_miss", "routing", "several_gpus")
SIDE_LINE = "write words: quantity conditions @machine other-conditions, or @machine {place}"
ON_OTHER = re.compile(r"(\S+) (\S+|\{[^{}]+\})")  # conditions, or a place
EVERY = re.compile(r"^```article\n```$", re.M)  # every number of the article beside ours
SIDE = re.compile(r"^```side (\w+)\n(.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Page:
    """One filled text. `why`: the reasons of what is missing, in the order of their marks."""

    name: str
    title: str
    lead: str
    body: str
    why: tuple[str, ...]


def names(language: str = "en") -> list[str]:
    """The texts of a language, without their ending."""
    return sorted(path.name[:-3] for path in _folder(language).iterdir() if path.name.endswith(".md"))


def source(name: str, language: str) -> str | None:
    """A text as it was written; None where the language has none of that name."""
    path = _folder(language) / f"{name}.md"
    return path.read_text(encoding="utf-8") if path.is_file() else None


@cache
def words(language: str) -> Mapping[str, str]:
    """The fixed words of the page in a language."""
    return tomllib.loads((_folder(language) / "words.toml").read_text(encoding="utf-8"))


@cache
def sources() -> Mapping[str, Mapping[str, str]]:
    """The papers and documents that may be cited, by key."""
    return tomllib.loads((resources.files("kvlab") / "text" / "sources.toml").read_text(encoding="utf-8"))


def check_all(writer: Writer, language: str) -> None:
    """Raises ProseError at the first number that no claim supports, in any text or fixed word of the language."""
    for name in names(language):
        text, where = source(name, language), f"kvlab/text/{language}/{name}.md"
        prose_check.check(SIDE.sub(_blank_side, text), where, writer)
        for section, lines in SIDE.findall(text):
            for said, _, _ in side_rows(section, lines, writer):
                prose_check.refuse(said, f"{where}, table of {section}", writer)
    for said in published.said(language):
        prose_check.refuse(said, "kvlab/text/published.toml", writer, language)
    for said in _every_word(words(language)):
        prose_check.refuse(re.sub(r"\{\w+\}", " ", said), f"kvlab/text/{language}/words.toml", writer)


def _every_word(listed: Mapping[str, Any]) -> Iterator[str]:
    for said in listed.values():
        yield from [said] if isinstance(said, str) else _every_word(said)


def places(text: str) -> list[str]:
    """The places of a text and the claims of its tables, in order: what two languages must share."""
    found = prose.places(SIDE.sub(_blank_side, text)) + EVERY.findall(text)
    for section, lines in SIDE.findall(text):
        found += [f"side {section} {line.partition(':')[2].strip()}" for line in lines.strip().splitlines()]
    return found


def _blank_side(match: re.Match) -> str:
    return "\n" * match[0].count("\n")


def page(name: str, writer: Writer, language: str) -> Page | None:
    """A filled text: its first heading is the title, the paragraph below it the lead. None where there is none."""
    text = source(name, language)
    if text is None:
        return None
    notes = Notes(name)
    heading, _, rest = text.strip().partition("\n")
    lead, _, body = rest.strip().partition("\n\n")
    return Page(
        name,
        heading.lstrip("# ").strip(),
        inline(lead, writer, notes),
        block(body, writer, notes),
        tuple(notes.reasons),
    )


def inline(text: str, writer: Writer, notes: Notes) -> str:
    """One paragraph as HTML without its <p>."""
    return block(text, writer, notes).strip().removeprefix("<p>").removesuffix("</p>")


def block(text: str, writer: Writer, notes: Notes) -> str:
    """A text with places and tables as HTML."""
    tables: dict[str, str] = {}

    def table(match: re.Match) -> str:
        key = f"\ue002{len(tables)}\ue003"
        tables[key] = side_table(match[1], match[2], writer, notes)
        return f"\n{key}\n"

    def every(_: re.Match) -> str:
        key = f"\ue002{len(tables)}\ue003"
        tables[key] = published.block(writer, notes)
        return f"\n{key}\n"

    filled, tokens = prose.fill(EVERY.sub(every, SIDE.sub(table, text)), writer, notes)
    out = re.sub(r"<table>.*?</table>", lambda m: _labelled(m[0]), _markdown()(filled), flags=re.S)
    for key, value in tables.items():
        out = out.replace(f"<p>{key}</p>", value)
    for key, value in tokens.items():
        out = out.replace(key, value)
    return re.sub(r"<table.*?</table>", r'<div class="scroll" tabindex="0">\g<0></div>', out, flags=re.S)


def _labelled(table: str) -> str:
    """Each cell with its column's head, for screens too narrow for columns."""
    heads = re.findall(r"<th(?: [^>]*)?>(.*?)</th>", table, re.S)

    def row(match: re.Match) -> str:
        places = iter(heads)
        return re.sub(r"<td", lambda _: f"<td{_label(next(places, ''))}", match[0])

    return re.sub(r"<tr>.*?</tr>", row, table, flags=re.S)


def _label(head: str) -> str:
    return f' data-label="{html.escape(head)}"'


@cache
def _markdown():
    return mistune.create_markdown(escape=False, plugins=["table", "strikethrough"])


# -- machines side by side ------------------------------------------------------------------------------------------


def machines(own: str) -> list[str]:
    """The columns of a table: the article, the committed machines, and the report's own one last."""
    return [name for name in COMMITTED if name != own] + [own]


def side_rows(section: str, lines: str, writer: Writer) -> list[tuple[str, str, dict[str, str]]]:
    """(words, quantity, conditions by machine; "" for every other one) of each line; ProseError where one is none."""
    rows = []
    for line in lines.strip().splitlines():
        said, colon, rest = line.partition(": ")
        first, *others = rest.split(" @")
        quantity, _, conditions = first.strip().partition(" ")
        elsewhere = [ON_OTHER.fullmatch(other.strip()) for other in others]
        if not colon or not quantity or None in elsewhere:
            raise ProseError(f"{line!r} is no line of a table.", next_step=SIDE_LINE)
        rows.append((said, quantity, {"": conditions.strip()} | {found[1]: found[2] for found in elsewhere}))
    return rows


def side_table(section: str, lines: str, writer: Writer, notes: Notes) -> str:
    """A table with a column a machine; each cell is computed → measured with its residual."""
    own, rows = writer.facts.own, side_rows(section, lines, writer)
    shown = [*machines(own), *_others(section, {quantity for _, quantity, _ in rows}, writer)]
    shown.sort(key=lambda name: name == own)  # stable: the reader's own stands last
    head = "".join(f'<th{_own(name, own)} scope="col">{html.escape(name)}</th>' for name in shown)
    body = []
    for said, quantity, where in rows:
        cells = [_side_cell(name, section, quantity, where, writer, notes) for name in shown]
        pairs = zip(shown, cells, strict=True)
        tds = "".join(f"<td{_own(name, own)}{_label(name)}>{cell}</td>" for name, cell in pairs)
        body.append(f'<tr><th class="t" scope="row">{html.escape(said)}</th>{tds}</tr>')
    return (
        f'<table class="side"><thead><tr><th class="t" scope="col">{html.escape(writer.words["quantity"])}</th>{head}'
        f"</tr></thead><tbody>{''.join(body)}</tbody></table>"
    )


def _others(section: str, quantities: set[str], writer: Writer) -> list[str]:
    """Further machines that have measured one of these, such as a host of several GPUs."""
    known = writer.facts.claims.items()
    return [
        name
        for name, rows in sorted(known)
        if name not in machines(writer.facts.own)
        and any(r["section"] == section and r["quantity"] in quantities and r["measured"] is not None for r in rows)
    ]


def _side_cell(
    machine: str, section: str, quantity: str, where: Mapping[str, str], writer: Writer, notes: Notes
) -> str:
    conditions = where.get(machine, where[""])
    if conditions == "none":
        return "–"
    if conditions.startswith("{"):
        return prose.fill_one(conditions[1:-1], writer, notes)
    term = " ".join(filter(None, (machine, section, quantity, conditions)))
    return prose.fill_one(f"{term} | pair", writer, notes)


def _own(name: str, own: str) -> str:
    return ' class="own"' if name == own else ""


def order(sections: Sequence[str], language: str) -> list[str]:
    """Every page of the write-up: the front, the sections in the order of their notebooks, the back.

    A text about a section whose notebook is not there comes last of the sections.
    """
    written = [name for name in WITHOUT_NOTEBOOK if name not in sections and source(name, language)]
    return [*FRONT, *sections, *written, *BACK]


def _folder(language: str) -> Any:
    if language not in LANGUAGES:
        raise ProseError(f"The write-up has no language {language!r}.", next_step=f"one of: {', '.join(LANGUAGES)}")
    return resources.files("kvlab") / "text" / language
