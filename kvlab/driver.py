"""Sends one phase of a load inside one event loop: a closed loop of clients, or requests at given times."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from kvlab.client import Endpoint, body, clock, send, warm_pool
from kvlab.http1 import IDLE_REUSE_S, Pool
from kvlab.row_file import RowFile
from kvlab.workload import Request

TICK_S = 0.01
TIMER_S = 0.001  # event loops count time in milliseconds
GONE_AFTER = 10  # connection failures in a row, over all clients
POOL_LIMIT = 256  # warm connections of an open loop
SERVER_GONE = "not sent: server gone"
Work = tuple[Request, Endpoint, bytes]


@dataclass(frozen=True)
class Job:
    """One phase of one process; `targets` says where each request goes."""

    targets: list[Endpoint]
    phase: str
    requests: list[Request]
    concurrency: int
    fields: dict[str, bool]
    timeout_s: float
    new_connection: bool
    process: int = 0

    @property
    def open_loop(self) -> bool:
        """True when the requests say when they start."""
        return any(r.at_s is not None for r in self.requests)

    @property
    def connections(self) -> int:
        """Connections to open before the start."""
        if self.new_connection:
            return 0
        if self.open_loop:  # those opened for later would be too old by then
            return min(POOL_LIMIT, sum((request.at_s or 0.0) < IDLE_REUSE_S for request in self.requests))
        return min(len(self.requests), self.concurrency)


@dataclass
class Prepared:
    """A job with its bodies serialised and its connections opened."""

    job: Job
    payloads: list[bytes]


@dataclass
class Outcome:
    """What a phase left behind: rows, how late the loop woke up (s), CPU time of the client (s), who stamped."""

    rows: RowFile = field(default_factory=RowFile)
    lags_s: array = field(default_factory=lambda: array("d"))
    cpu_s: float = 0.0
    wall_s: float = 0.0
    stamped: bool = False  # by the kernel


def serialise(job: Job) -> Prepared:
    """All bodies of a job. They take less memory than the prompts they are made of."""
    pairs = zip(job.targets, job.requests, strict=True)
    return Prepared(job, [body(target, request, job.fields) for target, request in pairs])


async def open_pool(pool: Pool, job: Job) -> None:
    """Opens the connections that the job will use, shortly before it starts."""
    for target in dict.fromkeys(job.targets) if job.connections else ():
        await warm_pool(pool, target, min(job.connections, job.targets.count(target)))


async def run_phase(pool: Pool, prepared: Prepared, outcome: Outcome, zero: float, start: float) -> None:
    """Sends the job and fills `outcome` as answers come, so that it holds what was measured also when cancelled.

    `zero` and `start` on `clock`. An exception other than cancellation is a defect of the load generator.
    """
    state = _State(pool, prepared.job, outcome, zero, start)
    ticker = asyncio.create_task(_tick(outcome.lags_s))
    cpu, wall = time.thread_time(), clock()
    try:
        await _sleep_until(start)
        work = list(zip(prepared.job.requests, prepared.job.targets, prepared.payloads, strict=True))
        async with asyncio.TaskGroup() as group:
            if prepared.job.open_loop:
                group.create_task(_by_schedule(state, work, group))
            else:
                shared = iter(work)
                for _ in range(min(prepared.job.concurrency, len(work))):
                    group.create_task(_client(state, shared))
    finally:
        ticker.cancel()
        outcome.cpu_s += time.thread_time() - cpu
        outcome.wall_s += clock() - wall
        outcome.stamped = pool.stamped


class _State:
    """What the clients of one phase share."""

    def __init__(self, pool, job: Job, outcome: Outcome, zero: float, start: float):
        self.pool, self.job, self.outcome, self.zero, self.start = pool, job, outcome, zero, start
        self.unreachable = 0

    def record(self, row: dict[str, Any]) -> None:
        row["process"] = self.job.process
        self.outcome.rows.append(row)
        self.unreachable = self.unreachable + 1 if row["start_s"] is None else 0

    async def send(self, request: Request, target: Endpoint, payload: bytes, scheduled: float | None = None) -> None:
        if self.unreachable >= GONE_AFTER:
            self.outcome.rows.append(self._not_sent(request, target, scheduled))
            return
        await send(
            self.pool,
            target,
            request,
            zero=self.zero,
            timeout_s=self.job.timeout_s,
            phase=self.job.phase,
            payload=payload,
            scheduled=scheduled,
            record=self.record,
        )

    def _not_sent(self, request: Request, target: Endpoint, scheduled: float | None) -> dict[str, Any]:
        return {
            "request": request.index,
            "phase": self.job.phase,
            "kind": request.kind,
            "prefix": request.prefix,
            "worker": target.worker,
            "scheduled_s": None if scheduled is None else scheduled - self.zero,
            "input_tokens_asked": len(request.prompt),
            "output_tokens_asked": request.output_tokens,
            "ok": False,
            "error": SERVER_GONE,
            "process": self.job.process,
        }


async def _client(state: _State, work: Iterator[Work]) -> None:
    """One client of the closed loop: the next request as soon as the last one has ended."""
    for request, target, payload in work:
        await state.send(request, target, payload)


async def _by_schedule(state: _State, work: list[Work], group: asyncio.TaskGroup) -> None:
    """Starts each request at its time, however many are still under way."""
    for request, target, payload in sorted(work, key=lambda item: item[0].at_s or 0.0):
        due = state.start + (request.at_s or 0.0)
        if state.unreachable < GONE_AFTER:
            await _sleep_until(due)
        group.create_task(state.send(request, target, payload, due))


async def _sleep_until(due: float) -> None:
    while (left := due - clock()) > 0:
        await asyncio.sleep(left if left > TIMER_S else 0)  # a timer may end a fraction too early


async def _tick(lags_s: array) -> None:
    """Measures how late this event loop is: what it adds to every stamp."""
    while True:
        due = clock() + TICK_S
        # uvloop counts from the start of its current round: after a long one the timer ends too early.
        while (left := due - clock()) > TIMER_S:
            await asyncio.sleep(left)
        lags_s.append(max(0.0, clock() - due))
