"""The workshop's checker: right answers are computed when they are checked, and the usual wrong ones are known.

from kvlab.workshop import ask, check
ask("1.predict")                      # the question
check("1.predict", 114_688)           # passed, or what the answer confuses

Part ids are `exercise.part`; the parts are predict and explain (for all), most, and stretch.
"""

from __future__ import annotations

import math
import numbers
import zlib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import pandas as pd
from IPython.display import Markdown, display

from kvlab import beside, claims, measure, profile, store, workshop_number
from kvlab.claims import parse_conditions
from kvlab.errors import ConfigError, KvlabError
from kvlab.workshop_number import CLOSE

LEVELS = {"predict": "all", "explain": "all", "most": "most", "stretch": "stretch"}
MACHINE = "cpu-tiny"  # committed, and every exercise can be decided by its data
PASSED, WRONG, UNANSWERED, UNDECIDED = "passed", "wrong", "unanswered", "undecided"
NOTEBOOKS = {  # exercise: the section's notebook that teaches it
    "1": "01_kv_capacity",
    "2": "01_kv_capacity",
    "3": "02_load",
    "4": "03_preemption",
    "5": "04_max_num_seqs",
    "6": "05_fp8_kv",
    "7": "06_prefix_cache",
    "8": "10_service_hit_rate",
    "9": "07_chunked_prefill",
    "10": "13_repeatability",
}
MARKS = {PASSED: "✓", WRONG: "✗", UNANSWERED: "…", UNDECIDED: "?"}


class Undecided(KvlabError):
    """The machine's data do not hold what the question needs."""

    def __init__(self, what: str, cause: str | None = None):
        super().__init__(what, cause, f"answer with MACHINE = {MACHINE!r}, whose data come with the workshop")


@lru_cache(maxsize=16)
def _profile_of(machine: str, _root: str) -> profile.Profile:
    return measure.open_lab("kv_capacity", machine=machine, mode="replay").profile


@dataclass(frozen=True)
class Facts:
    """What the questions may ask of one machine: its profile and its claims."""

    machine: str = MACHINE

    def profile(self) -> profile.Profile:
        """The profile with which the machine was measured."""
        return _profile_of(self.machine, str(store.root()))

    def value(self, section: str, quantity: str, column: str = "measured", *, on: str = "", **where) -> float:
        """The number of a claim of the machine (`on` names another one). Raises Undecided where there is none."""
        found = beside.value(on or self.machine, section, quantity, column, **where)
        if found is None:
            said = ", ".join(f"{key}={value}" for key, value in where.items())
            raise Undecided(
                f"{on or self.machine} has no {column} {quantity} of {section} ({said}).",
                cause="that machine did not measure this section, or with other lengths",
            )
        return found

    def claims(self, section: str, quantity: str, x: str, **where) -> list[tuple[float, dict[str, str], dict]]:
        """(x, conditions, row) of the measured claims of that quantity."""
        found = beside.points(self.machine, section, quantity, x, **where).dropna(subset="measured")
        return [(row["x"], parse_conditions(row["conditions"]), row) for row in found.to_dict("records")]

    def require(self, value: Any, what: str) -> Any:
        """The value; Undecided where it is missing."""
        if value is None:
            raise Undecided(f"{self.machine} has no {what}.")
        return value


Fact = Callable[[Facts], float]


@dataclass(frozen=True)
class Number:
    """A question with a number. `wrong`: what the usual mistakes give, and what each one confuses.

    `accept`: the relative distance that still passes, or the ends between which everything passes.
    """

    ask: str
    unit: str
    right: Fact
    wrong: Sequence[tuple[Fact, str]] = ()
    accept: float | Callable[[Facts], tuple[float, float]] = CLOSE
    because: str = ""

    def ends(self, facts: Facts) -> tuple[float, float]:
        """Between these an answer passes."""
        if callable(self.accept):
            return self.accept(facts)
        right = self.right(facts)
        return tuple(sorted((right * (1 - self.accept), right * (1 + self.accept))))


@dataclass(frozen=True)
class Choice:
    """A question with statements of which exactly one is true: each is tested against the data when it is checked."""

    ask: str
    options: Sequence[tuple[str, Callable[[Facts], bool], str]]  # statement, its test, what choosing it overlooks
    because: str = ""

    def right(self, facts: Facts) -> str:
        """The letter of the true statement. Raises Undecided where the data make none or several true."""
        true = [letter for letter, (_, test, _) in zip("abcdef", self.options, strict=False) if test(facts)]
        if len(true) != 1:
            raise Undecided(
                f"The data of {facts.machine} do not decide this question.",
                cause=f"{len(true)} of the statements are true of them",
            )
        return true[0]


@dataclass(frozen=True)
class Verdict:
    part: str
    state: str
    message: str


_verdicts: dict[str, Verdict] = {}


@cache
def parts() -> dict[str, Number | Choice]:
    """Every question by its id, in order; statements stand in an order that tells nothing."""
    from kvlab import workshop_cache, workshop_load, workshop_noise, workshop_pool

    every = workshop_pool.PARTS | workshop_load.PARTS | workshop_cache.PARTS | workshop_noise.PARTS
    return {name: _mixed(name, asked) if isinstance(asked, Choice) else asked for name, asked in every.items()}


def _mixed(name: str, asked: Choice) -> Choice:
    return replace(asked, options=sorted(asked.options, key=lambda option: zlib.crc32((name + option[0]).encode())))


def part(name: str) -> Number | Choice:
    """The question of that id; ConfigError names the known ones."""
    known = parts()
    if name not in known:
        raise ConfigError(f"There is no question {name!r}.", next_step=f"use one of: {', '.join(known)}")
    return known[name]


def link(name: str) -> str:
    """The section's notebook behind a question, as a link from the folder of the exercises."""
    notebook = NOTEBOOKS[name.partition(".")[0]]
    return f"[{notebook}](../{notebook}.ipynb)"


def ask(name: str) -> None:
    """Shows a question: for a choice its statements with their letters."""
    asked = part(name)
    level = LEVELS[name.partition(".")[2]]
    lines = [f"**{name}** ({level}): {asked.ask}"]
    if isinstance(asked, Choice):
        lines += [f"- **{letter}**: {text}" for letter, (text, _, _) in zip("abcdef", asked.options, strict=False)]
        lines.append("\nAnswer with a letter, such as `'a'`.")
    else:
        lines.append(f"\nAnswer with a number ({asked.unit}).")
    display(Markdown("\n".join(lines)))


def letter(name: str, beginning: str) -> str:
    """The letter of the statement that begins with these words: solutions name what they choose."""
    options = part(name).options
    found = [mark for mark, (text, _, _) in zip("abcdef", options, strict=False) if text.startswith(beginning)]
    if len(found) != 1:
        raise ConfigError(f"{len(found)} statements of {name} begin with {beginning!r}.")
    return found[0]


def check(name: str, answer: Any, machine: str = MACHINE) -> None:
    """Says whether the answer passes, and where not, what it confuses. Remembers the verdict for `progress`."""
    found = judge(name, answer, machine)
    _verdicts[name] = found
    display(Markdown(f"{MARKS[found.state]} **{name}**: {found.message}"))


def judge(name: str, answer: Any, machine: str = MACHINE) -> Verdict:
    """The verdict on an answer; nothing is shown."""
    asked, facts = part(name), Facts(machine)
    if machine not in store.machines():
        raise ConfigError(f"There is no machine {machine!r}.", next_step=f"use one of: {', '.join(store.machines())}")
    if answer is None:
        return Verdict(name, UNANSWERED, "write your answer into the cell above, then run both cells again.")
    try:
        if isinstance(asked, Choice):
            state, message = _choice(asked, answer, facts)
        else:
            state, message = _number(name, asked, answer, facts)
    except Undecided as error:
        return Verdict(name, UNDECIDED, str(error).replace("\n", " "))
    return Verdict(name, state, message)


def _choice(asked: Choice, answer: Any, facts: Facts) -> tuple[str, str]:
    letters = "abcdef"[: len(asked.options)]
    letter = str(answer).strip().lower()
    right = asked.right(facts)
    if len(letter) != 1 or letter not in letters:
        return UNANSWERED, f"answer with one letter of {', '.join(letters)}; you wrote {_short(answer)}."
    if letter == right:
        return PASSED, f"right. {asked.because}".strip()
    return WRONG, asked.options[letters.index(letter)][2]


def _number(name: str, asked: Number, answer: Any, facts: Facts) -> tuple[str, str]:
    if isinstance(answer, bool) or not isinstance(answer, numbers.Real) or not _finite(answer):
        better = workshop_number.rewritten(answer)
        plain = f"answer with a plain number, such as 12 or 0.5 ({asked.unit}), thousands as 12_000 or without any sign"
        state = WRONG if better else UNANSWERED  # no number was written down
        return state, f"{plain}; you wrote {_short(answer)}" + (f": write {better}." if better else ".")
    low, high = asked.ends(facts)
    if low <= answer <= high:
        return PASSED, f"right. {asked.because}".strip()
    known = [(fact(facts), why) for fact, why in asked.wrong]
    slack = CLOSE if callable(asked.accept) else asked.accept
    return WRONG, workshop_number.confusion(answer, low, high, asked.unit, known, slack, link(name))


def _finite(answer: numbers.Real) -> bool:
    try:
        return math.isfinite(answer)
    except OverflowError:  # a whole number that no float can hold
        return False


def _short(answer: Any) -> str:
    """What was written, as a sentence can hold it."""
    try:
        said = " ".join(repr(answer).split())
    except ValueError:  # a whole number with more digits than Python writes out
        said = "a number of thousands of digits"
    return said if len(said) <= 80 else f"{said[:77]}..."


def after(name: str, show: Callable[[], Any], look: bool = False) -> Any:
    """What `show` returns, once the question of that id was answered, right or wrong; `look`: at once.

    Before that nothing is computed, and how to go on is shown. ConfigError names the known questions.
    """
    part(name)
    verdict = _verdicts.get(name)
    if look or (verdict and verdict.state != UNANSWERED):
        return show()
    again = "Answer it above, run its check, then this cell again"
    display(Markdown(f"**Predict first**: {name} is not answered yet. {again}; or set `LOOK = True` at the top."))
    return None


def claims_of(machine: str, section: str, *quantities: str) -> pd.DataFrame | Markdown:
    """A machine's claims of these quantities for human eyes: computed, measured, interval, residual.

    Where it has none, which machines do.
    """
    kept = _claims_of(machine, section, quantities)
    if len(kept):
        return claims.show(kept)
    others = [name for name in store.machines() if len(_claims_of(name, section, quantities))]
    return Markdown(f"`{machine}` measured nothing of this section. Set `MACHINE` to one of: {', '.join(others)}.")


def _claims_of(machine: str, section: str, quantities: Collection[str]) -> pd.DataFrame:
    table = claims.read(store.machine_dir(machine))
    kept = table[(table["section"] == section) & table["quantity"].isin(quantities)]
    return kept[kept["state"] != "not measured"]


# -- how far one is -----------------------------------------------------------------------------------------------


def verdicts() -> dict[str, Verdict]:
    """The last verdict on each question of this kernel."""
    return dict(_verdicts)


def progress() -> None:
    """Shows the verdicts of this kernel, in the order of the page. Over all exercises: `workshop_progress`."""
    lines = ["| question | level | |", "|---|---|---|"]
    order = list(parts())
    for name, verdict in sorted(_verdicts.items(), key=lambda found: order.index(found[0])):
        lines.append(f"| {name} | {LEVELS[name.partition('.')[2]]} | {MARKS[verdict.state]} {verdict.state} |")
    passed = sum(verdict.state == PASSED for verdict in _verdicts.values())
    display(Markdown("\n".join([*lines, "", f"{passed} of {len(_verdicts)} pass."])))
