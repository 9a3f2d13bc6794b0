"""Whether a text of the write-up holds a number that no claim supports. `prose` knows places, `stray` numbers."""

from __future__ import annotations

import re
from collections.abc import Collection

from kvlab import stray
from kvlab.prose import CHOICES, CODE, PLACE, Notes, ProseError, Writer, blank, fill_one, located

LINK = re.compile(r"\]\([^)\s]+\)|https?://[^\s)>]+")
LISTED = re.compile(r"^(\d+)\. ")
NAME_IT = "name its claim {machine section quantity conditions}, or why it may stand: {lit 2 | formula}"


def check(text: str, where: str, writer: Writer) -> None:
    """Raises ProseError at the first number outside a place, or the first place that cannot be read."""
    for line, body in located(text):
        try:
            fill_one(body, writer, Notes("check"))
        except ProseError as error:
            raise ProseError(f"{where}, line {line}: {error.what}", next_step=error.next_step) from None
        for words in body.split("|")[1:] if body.split()[0] in CHOICES else ():
            refuse(words, f"{where}, line {line}", writer)
    for code in CODE.finditer(text):
        place = f"{where}, line {text.count(chr(10), 0, code.start()) + 1}"
        refuse(_without_few(code[0]) if code[0].startswith("```") else code[0], place, writer)
    plain = _without_list(blank(blank(blank(text, CODE), PLACE), LINK))
    for number, line in enumerate(plain.splitlines(), 1):
        refuse(line, f"{where}, line {number}", writer)


def refuse(text: str, where: str, writer: Writer, language: str = "", settings: Collection[str] = ()) -> None:
    """Raises ProseError where a text holds a number that no claim supports and that is not listed either.

    `language`: that of the text, the writer's own without it; `settings`: digits that may stand alone.
    """
    values = writer.facts.conditions if writer.facts.complete() else None
    if found := stray.number_in(text, language or writer.language, values, writer.facts.names, settings):
        raise ProseError(f"{where}: the number {found} comes from no claim.", next_step=NAME_IT)


def _without_few(block: str) -> str:
    """A formula without the few digits that are listed for it."""
    allowed = "|".join(stray.literals()["block"]["allowed"])
    return re.sub(rf"(?<![\w.,])(?:{allowed})(?![.,]?\w)", " ", block)


def _without_list(text: str) -> str:
    """Without the numbers of a numbered list; one that does not count from one is no such list."""
    lines, count = [], 0
    for line in text.splitlines():
        if found := LISTED.match(line):
            count = 1 if found[1] == "1" else count + 1
            line = line.replace(found[1], " ", 1) if found[1] == str(count) else line
        lines.append(line)
    return "\n".join(lines)
