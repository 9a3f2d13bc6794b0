"""The block account: what vLLM's scheduler does with the KV pool, step by step, without a model or a clock.

A request is admitted when the blocks of all its tokens are free, and only in steps that evict nobody; it grows by one
block every block_size tokens; when no block is free the request admitted last is evicted, loses all its blocks, goes
to the head of the queue, and computes its prompt and its output so far again. With prefix caching a freed block keeps
its content until another request takes it, so a part may be found again. Source: schedule(), _preempt_request() and
free_blocks() of vLLM's V1 scheduler and block pool, first come first served.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvlab.block_account import Account, Engine, Eviction, Job, Life, Step
from kvlab.block_pool import BlockPool, Stretch
from kvlab.config import ServerConfig
from kvlab.errors import ConfigError


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
    the server. Raises ConfigError for a request that does not fit even alone, and for steps too small for all requests.
    """
    running = min(engine.max_num_seqs, clients, len(jobs))
    if engine.max_num_batched_tokens < running:
        raise ConfigError(
            f"A step of {engine.max_num_batched_tokens} tokens leaves some of {running} running requests without one.",
            cause="max_num_batched_tokens is smaller than max_num_seqs, with which vLLM does not start",
            next_step="set max_num_batched_tokens to max_num_seqs or more",
        )
    for job in jobs:
        needed = _ceil(job.input_tokens + max(0, job.output_tokens - 1), engine.block_size)
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


def _ceil(tokens: int, size: int) -> int:
    return -(-tokens // size)


@dataclass(eq=False, slots=True)
class _Request:
    index: int
    job: Job
    arrived: int = 0
    computed: int = 0  # not kept up to date while it decodes: then it is step - since
    since: int = 0
    tokens: int = 0
    end: int = -1  # the step of its last token, known as soon as it decodes
    admitted: int = -1
    first_token: int = -1
    last_token: int = -1
    kept: Stretch = field(default_factory=Stretch)  # what an eviction left of it in the free queue
    eviction: tuple[int, int] | None = None  # step and computed tokens of the last one, until it is back


class _Loop:
    """Requests that decode advance together: a step costs the same for one of them as for a hundred.

    Only their blocks and their ends differ: `growing` holds them by the remainder of the steps in which they start a
    block, `ending` by the step of their last token. Both, like `running`, are in the order of admission. At most one
    request, the one admitted last, is still in its prefill when a step ends: `partial`.
    """

    def __init__(self, engine: Engine, clients: int, jobs: Sequence[Job], absent_steps: int, per_step: int):
        self.engine, self.absent_steps = engine, absent_steps
        self.pool = BlockPool(engine.usable_blocks, engine.prefix_caching)
        self.requests = [_Request(i, job, tokens=job.input_tokens) for i, job in enumerate(jobs)]
        self.unsent = deque(self.requests)
        self.coming: deque[tuple[int, _Request]] = deque()
        for i in range(min(clients, len(jobs))):
            self._send(_ceil(i, per_step))
        self.waiting: deque[_Request] = deque()
        self.running: dict[_Request, None] = {}
        self.growing: list[dict[_Request, None]] = [{} for _ in range(engine.block_size)]
        self.ending: defaultdict[int, dict[_Request, None]] = defaultdict(dict)
        self.partial: _Request | None = None
        self.kv_tokens = 0  # computed by all the requests that decode
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
        self._grow()
        decoding = len(self.running) - (self.partial is not None)
        prefills, budget = self._continue(self.engine.max_num_batched_tokens - decoding)
        evicted = len(self.waiting) - before
        held_by = "kv" if evicted else self._admit(prefills, budget)
        work = self._compute(decoding, prefills)
        for request in self.ending.pop(self.now, ()):
            self._finish(request)
        used = self.engine.usable_blocks - self.pool.free
        self.steps.append(Step(*work, len(self.running), len(self.waiting), used, evicted, held_by))

    def _grow(self) -> None:
        """A block for each request that starts one; the requests admitted last are evicted for the first ones."""
        growing = self.growing[self.now % self.engine.block_size]
        if len(growing) <= self.pool.free:
            self.pool.take(len(growing))
            return
        for request in tuple(growing):
            while request in self.running and not self.pool.free:
                self._evict()
            if request not in self.running:
                return
            self.pool.take(1)

    def _continue(self, budget: int) -> tuple[list[tuple[_Request, int]], int]:
        """The next chunk of the prompt that the last step left unfinished, and the tokens left after it."""
        request, size = self.partial, self.engine.block_size
        if request is None:
            return [], budget
        new = min(request.tokens - request.computed, budget)
        needed = _ceil(request.computed + new, size) - _ceil(request.computed, size)
        if needed > self.pool.free:
            self._evict()
            return [], budget
        self.pool.take(needed)
        self.partial = None
        return [(request, new)], budget - new

    def _evict(self) -> None:
        """Evicts the request admitted last."""
        request, _ = self.running.popitem()
        if request is self.partial:
            self.partial = None
        else:
            self._stop_decoding(request, self.now)
            request.tokens = request.computed + 1
        request.kept = self._release(request)
        request.eviction = (self.now, request.computed)
        request.computed = 0
        self.waiting.appendleft(request)

    def _release(self, request: _Request) -> Stretch:
        full, rest = divmod(request.computed, self.engine.block_size)
        return self.pool.release(full, 1 if rest else 0)

    def _admit(self, prefills: list[tuple[_Request, int]], budget: int) -> str | None:
        """Admits from the head of the queue; returns what keeps the next one waiting."""
        size = self.engine.block_size
        while self.waiting and budget > 0:
            if len(self.running) >= self.engine.max_num_seqs:
                return "max_num_seqs"
            request = self.waiting[0]
            cached = request.kept.blocks * size
            new = min(request.tokens - cached, budget)
            asked = request.tokens if self.engine.reserve_input else cached + new
            if _ceil(asked, size) > self.pool.free:
                return "kv"
            self.pool.adopt(request.kept)
            request.computed = cached
            self.pool.take(_ceil(cached + new, size) - cached // size)
            self.running[self.waiting.popleft()] = None
            prefills.append((request, new))
            budget -= new
            if request.admitted < 0:
                request.admitted = self.now
            if request.eviction is not None:
                step, computed = request.eviction
                self.evictions.append(Eviction(step, request.index, computed, self.now, cached))
                request.eviction = None
        return None

    def _compute(self, decoding: int, prefills: list[tuple[_Request, int]]) -> tuple[int, int, int, float, int]:
        """Computes the step and returns its first five numbers."""
        ones, kv_tokens, tokens, pairs, outputs = decoding, self.kv_tokens, 0, 0.0, decoding
        self.kv_tokens += decoding
        for request, new in prefills:
            if new == 1:
                ones, kv_tokens = ones + 1, kv_tokens + request.computed
            else:
                tokens, pairs = tokens + new, pairs + new * (request.computed + new / 2)
            request.computed += new
            if request.computed < request.tokens:
                self.partial = request
            else:
                outputs += 1
                self._start_decoding(request)
        return ones, kv_tokens, tokens, pairs, outputs

    def _start_decoding(self, request: _Request) -> None:
        if request.first_token < 0:
            request.first_token = self.now
        request.since = self.now + 1 - request.computed
        request.end = self.now + request.job.input_tokens + request.job.output_tokens - 1 - request.computed
        self.growing[request.since % self.engine.block_size][request] = None
        self.ending[request.end][request] = None
        self.kv_tokens += request.computed

    def _stop_decoding(self, request: _Request, step: int) -> None:
        """Before that step; leaves its tokens in `computed`."""
        request.computed = step - request.since
        self.kv_tokens -= request.computed
        del self.growing[request.since % self.engine.block_size][request]
        if request.end >= step:
            del self.ending[request.end][request]

    def _finish(self, request: _Request) -> None:
        self._stop_decoding(request, self.now + 1)
        self._release(request)
        del self.running[request]
        request.last_token = self.now
        self._send(self.now + 1 + self.absent_steps)
