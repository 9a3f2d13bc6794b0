"""Two arms of a comparison, turn by turn: what drifts with time is in both runs of a turn, and not in their ratio.

An interval is of the turns. Where the arms did not take turns there are no pairs: the ratio of their means stays, and
says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from kvlab import stats
from kvlab.results import Result

APART = "the arms did not take turns, so there are no pairs: a ratio of means, without an interval"
FEWEST = 3  # two turns have a t interval too, thirteen times as wide as their standard error: it says nothing

# Of a run: a number of its summary by name, or what is read of it; of several numbers of one run their mean counts.
Number = str | Callable[[Result], float | Sequence[float] | None]


def took_turns(*arms: Sequence[Result]) -> bool:
    """Whether the arms were measured in turns: the n-th run of each before the next one of any, by their own clock.

    False where a run is missing, and where there is one turn only.
    """
    times = [[_created(result) for result in arm] for arm in arms]
    if len({len(arm) for arm in times}) != 1 or any(None in arm for arm in times):
        return False
    each = list(zip(*times, strict=True))
    return len(each) > 1 and all(max(turn) < min(later) for turn, later in zip(each, each[1:], strict=False))


def _created(result: Result) -> str | None:
    return None if result.run is None else result.run.manifest.get("created_utc")


def paired_ratio(changed: Sequence[Result], base: Sequence[Result], number: Number) -> stats.Estimate | None:
    """`number` of one arm ÷ that of the other: geometric mean over the turns, with its interval from three turns on.

    The t interval is that of the logarithms: a ratio scatters by factors, and no interval of it may go below zero.
    None where nothing can be divided. Arms that did not take turns: the ratio of their means, and a note.
    """
    changed, base = _present(changed, base)
    a, b = ([_values(result, number) for result in arm] for arm in (changed, base))
    if not took_turns(changed, base) and not len(changed) == len(base) == 1:
        return _of_means(chain(*a), chain(*b))
    turns = [(_mean(one), _mean(other)) for one, other in zip(a, b, strict=True)]
    each = [math.log(one / other) for one, other in turns if one and other]
    return _of_logs(stats.mean_interval(each)) if each else None


def paired_change(changed: Sequence[Result], base: Sequence[Result], number: Number) -> stats.Estimate | None:
    """`paired_ratio` - 1: a relative difference."""
    found = paired_ratio(changed, base, number)
    if found is None:
        return None
    ends = [None if end is None else end - 1 for end in (found.value, found.low, found.high)]
    return stats.Estimate(*ends, found.n, found.note)


def _present(changed: Sequence[Result], base: Sequence[Result]) -> tuple[Sequence[Result], Sequence[Result]]:
    """Without the turns that nobody ran, such as those that a profile got after the runs were stored."""
    if len(changed) != len(base):
        return changed, base
    turns = [turn for turn in zip(changed, base, strict=True) if any(result.run is not None for result in turn)]
    return [one for one, _ in turns], [other for _, other in turns]


def _values(result: Result, number: Number) -> Sequence[float]:
    found = result.value(number) if isinstance(number, str) else number(result)
    if found is None:
        return []
    return [found] if isinstance(found, int | float) else found


def _mean(values: Iterable[float]) -> float | None:
    return stats.mean_interval(values).value


def _of_means(a: Iterable[float], b: Iterable[float]) -> stats.Estimate | None:
    all_a, all_b = list(a), list(b)
    one, other = _mean(all_a), _mean(all_b)
    if one is None or not other:
        return None
    return stats.Estimate(one / other, None, None, min(len(all_a), len(all_b)), APART)


def _of_logs(found: stats.Estimate) -> stats.Estimate:
    value = math.exp(found.value)
    if found.n < FEWEST:
        return stats.Estimate(value, None, None, found.n, "fewer than three turns: too few for an interval")
    return stats.Estimate(value, math.exp(found.low), math.exp(found.high), found.n)
