"""Where the time of a request goes, and which part of it a change of the server adds to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvlab.claims import Claim
from kvlab.display import number
from kvlab.results import Result, rows
from kvlab.stats import Estimate, paired_difference

PARTS = ("queue", "prefill", "rest", "decode")
MEANING = {
    "queue": "waiting to be scheduled",
    "prefill": "from the first scheduling to the first token",
    "rest": "on the way in and out: reading, hashing blocks, streaming",
    "decode": "from the first token to the last",
}


def parts_s(result: Result) -> dict[str, float | None]:
    """Mean seconds of a request by part; `ttft` and `latency` are sums of parts.

    Queue and prefill come from the server's histograms, TTFT and latency from the client; `rest` is what the client
    waited for its first token beyond both. Null where either side is missing.
    """
    table, queue, prefill = rows(result), result.value("queue_mean_s"), result.value("prefill_mean_s")
    if not len(table):
        return dict.fromkeys((*PARTS, "ttft", "latency"))
    ttft, latency = float(table["ttft_s"].mean()), float(table["latency_s"].mean())
    known = queue is not None and prefill is not None
    return {
        "queue": queue,
        "prefill": prefill,
        "rest": ttft - queue - prefill if known else None,
        "decode": latency - ttft,
        "ttft": ttft,
        "latency": latency,
    }


def added_s(changed: Sequence[Result], base: Sequence[Result]) -> dict[str, Estimate]:
    """Seconds that a change adds to each part of a request, over repeats in pairs, with their intervals."""
    first, second = ([parts_s(result) for result in side] for side in (base, changed))
    names = (*PARTS, "ttft", "latency")
    return {name: paired_difference([p[name] for p in first], [p[name] for p in second]) for name in names}


def per_token_s(changed: Sequence[Result], base: Sequence[Result]) -> Estimate:
    """Seconds of wall time that a change adds to each prompt token, over repeats in pairs."""
    sides = [[_wall_per_token(result) for result in side] for side in (base, changed)]
    return paired_difference(*sides)


def _wall_per_token(result: Result) -> float | None:
    wall, table = result.value("wall_s"), rows(result)
    return None if wall is None or not len(table) else wall / float(table["prompt_tokens"].sum())


def littles_latency_s(clients: int, per_token: float, prompt_tokens: int) -> float:
    """Seconds that a closed loop adds to each latency when every request costs the server `per_token` more a token.

    Little's law: clients = rate x latency, so the latency grows by clients x the growth of 1 / rate.
    """
    return clients * per_token * prompt_tokens


def sentence(stated: Iterable[Claim], prefix: str) -> str | None:
    """Which parts of a request a change adds to: those whose interval excludes 0, and the rest."""
    found = {c.quantity.removeprefix(prefix).removesuffix("_s"): c for c in stated if c.quantity.startswith(prefix)}
    found = {name: c for name, c in found.items() if name in PARTS and c.measured is not None and c.ci_low is not None}
    if not found:
        return None
    clear = [name for name, c in found.items() if not c.ci_low <= 0 <= c.ci_high]
    listed = "; ".join(
        f"{name} {_signed(c.measured)} ({_signed(c.ci_low)} to {_signed(c.ci_high)})" for name, c in found.items()
    )
    told = (
        f"distinguishable from 0: {', '.join(f'{name} ({MEANING[name]})' for name in clear)}"
        if clear
        else "none of them distinguishable from 0"
    )
    return f"Added to a request, by part: {listed}; {told}."


def _signed(seconds: float) -> str:
    return ("+" if seconds > 0 else "−" if seconds < 0 else "") + number(abs(seconds), "s")
