"""KV formats against their base: verdicts, claims and the pictures of the fp8 section."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes

from kvlab import beside, claims, perplexity, plot, store
from kvlab.claims import Claim
from kvlab.profile import KvFormat
from kvlab.results import Result, across
from kvlab.stats import Estimate

SECTION = "fp8_kv"
FP8 = "fp8"
MEANING = {  # what the picture writes where a format has no number, by the first word of the reason
    "ignored": "ignored: the flag changes no number",
    "wrong": "wrong: reads as another text",
    "refused": "refused: no server starts with it",
}


class Compared(NamedTuple):
    """A format against its base; `change` and `verdict` of a base say nothing."""

    perplexity: Estimate | None
    change: Estimate | None
    token_change: Estimate | None
    verdict: perplexity.Verdict
    capacity_tokens: float | None
    backend: str | None


class Row(NamedTuple):
    """One line of the picture: a change with its interval, or the word for why there is none."""

    label: str
    change: float | None
    low: float | None
    high: float | None
    note: str
    machine: str


def compare(tried: Sequence[Result], base: Sequence[Result] | None) -> Compared:
    """A format's repeats against the first run of its base; for a base, that its own repeats agree."""
    summaries = [summary(result) for result in tried]
    reference = summary(base[0]) if base else summaries[0]
    if base is None:
        again = perplexity.judge(reference, summaries[1:]) if len(summaries) > 1 else None
        state = "wrong" if again and again.state == "wrong" else "ok" if summaries[0] else "not measured"
        verdict = perplexity.Verdict(state, again.why if state == "wrong" else None)
    else:
        verdict = perplexity.judge(reference, summaries)
    if verdict.state == "not measured":
        reasons = [result.reason for result in [*tried, *(base or [])] if result.reason]
        verdict = perplexity.Verdict(verdict.state, next(iter(reasons), verdict.why))
    change = perplexity.change(reference, summaries[0]) if base else None
    moved = perplexity.token_change(reference, summaries[0]) if base else None
    server = tried[0].run.manifest["server"] if tried[0].run else {}
    blocks = server.get("capacity", {})
    capacity = (blocks.get("metric_blocks") or 0) * (blocks.get("metric_block_size") or 0) or None
    backend = server.get("startup", {}).get("attention_backend")
    return Compared(perplexity.perplexity(summaries[0]), change, moved, verdict, capacity, backend)


def summary(result: Result) -> dict | None:
    """The stored numbers of a run; None where there is none."""
    return None if result.run is None else result.run.manifest["summary"]


def text_name(text: str) -> str:
    """A text as a condition: "heldout", or the file's name."""
    return Path(text).stem.replace(" ", "-")


def table(formats: Sequence[KvFormat], found: dict[str, Compared]) -> pd.DataFrame:
    """One line a format, for the eye."""
    lines = []
    for f in formats:
        c = found[f.name]
        line = {"format": f.name, "base": f.base or "", "capacity": c.capacity_tokens, "backend": c.backend or ""}
        line["perplexity"] = c.perplexity.value if c.perplexity else None
        line["change"] = c.change.value if c.change else None
        line["nats a token"] = c.token_change.value if c.token_change else None
        lines.append(line | {"verdict": c.verdict.state, "why": c.verdict.why or ""})
    return pd.DataFrame(lines).set_index("format")


def state(lab, f: KvFormat, c: Compared, tried: Sequence[Result], of_text: dict) -> list[Claim]:
    """Claims of one format: perplexity and its change. One that is ignored or wrong has failed, whatever it printed."""
    where = of_text | {"kv_dtype": f.name}
    given = {"perplexity": (where, c.perplexity, "ppl")}
    if f.base:
        given["perplexity_change"] = (where | {"over": f.base}, c.change, "ratio")
        given["token_logprob_change"] = (where | {"over": f.base}, c.token_change, "nats")
    rows = []
    for quantity, (conditions, value, unit) in given.items():
        values = {"measured": value} if c.verdict.state == "ok" else {"reason": c.verdict.why}
        failed = c.verdict.state in ("ignored", "wrong") or any(r.failed for r in tried)
        rows.append(lab.claim(quantity, conditions, unit=unit, results=tried, failed=failed, **values))
    return rows


def verdicts(formats: Sequence[KvFormat], found: dict[str, Compared]) -> str | None:
    """Which formats did not do what their name says."""
    bad = [f"{f.name} is {found[f.name].verdict.why}" for f in formats if found[f.name].verdict.state == "wrong"]
    bad += [f"{f.name} is {found[f.name].verdict.why}" for f in formats if found[f.name].verdict.state == "ignored"]
    return f"Accepted by the engine, and not what they say: {'; '.join(bad)}." if bad else None


def direction(stated: Sequence[Claim]) -> str | None:
    """In which direction the perplexity goes, and with which intervals."""
    said = []
    for c in stated:
        if c.quantity != "perplexity_change" or c.measured is None:
            continue
        name = claims.parse_conditions(c.conditions)["kv_dtype"]
        if c.ci_low is None or c.ci_high is None:
            said.append(f"{name} {c.measured:+.2%}, too few windows for an interval")
            continue
        word = "no difference can be told" if c.ci_low <= 0 <= c.ci_high else "lower" if c.measured < 0 else "higher"
        said.append(f"{name} {c.measured:+.2%} ({c.ci_low:+.2%} to {c.ci_high:+.2%}): {word}")
    return f"Perplexity against the base, paired: {'; '.join(said)}." if said else None


def single_tokens(stated: Sequence[Claim]) -> str | None:
    """How far single tokens move, which the mean hides."""
    found = [c for c in stated if c.quantity == "token_logprob_change" and c.measured is not None]
    listed = [f"{claims.parse_conditions(c.conditions)['kv_dtype']} {c.measured:.3f}" for c in found]
    if not listed:
        return None
    return f"The mean hides what single tokens gain and lose; each one moves on average by (nats): {', '.join(listed)}."


# -- pictures -----------------------------------------------------------------------------------------------------


def base_and_fp8(machine: str, quantity: str, **where) -> tuple[float, float] | None:
    """A machine's (base, fp8) of a quantity; whatever is not fp8 is the base. None where one is missing."""
    stored = claims.read(store.machine_dir(machine))
    stored = stored[(stored["section"] == SECTION) & (stored["quantity"] == quantity)]
    kinds = {claims.parse_conditions(text).get("kv_dtype") for text in stored["conditions"].dropna()}
    values = [beside.value(machine, SECTION, quantity, kv_dtype=kind, **where) for kind in sorted(kinds - {FP8, None})]
    base, fp8 = next(filter(None, values), None), beside.value(machine, SECTION, quantity, kv_dtype=FP8, **where)
    return (base, fp8) if base and fp8 else None


def capacity_ratio(machine: str) -> float | None:
    """Capacity with fp8 ÷ with the base cache; the article states it where it is about capacity."""
    found = [beside.value(machine, section, "capacity_ratio", kv_dtype=FP8) for section in (SECTION, "kv_capacity")]
    return next(filter(None, found), None)


def draw_pair(axis: Axes, y: float, base_s: float, fp8_s: float, ratio: float | None = None) -> None:
    """One machine's times with the base cache and with fp8 in one row, with their ratio, or the one that is stated."""
    first = y == 0
    axis.plot([fp8_s * 1e3, base_s * 1e3], [y, y], color="#bbbbbb", lw=2, zorder=2)
    axis.plot([base_s * 1e3], [y], "o", color=plot.MISS, zorder=3, label="base" if first else None)
    axis.plot([fp8_s * 1e3], [y], "o", color=plot.HIT, zorder=3, label=FP8 if first else None)
    middle = (base_s * fp8_s) ** 0.5 * 1e3
    said = f"{ratio or base_s / fp8_s:.1f}×"
    axis.annotate(said, (middle, y), xytext=(0, 6), textcoords="offset points", ha="center")


def draw_turns(
    axis: Axes, y: float, arms: Sequence[Sequence[Result]], quantity: str, computed_s: Sequence[float | None]
) -> None:
    """Base and fp8 of one machine: computed as bars, each turn as a small point, and the intervals of their means (s).

    One turn has nothing to add to its own point.
    """
    for results, value_s, color in zip(arms, computed_s, (plot.MISS, plot.HIT), strict=True):
        label = (lambda text: text) if color == plot.MISS else (lambda text: None)
        if value_s:
            axis.plot([1e3 * value_s], [y], "|", ms=22, mew=2, color=plot.COMPUTED, label=label("computed"))
        each = [1e3 * value for r in results if (value := r.value(quantity)) is not None]
        if len(each) < 2:
            continue
        axis.plot(each, [y + 0.17] * len(each), "o", ms=3.5, color=color, alpha=0.7, label=label("one turn"))
        mean = across(results, quantity)
        if mean.low is not None:
            style = {"lw": 5, "alpha": 0.5, "solid_capstyle": "butt", "label": label("95% interval")}
            axis.plot([1e3 * mean.low, 1e3 * mean.high], [y, y], color=color, **style)


def say_change(axis: Axes, c: Claim) -> None:
    """Writes a relative change into the picture of its turns: its mean and interval, or why there is none."""
    if c.measured is None:
        return
    known = c.ci_low is not None and c.ci_high is not None
    interval = f"95%: {c.ci_low:+.1%} to {c.ci_high:+.1%}" if known else c.reason or "no interval"
    said = f"fp8 against base: {c.measured:+.1%}\n({interval})"
    clear = {"fc": "white", "ec": "none", "alpha": 0.8, "pad": 1}  # turns far apart may run through it
    axis.text(0.03, 0.36, said, transform=axis.transAxes, va="top", bbox=clear, zorder=6)


def rows(own: str, stated: Sequence[Claim]) -> list[Row]:
    """The lines of the picture: this machine's formats, then the other machines' and the article's pairs."""
    found = [_row(c, own) for c in stated if c.quantity == "perplexity_change"]
    shown = ("measured", "failed")
    for machine in store.machines():
        if machine != own:
            others = claims.from_frame(claims.read(store.machine_dir(machine)))
            section = [c for c in others if c.section == SECTION]
            found += [_row(c, machine) for c in section if c.quantity == "perplexity_change" and c.state in shown]
            found += _published(section, machine) if machine == "article" else []
    return found


def _row(c: Claim, machine: str) -> Row:
    name = claims.parse_conditions(c.conditions)["kv_dtype"]
    short = next((words for word, words in MEANING.items() if (c.reason or "").startswith(word)), c.state)
    note = "" if c.measured is not None else MEANING["refused"] if c.state == short == "failed" else short
    return Row(name, c.measured, c.ci_low, c.ci_high, note, machine)


def _published(section: list[Claim], machine: str) -> list[Row]:
    """The article states perplexities, not changes: fp8 against bf16 of the same text and attention backend."""
    stated = {}
    for c in section:
        if c.quantity == "perplexity":
            where = claims.parse_conditions(c.conditions)
            stated[where.get("text"), where.get("backend"), where["kv_dtype"]] = c.measured
    pairs = []
    for (text, backend, kind), value in stated.items():
        base = stated.get((text, backend, "bf16"))
        if kind == FP8 and base:
            label = " ".join(filter(None, ["fp8,", text, f"backend {backend}" if backend else "text"]))
            pairs.append(Row(label, value / base - 1, None, None, "", machine))
    return pairs


def draw_changes(axis: Axes, lines: Sequence[Row]) -> None:
    """Changes in percent with their intervals, one line a format; what is ignored or wrong is named in its line."""
    axis.axvline(0, color=plot.COMPUTED, lw=1)
    for y, line in enumerate(lines):
        style = plot.machine_style(line.machine)
        if line.change is None:
            axis.annotate(line.note, (0, y), xytext=(6, 0), textcoords="offset points", va="center")
            continue
        if line.low is not None and line.high is not None:
            axis.plot([100 * line.low, 100 * line.high], [y, y], color=style["color"], lw=2)
        axis.plot([100 * line.change], [y], zorder=4, **style)
    labels = [f"{line.machine}: {line.label}" for line in lines]
    axis.set_yticks(range(len(lines)), labels)
    axis.set_ylim(max(len(lines), 1) - 0.4, -0.6)
    axis.set_xlabel("change of the perplexity, %")
