"""What the block account takes and what it gives: a server's limits, requests, steps, evictions. See `kvlab.blocks`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Job(NamedTuple):
    """One request, in tokens."""

    input_tokens: int
    output_tokens: int


class Engine(NamedTuple):
    """The server's limits: usable blocks (without the null block), tokens a block, requests, tokens a step."""

    usable_blocks: int
    block_size: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    prefix_caching: bool = True
    reserve_input: bool = True  # False: releases that admit a request when its first chunk fits


class Eviction(NamedTuple):
    """A preemption: the tokens computed by then, and, once the request is back, how many of them were cached."""

    step: int
    request: int
    computed_tokens: int
    resumed_step: int
    cached_tokens: int

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that this preemption makes the server compute a second time."""
        return self.computed_tokens - self.cached_tokens


class Step(NamedTuple):
    """One forward pass. `decoding` requests compute one token each, with `kv_tokens` before them in the cache.

    `prefill_tokens` are all other tokens, recomputed ones included; `prefill_pairs` is the sum of n (m + n / 2) over
    their requests, n new tokens after m cached ones. `output_tokens` leave the step for the clients. `running`,
    `waiting` and `used_blocks` are what the server's gauges show at its end. `held_by` is what keeps the head of the
    queue waiting: "kv", "max_num_seqs", or null where it is only the tokens of a step.
    """

    decoding: int
    kv_tokens: int
    prefill_tokens: int
    prefill_pairs: float
    output_tokens: int
    running: int
    waiting: int
    used_blocks: int
    evicted: int
    held_by: str | None


class Life(NamedTuple):
    """Steps of one request: the first that could admit it, the one that did, and those of its first and last token."""

    arrived: int
    admitted: int
    first_token: int
    last_token: int


@dataclass(frozen=True)
class Account:
    """What became of a load. Steps in order; `lives` by request."""

    steps: tuple[Step, ...]
    evictions: tuple[Eviction, ...]
    lives: tuple[Life, ...]

    @property
    def preemptions(self) -> int:
        return len(self.evictions)

    @property
    def recomputed_tokens(self) -> int:
        """Tokens computed more than once, over all preemptions."""
        return sum(eviction.recomputed_tokens for eviction in self.evictions)

    @property
    def cached_tokens(self) -> int:
        """Tokens that resumed requests found in the prefix cache."""
        return sum(eviction.cached_tokens for eviction in self.evictions)

    @property
    def lost_tokens(self) -> int:
        """Tokens that were computed when their request was preempted: recomputed + cached."""
        return sum(eviction.computed_tokens for eviction in self.evictions)

    @property
    def max_running(self) -> int:
        return max((step.running for step in self.steps), default=0)

    @property
    def max_waiting(self) -> int:
        return max((step.waiting for step in self.steps), default=0)

    @property
    def verdict(self) -> str:
        """`eviction`, `queue` where requests wait for blocks or for max_num_seqs and none is evicted, or `free`."""
        return "eviction" if self.evictions else "queue" if any(step.held_by for step in self.steps) else "free"
