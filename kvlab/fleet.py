"""Several vLLM servers that start together, each on its share of the cores or GPUs.

with Fleet(config, workers=6, log_dir=folder) as fleet:
    fleet.endpoints, fleet.placement, fleet.check_alive()
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kvlab import gpu, service
from kvlab.client import Endpoint
from kvlab.config import ServerConfig
from kvlab.control import Capacity
from kvlab.errors import ConfigError, KvlabError, ServerDied, ServerError

PLACEMENTS = ("spread", "packed", "one")


@dataclass(frozen=True)
class Place:
    """Where a worker runs. `gpus`: entries for CUDA_VISIBLE_DEVICES; `cores`: null where it may use all of them."""

    worker: str
    gpus: tuple[str, ...] = ()
    cores: tuple[int, ...] | None = None

    def told(self) -> dict[str, str | None]:
        """As a run says it: GPUs and cores, null where it may use all of them."""
        cores = None if self.cores is None else ",".join(map(str, self.cores))
        return {"gpu": ",".join(self.gpus) or None, "cores": cores}


def places(configs: Sequence[ServerConfig], cores: Sequence[int], gpus: Sequence[str], placement: str) -> list[Place]:
    """One place a worker. ConfigError for an unknown placement, or more GPUs a worker than there are.

    spread: each worker on the least loaded GPUs; packed: the first GPUs are filled with as many workers as the others
    get; one: all on the first GPU, or on as many of the first ones as a worker has ranks. A CPU worker has a share of
    the cores of its own where there is at least one for each; else they share all.
    """
    if placement not in PLACEMENTS:
        raise ConfigError(f"The placement {placement!r} is unknown.", next_step=f"use one of: {', '.join(PLACEMENTS)}")
    names = [f"w{i}" for i in range(len(configs))]
    if all(config.engine == "cpu" for config in configs):
        share = len(cores) // len(configs)
        own = [tuple(cores[i * share : (i + 1) * share]) or None for i in range(len(configs))]
        return [Place(name, (), part) for name, part in zip(names, own, strict=True)]
    groups = [_group(config, i, configs, gpus, placement) for i, config in enumerate(configs)]
    return [Place(name, group) for name, group in zip(names, groups, strict=True)]


def _group(config: ServerConfig, i: int, configs: Sequence[ServerConfig], gpus: Sequence[str], placement: str):
    """The GPUs of worker i: neighbours, as many as its tensor-parallel ranks."""
    ranks = config.tensor_parallel_size
    groups = len(gpus) // ranks
    if groups == 0:
        raise ConfigError(
            f"A worker of {ranks} tensor-parallel ranks does not fit on {len(gpus)} GPU(s).",
            next_step=f"set tensor_parallel_size to at most {len(gpus)}, or use a machine with more GPUs",
        )
    each = -(-len(configs) // groups)
    group = {"spread": i % groups, "packed": i // each, "one": 0}[placement]
    return tuple(gpus[group * ranks : (group + 1) * ranks])


def gpu_names() -> list[str]:
    """What CUDA_VISIBLE_DEVICES calls the GPUs that this process may see."""
    count, setting = len(gpu.gpus()), os.environ.get("CUDA_VISIBLE_DEVICES")
    names = [part.strip() for part in setting.split(",")] if setting else [str(i) for i in range(count)]
    return names[:count]


def placed(config: ServerConfig, place: Place) -> ServerConfig:
    """The worker's own configuration, which shows it its GPUs only. `config.env` wins."""
    if not place.gpus:
        return config
    env = {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus)}
    return config.model_copy(update={"env": env | config.env})


def allot(configs: Sequence[ServerConfig], placement: str) -> tuple[list[Place], list[ServerConfig]]:
    """Each worker's place on this machine, and its own configuration. ConfigError where the GPUs cannot hold them."""
    gpus = gpu_names()
    _check_shared(configs, len(gpus))
    found = places(configs, sorted(os.sched_getaffinity(0)), gpus, placement)
    return found, [placed(config, place) for config, place in zip(configs, found, strict=True)]


def launcher(place: Place) -> tuple[str, ...]:
    """What stands before a worker's command, so that it stays on its cores."""
    if place.cores is None or not shutil.which("taskset"):
        return ()
    return ("taskset", "-c", ",".join(map(str, place.cores)))


class Fleet:
    """Servers of this process; they end with `stop`, with the `with` block, or with this process.

    `configs` is one configuration for all `workers`, or one for each. On a shared GPU each needs its KV pool pinned
    (kv_cache_memory_bytes) beside gpu_memory_utilization = 0.01.
    """

    def __init__(
        self,
        configs: ServerConfig | Sequence[ServerConfig],
        *,
        workers: int | None = None,
        log_dir: Path,
        placement: str = "spread",
        ready_timeout_s: float = 900,
    ):
        alike = isinstance(configs, ServerConfig)
        self.configs = [configs] * (workers or 1) if alike else list(configs)
        if not self.configs or (workers or len(self.configs)) != len(self.configs):
            raise ConfigError(
                f"{len(self.configs)} configurations do not make {workers} workers.",
                next_step="give one configuration, or one for each worker",
            )
        self.log_dir, self.ready_timeout_s, self._placement = Path(log_dir), ready_timeout_s, placement
        self.servers: list[Any] = []
        self.places: list[Place] = []

    def __enter__(self) -> Fleet:
        return self if self.servers else self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> Fleet:
        """Starts all of them at once and waits. The first that fails ends the others and is raised, with its cause."""
        from kvlab import server

        self.places, configs = allot(self.configs, self._placement)
        self.servers = [
            server.VllmServer(
                config,
                log_dir=self.log_dir,
                ready_timeout_s=self.ready_timeout_s,
                on_phase=lambda phase, elapsed_s: None,
                launcher=launcher(place),
            )
            for config, place in zip(configs, self.places, strict=True)
        ]
        pool = ThreadPoolExecutor(max_workers=len(self.servers))
        try:
            starts = [pool.submit(one.start) for one in self.servers]
            wait(starts, return_when=FIRST_EXCEPTION)
            for place, begun in zip(self.places, starts, strict=True):
                if begun.done() and begun.exception() is not None:
                    raise _named(begun.exception(), place.worker, len(starts))
            self.capacities  # noqa: B018  refuses workers that do not belong together
        except BaseException:
            servers = self.servers
            for again in (True, False):  # once more for one that was about to be launched
                self.servers = servers
                self.stop()
                pool.shutdown(wait=again, cancel_futures=True)
            raise
        pool.shutdown()
        return self

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where each worker listens, with its name."""
        return [replace(s.endpoint, worker=p.worker) for s, p in zip(self.servers, self.places, strict=True)]

    @property
    def capacities(self) -> list[Capacity]:
        """The KV pool of each worker; ServerError where they differ."""
        service.check_alike(self.endpoints, [one.capacity for one in self.servers])
        return [one.capacity for one in self.servers]

    @property
    def placement(self) -> list[dict[str, Any]]:
        """One row a running worker: worker, port, pid, gpu, cores, model, version."""
        return [
            {
                "worker": place.worker,
                "port": getattr(one, "port", None),
                "pid": getattr(one, "pid", None),
                **place.told(),
                "model": one.config.model,
                "version": getattr(one, "version", None),
            }
            for place, one in zip(self.places, self.servers, strict=False)
        ]

    def check_alive(self) -> None:
        """ServerDied, with the cause from its log, if a worker has ended; the others are stopped then."""
        if not self.servers:
            raise ServerDied("The fleet is not running", next_step="call start() first")
        for place, one in zip(self.places, self.servers, strict=True):
            try:
                one.check_alive()
            except ServerError as error:
                self.stop()
                raise _named(error, place.worker, len(self.places)) from None

    def reset_prefix_caches(self) -> None:
        """Empties every worker's prefix cache, each verified by a probe; ServerError where one is not empty."""
        with ThreadPoolExecutor(max_workers=len(self.servers)) as pool:
            list(pool.map(lambda one: one.reset_prefix_cache(), self.servers))

    def describe(self, workers: int | None = None) -> list[dict[str, Any]]:
        """What a stored run says about each of the first `workers`: its place and what its server says of itself."""
        rows = zip(self.placement[:workers], self.servers, strict=False)
        return [row | one.describe() for row, one in rows]

    def stop(self) -> None:
        """Ends every worker, all at once. Safe to call twice."""
        servers = self.servers
        if not servers:
            return
        with ThreadPoolExecutor(max_workers=len(servers)) as pool:
            list(pool.map(lambda one: one.stop(), servers))
        self.servers = []


def _check_shared(configs: Sequence[ServerConfig], gpus: int) -> None:
    """ConfigError before minutes of starting: a server that may take most of a GPU cannot share it."""
    crowded = sum(c.tensor_parallel_size for c in configs if c.engine == "cuda") > gpus
    greedy = [c for c in configs if c.engine == "cuda" and c.kv_cache_memory_bytes is None]
    if crowded and greedy:
        raise ConfigError(
            f"{len(configs)} workers share {gpus} GPU(s), and their KV pools are not pinned.",
            cause="each would take most of the GPU's memory, and all but the first would fail",
            next_step="set kv_cache_memory_bytes, and gpu_memory_utilization = 0.01 beside it",
        )


def _named(error: BaseException, worker: str, workers: int) -> BaseException:
    """The same error, told of one worker among several."""
    if not isinstance(error, KvlabError):
        return error
    rest = "; the others were stopped" if workers > 1 else ""
    named = type(error)(f"Worker {worker} of {workers}: {error.what}{rest}", error.cause, error.next_step)
    named.worker = worker
    return named
