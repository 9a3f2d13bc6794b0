"""The engine's own account of its steps, from the log of a server started with --enable-logging-iteration-details.

No counter of /metrics holds what a preempted request computes again; the step lines do: a resumed request stands among
the generation requests, with all the tokens of its prefill. The times in these lines are not used: where the engine
runs its worker in its own process they are those of queueing the step.
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


def parse_iterations(text: str) -> pd.DataFrame:
    """One row a step that computed something, in the order of the log; no rows where the flag was not set."""
    rows = [list(map(int, match.groups())) for match in LINE.finditer(text)]
    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype="int64")
    return frame[(frame["context_tokens"] + frame["generation_tokens"]) > 0].reset_index(drop=True)


def last_load(steps: pd.DataFrame, prompt_tokens: int) -> pd.DataFrame | None:
    """The steps of the last load, whose prompts held so many tokens, none of them cached.

    A server's log grows from load to load; null where no step begins exactly with the load's first prompt.
    """
    from_end = steps["context_tokens"][::-1].cumsum()[::-1]
    exact = steps[(from_end == prompt_tokens) & (steps["context_tokens"] > 0)]
    return None if exact.empty or not prompt_tokens else steps.loc[exact.index[-1] :].reset_index(drop=True)


def recomputed_tokens(steps: pd.DataFrame, prompt_tokens: int, output_tokens: int, requests: int) -> int:
    """Tokens computed more than once: all that the steps computed - (prompts + outputs - one a request).

    The last output token of a request is never an input.
    """
    computed = steps["context_tokens"].sum() + steps["generation_tokens"].sum()
    return int(computed) - (prompt_tokens + output_tokens - requests)


def resumes(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps in which resumed requests were prefilled again: more generation tokens than generation requests."""
    again = steps["generation_tokens"] - steps["generation_requests"]
    return steps[again > 0].assign(again=again[again > 0] + 1).reset_index(drop=True)
