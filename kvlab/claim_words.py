"""What a sentence calls the quantity and the conditions of a claim: words of the page's language, no columns."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources

from kvlab.claims import parse_conditions

AGAINST = "over_"  # over_c=8: compared with 8 clients


@cache
def words(language: str = "en") -> Mapping[str, Mapping[str, str]]:
    """`quantities` and `conditions` of a language."""
    path = resources.files("kvlab") / "text" / language / "claim_words.toml"
    return tomllib.loads(path.read_text(encoding="utf-8"))


def quantity(name: str, language: str = "en") -> str:
    """`ttft_p50_s` is the median time to the first token; a name that has no words stays as it is."""
    return words(language)["quantities"].get(name, name)


def conditions(text: str, language: str = "en") -> list[str]:
    """`c=16;workers=3` is 16 clients, 3 workers; a condition that has no words stays as it is."""
    return [_condition(name, value, words(language)["conditions"]) for name, value in parse_conditions(text).items()]


def _condition(name: str, value: str, known: Mapping[str, str]) -> str:
    if name.startswith(AGAINST):
        return known[AGAINST].replace("{v}", _condition(name.removeprefix(AGAINST), value, known))
    form = known.get(f"{name}={value}") or known.get(name)
    return form.replace("{v}", f"{int(value):,}" if value.isdecimal() else value) if form else f"{name}={value}"
