"""The article's numbers one by one: which of ours each stands beside, or why there is none.

A claim of the same id on a machine of `MACHINES` needs no word; the rest is listed in kvlab/text/published.toml. In a
text the fenced block `article` becomes the count, the reasons, and a folded table of every number.
"""

from __future__ import annotations

import html
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib import resources
from typing import Any

from kvlab import display, phrases, prose
from kvlab.facts import Facts
from kvlab.prose import Notes, Writer

ARTICLE, MACHINES = "article", ("h200", "h200-x2")
COLUMNS = ("quantity", "conditions", ARTICLE, "ours", "times", "but")
WORDED = ("quantity", "conditions", "but")  # columns of words, not of numbers
SAME, BESIDE, UNMEASURED, OPEN = "same", "beside", "unmeasured", "open"


@dataclass(frozen=True)
class Row:
    """One number of the article. `kind`: SAME id, listed BESIDE another claim, UNMEASURED with a reason, or OPEN.

    `ours`: our claim, of `machine`; `column`: which of its numbers; `said`: by language, what differs or why it is
    missing. A claim of ours that holds no number makes its row UNMEASURED, with the reason that it states itself.
    """

    article: Mapping[str, Any]
    kind: str
    machine: str = ""
    ours: Mapping[str, Any] | None = None
    column: str = "measured"
    said: Mapping[str, str] | None = None


@cache
def listed() -> Mapping[str, Any]:
    """`beside` and `unmeasured` of published.toml."""
    return tomllib.loads((resources.files("kvlab") / "text" / "published.toml").read_text(encoding="utf-8"))


def said(language: str) -> Iterator[str]:
    """Every sentence of the list in a language."""
    for entry in listed()[BESIDE]:
        yield from [entry["but"][language]] if "but" in entry else []
    for entry in listed()[UNMEASURED]:
        yield entry["why"][language]


def rows(facts: Facts) -> list[Row]:
    """Every number of the article, in the order of its claims."""
    return [_row(row, facts) for row in facts.claims.get(ARTICLE, ())]


def _row(row: Mapping[str, Any], facts: Facts) -> Row:
    if entry := _entry(BESIDE, row):
        ours, column = _claim(entry, facts)
        return _with(Row(row, BESIDE, entry["ours"].split()[0], ours, column, entry.get("but")))
    if entry := _entry(UNMEASURED, row):
        return Row(row, UNMEASURED, said=entry["why"])
    for machine in MACHINES:
        if ours := _same(row, machine, facts):
            return _with(Row(row, SAME, machine, ours))
    return Row(row, OPEN)


def _entry(kind: str, row: Mapping[str, Any]) -> Mapping[str, Any] | None:
    return next((entry for entry in listed()[kind] if _fits(entry, row)), None)


def _fits(entry: Mapping[str, Any], row: Mapping[str, Any]) -> bool:
    return any(fnmatchcase(row["id"], pattern) for pattern in entry["article"])


def _claim(entry: Mapping[str, Any], facts: Facts) -> tuple[Mapping[str, Any] | None, str]:
    words = entry["ours"].split()
    column = words.pop() if words[-1] in prose.COLUMNS else "measured"
    return facts.find(*words), column


def _same(row: Mapping[str, Any], machine: str, facts: Facts) -> Mapping[str, Any] | None:
    return next((ours for ours in facts.claims.get(machine, ()) if ours["id"] == row["id"]), None)


def _with(row: Row) -> Row:
    """The row, unless our claim is not there or holds no number."""
    if row.ours is None:
        return Row(row.article, OPEN)
    if row.ours[row.column] is None and row.ours["state"] != "computed":
        return Row(row.article, UNMEASURED, said=_own_reason(row.ours))
    return row


def _own_reason(ours: Mapping[str, Any]) -> Mapping[str, str]:
    return {language: phrases.said(ours["reason"], language) for language in ("en", "zh")}


def problems(facts: Facts) -> list[str]:
    """What is wrong with the list: a number that nobody speaks of, a line for nothing, a reason that is outdated."""
    found = [f"{row.article['id']}: neither a claim of ours nor a reason" for row in rows(facts) if row.kind == OPEN]
    published = facts.claims.get(ARTICLE, ())
    for kind in (BESIDE, UNMEASURED):
        for entry in listed()[kind]:
            for pattern in entry["article"]:
                if not any(fnmatchcase(row["id"], pattern) for row in published):
                    found.append(f"{pattern}: no number of the article has such an id")
    for row in published:
        entries = [entry for kind in (BESIDE, UNMEASURED) for entry in listed()[kind] if _fits(entry, row)]
        if len(entries) > 1:
            found.append(f"{row['id']}: listed more than once")
        if entries and (ours := _measured_since(row, entries[0], facts)):
            found.append(f"{row['id']}: measured since, as {ours}")
    return found


def _measured_since(row: Mapping[str, Any], entry: Mapping[str, Any], facts: Facts) -> str | None:
    """Our measured claim that makes the entry needless: of the same id, for a reason also one that says more."""
    for machine in MACHINES:
        ours = _same(row, machine, facts)
        if "why" in entry:
            ours = facts.find(machine, row["section"], row["quantity"], row["conditions"] or "")
        if ours and ours["measured"] is not None:
            return f"{machine} {ours['id']}"
    return None


# -- on the page ----------------------------------------------------------------------------------------------------


def counts(found: list[Row]) -> dict[str, int]:
    """How many numbers of the article stand beside one of ours, and how many do not."""
    kinds = [row.kind for row in found]
    each = {kind: kinds.count(kind) for kind in (SAME, BESIDE)}
    return {"n": len(found)} | each | {"without": len(found) - sum(each.values())}


def block(writer: Writer, notes: Notes) -> str:
    """The count, the reasons, and the folded table, as HTML."""
    found, words = rows(writer.facts), writer.words["article_rows"]
    told = words["counts"].format(**counts(found))
    why: dict[str, list[str]] = {}
    for row in found:
        if row.kind in (UNMEASURED, OPEN):
            why.setdefault(_reason(row, writer), []).append(row.article["section"])
    reasons = "".join(
        f"<li>{html.escape(words['reason'].format(why=reason, n=len(of), sections=', '.join(dict.fromkeys(of))))}</li>"
        for reason, of in why.items()
    )
    heads = {name: words.get(name) or writer.words[name] for name in COLUMNS}
    head = "".join(f'<th{_class(name)} scope="col">{html.escape(said)}</th>' for name, said in heads.items())
    body = "".join(_line(row, heads, writer, notes) for row in found)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    folded = f"<details><summary>{html.escape(words['all'].format(n=len(found)))}</summary>{table}</details>"
    return f"<p>{html.escape(told)}</p><ul>{reasons}</ul>{folded}"


def _class(name: str) -> str:
    return ' class="t"' if name in WORDED else ""


def _reason(row: Row, writer: Writer) -> str:
    return row.said[writer.language] if row.said else writer.words["article_rows"]["open"]


def _line(row: Row, heads: Mapping[str, str], writer: Writer, notes: Notes) -> str:
    missing = row.kind in (UNMEASURED, OPEN)
    cells = _published(row, writer) | (_unmeasured(row, writer) if missing else _beside(row, writer, notes))
    wide = {"ours": ' class="t" colspan="3"'} if missing else {}  # a reason takes the place of a number and more
    tds = "".join(
        f'<td{wide.get(name) or _class(name)} data-label="{html.escape(heads[name])}">{cell}</td>'
        for name, cell in cells.items()
    )
    return f'<tr class="missing">{tds}</tr>' if missing else f"<tr>{tds}</tr>"


def _published(row: Row, writer: Writer) -> dict[str, str]:
    texts = display.cells(row.article)
    value = phrases.with_unit(texts["measured"] or texts["computed"], row.article["unit"], writer.language)
    quantity = f"{row.article['section']}/{texts['quantity']}"
    told = {"quantity": quantity, "conditions": texts["conditions"], ARTICLE: value}
    return {name: html.escape(text) for name, text in told.items()}


def _unmeasured(row: Row, writer: Writer) -> dict[str, str]:
    return {"ours": html.escape(f"{writer.words['not_measured']}: {_reason(row, writer)}")}


def _beside(row: Row, writer: Writer, notes: Notes) -> dict[str, str]:
    named = "" if row.machine == MACHINES[0] else f" ({row.machine})"
    ours = prose.shown(row.ours, row.column, writer, notes) + html.escape(named)
    return {"ours": ours, "times": _times(row), "but": html.escape(_reason(row, writer)) if row.said else ""}


def _times(row: Row) -> str:
    """Ours ÷ the article's, of two numbers that mean the same; nothing else is a ratio of anything."""
    a, b = (of["computed"] if of["measured"] is None else of["measured"] for of in (row.ours, row.article))
    same = row.said is None and row.column != "residual" and row.ours["unit"] == row.article["unit"]
    if not same or not b or a is None or row.article["unit"] == "ratio":
        return ""
    return html.escape(f"{display.digits(float(f'{a / b:.3g}'))}×")
