"""The block account: what vLLM's scheduler does with the KV pool, step by step, without a model or a clock.

A request is admitted when the blocks of all its tokens are free, and only in steps that evict nobody; it grows by one
block every block_size tokens; when no block is free the request admitted last is evicted, loses all its blocks, goes
to the head of the queue, and computes its prompt and its output so far again. With prefix caching a freed block keeps
its content until another request takes it, so a part may be found again. Source: schedule(), _preempt_request() and
free_blocks() of vLLM's V1 scheduler and block pool, first come first served.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvlab.block_pool import BlockPool
from kvlab.config import ServerConfig
from kvlab.errors import ConfigError


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
    def evicted_requests(self) -> int:
        """Requests that were preempted at least once."""
        return len({eviction.request for eviction in self.evictions})

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


def engine_of(server: ServerConfig, usable_blocks: int) -> Engine:
    """The limits of a server; ConfigError where one that the account needs is left to vLLM's defaults."""
    values = {name: getattr(server, name) for name in ("block_size", "max_num_seqs", "max_num_batched_tokens")}
    if missing := [name for name, value in values.items() if value is None]:
        raise ConfigError(
            f"The block account needs {', '.join(missing)}.",
            cause="the profile leaves them to vLLM, whose defaults depend on the machine",
            next_step="set them in the profile's [server]",
        )
    return Engine(usable_blocks, **values, prefix_caching=server.enable_prefix_caching is not False)


def closed_loop(
    engine: Engine, clients: int, jobs: Sequence[Job], *, absent_steps: int = 1, per_step: int | None = None
) -> Account:
    """The account of `clients` that send `jobs` in order, each its next one when its last one has ended.

    The first request is scheduled alone, as it reaches an idle server before the others; of these, `per_step` arrive
    in each further step (null: all in the second one). `absent_steps` begin before a client's next request has reached
    the server. Raises ConfigError for a request that does not fit even alone.
    """
    for job in jobs:
        needed = math.ceil((job.input_tokens + max(0, job.output_tokens - 1)) / engine.block_size)
        if needed > engine.usable_blocks or job.output_tokens < 1:
            raise ConfigError(
                f"{job.input_tokens} + {job.output_tokens} tokens cannot run in {engine.usable_blocks} blocks.",
                next_step="make the pool larger or the request shorter (and at least one token long)",
            )
    return _Loop(engine, clients, jobs, absent_steps, per_step or clients).run()


def variants(engine: Engine, clients: int, jobs: Sequence[Job]) -> list[Account]:
    """The same load with clients that start and return a little sooner or later: how much hangs on their timing.

    The first one is the nominal account.
    """
    timings = [(1, None), (0, None), (3, None), (1, 1), (1, 2), (1, 4)]
    return [closed_loop(engine, clients, jobs, absent_steps=absent, per_step=n) for absent, n in timings]


@dataclass
class _Request:
    index: int
    job: Job
    arrived: int
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    tokens: int = 0
    admitted: int = -1
    first_token: int = -1
    last_token: int = -1
    eviction: tuple[int, int] | None = None  # step and computed tokens of the last one, until it is back


class _Loop:
    def __init__(self, engine: Engine, clients: int, jobs: Sequence[Job], absent_steps: int, per_step: int):
        self.absent_steps = absent_steps
        self.engine, self.pool = engine, BlockPool(engine.usable_blocks, engine.prefix_caching)
        self.requests = [_Request(i, job, 0, tokens=job.input_tokens) for i, job in enumerate(jobs)]
        self.unsent = deque(self.requests)
        self.coming: deque[tuple[int, _Request]] = deque()
        for i in range(min(clients, len(jobs))):
            self._send(math.ceil(i / per_step))
        self.waiting: deque[_Request] = deque()
        self.running: list[_Request] = []
        self.steps: list[Step] = []
        self.evictions: list[Eviction] = []
        self.now = 0

    def run(self) -> Account:
        while self.coming or self.waiting or self.running:
            while self.coming and self.coming[0][0] <= self.now:
                self.waiting.append(self.coming.popleft()[1])
            self._step()
            self.now += 1
        lives = tuple(Life(r.arrived, r.admitted, r.first_token, r.last_token) for r in self.requests)
        return Account(tuple(self.steps), tuple(self.evictions), lives)

    def _send(self, step: int) -> None:
        if self.unsent:
            request = self.unsent.popleft()
            request.arrived = step
            self.coming.append((step, request))

    def _step(self) -> None:
        before = len(self.waiting)
        scheduled, budget = self._grow()
        evicted = len(self.waiting) - before
        held_by = "kv" if evicted else self._admit(scheduled, budget)
        work = _work(scheduled)
        for request, new in scheduled:
            self._compute(request, new)
        used = self.engine.usable_blocks - len(self.pool.free)
        self.steps.append(Step(*work, len(self.running), len(self.waiting), used, evicted, held_by))

    def _grow(self) -> tuple[list[tuple[_Request, int]], int]:
        """The running requests, in the order of their admission; the last ones are evicted for the first ones."""
        scheduled, budget, i = [], self.engine.max_num_batched_tokens, 0
        while i < len(self.running) and budget > 0:
            request = self.running[i]
            new = min(request.tokens - request.computed, budget)
            while not self._extend(request, request.computed + new):
                victim = self.running.pop()
                self._evict(victim)
                if victim is request:
                    return scheduled, budget
            scheduled.append((request, new))
            budget -= new
            i += 1
        return scheduled, budget

    def _extend(self, request: _Request, tokens: int) -> bool:
        """Gives the request the blocks for that many tokens; False where too few are free."""
        needed = math.ceil(tokens / self.engine.block_size) - len(request.blocks)
        if needed > len(self.pool.free):
            return False
        request.blocks += [self.pool.take() for _ in range(needed)]
        for index in range(request.computed // self.engine.block_size, tokens // self.engine.block_size):
            self.pool.keep(request.index, index, request.blocks[index])
        return True

    def _evict(self, request: _Request) -> None:
        self.pool.release(request.blocks)
        request.eviction = (self.now, request.computed)
        request.blocks, request.computed = [], 0
        self.waiting.appendleft(request)

    def _admit(self, scheduled: list[tuple[_Request, int]], budget: int) -> str | None:
        """Admits from the head of the queue; returns what keeps the next one waiting."""
        size = self.engine.block_size
        while self.waiting and budget > 0:
            if len(self.running) >= self.engine.max_num_seqs:
                return "max_num_seqs"
            request = self.waiting[0]
            blocks = self.pool.found(request.index, (request.tokens - 1) // size)
            new = min(request.tokens - len(blocks) * size, budget)
            asked = request.tokens if self.engine.reserve_input else len(blocks) * size + new
            if math.ceil(asked / size) > len(self.pool.free):
                return "kv"
            self.pool.adopt(blocks)
            request.blocks, request.computed = list(blocks), len(blocks) * size
            self._extend(request, request.computed + new)
            self.running.append(self.waiting.popleft())
            scheduled.append((request, new))
            budget -= new
            if request.admitted < 0:
                request.admitted = self.now
            if request.eviction is not None:
                step, computed = request.eviction
                self.evictions.append(Eviction(step, request.index, computed, self.now, len(blocks) * size))
                request.eviction = None
        return None

    def _compute(self, request: _Request, new: int) -> None:
        request.computed += new
        if request.computed < request.tokens:
            return
        request.tokens += 1
        if request.first_token < 0:
            request.first_token = self.now
        if request.tokens - request.job.input_tokens == request.job.output_tokens:
            request.last_token = self.now
            self.running.remove(request)
            self.pool.release(request.blocks)
            self._send(self.now + 1 + self.absent_steps)


def _work(scheduled: list[tuple[_Request, int]]) -> tuple[int, int, int, float, int]:
    """The first five numbers of a step, before it is computed."""
    ones = [request for request, new in scheduled if new == 1]
    others = [(request, new) for request, new in scheduled if new > 1]
    return (
        len(ones),
        sum(request.computed for request in ones),
        sum(new for _, new in others),
        sum(new * (request.computed + new / 2) for request, new in others),
        sum(request.computed + new == request.tokens for request, new in scheduled),
    )
