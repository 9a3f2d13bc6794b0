"""Numbers in prose that no claim supports: digits, words such as "six", Chinese numerals, fractions.

What may stand without a claim is listed with its reason in kvlab/text/literals.toml.
"""

from __future__ import annotations

import re
import tomllib
import unicodedata
from collections.abc import Collection, Mapping
from functools import cache
from importlib import resources
from typing import Any

_TEENS = ("ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen")
_ONES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", *_TEENS)
_TENS = ("twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety")
_WORDS = dict(zip(_ONES, range(2, 20), strict=True)) | dict(zip(_TENS, range(20, 100, 10), strict=True))
_OTHER = (
    r"hundreds?|thousands?|millions?|billions?|dozens?|twice|thrice|doubl\w+|half|halv\w+|quarters?|tripl\w+|percent"
    r"|\w*fold"
)
_NUMBER_WORD = re.compile(
    rf"\b(?:(?:{'|'.join(_TENS)})(?:-\w+)?|{'|'.join(sorted(_ONES, key=len, reverse=True))}|{_OTHER})\b", re.I
)
_CHINESE = {char: value for value, char in enumerate("零一二三四五六七八九")} | {"两": 2, "〇": 0}
_CHINESE_MORE = "十百千万亿半倍双俩仨廿卅壹贰叁肆伍陆柒捌玖拾佰仟"
_CHINESE_RUN = re.compile(f"[{''.join(_CHINESE)}{_CHINESE_MORE}]+")
_ALONE = ("一", "零", "〇")  # an article more often than a number
_DIGITS = re.compile(r"\d[\d.,]*")
_PLAIN = re.compile(r"(?<![\w.,])\d+(?![\w%×.]|,\d| ?(?:%|percent|times|倍))")
_NAMED = re.compile(r"[A-Za-z_][\w.+-]*|[\w.+-]*[A-Za-z_][\w.+-]*", re.ASCII)


@cache
def literals() -> Mapping[str, Any]:
    """What may stand without a claim, by kind, each with its reason."""
    return tomllib.loads((resources.files("kvlab") / "text" / "literals.toml").read_text(encoding="utf-8"))


def value_of(text: str) -> str | None:
    """The digits of a number word such as "six", "twenty-four", "十二", or of digits; None for anything else."""
    if re.fullmatch(r"\d+", text):
        return text
    tens, _, ones = text.lower().partition("-")
    if tens in _WORDS and (not ones or ones in _WORDS or ones == "one"):
        return str(_WORDS[tens] + (1 if ones == "one" else _WORDS.get(ones, 0)))
    if found := re.fullmatch(r"([二三四五六七八九]?)十([一二三四五六七八九]?)", text):
        return str(10 * _CHINESE.get(found[1], 1) + _CHINESE.get(found[2], 0))
    return str(_CHINESE[text]) if text in _CHINESE else None


def number_in(
    text: str,
    language: str,
    values: Mapping[str, Collection[str]] | None = None,
    names: Collection[str] = (),
    settings: Collection[str] = (),
) -> str:
    """The first number of a text that may not stand there, "" where there is none.

    `values`: the values that claims hold of each condition (None: not known, then any may stand before its noun);
    `names`: further words that may hold digits; `settings`: digits that may stand alone.
    """
    plain = _without_conditions(_free(language).sub(" ", text), language, values)
    plain = _PLAIN.sub(lambda m: " " if m[0] in settings else m[0], plain)
    known = {*literals()["names"]["allowed"], *names}
    plain = _NAMED.sub(lambda m: m[0] if _has_digit(m[0]) and m[0].rstrip(".+-") not in known else _words(m[0]), plain)
    found = [match for pattern in (_DIGITS, _NUMBER_WORD) if (match := pattern.search(plain))]
    found += [match for match in _CHINESE_RUN.finditer(plain) if match[0] not in _ALONE][:1]
    first = min(found, key=lambda match: match.start())[0] if found else ""
    return first or next((char for char in plain if _is_odd_digit(char)), "")


@cache
def _free(language: str) -> re.Pattern:
    """The phrases that may stand, the longest first."""
    phrases = sorted(literals()["free"][language], key=len, reverse=True)
    return re.compile(rf"(?<![A-Za-z\d])(?:{'|'.join(map(re.escape, phrases))})(?![A-Za-z\d])", re.I)


@cache
def _conditions(language: str) -> list[tuple[re.Pattern, str, str]]:
    """(pattern, noun, condition) of "six workers", "from four to sixteen clients", "六个副本"."""
    made = []
    for noun, key in literals()["conditions"][language].items():
        word = r"[A-Za-z]+(?:-[a-z]+)?|\d+" if noun.isascii() else rf"[{''.join(_CHINESE)}十百]+|\d+"
        ahead = rf"(?P<first>{word})(?: (?:to|and|or) (?P<second>{word}))? ?"
        made.append((re.compile(rf"{ahead}{re.escape(noun)}(?![A-Za-z])"), noun, key))
    return made


def _without_conditions(text: str, language: str, values: Mapping[str, Collection[str]] | None) -> str:
    """Without numbers before a condition's noun where claims hold these values."""
    for pattern, noun, key in _conditions(language):

        def blank(match: re.Match, key: str = key, noun: str = noun) -> str:
            given = [part for part in (match["first"], match["second"]) if part and value_of(part)]
            held = values is None or all(value_of(part) in values.get(key, ()) for part in given)
            return f" {noun} " if given and held else match[0]

        text = pattern.sub(blank, text)
    return text


def _has_digit(text: str) -> bool:
    return any(char.isdigit() for char in text)


def _words(token: str) -> str:
    """A name's own digits are no number; a word without digits stays, for it may be one."""
    return " " if _has_digit(token) else token


def _is_odd_digit(char: str) -> bool:
    return not char.isascii() and unicodedata.category(char) in ("No", "Nl", "Nd")
