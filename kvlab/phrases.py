"""What claims and figures say in English, said in the language of a page; sentences that claims write.

What has no form in a language stands there as a quotation: no sentence is half in one language.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

# What a stored error holds and no reader of a page can use: what to do next.
USELESS = re.compile(r"(?<=\S) Next: .*$", re.S)
HOLE = re.compile(r"\{(\w+)\}")
FITS = {  # what a hole may hold; every other one holds anything
    **dict.fromkeys(("n", "wanted", "nats"), r"[\d.,]+"),
    **dict.fromkeys(("first", "last"), r"\d{4}-\d\d-\d\d"),
    **dict.fromkeys(("section", "profile"), r"[\w.+-]+"),
    "machine": r"[^;]+",
    "memory": r"[\d.]+ [KMGT]iB",
}


@cache
def _file(language: str) -> Mapping[str, Any]:
    return tomllib.loads((resources.files("kvlab") / "text" / language / "phrases.toml").read_text(encoding="utf-8"))


def sentences(language: str = "en") -> Mapping[str, str]:
    """The sentences of a language by name; their holes are filled by whoever writes one."""
    return _file(language)["sentences"]


def known(text: str, language: str) -> str | None:
    """What a stored English text is in a language; None where it has no form there."""
    text = USELESS.sub("", text)
    if language == "en":
        return text
    for pattern, form in _forms(language):
        if found := pattern.fullmatch(text):
            return HOLE.sub(lambda hole, found=found: found[hole[1]], form)
    return None


def said(text: str, language: str) -> str:
    """The same; what has no form there is quoted as it is."""
    form = known(text, language)
    if form is not None:
        return form
    parts = text.split("; ")
    forms = [known(part, language) for part in parts]
    if len(parts) > 1 and None not in forms:  # several reasons in one
        return sentences(language)["between"].join(forms)
    return sentences(language)["as_written"].format(text=USELESS.sub("", text))


def with_unit(text: str, unit: str, language: str) -> str:
    """Numbers as `display` writes them, with their unit in the language: 22,048 tokens, 22,048 个 token."""
    form = _file(language).get("units", {}).get(unit)
    return re.sub(rf" {re.escape(unit)}(?!\w)", f" {form}", text) if form else text


@cache
def _forms(language: str) -> list[tuple[re.Pattern, str]]:
    return [(_pattern(entry["en"]), entry[language]) for entry in _file(language).get("said", ())]


def _pattern(template: str) -> re.Pattern:
    parts = HOLE.split(template)  # text, hole, text, hole, ...
    made = [re.escape(part) if n % 2 == 0 else f"(?P<{part}>{FITS.get(part, '.+?')})" for n, part in enumerate(parts)]
    return re.compile("".join(made), re.S)


def templates(language: str) -> list[Mapping[str, str]]:
    """Every stored text that has a form in the language: `en` and the form."""
    return list(_file(language).get("said", ()))
