"""Seconds for the block account: each of its steps priced by the step-time model and the prefill model. Pure."""

from __future__ import annotations

from itertools import accumulate
from statistics import mean, median
from typing import NamedTuple

from kvlab.blocks import Account, Step
from kvlab.predict import PrefillModel
from kvlab.steptime import StepModel


class Timed(NamedTuple):
    """What a closed loop measures. Means are over all requests.

    `throughput_tok_s` counts from the start to the first end after the last start, when all clients are served;
    `queue_s` is the wait for the first admission; `paused_s` the time between a preemption and the next token.
    """

    throughput_tok_s: float | None
    throughput_whole_tok_s: float
    ttft_p50_s: float
    queue_s: float
    paused_s: float
    wall_s: float


def step_s(step: Step, model: StepModel, prefill: PrefillModel) -> float:
    """Seconds of one step: the decode step of its running requests, and the prefill beside it."""
    base = model.step_s(step.decoding, step.kv_tokens) if step.decoding else prefill.fixed_s
    return base + prefill.per_token_s * step.prefill_tokens + prefill.per_pair_s * step.prefill_pairs


def timed(account: Account, model: StepModel, prefill: PrefillModel) -> Timed:
    """The account in seconds. A request starts when its client's last one has ended, before it reaches the server."""
    ends = list(accumulate(step_s(step, model, prefill) for step in account.steps))
    before = [0.0, *ends]  # before[k]: when step k begins
    starts = _starts(account, ends)
    lives = account.lives
    return Timed(
        _plateau(account, ends, starts),
        sum(step.output_tokens for step in account.steps) / ends[-1],
        median(ends[life.first_token] - start for life, start in zip(lives, starts, strict=True)),
        mean(max(0.0, before[life.admitted] - start) for life, start in zip(lives, starts, strict=True)),
        sum(ends[e.resumed_step] - before[e.step] for e in account.evictions) / len(lives),
        ends[-1],
    )


def _starts(account: Account, ends: list[float]) -> list[float]:
    """When each request leaves its client: 0 for the first ones, then the end of the requests in their order."""
    first_end = min(life.last_token for life in account.lives)
    first = sum(life.arrived <= first_end for life in account.lives)
    finished = sorted(ends[life.last_token] for life in account.lives)
    return [0.0] * first + finished[: len(account.lives) - first]


def _plateau(account: Account, ends: list[float], starts: list[float]) -> float | None:
    after = [end for life in account.lives if (end := ends[life.last_token]) > starts[-1]]
    if starts[-1] == 0 or not after:
        return None
    until = min(after)
    return sum(step.output_tokens for step, end in zip(account.steps, ends, strict=True) if end <= until) / until
