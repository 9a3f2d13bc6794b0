"""NVIDIA Dynamo in place of a fleet and its router: its frontend, with real vLLM engines in Dynamo's own workers.

Dynamo's router speaks to its own workers only, so that they take the place of vLLM's API servers: the same engine, the
same flags, the same counters. Discovery is a folder, events go over ZeroMQ; neither etcd nor NATS is needed.
"""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from kvlab import caches, control, engine, fleet, model_files, ports, processes, router_checks, router_packages, scrape
from kvlab.client import Endpoint
from kvlab.config import Cell, ServerConfig
from kvlab.control import Capacity
from kvlab.errors import ConfigError, ServerDied, ServerError
from kvlab.leashed import Leashed
from kvlab.service import Service
from kvlab.startup_log import plain

MODES = {"dynamo-kv": "kv", "dynamo-random": "random", "dynamo-round-robin": "round-robin"}
WORKER = "kvlab.dynamo_worker"
LOCAL = ("DYN_TCP_RPC_HOST", "DYN_EVENT_PLANE_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_SYSTEM_HOST")
# There this one names an interface; two others are unknown, and events and counters are open to the network.
OLDER = {"1.4.2": {"DYN_TCP_RESPONSE_STREAM_HOST": "lo"}}
PLANES = {"DYN_DISCOVERY_BACKEND": "file", "DYN_EVENT_PLANE": "zmq", "DYN_REQUEST_PLANE": "tcp"}
SAME_NAMES = {"PYTHONHASHSEED": "0"}  # as Dynamo's own start sets it: else each engine names equal blocks differently
POLL_S, READY_S = 0.25, 900.0  # as a fleet's: a cold start on a slow machine compiles for minutes
REFUSED_S = 60.0  # its workers are up by then: a frontend that still refuses their model goes on doing so


def is_kind(service: str) -> bool:
    """Whether a cell's service is one of Dynamo's."""
    return service.partition(":")[2].startswith("dynamo-")


class DynamoDeployment:
    """Frontend and workers for one laboratory, with the read side of `Deployment`. A frontend of its own for each cell.

    The prefix caches are not emptied between cells: prompts of two runs share nothing, and what is old goes first.
    """

    def __init__(self, config: ServerConfig, workers: int, log_dir: Path, placement: str = "spread"):
        self.config, self.workers, self.placement = config, workers, placement
        self.places: list[fleet.Place] = []
        self._log_dir = Path(log_dir) / f"dynamo-{id(self):x}"
        self.log_path = self._log_dir / "dynamo.log"
        self.programs: list[Leashed] = []
        self._gpu_settings: dict[str, dict[str, str | None]] = {}
        self.endpoints: list[Endpoint] = []
        self._frontend: Leashed | None = None
        self._service: Service | None = None
        self._mode: str | None = None

    def start(self) -> DynamoDeployment:
        """Starts the workers and waits until each has its engine. Raises ServerError with the cause of the log."""
        _, self.version = router_packages.require("dynamo")
        engine.check(self.config)
        self._model, self._extra = model_files.resolve_model(self.config)
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._began = time.monotonic()
        self.places, configs = fleet.allot([self.config] * self.workers, self.placement)
        try:
            for place, config in zip(self.places, configs, strict=True):
                self._start_worker(place, config)
            self._wait(self.programs, lambda: all(map(_has_engine, self.endpoints)))
        except BaseException:
            self.stop()
            raise
        self.ready_s = round(time.monotonic() - self._began, 1)
        self._capacity = control.read_capacity(self.endpoints[0])
        return self

    def _start_worker(self, place: fleet.Place, config: ServerConfig) -> None:
        port, sockets = ports.free_port(), tempfile.mkdtemp(prefix="kvlab-")  # the path of a socket has to be short
        flags = engine.to_argv(config, self._model, port)
        flags = flags[flags.index("--enable-prompt-tokens-details") + 1 :]
        argv = [*fleet.launcher(place), sys.executable, "-m", WORKER]
        argv += ["--model", self._model, "--served-model-name", config.served_name]
        argv += [*flags, *self._extra, "--kv-events-config", json.dumps(events_config(sockets))]
        env = {"VLLM_RPC_BASE_PATH": sockets} | SAME_NAMES | engine.environment(config, local_model=True)
        env |= caches.environment(config) | config.env
        self._gpu_settings[place.worker] = engine.gpu_settings(config, env)
        program = Leashed(
            argv,
            port=port,
            log_dir=self._log_dir,
            name=place.worker,
            env=self._environment(env) | {"DYN_SYSTEM_PORT": str(port)},
            remove=sockets,
        )
        program.start()
        self.programs.append(program)
        vocab = model_files.safe_token_ids(self._model) or control.GUESSED_VOCAB
        base_url = f"http://127.0.0.1:{port}"
        self.endpoints.append(Endpoint(base_url, config.served_name, vocab=vocab, worker=place.worker))

    def _environment(self, base: dict[str, str]) -> dict[str, str]:
        own = router_packages.environment("dynamo", base)
        local = dict.fromkeys(LOCAL, "127.0.0.1") | OLDER.get(self.version, {})
        return own | PLANES | local | {"DYN_FILE_KV": str(self._log_dir / "discovery")}

    def _wait(self, programs: list[Leashed], ready) -> None:
        while not ready():
            for program in programs:
                if not program.running:
                    raise self._died(program, "while it started")
            waited_s = time.monotonic() - self._began
            if waited_s > REFUSED_S and (why := self._refusal()):
                raise ServerError(
                    f"Dynamo's frontend does not take the model: {why}",
                    "a file of the model's folder lacks what this release of Dynamo asks for",
                    f"read its logs: {self._log_dir}",
                )
            if waited_s > READY_S:
                raise ServerError(
                    f"Dynamo was not ready after {READY_S:g} s",
                    next_step=f"read its logs: {self._log_dir}",
                )
            time.sleep(POLL_S)

    def _refusal(self) -> str | None:
        return router_checks.dynamo_refusal(self._frontend.log_text()) if self._frontend else None

    def serves(self, cell: Cell) -> bool:
        """Whether these workers are what the cell asks for: Dynamo routes to all of them."""
        alike = cell.server == self.config and cell.placement == self.placement
        return alike and cell.workers == self.workers and is_kind(cell.service)

    def use(self, cell: Cell) -> DynamoDeployment:
        """A new frontend in the cell's mode. Raises ConfigError or ServerError; nothing was sent then."""
        kind = cell.service.partition(":")[2]
        if kind not in MODES:
            raise ConfigError(f"There is no router {kind!r}.", next_step=f"use one of: {', '.join(MODES)}")
        self._close_frontend()
        self.check_alive()
        port = ports.free_port()
        argv = [sys.executable, "-m", "dynamo.frontend", "--http-host", "127.0.0.1", "--http-port", str(port)]
        argv += ["--router-mode", MODES[kind], "--router-min-initial-workers", str(self.workers), *cell.service_args]
        if self.config.block_size:
            argv += ["--kv-cache-block-size", str(self.config.block_size)]
        environment = self._environment(router_packages.environment("dynamo"))
        self._frontend = Leashed(argv, port=port, log_dir=self._log_dir, name=kind, env=environment)
        self._mode, self._flags, self._began = MODES[kind], cell.service_args, time.monotonic()
        self._frontend.start()
        entrance = self._entrance = replace(self.endpoints[0], base_url=f"http://127.0.0.1:{port}", worker=None)
        self._wait([self._frontend, *self.programs], lambda: self._routes(entrance))
        self._hits_before = self._hit_tokens()
        self._service = Service(self.endpoints, cell.service, seed=cell.load.pick_seed, entrance=entrance)
        return self

    def _routes(self, entrance: Endpoint) -> bool:
        """Whether the frontend knows every worker, and a completion comes back."""
        try:
            status, text = control.call(entrance, "/health")
            known = [i for i in json.loads(text).get("instances", []) if i.get("endpoint") == "generate"]
            if status != 200 or len(known) < self.workers:
                return False
            return control.answers(*control.complete(entrance, [entrance.vocab[0]]))
        except (OSError, ValueError, ServerError):
            return False

    @property
    def endpoint(self) -> Service:
        """Where the load goes."""
        return self._service

    @property
    def capacity(self) -> Capacity:
        """The KV pool of one worker, as its engine states it."""
        return self._capacity

    def check_alive(self) -> None:
        """ServerDied where the frontend or a worker has ended; ServerError where KV routing found no block anywhere."""
        for program in [*self.programs, *([self._frontend] if self._frontend else [])]:
            if not program.running:
                raise self._died(program, "while it was in use")
        if self._frontend is None or self._mode != "kv":
            return
        problems = router_checks.dynamo_fallbacks(self._counts(), self._hit_tokens() - self._hits_before)
        if problems:
            raise ServerError(
                f"Dynamo's router does not route by KV blocks: {'; '.join(problems)}",
                "events are off or lost, or block sizes differ",
                f"read its logs: {self._log_dir}",
            )

    def _counts(self) -> dict[str, int]:
        try:
            status, text = control.call(self._entrance, "/metrics")
        except OSError:
            status, text = 0, ""
        return router_checks.dynamo_counts(text if status == 200 else "")

    def _hit_tokens(self) -> float:
        return sum(scrape.fetch(endpoint)["prefix_hits"] or 0.0 for endpoint in self.endpoints)

    def _died(self, program: Leashed, when: str) -> ServerDied:
        said = router_checks.death(program.log_text())
        return ServerDied(
            f"A program of Dynamo ended {when} (exit code {program.exit_code})",
            f"its log says: {said}" if said else None,
            f"read its log: {program.log_path}",
        )

    def describe(self) -> dict[str, Any]:
        """What a stored run says: frontend, flags and version, and each worker."""
        parts = [f"== {p.log_path.stem}\n{_excerpt(p.log_text())}" for p in (*self.programs, self._frontend)]
        self.log_path.write_text("\n".join(parts), encoding="utf-8")
        told = {"how": self._service.how, "pick_seed": self._service.seed, "product": "dynamo", "version": self.version}
        told |= {"command": shlex.join(self._frontend.argv), "flags": self._flags, "mode": self._mode}
        told["decisions"] = self._counts() | {"found_tokens": round(self._hit_tokens() - self._hits_before)}
        workers = [
            {"worker": place.worker, "port": p.port, "pid": p.pid}
            | place.told()
            | self._gpu_settings[place.worker]
            | {"command": shlex.join(p.argv), "memory": processes.memory_of(p.id)}
            for place, p in zip(self.places, self.programs, strict=True)
        ]
        first = {"version": engine.installed_build()[1], "command": workers[0]["command"]}
        return first | {
            "capacity": asdict(self._capacity),
            "ready_s": self.ready_s,
            "service": told,
            "workers": workers,
        }

    def _close_frontend(self) -> None:
        frontend, self._frontend = self._frontend, None
        if frontend is not None:
            frontend.stop()

    def stop(self) -> None:
        """Ends the frontend and every worker. Safe to call twice."""
        self._close_frontend()
        programs, self.programs = self.programs, []
        if programs:
            with ThreadPoolExecutor(max_workers=len(programs)) as pool:
                list(pool.map(lambda one: one.stop(), programs))


def events_config(sockets: str) -> dict[str, Any]:
    """Where an engine tells its blocks: a socket in this folder, which is the engine's to bind.

    vLLM binds names of files and addresses with a wildcard; to any other address it connects, as Dynamo does too, and
    then nobody hears the events. A wildcard would be open to the network.
    """
    return {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"ipc://{sockets}/events"}


def _excerpt(log: str) -> str:
    """Start and end of a log: several lines a request stand between."""
    lines = [line[:400] for line in plain(log).splitlines()]
    kept = lines if len(lines) <= 150 else [*lines[:120], f"... {len(lines) - 140} lines ...", *lines[-20:]]
    return "\n".join(kept)


def _has_engine(endpoint: Endpoint) -> bool:
    """Whether the worker's engine is up: its counters are there."""
    try:
        status, text = control.call(endpoint, "/metrics")
    except OSError:
        return False
    return status == 200 and "vllm:prefix_cache_queries_total" in text
