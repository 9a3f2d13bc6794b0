"""What a number that does not pass confuses: a known mistake, percent or a unit; else how far off it is.

See `workshop`. Nothing here knows the questions: an answer is compared with the ends between which one passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

CLOSE = 0.005  # how near an answer must be to a known wrong one to be taken for it, where the question is no stricter
STRICT = 1e-3  # a question that accepts less is about whole things: then only the wrong number itself is meant
SCALES = {  # answer / right: what was taken for what
    1.024: "KiB for kB: 1,024 against 1,000",
    1.048576: "MiB for MB: 1,048,576 against 1,000,000",
    1.073741824: "GiB for GB: 2^30 against 10^9",
    8: "bits for bytes",
    1000: "thousands: look at the unit (ms against s, kB against bytes)",
    1024: "1,024s: look at the unit (KiB against bytes)",
    1e6: "millions: look at the unit (MB against bytes, µs against s)",
    2**20: "MiB against bytes",
    1e9: "billions: look at the unit (GB against bytes)",
    2**30: "GiB against bytes",
    2: "a factor of two: something counts twice, or was left out once",
}
TIMES = (1000, 1e6, 1e9, 2)
CONFUSED = {  # unit: the scales that somebody confuses there; things that are counted have none
    "bytes": tuple(SCALES),
    "GiB": tuple(SCALES),
    "s": TIMES,
    "ms": TIMES,
    "tokens": (1000, 2),
    "times": (2,),
    "ratio": (2,),
}
COUNTED = ("loads", "requests", "clients", "repeats", "numbers")
IN_BLOCKS = ("tokens", "bytes", "GiB")  # a pool is cut into blocks: what is near may have been rounded there
WIDE = 1.05  # where so much passes, a factor of two is no sign of counting twice

Known = Sequence[tuple[float, str]]  # what a usual mistake gives, and what it confuses


def rewritten(answer: Any) -> str:
    """The plain number behind a text or a tuple: 12_500 for '12,500' and (12, 500), 0.5 for '50 %'; else nothing."""
    if isinstance(answer, (tuple, list)) and all(type(part) is int and part < 1e15 for part in answer):
        text = ",".join(map(str, answer))
    elif isinstance(answer, str) and len(answer) < 40:
        text = re.sub(r"(?<=\d)[\s_'’](?=\d{3}\b)", ",", answer.strip())
    else:
        return ""
    if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text):
        return text.replace(",", "_")
    if found := re.fullmatch(r"(\d+)[.,](\d+)|(\d+)", text):
        return found[3] or f"{found[1]}.{found[2]}"
    if found := re.fullmatch(r"(\d{1,9}(?:[.,]\d{1,9})?)\s*%", text):
        return f"{float(found[1].replace(',', '.')) / 100:g}"
    return ""


def confusion(answer: float, low: float, high: float, unit: str, known: Known, slack: float, where: str) -> str:
    """What to say of a number outside low ... high. `slack`: the question's own tolerance; `where`: its notebook."""
    if mistake := _mistake(answer, low, high, known, slack):
        return f"this is {mistake}."
    told = _percent(answer, low, high, unit, known, slack, where) or _scaled(answer, low, high, unit)
    return told or _far(answer, low, high, unit, where)


def _mistake(answer: float, low: float, high: float, known: Known, slack: float) -> str:
    """The known mistake that gives this number: the nearest one, or several that give the same."""
    met = [(abs(answer - v), why) for v, why in known if not low <= v <= high and _near(answer, v, slack)]
    nearest = min((distance for distance, _ in met), default=0)
    return "; or ".join(dict.fromkeys(why for distance, why in met if distance <= nearest + 1e-9 * abs(answer)))


def _near(answer: float, value: float, slack: float) -> bool:
    if slack >= STRICT:
        return math.isclose(answer, value, rel_tol=CLOSE, abs_tol=1e-9)
    rounded = answer == int(answer) and value != int(value) and abs(answer - value) < 1 < abs(value) / 100
    return rounded or math.isclose(answer, value, rel_tol=max(slack, 1e-9), abs_tol=1e-9)


def _percent(answer: float, low: float, high: float, unit: str, known: Known, slack: float, where: str) -> str:
    if unit not in ("ratio", "times"):
        return ""
    share = answer / 100
    if low <= share <= high:
        return "the size is right, but in percent: the question asks for a ratio, 0.5 and not 50."
    asked = "this is in percent, and the question asks for a ratio: 0.5 and not 50. "
    if mistake := _mistake(share, low, high, known, slack):
        return f"{asked}As a ratio it is {mistake}."
    return f"{asked}As a ratio it is {_far(share, low, high, unit, where)}" if unit == "ratio" and answer > 2 else ""


def _scaled(answer: float, low: float, high: float, unit: str) -> str:
    if answer <= 0 or low <= 0:
        return ""
    for scale in CONFUSED.get(unit, ()):
        if scale == 2 and high > low * WIDE:
            continue
        slack = CLOSE / 5 if scale < 2 else CLOSE
        for factor in (scale, 1 / scale):
            if low * factor * (1 - slack) <= answer <= high * factor * (1 + slack):
                return f"the number is off by {SCALES[scale]}."
    return ""


def _far(answer: float, low: float, high: float, unit: str, where: str) -> str:
    nearest = low if answer < low else high
    side = "too low" if answer < low else "too high"
    if unit in COUNTED:  # of a few things, how many times too many says nothing
        one_by_one = "Go through what is given one by one: which of them does the question ask for?"
        return f"{side}. {one_by_one} The rule is in {where}."
    if answer < 0 <= low:
        subtracted = "which two numbers were subtracted the wrong way round?"
        return f"{side}: it cannot be below zero; {subtracted} See {where}."
    if answer <= 0 or nearest <= 0:
        return f"{side}: look at the formula in {where} again."
    factor = max(answer / nearest, nearest / answer)
    if factor < 1.1:
        rounding = "a rounding to whole blocks, the null block, or one token more or less?"
        return f"{side}, but near: {rounding if unit in IN_BLOCKS else 'was something rounded on the way?'}"
    size = "less than a factor of two" if factor < 2 else "a factor of a few" if factor < 10 else "far"
    return f"{side}, by {size}. Write the formula of {where} down with its units, then put the numbers in."
