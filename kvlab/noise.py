"""How far repeats scatter, how many of them a claim needs, and below which size a difference is noise.

Spread is the relative standard deviation, sd / mean, of n - 1 degrees of freedom throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
import scipy  # its parts load where they are used: a second of every start

from kvlab import claims, store
from kvlab.claims import Claim
from kvlab.errors import KvlabError
from kvlab.rows import known
from kvlab.stats import Estimate

SECTION, QUANTITY = "repeatability", "noise_floor"
MOST_REPEATS = 1_000_000


def relative_sd(values: Iterable[Any], confidence: float = 0.95) -> Estimate | None:
    """sd / mean of repeats with the chi-square interval of the sd: five repeats know it to a factor of about two.

    Null below two values or around a mean of 0.
    """
    numbers = known(values)
    n = len(numbers)
    if n < 2 or not numbers.mean():
        return None
    value = float(numbers.std(ddof=1) / abs(numbers.mean()))
    tails = scipy.stats.chi2.ppf([(1 + confidence) / 2, (1 - confidence) / 2], n - 1)
    low, high = (float(value * math.sqrt((n - 1) / tail)) for tail in tails)
    return Estimate(value, low, high, n)


def between_starts_sd(starts: Iterable[Iterable[Any]]) -> float | None:
    """The part of the relative spread that belongs to the start of a server, not to a measurement on it.

    `starts`: for each server its repeats. One-way analysis of variance: between² = (mean square between servers - mean
    square within) / mean repeats, 0 where the servers differ no more than repeats do. Null without two servers of two.
    """
    groups = [numbers for numbers in map(known, starts) if len(numbers)]
    counts = np.array([len(g) for g in groups])
    spare = counts.sum() - len(groups)
    if len(groups) < 2 or spare < 1:
        return None
    mean = np.concatenate(groups).mean()
    within = sum(((g - g.mean()) ** 2).sum() for g in groups) / spare
    between = sum(n * (g.mean() - mean) ** 2 for n, g in zip(counts, groups, strict=True)) / (len(groups) - 1)
    typical = (counts.sum() - (counts**2).sum() / counts.sum()) / (len(groups) - 1)
    return math.sqrt(max(0.0, (between - within) / typical)) / abs(mean) if mean else None


def half_width(spread: float, n: int, confidence: float = 0.95) -> float:
    """Relative half-width of the mean's t interval after n repeats: t(n - 1) spread / sqrt(n)."""
    return float(scipy.stats.t.ppf((1 + confidence) / 2, n - 1) * spread / math.sqrt(n))


def repeats_needed(spread: float, wanted: float, confidence: float = 0.95) -> int:
    """Fewest repeats, two at least, with which a mean is known to ± `wanted` (relative), if the spread stays as it is.

    For the difference of two arms measured in turns, pass sqrt(2) x spread: the number is then pairs.
    """
    if not wanted > 0 or spread < 0:
        raise KvlabError(f"A half-width of {wanted} or a spread of {spread} has no number of repeats.")
    low, high = 1, 2
    while half_width(spread, high, confidence) > wanted:
        low, high = high, high * 2
        if high > MOST_REPEATS:
            raise KvlabError(f"± {wanted:g} needs more than {MOST_REPEATS:,} repeats at a spread of {spread:g}.")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if half_width(spread, middle, confidence) <= wanted else (middle, high)
    return high


def floor(spread: float, n: int, confidence: float = 0.95) -> float:
    """The relative difference that two single measurements of one configuration exceed in 1 - confidence of all cases.

    t(n - 1) sqrt(2) spread; n: the repeats from which the spread is known.
    """
    return float(scipy.stats.t.ppf((1 + confidence) / 2, n - 1) * math.sqrt(2) * spread)


def floor_of(machine: str, quantity: str, *, between: str = "starts", pairs: int = 1) -> float | None:
    """The machine's stored noise floor of a quantity, the largest over loads; null where it was not measured.

    `between`: "starts" for arms on servers of their own, "repeats" for both arms on one server. `pairs`: how often both
    arms got a new server (or measurement); the floor falls with its square root.
    """
    return floor_among(claims.read(store.machine_dir(machine)), quantity, between=between, pairs=pairs)


def floor_among(table: pd.DataFrame, quantity: str, *, between: str = "starts", pairs: int = 1) -> float | None:
    """`floor_of` in a machine's table of claims."""
    table = table[(table["section"] == SECTION) & (table["quantity"] == QUANTITY) & table["measured"].notna()]
    wanted = {"of": quantity, "between": between}
    fits = [wanted.items() <= claims.parse_conditions(text).items() for text in table["conditions"].fillna("")]
    found = table.loc[fits, "measured"]
    return None if found.empty else float(found.max()) / math.sqrt(pairs)


# -- in words -----------------------------------------------------------------------------------------------------


def _of(stated: Iterable[Claim], quantity: str, between: str) -> list[tuple[dict[str, str], Claim]]:
    """(conditions, claim) of what was measured."""
    found = [(claims.parse_conditions(c.conditions), c) for c in stated if c.quantity == quantity]
    return [(where, c) for where, c in found if c.measured is not None and where.get("between") == between]


def _where(conditions: dict[str, str]) -> str:
    return (
        f"{conditions['of']} at {conditions['c']} clients" if "c" in conditions else f"{conditions['of']} of insertions"
    )


def largest(stated: Iterable[Claim], between: str) -> str | None:
    """The steadiest and the least steady quantity, with their noise floors."""
    found = sorted(_of(stated, QUANTITY, between), key=lambda pair: pair[1].measured)
    if len(found) < 2:
        return None
    (best, low), (worst, high) = found[0], found[-1]
    return (
        f"Noise floor between {between}: from {low.measured:.1%} ({_where(best)}) "
        f"to {high.measured:.1%} ({_where(worst)}); a smaller difference says nothing."
    )


def starts_against_repeats(stated: Iterable[Claim]) -> str | None:
    """How often a spread over starts is larger than the one on a single server, and beyond what chance explains."""
    stated = list(stated)
    one = {(w["of"], w.get("c")): c for w, c in _of(stated, "spread", "repeats")}
    starts = {(w["of"], w["c"]): c for w, c in _of(stated, "spread", "starts")}
    pairs = [(name, starts[name], one[name]) for name in starts if name in one]
    if not pairs:
        return None
    larger = [(name, a, b) for name, a, b in pairs if a.measured > b.measured]
    beyond = [name for name, a, b in larger if a.ci_low is not None and a.ci_low > (b.ci_high or math.inf)]
    clear = ", ".join(f"{quantity} at {c} clients" for quantity, c in beyond)
    told = f"beyond chance for {clear or 'none of them'}"
    return f"The spread over fresh starts is larger than on one server in {len(larger)} of {len(pairs)} cases, {told}."


def repeats_wanted(stated: Iterable[Claim], between: str) -> str | None:
    """How many repeats the wanted precision takes, at the load with the largest spread of each quantity."""
    most: dict[str, tuple[float, str]] = {}
    for where, c in _of(stated, "repeats_for_half_width", between):
        most[where["of"]] = max(most.get(where["of"], (0.0, "")), (c.measured, where["half_width"]))
    if not most:
        return None
    listed = ", ".join(f"{n:,.0f} of {quantity}" for quantity, (n, _) in most.items())
    wanted = float(next(iter(most.values()))[1])
    return f"± {wanted:.2%} of a mean takes this many {between}: {listed}."
