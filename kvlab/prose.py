"""Text with places for claims. A number that stands in the text itself, outside such a place, is refused.

    {h200 load throughput_tok_s c=32;in=512}               the measured value of that claim
    {h200 load throughput_tok_s c=32;in=512 | pair}        computed → measured (residual)
    {A / B | times}   {A / B | percent}   {A - B}          two claims; a term may end in `computed`
    {say A < B | words | other words}                      chosen by the numbers
    {holds A | words | other words}                        whether the prediction holds
    {told A | above | below | not told from 0}             by the interval of a difference
    {about h200 engine}   {machine h200}   {ref sarathi}   what runs say; a machine's name; a source
    {lit 2 | formula}   {cited 2.6× | sarathi}             a number that is no claim, and why it may stand here

What is missing reads "not measured", with a note that says why. Words of a choice, of code and of lists are read as
closely as the rest; what may stand without a claim is listed in kvlab/text/literals.toml.
"""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvlab import display, phrases, stray
from kvlab.errors import ConfigError
from kvlab.explain import holds
from kvlab.facts import FIELDS, HERE, Facts

PLACE = re.compile(r"\{([^{}\n]+)\}")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.S)
CLAIM_FORM = "write {machine section quantity conditions}, conditions as c=32;in=512"
LIST_IT = "name its claim, or list it with its reason in kvlab/text/literals.toml"
KINDS = ("formula", "version", "date", "setting", "name", "rule")
CHOICES = ("say", "holds", "told")
TOLERANCE = 0.15  # how far a prediction may be off and still hold
LATE = "†"
COLUMNS = ("computed", "measured", "ci_low", "ci_high", "residual")


class ProseError(ConfigError):
    """A text of the write-up holds something that no claim supports, or a place that cannot be read."""


@dataclass
class Notes:
    """Why numbers of a page are missing: the reasons in order of their appearance."""

    prefix: str
    reasons: list[str] = field(default_factory=list)

    def mark(self, reason: str) -> str:
        """The number of a reason; a new one is added."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        return str(self.reasons.index(reason) + 1)


@dataclass(frozen=True)
class Writer:
    """What filling a text needs. `words`: the language's fixed words; `sources`: key -> {title, url, ...}."""

    facts: Facts
    words: Mapping[str, str]
    sources: Mapping[str, Mapping[str, Any]]
    about: Callable[[str], Mapping[str, Any]]

    @property
    def language(self) -> str:
        """The language of the words: en or zh."""
        return self.words.get("lang", "en").partition("-")[0]


# -- reading ----------------------------------------------------------------------------------------------------------


def places(text: str) -> list[str]:
    """Every place of a text, words of a choice left out: what two languages must share."""
    found = []
    for _, body in located(text):
        head, _, rest = body.partition("|")
        worded = head.split()[0] in CHOICES
        found.append(head.strip() + ("" if worded or not rest else f" | {rest.strip()}"))
    return found


def located(text: str) -> list[tuple[int, str]]:
    """Every place of a text with the number of its line."""
    plain = blank(text, CODE)
    return [(plain.count("\n", 0, m.start()) + 1, m[1].strip()) for m in PLACE.finditer(plain)]


def blank(text: str, pattern: re.Pattern) -> str:
    """The text with spaces in place of what matches; its lines stay where they are."""
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


# -- filling --------------------------------------------------------------------------------------------------------


def fill(text: str, writer: Writer, notes: Notes) -> tuple[str, dict[str, str]]:
    """The text with a token in each place, and what each token stands for (HTML): Markdown leaves tokens alone."""
    tokens: dict[str, str] = {}

    def token(match: re.Match) -> str:
        key = f"\ue000{len(tokens)}\ue001"
        tokens[key] = fill_one(match[1].strip(), writer, notes)
        return key

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [PLACE.sub(token, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, PLACE.sub(token, text[end:])]), tokens


def fill_one(body: str, writer: Writer, notes: Notes) -> str:
    """The HTML of one place. Raises ProseError where it cannot be read."""
    head, *options = [part.strip() for part in body.split("|")]
    word, _, rest = head.partition(" ")
    special = {"lit": _lit, "cited": _cited, "ref": _ref, "about": _about, "machine": _machine}
    if word in special:
        return special[word](rest.strip(), options, writer, notes)
    if word in CHOICES:
        return _choice(word, rest, options, writer, notes)
    return _number(head, options, writer, notes)


def missing(reason: str, writer: Writer, notes: Notes) -> str:
    """The words for a number that is not there, with the mark of its reason."""
    mark = notes.mark(reason)
    said = html.escape(writer.words["not_measured"])
    return f'<span class="missing">{said}<sup><a href="#{notes.prefix}-why-{mark}">{mark}</a></sup></span>'


def claim_cells(term: str, writer: Writer) -> tuple[dict[str, Any] | None, str]:
    """The claim that a term names, and which of its columns; ProseError where the term has another shape."""
    words = term.split()
    column = words.pop() if words[-1] in COLUMNS else "measured"
    conditions = words[3].split(";") if len(words) == 4 else []
    if not 3 <= len(words) <= 4 or not all("=" in pair for pair in conditions):
        raise ProseError(
            f"{{{term}}} is no claim.",
            next_step=CLAIM_FORM,
        )
    return writer.facts.find(*words), column


def _number(head: str, options: list[str], writer: Writer, notes: Notes) -> str:
    style = options[0] if options else ""
    two = re.split(r" ([/-]) ", head)
    if len(two) == 3:
        return _pair_of_claims(two, style, writer, notes)
    row, column = claim_cells(head, writer)
    column = style if style in COLUMNS else column
    if style == "pair":
        return _pair(row, head, writer, notes)
    if row is None or row[column] is None:
        return missing(_why(row, column, head, writer), writer, notes)
    value = float(row[column])
    if style == "plain":
        return html.escape(display.digits(value))
    if style == "interval":
        return _interval(row, writer)
    text = _with_unit(value, row, writer)
    if style == "percent" or column == "residual":
        text = _percent(value)
    return _mark(text, "computed") if column == "computed" else _mark(text, "measured", writer, row)


def _with_unit(value: float, row: Mapping[str, Any], writer: Writer) -> str:
    """A value of a claim, or of two of its kind, with its unit."""
    text = display.number(value, row["unit"], signed=display.is_signed(row["quantity"], row["unit"]))
    return _said(text, row["unit"], writer)


def _said(text: str, unit: str, writer: Writer) -> str:
    """A number with its unit in the writer's language, as HTML."""
    text = phrases.with_unit(text, unit, writer.language)
    return html.escape(text)


def _percent(value: float) -> str:
    return display.percent(value) if abs(value) < 0.1 else f"{value:+,.0%}"


def _interval(row: Mapping[str, Any], writer: Writer) -> str:
    if row["ci_low"] is None or row["ci_high"] is None:
        return html.escape(writer.words["no_interval"])
    ends = [float(row[name]) for name in ("ci_low", "ci_high")]
    if display.is_signed(row["quantity"], row["unit"]):
        return " … ".join(map(_percent, ends))
    return " … ".join(_with_unit(end, row, writer) for end in ends)


def _pair(row: Mapping[str, Any] | None, head: str, writer: Writer, notes: Notes) -> str:
    if row is None or row["measured"] is None and row["computed"] is None:
        return missing(_why(row, "measured", head, writer), writer, notes)
    texts = display.cells(row)
    computed, measured = (_said(texts[name], row["unit"], writer) for name in ("computed", "measured"))
    if row["state"] == "computed":  # nobody meant to measure it
        return _mark(computed, "computed")
    if not measured:
        return f"{_mark(computed, 'computed')} → {missing(_why(row, 'measured', head, writer), writer, notes)}"
    compares = texts["residual"] and row["unit"] != "ratio"  # the residual of a relative change misleads
    residual = f" ({html.escape(texts['residual'])})" if compares else ""
    return (
        (f"{_mark(computed, 'computed')} → " if computed else "") + _mark(measured, "measured", writer, row) + residual
    )


def shown(row: Mapping[str, Any], column: str, writer: Writer, notes: Notes) -> str:
    """The HTML of a claim: computed → measured (residual), or where another column is asked for, that number alone."""
    if column == "measured":
        return _pair(row, row["id"], writer, notes)
    text = _percent(row[column]) if column == "residual" else _with_unit(row[column], row, writer)
    return _mark(text, "computed" if column == "computed" else "measured")


def _pair_of_claims(two: list[str], style: str, writer: Writer, notes: Notes) -> str:
    values, used = [], []
    for term in (two[0], two[2]):
        row, column = claim_cells(term, writer)
        if row is None or row[column] is None:
            return missing(_why(row, column, term, writer), writer, notes)
        values.append(float(row[column]))
        used.append(row)
    a, b = values
    if two[1] == "-":
        return _mark(_with_unit(a - b, used[-1], writer), "measured", writer, *used)
    if not b:
        return missing(writer.words["divided_by_zero"], writer, notes)
    text = {"percent": _percent(a / b - 1), "share": f"{a / b:,.0%}"}.get(style, f"{display.digits(_three(a / b))}×")
    return _mark(text, "measured", writer, *used)


def _three(value: float) -> float:
    return float(f"{value:.3g}")


def _choice(word: str, rest: str, options: list[str], writer: Writer, notes: Notes) -> str:
    wanted = 3 if word == "told" else 2
    if len(options) != wanted:
        raise ProseError(f"{{{word} {rest}}} needs {wanted} texts after it, separated by |.")
    if word == "say":
        sides = re.split(r" [<>] ", rest)
        if len(sides) != 2:
            raise ProseError(f"{{say {rest}}} compares nothing.", next_step="write {say A < B | words | other words}")
    else:
        sides = [rest]
    rows = []
    for term in sides:
        row, column = claim_cells(term, writer)
        if row is None or row[column] is None:
            return missing(_why(row, column, term, writer), writer, notes)
        rows.append((row, column))
    return html.escape(options[_which(word, rest, rows)])


def _which(word: str, rest: str, rows: list[tuple[dict[str, Any], str]]) -> int:
    values = [float(row[column]) for row, column in rows]
    if word == "say":
        return 0 if (values[0] < values[1] if " < " in rest else values[0] > values[1]) else 1
    row = rows[0][0]
    if word == "holds":
        return 0 if holds(row, TOLERANCE) else 1
    low, high = row["ci_low"], row["ci_high"]
    return 2 if low is None or high is None or low <= 0 <= high else 0 if low > 0 else 1


def _why(row: Mapping[str, Any] | None, column: str, term: str, writer: Writer) -> str:
    if row is not None and row["reason"]:
        return phrases.said(str(row["reason"]), writer.language)
    if row is not None:
        return writer.words["only_other"].format(column=column)
    machine, section, *_ = term.split()
    return no_claim(writer.facts.own if machine == HERE else machine, section, writer)


def no_claim(machine: str, section: str, writer: Writer) -> str:
    """Why a machine has no such claim: the article does not state it, or nobody has measured it there."""
    key = "not_in_article" if machine == "article" else "no_claim"
    return writer.words[key].format(machine=machine, section=section)


def _mark(text: str, kind: str, writer: Writer | None = None, *rows: Mapping[str, Any]) -> str:
    """The text as a computed or measured number; a measured one by a client that was late has a mark."""
    marked = f'<span class="{kind}">{text}</span>'
    return marked + late_mark(writer.words) if any(row.get("late") for row in rows) else marked


def late_mark(words: Mapping[str, Any]) -> str:
    """The mark of a number in which the load generator's own delay may stand."""
    return f'<sup><a href="#method" title="{html.escape(words["late"].lstrip(f"{LATE} "))}">{LATE}</a></sup>'


def _lit(text: str, options: list[str], writer: Writer, notes: Notes) -> str:
    if options not in [[kind] for kind in KINDS]:
        raise ProseError(f"{{lit {text}}} does not say what it is.", next_step=f"one of: {', '.join(KINDS)}")
    number = text.replace(",", "")
    if options == ["setting"] and writer.facts.complete() and number not in writer.facts.settings:
        raise ProseError(f"{{lit {text} | setting}}: no claim has such a condition.")
    if options != ["setting"] and text not in stray.literals()[options[0]]:
        raise ProseError(f"{{lit {text} | {options[0]}}}: nobody has said why it may stand.", next_step=LIST_IT)
    return html.escape(f"{int(text):,}" if options == ["setting"] and text.isdigit() else text)


def _source(key: str, writer: Writer) -> Mapping[str, Any]:
    if key not in writer.sources:
        raise ProseError(f"The source {key!r} is unknown.", next_step="add it to kvlab/text/sources.toml")
    return writer.sources[key]


def _cited(text: str, options: list[str], writer: Writer, notes: Notes) -> str:
    key = options[0] if options else ""
    if text not in _source(key, writer)["numbers"]:
        raise ProseError(
            f"{{cited {text} | {key}}}: the source is not known to say so.",
            next_step="check it there, then add it to its `numbers` in kvlab/text/sources.toml",
        )
    return html.escape(text)


def _ref(key: str, options: list[str], writer: Writer, notes: Notes) -> str:
    source = _source(key, writer)
    read = html.escape(writer.words["read"][source["read"]])
    return f'<a href="{html.escape(source["url"])}">{html.escape(source["title"])}</a> <span class="read">{read}</span>'


def _machine(name: str, options: list[str], writer: Writer, notes: Notes) -> str:
    name = writer.facts.own if name == HERE else name
    own = ' class="own"' if name == writer.facts.own else ""
    return f"<strong{own}>{html.escape(name)}</strong>"


def _about(rest: str, options: list[str], writer: Writer, notes: Notes) -> str:
    machine, _, name = rest.partition(" ")
    if name not in FIELDS:
        raise ProseError(f"{{about {rest}}} is unknown.", next_step=f"one of: {', '.join(FIELDS)}")
    machine = writer.facts.own if machine == HERE else machine
    value = writer.about(machine).get(name)
    if value is None:
        return missing(writer.words["not_known"].format(machine=machine), writer, notes)
    return html.escape(
        f"{value:.0f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else value
    )
