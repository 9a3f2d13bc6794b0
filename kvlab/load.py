"""Generates a load and says how far it can be trusted: rows, samples, the plateau window, a certificate."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from kvlab import open_files, service, workload
from kvlab.certificate import Evidence, certify, plateau
from kvlab.client import Endpoint, clock, probe, warm_pool
from kvlab.config import LoadConfig
from kvlab.driver import Job, Outcome, open_pool, run_phase, serialise
from kvlab.errors import ConfigError, KvlabError, LoadError
from kvlab.http1 import Pool
from kvlab.load_worker import Worker, loop_factory, transport
from kvlab.records import REQUEST_COLUMNS
from kvlab.scrape import Poller, sample_frame
from kvlab.service import Service
from kvlab.workload import Request

PROGRESS_AFTER_S = 2.0
START_DELAY_S = 0.02  # between the word to start and the start: every process has heard it by then


@dataclass(frozen=True)
class LoadResult:
    """`requests` (REQUEST_COLUMNS), `samples` (SAMPLE_COLUMNS), the plateau `window` (s on the run's clock) or None,
    and the certificate. Interrupted: what was measured until then, with the requests under way as failed rows.
    """

    requests: pd.DataFrame
    samples: pd.DataFrame
    window: tuple[float, float] | None
    certificate: dict[str, Any]
    interrupted: bool = False


def run_load(
    endpoint: Endpoint | Service,
    load: LoadConfig,
    *,
    nonce: int,
    requests: list[Request] | None = None,
    metrics: Sequence[Endpoint] | None = None,
    progress: bool = True,
) -> LoadResult:
    """Sends the load and returns when it has drained; usable anywhere, also where an event loop already runs.

    `endpoint` is a server, or several behind a service: every worker is sampled, and the rows name the one that was
    picked. `nonce` must differ between runs on a server. `requests` is an explicit plan in place of the one of `load`,
    with `at_s` offsets from the start of the measured phase. `metrics` are the servers whose counters are watched,
    where they are others than `endpoint`. Raises LoadError when no load can be generated; a failing server is rows, not
    an exception. Ctrl-C returns what was measured with `interrupted` set (of several processes: the phases that ended).
    """
    run = _Run(endpoint, load, nonce, requests, metrics)
    run.thread.start()
    try:
        with _bar(run, progress) as bar:
            while not run.ended.wait(0.2):
                bar.update(run.done - bar.n)
    except KeyboardInterrupt:
        run.cancel()
        run.ended.wait()
    return run.result()


async def run_load_async(
    endpoint: Endpoint | Service,
    load: LoadConfig,
    *,
    nonce: int,
    requests: list[Request] | None = None,
    metrics: Sequence[Endpoint] | None = None,
    progress: bool = True,
) -> LoadResult:
    """`run_load` for a coroutine. The load runs in a loop of its own, which the caller's work does not delay."""
    run = _Run(endpoint, load, nonce, requests, metrics)
    run.thread.start()
    try:
        with _bar(run, progress) as bar:
            while not await asyncio.to_thread(run.ended.wait, 0.2):
                bar.update(run.done - bar.n)
    except asyncio.CancelledError:
        run.cancel()
        await asyncio.shield(asyncio.to_thread(run.ended.wait))
        raise
    return run.result()


@dataclass
class _Run:
    """One load from its plan to its result; `thread` drives it in an event loop of its own."""

    target: Endpoint | Service
    load: LoadConfig
    nonce: int
    explicit: list[Request] | None
    metrics: Sequence[Endpoint] | None
    outcomes: list[Outcome] = field(default_factory=list)
    poller: Poller | None = None
    fields: dict[str, bool] = field(default_factory=dict)
    fake: bool = False
    interrupted: bool = False
    error: BaseException | None = None
    loop: asyncio.AbstractEventLoop | None = None
    task: asyncio.Task | None = None

    def __post_init__(self):
        self.service = service.of(self.target)
        self.service.check_load(self.load)
        self.warmup, self.measured = _plan(self.load, self.service.vocab, self.nonce, self.explicit)
        self.total = len(self.warmup) + len(self.measured)
        self._allow_connections()
        # Not Thread.join: in Python 3.11 Ctrl-C within a join takes a running thread for an ended one.
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._main, name="kvlab-load", daemon=True)

    @property
    def done(self) -> int:
        """Requests that have ended."""
        return sum(len(outcome.rows) for outcome in self.outcomes)

    @property
    def open_loop(self) -> bool:
        """True when the measured requests say when they start."""
        return any(request.at_s is not None for request in self.measured)

    def _allow_connections(self) -> None:
        n = self.load.processes
        if self.open_loop:  # how many will be open at once depends on the server
            with contextlib.suppress(ConfigError):
                open_files.allow(-(-len(self.measured) // n), n)
        else:
            open_files.allow(-(-self.load.concurrency // n), n)

    def cancel(self) -> None:
        """Stops the load from another thread; its thread ends soon after."""
        self.interrupted = True
        if self.task is not None:
            self.loop.call_soon_threadsafe(self.task.cancel)

    def _main(self) -> None:
        # The notebook's own objects are left out of garbage collections while the load runs: no long pauses.
        gc.freeze()
        try:
            with asyncio.Runner(loop_factory=loop_factory()) as runner:
                runner.run(self._drive())
        except BaseException as error:  # handed over to the caller's thread
            self.error = error
        finally:
            gc.unfreeze()
            self.ended.set()

    async def _drive(self) -> None:
        self.loop, self.task = asyncio.get_running_loop(), asyncio.current_task()
        if self.interrupted:
            return
        try:
            async with Pool(reuse=not self.load.new_connection) as pool:
                for endpoint in self.service.addresses:
                    accepted = await probe(pool, endpoint, self.nonce, self.load.timeout_s)
                    self.fields = {name: on and self.fields.get(name, True) for name, on in accepted.items()}
                    self.fake = await warm_pool(pool, endpoint, 1) or self.fake
                await self._watched(pool)
        except asyncio.CancelledError:
            if not self.interrupted:
                raise

    async def _watched(self, pool: Pool) -> None:
        """The phases between a first and a last sample of the counters."""
        zero = clock()
        self.poller = Poller(self.metrics or self.service.endpoints, self.load.sample_interval_s, zero)
        team = _Team(pool, self.load.processes)
        try:
            await self.poller.sample()
            for phase, requests in (("warmup", self.warmup), ("measure", self.measured)):
                if requests:
                    await self._phase(team, phase, requests, zero)
        except asyncio.CancelledError:
            await self.poller.stop()
            await self.poller.sample()
            raise
        finally:
            team.stop()
            await self.poller.close()

    async def _phase(self, team: _Team, phase: str, requests: list[Request], zero: float) -> None:
        self.poller.start()
        await team.run(_jobs(self, phase, requests), self.outcomes, zero)
        await self.poller.stop()
        await self.poller.settle(sum(outcome.rows.ok for outcome in self.outcomes))

    def result(self) -> LoadResult:
        """The result, in the caller's thread; raises what went wrong in the load's."""
        if self.error is not None:
            raise _explained(self.error)
        rows = [row for outcome in self.outcomes for row in outcome.rows]
        rows.sort(key=lambda row: (row["phase"] != "warmup", row["request"]))
        measured = [row for row in rows if row["phase"] == "measure"]
        window = None if self.open_loop else plateau(measured, self.load.concurrency)
        samples, trouble = self._samples()
        frame = request_frame(rows)
        certificate = self._certificate(rows, frame, samples, window, trouble)
        return LoadResult(frame, samples, window, certificate, self.interrupted)

    def _certificate(self, rows, frame, samples, window, trouble) -> dict[str, Any]:
        evidence = Evidence(self.load, frame, samples, window, trouble, open_loop=self.open_loop)
        evidence.lags_s = [lag for outcome in self.outcomes for lag in outcome.lags_s]
        evidence.cpu_s = [(outcome.cpu_s, outcome.wall_s) for outcome in self.outcomes]
        evidence.exact = all(row.get("exact", True) for row in rows)
        stamps = "kernel" if all(outcome.stamped for outcome in self.outcomes) else "process"
        told = {"fake": self.fake, "interrupted": self.interrupted, "transport": transport(), "stamps": stamps}
        return certify(evidence) | told | {"rows_of_processes": _rows_of_processes(rows)}

    def _samples(self) -> tuple[pd.DataFrame, str | None]:
        """The samples, and why there are none where the server offers none that can be read."""
        if self.poller is None or not self.poller.texts:
            failure = self.poller.last_failure if self.poller else "the load never started"
            return sample_frame([]), f"the server's counters could not be read: {failure}"
        try:
            return self.poller.frame(), None
        except KvlabError as error:
            return sample_frame([]), f"the server's counters could not be read: {error.what}"


class _Team:
    """Who sends: this process, or several worker processes with a share of the clients each."""

    def __init__(self, pool: Pool, processes: int):
        self.pool = pool
        self.workers = [Worker() for _ in range(processes)] if processes > 1 else []

    async def run(self, jobs: list[Job], outcomes: list[Outcome], zero: float) -> None:
        """Runs one phase to its end; `outcomes` grows by one for each job."""
        if not self.workers:
            prepared = serialise(jobs[0])
            await open_pool(self.pool, jobs[0])
            outcomes.append(Outcome())
            await run_phase(self.pool, prepared, outcomes[-1], zero, clock())
            return
        await self._each(lambda worker, job: worker.tell((job, zero)), jobs)
        await self._each(lambda worker, job: worker.hear(), jobs)
        start = clock() + START_DELAY_S
        await self._each(lambda worker, job: worker.tell(start), jobs)
        outcomes += await self._each(lambda worker, job: worker.hear(), jobs)

    async def _each(self, action, jobs: list[Job]) -> list[Any]:
        calls = zip(self.workers, jobs, strict=True)
        return await asyncio.gather(*(asyncio.to_thread(action, worker, job) for worker, job in calls))

    def stop(self) -> None:
        for worker in self.workers:
            worker.stop()


def _rows_of_processes(rows: list[dict[str, Any]]) -> list[int]:
    """Measured requests that each process sent; their sum is what was merged."""
    sent = Counter(row["process"] for row in rows if row["phase"] == "measure")
    return [sent[process] for process in sorted(sent)]


def request_frame(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows as a frame with exactly REQUEST_COLUMNS and their types; what is missing is null."""
    frame = pd.DataFrame(rows, columns=list(REQUEST_COLUMNS))
    return frame.astype({name: kind for name, (kind, _) in REQUEST_COLUMNS.items()})


def _plan(load: LoadConfig, vocab: tuple[int, int], nonce: int, explicit: list[Request] | None):
    if load.processes > 1 and load.arrival == "closed" and load.processes > load.concurrency:
        raise ConfigError(
            f"{load.processes} processes cannot share {load.concurrency} clients.",
            next_step="set processes to at most concurrency",
        )
    if explicit is None:
        return workload.plan(load, vocab, nonce)
    if not explicit:
        raise ConfigError("The explicit plan holds no request.", next_step="give at least one, or leave it out")
    warmup, _ = workload.plan(load.model_copy(update={"requests": 1}), vocab, nonce)
    return warmup, explicit


def _jobs(run: _Run, phase: str, requests: list[Request]) -> list[Job]:
    """The phase dealt out over the processes: every n-th request, and the clients as evenly as they divide."""
    load, n = run.load, run.load.processes
    clients = load.warmup_concurrency or load.concurrency if phase == "warmup" else load.concurrency
    targets = run.service.targets(requests, phase)
    return [
        Job(
            targets=targets[k::n],
            phase=phase,
            requests=requests[k::n],
            concurrency=clients // n + (k < clients % n) or 1,
            fields=run.fields,
            timeout_s=load.timeout_s,
            new_connection=load.new_connection,
            process=k,
        )
        for k in range(n)
    ]


def _explained(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, KvlabError):
        return error
    explained = LoadError(
        f"The load generator failed: {type(error).__name__}: {error}",
        cause="a defect of the load generator, not of the server; nothing of this load is valid",
        next_step="report it with the traceback",
    )
    explained.__cause__ = error
    return explained


def _bar(run: _Run, progress: bool) -> tqdm:
    return tqdm(total=run.total, unit="req", desc="load", delay=PROGRESS_AFTER_S, leave=False, disable=not progress)
