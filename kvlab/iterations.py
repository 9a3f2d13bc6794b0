"""The engine's own account of its steps, from the log of a server started with --enable-logging-iteration-details.

No counter of /metrics holds what a preempted request computes again; the step lines do. Releases write it differently:
vLLM 0.31 counts a resumed request among the generation requests; 0.26 counts the first part of its prefill among the
context requests, as if it were new, and the rest among the generation requests. So only the sum of both columns means
the same in both. The times in these lines are not used: where the engine runs its worker in its own process they are
those of queueing the step.
"""

from __future__ import annotations

import re

import pandas as pd

FLAG = "--enable-logging-iteration-details"
LINE = re.compile(
    r"Iteration\((\d+)\): (\d+) context requests, (\d+) context tokens, "
    r"(\d+) generation requests, (\d+) generation tokens"
)
COLUMNS = ("iteration", "context_requests", "context_tokens", "generation_requests", "generation_tokens")
PROBE_TOKENS = 15  # the longest workload.probe_prompt


def parse_iterations(text: str) -> pd.DataFrame:
    """One row a step that computed something, in the order of the log; no rows where the flag was not set."""
    rows = [list(map(int, match.groups())) for match in LINE.finditer(text)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype="int64")
    return frame[(frame["context_tokens"] + frame["generation_tokens"]) > 0].reset_index(drop=True)


def once(prompt_tokens: int, output_tokens: int, requests: int) -> int:
    """Tokens that a load computes without preemptions: the last output token of a request is never an input."""
    return prompt_tokens + output_tokens - requests


def last_load(steps: pd.DataFrame, tokens: int, warmup_tokens: int = 0) -> pd.DataFrame | None:
    """The steps of the last load's measured phase, which computes at least so many `tokens` (see `once`).

    A server's log grows from load to load, and each begins with a probe: a short prompt alone, one output token. Then
    comes the warm-up, drained before the measured phase starts. Null rather than a wrong start: where no probe is
    found, too little follows it, or no step ends the warm-up after exactly its tokens.
    """
    alone = (steps["context_requests"] == 1) & (steps["generation_requests"] == 0)
    idle_after = steps["generation_requests"].shift(-1) == 0  # a short rest of a prefill goes on to generate
    probes = steps[alone & (steps["context_tokens"] <= PROBE_TOKENS) & idle_after]
    if probes.empty:
        return None
    load = steps.loc[probes.index[-1] + 1 :]
    done = _tokens(load).cumsum()
    measured = load[done > warmup_tokens]
    exact = not warmup_tokens or (done == warmup_tokens).any()
    enough = _tokens(measured).sum() >= tokens > 0
    from_idle = measured["generation_requests"].head(1).eq(0).all()
    return measured.reset_index(drop=True) if exact and enough and from_idle else None


def recomputed_tokens(steps: pd.DataFrame, prompt_tokens: int, output_tokens: int, requests: int) -> int:
    """Tokens computed more than once: all that the steps computed, of both columns, less what is computed once."""
    return int(_tokens(steps).sum()) - once(prompt_tokens, output_tokens, requests)


def resumes(steps: pd.DataFrame, prompt_tokens: int) -> pd.DataFrame:
    """The steps of a load in which resumed requests were prefilled again, with the tokens of it in `again`.

    More generation tokens than generation requests, or context tokens beyond the prompts. Where 0.26 resumes requests
    while new ones still come, it is their sum alone that is exact, not the steps: the log tells the two not apart.
    """
    beyond = (steps["context_tokens"].cumsum() - prompt_tokens).clip(lower=0)
    again = beyond.diff().fillna(beyond)
    extra = steps["generation_tokens"] - steps["generation_requests"]
    again = (again + (extra + 1).where(extra > 0, 0)).astype("int64")
    return steps[again > 0].assign(again=again[again > 0]).reset_index(drop=True)


def _tokens(steps: pd.DataFrame) -> pd.Series:
    return steps["context_tokens"] + steps["generation_tokens"]
