"""Claims without a number, counted and told with their reasons."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kvlab import claim_words
from kvlab.claims import Claim
from kvlab.phrases import said, sentences

_WHOLE = re.compile(r"(?<![\w.])\d+(?:,\d{3})*(?![\w.])")


def told(missing: Sequence[Claim], state: str, language: str) -> str:
    """How many claims are in this state ("not measured" or "failed"), and why; "" for no claims."""
    if not missing:
        return ""
    words = sentences(language)
    reasons: dict[str, set[str]] = {}
    for c in missing:
        reason = said(c.reason, language) if c.reason else words["no_reason"]
        reasons.setdefault(reason, set()).add(claim_words.quantity(c.quantity, language))
    together: dict[str, list[str]] = {}  # what has several reasons is named once
    for reason, quantities in sorted(reasons.items()):
        together.setdefault(_some(quantities, words), []).append(reason)
    listed = [
        words["because"].format(quantities=quantities, reason=words["beside"].join(_merged(alike)))
        for quantities, alike in together.items()
    ]
    form = ("one_" if len(missing) == 1 else "") + ("missing" if state == "not measured" else "failed")
    return words[form].format(n=len(missing), listed=words["between"].join(listed))


def _merged(reasons: Iterable[str]) -> list[str]:
    """Reasons that differ in one whole number, said once with the range: n too small (16–64, needs 72)."""
    by_form: dict[str, list[str]] = {}
    for reason in reasons:
        by_form.setdefault(_WHOLE.sub("\0", reason), []).append(reason)
    found = []
    for form, alike in by_form.items():
        columns = list(zip(*(_WHOLE.findall(reason) for reason in alike), strict=True))
        varied = [n for n, column in enumerate(columns) if len(set(column)) > 1]
        if len(varied) != 1:
            found += alike
            continue
        ends = [sorted(column, key=lambda text: int(text.replace(",", ""))) for column in columns]
        numbers = [column[0] if n not in varied else f"{column[0]}–{column[-1]}" for n, column in enumerate(ends)]
        found.append("".join(part for pair in zip(form.split("\0"), [*numbers, ""], strict=True) for part in pair))
    return found


def _some(names: Iterable[str], words: Mapping[str, str], limit: int = 4) -> str:
    names = sorted(names)
    listed, more = words["comma"].join(names[:limit]), len(names) - limit
    return words["some"].format(names=listed, n=more) if more > 0 else listed
