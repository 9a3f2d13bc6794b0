"""The block account against a scheduler that walks through every token of every request and names every block."""

import math
import random
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from kvlab.blocks import Account, Engine, Eviction, Job, Life, Step, closed_loop
from kvlab.errors import ConfigError


class Blocks:
    """`blocks` usable blocks. `free` is the queue of the free ones, the next one to be taken first."""

    def __init__(self, blocks: int, caching: bool):
        self.free: OrderedDict[int, None] = OrderedDict.fromkeys(range(blocks))
        self.caching = caching
        self.block_of: dict[tuple[int, int], int] = {}
        self.content: dict[int, tuple[int, int]] = {}

    def take(self) -> int:
        """A free block, whose old content is forgotten."""
        block, _ = self.free.popitem(last=False)
        content = self.content.pop(block, None)
        if content is not None and self.block_of.get(content) == block:
            del self.block_of[content]
        return block

    def keep(self, request: int, index: int, block: int) -> None:
        """Block `index` of the request is full: it can be found again."""
        if self.caching:
            self.block_of[request, index] = block
            self.content[block] = (request, index)

    def release(self, blocks: list[int]) -> None:
        """Frees the blocks of a request, its last one first."""
        hashed = [block for block in reversed(blocks) if block in self.content]
        plain = [block for block in reversed(blocks) if block not in self.content]
        self.free.update(OrderedDict.fromkeys(hashed))
        for block in reversed(plain):
            self.free[block] = None
            self.free.move_to_end(block, last=False)

    def found(self, request: int, at_most: int) -> list[int]:
        """The free blocks that still hold the beginning of the request."""
        blocks = []
        for index in range(at_most):
            block = self.block_of.get((request, index))
            if block is None or block not in self.free:
                break
            blocks.append(block)
        return blocks

    def adopt(self, blocks: list[int]) -> None:
        """Takes blocks that were found, with their content."""
        for block in blocks:
            del self.free[block]


@dataclass
class Request:
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


class ByToken:
    """The scheduler's own loop, with the numbers of `closed_loop`."""

    def __init__(self, engine: Engine, clients: int, jobs: Sequence[Job], absent_steps: int, per_step: int):
        self.absent_steps = absent_steps
        self.engine, self.pool = engine, Blocks(engine.usable_blocks, engine.prefix_caching)
        self.requests = [Request(i, job, 0, tokens=job.input_tokens) for i, job in enumerate(jobs)]
        self.unsent = deque(self.requests)
        self.coming: deque[tuple[int, Request]] = deque()
        for i in range(min(clients, len(jobs))):
            self._send(math.ceil(i / per_step))
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
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

    def _grow(self) -> tuple[list[tuple[Request, int]], int]:
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

    def _extend(self, request: Request, tokens: int) -> bool:
        """Gives the request the blocks for that many tokens; False where too few are free."""
        needed = math.ceil(tokens / self.engine.block_size) - len(request.blocks)
        if needed > len(self.pool.free):
            return False
        request.blocks += [self.pool.take() for _ in range(needed)]
        for index in range(request.computed // self.engine.block_size, tokens // self.engine.block_size):
            self.pool.keep(request.index, index, request.blocks[index])
        return True

    def _evict(self, request: Request) -> None:
        self.pool.release(request.blocks)
        request.eviction = (self.now, request.computed)
        request.blocks, request.computed = [], 0
        self.waiting.appendleft(request)

    def _admit(self, scheduled: list[tuple[Request, int]], budget: int) -> str | None:
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

    def _compute(self, request: Request, new: int) -> None:
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


def _work(scheduled: list[tuple[Request, int]]) -> tuple[int, int, int, float, int]:
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


def random_case(seed):
    """A small load, most of them in a pool that is too small for it."""
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4, 16])
    jobs = [Job(draw.randint(1, 12 * size), draw.randint(1, 10 * size)) for _ in range(draw.randint(1, 30))]
    if draw.random() < 0.5:
        jobs = jobs[:1] * len(jobs)
    clients = draw.randint(1, 12)
    longest = max(math.ceil((job.input_tokens + job.output_tokens - 1) / size) for job in jobs)
    engine = Engine(
        longest + draw.randint(0, 3 * longest),
        size,
        draw.choice([1, 3, 8, 64]),
        draw.choice([12, 13, 5 * size + 12, 2048]),
        draw.random() < 0.7,
        draw.random() < 0.7,
    )
    return engine, clients, jobs, draw.choice([0, 1, 3]), draw.choice([1, 2, clients])


@pytest.mark.parametrize("first", range(0, 600, 100))
def test_the_account_equals_a_walk_through_every_token(first):
    evictions = cached = partly = 0
    for seed in range(first, first + 100):
        engine, clients, jobs, absent, per_step = random_case(seed)
        account = closed_loop(engine, clients, jobs, absent_steps=absent, per_step=per_step)
        assert account == ByToken(engine, clients, jobs, absent, per_step).run(), f"seed {seed}"
        evictions += account.preemptions
        cached += account.cached_tokens
        partly += sum(
            0 < e.cached_tokens < e.computed_tokens // engine.block_size * engine.block_size for e in account.evictions
        )
    assert evictions > 100 and cached > 100 and partly > 5  # the cases reach what they are for


@pytest.mark.parametrize("caching", [True, False])
def test_a_load_of_real_size_equals_it_too(caching):
    engine, jobs = Engine(31, 32, 32, 256, caching), [Job(128, 256)] * 24
    account = closed_loop(engine, 12, jobs)
    assert account.preemptions > 10
    assert account == ByToken(engine, 12, jobs, 1, 12).run()


def test_steps_too_small_for_a_token_of_each_request_are_refused():
    engine, jobs = Engine(100, 16, max_num_seqs=8, max_num_batched_tokens=4), [Job(16, 8)] * 8
    assert closed_loop(engine, 4, jobs) == ByToken(engine, 4, jobs, 1, 4).run()
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        closed_loop(engine, 5, jobs)
