"""What did not match, and why: sentences made of the claims themselves, so that no number in prose is typed by hand."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from IPython.display import Markdown, display

from kvlab import claim_words, lacking, startup
from kvlab.claims import Claim, conditions_text
from kvlab.display import is_change
from kvlab.measure import Result
from kvlab.phrases import sentences

CROSS_CHECK = 0.05  # two tools on one server: gaps that differ by more have another cause than definitions
_READ_AS = {
    "throughput_whole_tok_s": "throughput over the whole time",
    "ttft_p50_s": "time to the first token",
    "tpot_p50_s": "time per output token",
    "itl_p50_s": "gap between tokens",
}


def show(*sentences: str | None) -> None:
    """Displays the sentences that have something to say, as a list."""
    display(Markdown("\n".join(f"- {sentence}" for sentence in sentences if sentence)))


def residuals(
    claims: Iterable[Claim], *, exact: Iterable[str] = (), tolerance: float | None = None, language: str = "en"
) -> str | None:
    """How many predictions held, and which did not: `exact` quantities to the last digit, others to `tolerance`."""
    exact, claims, words = set(exact), list(claims), sentences(language)
    compared = [c for c in claims if c.computed is not None and c.measured is not None]
    if tolerance is None:
        compared = [c for c in compared if c.quantity in exact]
    off = [c for c in compared if not _holds(c, c.quantity in exact, tolerance or 0.0)]
    if not compared:
        none = any(c.measured is not None for c in claims)
        return words["no_prediction" if none else "nothing_measured"]
    rules = [words["exact"]] if exact else []
    near = words["within" if exact else "all_within"]
    rules += [near.format(tolerance=f"{tolerance:.0%}")] if tolerance is not None else []
    if tolerance is not None and any(_is_change(c) and c.quantity not in exact for c in compared):
        rules.append(words["changes_within"].format(points=f"{100 * tolerance:g}"))
    held, rule = len(compared) - len(off), words["and"].join(rules)
    inside = [c for c in compared if c not in off and not _near(c, c.quantity in exact, tolerance or 0.0)]
    rule += words["inside"].format(n=len(inside)) if inside else ""
    return words["hold"].format(held=held, compared=len(compared), rule=rule) + _outside(off, language)


def _outside(off: list[Claim], language: str) -> str:
    """The worst eight predictions that did not hold, those of one quantity together, and how many more there are."""
    words, by_quantity = sentences(language), {}
    for claim in sorted(off, key=lambda c: -abs(math.inf if (by := _distance(c)) is None else by))[:8]:
        where = words["beside"].join(claim_words.conditions(claim.conditions, language))
        told = words["off_by_at" if where else "off_by"].format(by=_off_by(claim, words), conditions=where)
        by_quantity.setdefault(claim_words.quantity(claim.quantity, language), []).append(told)
    told = [
        words["off"].format(quantity=quantity, listed=words["beside"].join(listed))
        for quantity, listed in by_quantity.items()
    ]
    told += [words["more"].format(n=len(off) - 8)] if len(off) > 8 else []
    return words["outside"].format(listed=words["between"].join(told)) if told else ""


def _near(claim: Claim | Compared, exactly: bool, tolerance: float) -> bool:
    if exactly:
        return math.isclose(claim.measured, claim.computed, rel_tol=0, abs_tol=1e-9)
    by = _distance(claim)
    return claim.measured == claim.computed or (by is not None and abs(by) <= tolerance)


def _holds(claim: Claim | Compared, exactly: bool, tolerance: float) -> bool:
    if exactly or _near(claim, exactly, tolerance):
        return _near(claim, exactly, tolerance)
    return claim.ci_low is not None and claim.ci_high is not None and claim.ci_low <= claim.computed <= claim.ci_high


def _is_change(claim: Claim | Compared) -> bool:
    return is_change(claim.quantity, claim.unit)


def _distance(claim: Claim | Compared) -> float | None:
    return claim.measured - claim.computed if _is_change(claim) else claim.residual


def holds(row: Mapping[str, Any], tolerance: float) -> bool:
    """Whether a claim's prediction holds: within the tolerance, or inside the interval of the measurement.

    A relative change may be off by as many points.
    """
    if row["computed"] is None or row["measured"] is None:
        return False
    names = ("computed", "measured", "ci_low", "ci_high", "residual")
    numbers = [None if row[name] is None else float(row[name]) for name in names]
    return _holds(Compared(row["quantity"], row["unit"], *numbers), False, tolerance)


class Compared(NamedTuple):
    """What a comparison reads of a claim."""

    quantity: str
    unit: str
    computed: float
    measured: float
    ci_low: float | None
    ci_high: float | None
    residual: float | None


def _off_by(claim: Claim, words: Mapping[str, str]) -> str:
    if claim.residual is None and not _is_change(claim):
        return words["instead"].format(measured=f"{claim.measured:g}", computed=f"{claim.computed:g}")
    if _is_change(claim):
        return words["points"].format(by=f"{100 * (claim.measured - claim.computed):+.1f}")
    return f"{claim.residual:+,.0%}"


def rounding(claims: Iterable[Claim]) -> str | None:
    """Why the measured bytes per token lie a little above the formula's."""
    rows = [c for c in claims if c.quantity == "kv_bytes_per_token" and c.residual]
    if not rows:
        return None
    worst = max(rows, key=lambda c: abs(c.residual))
    return (
        f"Pool ÷ capacity gives up to {abs(worst.residual):.3%} more bytes per token than the formula "
        f"({worst.conditions}): the pool is cut into whole blocks, and the rest of it stays unused."
    )


def gain(claims: Iterable[Claim], quantity: str, where: dict) -> str | None:
    """Between which concurrencies a quantity grows, and by how much."""
    ending = ";".join(f"{key}={value}" for key, value in where.items())
    points = [c for c in claims if c.quantity == quantity and c.conditions.endswith(ending) and c.measured]
    if len(points) < 3:
        return None
    first, middle, last = points[0], points[len(points) // 2], points[-1]
    return (
        f"{quantity} grows {middle.measured / first.measured:.1f}-fold from {first.conditions} to {middle.conditions}, "
        f"and {last.measured / middle.measured:.2f}-fold from there to {last.conditions}."
    )


def honest(results: Iterable[Result]) -> str | None:
    """Whether the client kept up: the certificates of all runs in one sentence."""
    runs = [r for r in results if r.run is not None]
    marked = [(r.run.id, p) for r in runs for p in r.run.manifest["certificate"].get("problems", [])]
    if not runs:
        return None
    if not marked:
        return f"The client kept up in all {len(runs)} runs: no certificate is marked.{_adds(runs)}"
    listed = "; ".join(f"{run}: {problem}" for run, problem in marked[:3])
    share = f"{len({run for run, _ in marked})} of {len(runs)} runs are marked by their certificate"
    return f"{share}, such as {listed}.{_adds(runs)}"


def _adds(runs: Iterable[Result]) -> str:
    """What the client itself adds at most, by the certificates that know."""
    worst = {}
    for what in ("ttft", "itl"):
        found = [r.run.manifest["certificate"].get(f"added_{what}_p99_s") for r in runs]
        worst[what] = max((value for value in found if value is not None), default=None)
    if None in worst.values():
        return ""
    return (
        f" Against a server of known delays, with as many streams, it adds at most {1e3 * worst['ttft']:.2g} ms to the "
        f"p99 of the time to the first token and {1e3 * worst['itl']:.2g} ms to that of the gaps."
    )


def difference(claims: Iterable[Claim], prefix: str, floors: Mapping[str, float | None] | None = None) -> str | None:
    """Whether an interval of a relative difference excludes zero.

    `floors`: the noise floor of a quantity (what follows the prefix): a difference below it may come from the start of
    the two servers, however often both were measured.
    """
    found = [c for c in claims if c.quantity.startswith(prefix) and c.measured is not None]
    sentences = [_difference(c, c.quantity.removeprefix(prefix), floors or {}) for c in found]
    return "; ".join(sentences) + "." if sentences else None


def _difference(c: Claim, what: str, floors: Mapping[str, float | None]) -> str:
    if c.ci_low is None or c.ci_high is None:
        return f"{what}: {c.measured:+.1%}, too few repeats for an interval"
    said, floor = f"{what}: {c.measured:+.1%} with {c.ci_low:+.1%} to {c.ci_high:+.1%}", floors.get(what)
    if c.ci_low <= 0 <= c.ci_high:
        return f"{said}, no difference can be told"
    if floor is not None and abs(c.measured) < floor:
        return f"{said}, but below the noise floor of {floor:.1%} between two starts of one configuration"
    return f"{said}, a real difference"


def two_models(plain: Iterable[Claim], refined: Iterable[Claim], first: str, second: str) -> str | None:
    """How far a plain formula is off, and how far one with more in it: the range and the largest residual of both."""
    sides = [[c.residual for c in side if c.residual is not None] for side in (plain, refined)]
    if not all(sides):
        return None
    (low, high), (low2, high2) = ((min(side), max(side)) for side in sides)
    plain_text, refined_text = f"{low:+.0%} to {high:+.0%}", f"{low2:+.0%} to {high2:+.0%}"
    return f"With {first} the predictions are off by {plain_text}; with {second} by {refined_text}."


def refused(checked: Iterable[tuple[Result, str | None]]) -> str | None:
    """What a section left out of its runs because it does not show what it looks for, and why."""
    checked = list(checked)
    out = [(result.run.id, why) for result, why in checked if why]
    if not out:
        return None
    listed = "; ".join(f"{run}: {why}" for run, why in out)
    return f"{len(out)} of {len(checked)} runs are not read in full: {listed}."


def change(claims: Iterable[Claim], quantity: str, what: str) -> str | None:
    """Relative changes of one quantity, condition by condition, with what was computed."""
    found = [c for c in claims if c.quantity == quantity and c.measured is not None]
    if not found:
        return None
    return f"Change of the {what}: " + "; ".join(f"{_changed(c)} at {c.conditions}" for c in found) + "."


def _changed(c: Claim) -> str:
    beside = [f"computed {c.computed:+.1%}"] if c.computed is not None else []
    beside += [f"{c.ci_low:+.1%} to {c.ci_high:+.1%}"] if None not in (c.ci_low, c.ci_high) else []
    return f"{c.measured:+.1%}" + (f" ({', '.join(beside)})" if beside else "")


def within_noise(claims: Iterable[Claim], quantity: str, floor: float | None) -> str | None:
    """Names the relative differences that two starts of one configuration could show as well; None where none could.

    `floor`: the machine's noise floor between starts; None where it was not measured.
    """
    found = [c for c in claims if c.quantity == quantity and c.measured is not None]
    small = [f"{c.measured:+.1%} at {c.conditions}" for c in found if floor is not None and abs(c.measured) < floor]
    if not small:
        return None
    return f"Below the noise floor of {floor:.1%} between two starts of one configuration: {'; '.join(small)}."


def longest_phase(claims: Iterable[Claim], where: Mapping[str, object]) -> str | None:
    """Which phase of a start takes the most of it. `where`: the start's conditions, without the phase."""
    start = conditions_text(where) + ";phase="
    found = [c for c in claims if c.quantity == "phase_s" and c.conditions.startswith(start) and c.measured is not None]
    total = sum(c.measured for c in found)
    if not total:
        return None
    most = max(found, key=lambda c: c.measured)
    name = most.conditions.removeprefix(start)
    return f"{conditions_text(where)}: {name} takes {most.measured:.1f} of {total:.1f} s ({most.measured / total:.0%})."


def saved_per_step(points: Iterable[tuple[int, float | None, float | None]], model: str) -> str | None:
    """What graphs or compilation save of a decode step. `points`: clients, step with, step without (s)."""
    saved = [(clients, slow - fast) for clients, fast, slow in points if None not in (fast, slow)]
    if len(saved) < 2:
        return None
    listed = ", ".join(f"{seconds * 1e3:.2g} ms at c={clients}" for clients, seconds in saved)
    grows = saved[-1][1] > 1.5 * abs(saved[0][1])
    why = "grows with the batch: not only the starting of kernels is saved" if grows else "does not grow with the batch"
    return f"{model}: a decode step saves {listed}; it {why}."


def recompiled(name: str, server: Mapping | None, cold: Mapping, warm: Mapping) -> str | None:
    """How much of the compile phase is left where the caches are filled, and the log's own reason for it."""
    if not server or not cold.get("compile") or "compile" not in warm:
        return None
    warnings = [w for w in server["startup"].get("warnings") or () if "Compiling model again" in w]
    said = f" The log says why: {warnings[0].partition('reason:')[2].strip()}." if warnings else ""
    share = f"{warm['compile']:.1f} of {cold['compile']:.1f} s"
    return f"{name}: with filled caches the compile phase still takes {share}.{said}"


def moved_memory(cold: Mapping[str, float], warm: Mapping[str, float], server: str) -> str | None:
    """Which part of the memory explains that two starts get KV pools of different sizes."""
    moved = startup.moved_most(cold, warm)
    if moved is None or not {"kv"} <= cold.keys() & warm.keys():
        return None
    grown, (part, change) = warm["kv"] - cold["kv"], moved
    return (
        f"{server}: the pool changes by {grown / 2**20:+,.0f} MiB from the cold to the warm start; of the memory in "
        f"use {part.replace('_', ' ')} changes most, by {change / 2**20:+,.0f} MiB."
    )


def cross_check(claims: Iterable[Claim]) -> str | None:
    """What `vllm bench serve` read beside kvlab, quantity by quantity, and whether definitions account for it."""
    found = {c.quantity.removeprefix("cross_check_"): c for c in claims}
    changes = {name.removesuffix("_change"): c for name, c in found.items() if name.endswith("_change")}
    told = [f"{_READ_AS[name]} {_changed(c)}" for name, c in changes.items() if c.measured is not None]
    if not told:
        reasons = [c.reason for c in changes.values() if c.reason]
        return f"There is no cross-check: {reasons[0]}." if reasons else None
    step, ttft = changes["itl_p50_s"].measured, changes["ttft_p50_s"].measured
    said = f"vllm bench serve against kvlab: {', '.join(told)}."
    if step is not None and abs(step) > CROSS_CHECK:
        return f"{said} Gaps mean the same in both tools: so large a difference is the server's or the machine's own."
    means = [changes[name].measured for name in ("tpot_p50_s", "throughput_whole_tok_s")]
    if any(value is not None and abs(value) > CROSS_CHECK for value in means):
        return (
            f"{said} Median gaps agree within {CROSS_CHECK:.0%}, means do not: single long pauses in one of the turns, "
            "which no definition explains. Other programs on the machine do that; measure again on a quiet one."
        )
    if ttft is not None and ttft > 0:
        return f"{said} Gaps agree within {CROSS_CHECK:.0%}; the longer time to the first token is its client's."
    return f"{said} Gaps agree within {CROSS_CHECK:.0%}; between single requests the first token varies by more."


def not_measured(claims: Iterable[Claim], *, language: str = "en") -> str | None:
    """What was not measured and what failed, each counted by itself, with the reasons."""
    claims = list(claims)
    by_state = {state: [c for c in claims if c.state == state] for state in ("not measured", "failed")}
    told = [lacking.told(missing, state, language) for state, missing in by_state.items()]
    return sentences(language)["sentence_gap"].join(filter(None, told)) or None
