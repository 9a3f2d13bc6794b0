"""A vLLM server from start to verified end, or one that is already there: the same read side for both.

with VllmServer(config, log_dir=folder) as server:
    server.capacity.tokens, server.startup.phases, server.endpoint
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from kvlab import caches, control, engine, gpu_memory, leashed, model_files, ports, preload, processes, progress
from kvlab.config import ServerConfig
from kvlab.control import GUESSED_VOCAB, Capacity
from kvlab.errors import ServerDied, ServerError
from kvlab.existing import AttachedServer, attach
from kvlab.failures import oom_kills, server_died
from kvlab.leash import GRACE_S, LINGER_S, remove_shared_files, shared_files
from kvlab.startup_log import StartupReport, last_lines, parse_startup, phase_of

if TYPE_CHECKING:
    from kvlab.client import Endpoint

__all__ = ["AttachedServer", "Capacity", "VllmServer", "attach"]

POLL_S = 0.1
PROBE_S = 0.5
DIST_FILE = re.compile(r"distributed_init_method=file://(/\S+/vllm_dist_[0-9a-f]{32})\b")


def _default_progress() -> Callable[[str, float], None]:
    """One line that rewrites itself, where somebody looks; silence otherwise."""
    if not sys.stderr.isatty() and "ipykernel" not in sys.modules:
        return lambda phase, elapsed_s: None

    def show(phase: str, elapsed_s: float) -> None:
        end = "\n" if phase == "ready" else ""
        progress.tell(f"vLLM starts: {phase}, {elapsed_s:.0f} s")
        print(f"\rvLLM starts: {phase}, {elapsed_s:.0f} s".ljust(50), end=end, file=sys.stderr, flush=True)

    return show


def _durations(began_s: dict[str, float], end_s: float) -> dict[str, float]:
    """Seconds of each phase, from when each began to the next; together they are `end_s`."""
    ends = [*list(began_s.values())[1:], end_s]
    return {name: round(end - began, 3) for (name, began), end in zip(began_s.items(), ends, strict=True)}


def _runs(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


class VllmServer:
    """One vLLM server of this process; it ends with `stop`, with the `with` block, or with this process.

    `on_phase(phase, elapsed_s)` is called at each phase of the start and once a second.
    `ready_timeout_s` is generous because cold starts that compile take minutes. `launcher` stands before the command,
    such as ("taskset", "-c", "0").
    """

    def __init__(
        self,
        config: ServerConfig,
        *,
        log_dir: Path,
        port: int | None = None,
        ready_timeout_s: float = 900,
        on_phase: Callable[[str, float], None] | None = None,
        launcher: tuple[str, ...] = (),
    ):
        self.config, self.ready_timeout_s, self._launcher = config, ready_timeout_s, launcher
        self.startup, self.capacity, self.version = StartupReport(), Capacity(), None
        self.argv: list[str] = []
        self.log_path: Path | None = None
        self.port: int | None = port
        self.ready_s: float | None = None
        self.started_utc: str | None = None
        self.start_kind: str | None = None  # "plain", or how it was spared imports: kvlab.preload
        self._log_dir, self._asked_port = Path(log_dir), port
        self._on_phase = on_phase or _default_progress()
        self._leash: subprocess.Popen | preload.Leash | None = None
        self._owner = os.getpid()
        self._ready = False
        self._gpu_memory: gpu_memory.GpuMemory | None = None
        self._others: set[str] = set()  # servers that were up before this one
        self._cache_files: int | None = None
        self._gpu_settings: dict[str, str | None] = {}

    def __enter__(self) -> VllmServer:
        return self if self._leash is not None else self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> VllmServer:
        """Start and wait until a completion came back. Raises ConfigError, EngineMissing, PortBusy or ServerError."""
        if self._leash is not None:
            raise ServerError("This server was started already", next_step="stop it first, or make another VllmServer")
        engine.check(self.config)
        self._model_path, extra = model_files.resolve_model(self.config)
        self.port = ports.free_port() if self._asked_port is None else self._asked_port
        ports.refuse_busy(self.port)
        self.argv = [*self._launcher, *engine.to_argv(self.config, self._model_path, self.port), *extra]
        env = engine.environment(self.config, local_model=model_files.is_local(self._model_path))
        env |= caches.environment(self.config) | self.config.env
        self._gpu_settings = engine.gpu_settings(self.config, env)
        if self.config.engine == "cuda":
            self._gpu_memory, self._others = gpu_memory.GpuMemory(), {one.id for one in processes.list_servers()}
        self._cache_files = caches.prepare(self.config)
        try:
            self._launch(env)
            self._wait_until_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def _launch(self, env: dict[str, str]) -> None:
        self.id = f"{self.port}-{secrets.token_hex(3)}"
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self.log_path = self._log_dir / f"server-{self.id}.log"
        sockets = tempfile.mkdtemp(prefix="kvlab-")  # vLLM never removes them; the path of a socket has to be short
        self._began, self.started_utc = time.monotonic(), datetime.now(UTC).isoformat(timespec="seconds")
        self._ready, self._oom_before = False, oom_kills()
        self.__dict__.pop("pid", None)
        self._leash, self._rope, self.start_kind = preload.launch(
            self.argv,
            spared=preload.possible(self.config),
            name=self.id,
            port=self.port,
            log_path=self.log_path,
            env={"VLLM_RPC_BASE_PATH": sockets} | env,
            grace_s=GRACE_S,
            remove=sockets,
        )

    def _wait_until_ready(self) -> None:
        deadline = self._began + self.ready_timeout_s
        phase, read_to, told, probed = "imports", 0, -1.0, 0.0
        answer_began: float | None = None
        self._began_s: dict[str, float] = {"imports": 0.0}  # phase -> when it was seen to begin
        while True:
            elapsed = time.monotonic() - self._began
            if self._leash.poll() is not None:
                raise self._died(f"during its start-up, after {elapsed:.0f} s", self._leash.returncode)
            names, read_to = self._read_phases(read_to)
            for name in names:
                self._began_s.setdefault(name, elapsed)
            new_phase = names[-1] if names else None
            if (new_phase or phase) != phase or elapsed - told >= 1:
                phase, told = new_phase or phase, elapsed
                self._on_phase(phase, elapsed)
            if time.monotonic() > deadline:
                raise self._not_ready(phase)
            if time.monotonic() - probed >= PROBE_S and self._listens():
                answer_began, probed = answer_began or time.monotonic(), time.monotonic()
                if self._answers(max(5.0, deadline - probed)):
                    break
            time.sleep(POLL_S)
        for name in self._read_phases(read_to)[0]:  # logged between the last look and the answer
            self._began_s.setdefault(name, time.monotonic() - self._began)
        self._take_stock(time.monotonic() - answer_began)

    def _read_phases(self, offset: int) -> tuple[list[str], int]:
        """The phases that the log's new lines begin, and how far it has been read."""
        with self.log_path.open("rb") as file:
            file.seek(offset)
            text = file.read()
        whole = max(text.rfind(b"\n"), text.rfind(b"\r")) + 1  # a progress bar rewrites its line until it is full
        names = [phase_of(line) for line in text[:whole].decode(errors="replace").splitlines()]
        return [name for name in names if name], offset + whole

    def _listens(self) -> bool:
        # Whoever answers on the port must be ours: a foreign server may serve a model of the same name.
        found = ports.listens(self._leash.pid, self.port)
        return found is None or found

    def _answers(self, timeout_s: float) -> bool:
        try:
            names = [model.get("id") for model in control.served_models(self.endpoint)]
            if self.config.served_name not in names:
                return False
            answer = control.complete(self.endpoint, [self.endpoint.vocab[0]], timeout_s)
        except (OSError, ServerError):
            return False
        return control.answers(*answer)

    def _not_ready(self, phase: str) -> ServerError:
        tail = "\n".join(f"  {line[:300]}" for line in last_lines(self._log_text()))
        return ServerError(
            f"The server was not ready after {self.ready_timeout_s:g} s; last phase: {phase}. Last lines:\n{tail}",
            "a cold start that compiles or downloads takes minutes; a hang shows the same line for long",
            f"raise ready_timeout_s, or read the log: {self.log_path}",
        )

    def _take_stock(self, first_answer_s: float) -> None:
        self.ready_s = time.monotonic() - self._began
        report = parse_startup(self._log_text())
        timeline = _durations(self._began_s, self.ready_s)
        own = {"first answer": first_answer_s, "ready": self.ready_s}
        if len(timeline) > 1:  # the log has no time stamp before the imports are over
            own["imports"] = timeline["imports"]
        own = {name: round(seconds, 3) for name, seconds in own.items()}
        self.startup = replace(report, phases=report.phases | own, timeline=timeline)
        self.version = control.version(self.endpoint) or self.startup.version
        self.capacity = control.read_capacity(self.endpoint, self.startup)
        self._ready = True
        self._on_phase("ready", self.ready_s)

    def _log_text(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def base_url(self) -> str:
        """Without /v1."""
        return f"http://127.0.0.1:{self.port}"

    @cached_property
    def _vocab(self) -> tuple[int, int]:
        return model_files.safe_token_ids(self._model_path) or GUESSED_VOCAB

    @property
    def endpoint(self) -> Endpoint:
        """Where requests go, and which token ids they may hold."""
        from kvlab.client import Endpoint

        key = self.config.env.get("VLLM_API_KEY")
        return Endpoint(self.base_url, self.config.served_name, api_key=key, vocab=self._vocab)

    @cached_property
    def pid(self) -> int:
        """The server's main process, a child of its leash."""
        if (found := leashed.main_pid(self._leash)) is None:
            raise ServerDied("The server has no process", next_step=f"read its log: {self.log_path}")
        return found

    def check_alive(self) -> None:
        """ServerDied, with the cause from the log, if the server or one of its engine processes has ended."""
        if self._leash is None:
            raise ServerDied("The server is not running", next_step="call start() first")
        code = self._leash.poll()
        gone = [pid for pid in self.startup.engine_pids if not _runs(pid)] if code is None else []
        if code is not None or gone:
            with contextlib.suppress(subprocess.TimeoutExpired):  # it tells why the main process ended, if that did
                code = self._leash.wait(LINGER_S + 1)
            raise self._died("while it was in use", code, bool(gone))

    def _died(self, when: str, code: int | None, engine_gone: bool = False) -> ServerDied:
        return server_died(when, code, self.log_path, engine_gone=engine_gone, oom_before=self._oom_before)

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, and verify by a probe that it is empty; ServerError if it is not."""
        self.check_alive()
        control.reset_prefix_cache(self.endpoint, self.capacity)

    def describe(self) -> dict[str, Any]:
        """What a stored run says about its server."""
        return {
            "version": self.version,
            "command": shlex.join(self.argv),
            "started_utc": self.started_utc,
            "start": self.start_kind,
            "ready_s": self.ready_s,
            "capacity": asdict(self.capacity),
            "startup": asdict(self.startup),
            "memory": processes.memory_of(self.id) | {"gpu_own_bytes": self._gpu_bytes()},
            "cache_files_at_start": self._cache_files,
            **self._gpu_settings,
        }

    def _gpu_bytes(self) -> int | None:
        """GPU memory of this server; null where others came meanwhile and the driver does not tell them apart."""
        if self._gpu_memory is None:
            return None
        others = {server.id for server in processes.list_servers()} - {self.id}
        alone = not (others | self._others)
        return gpu_memory.of_processes(processes.pids(self.id)) or (self._gpu_memory.more() if alone else None)

    def stop(self) -> None:
        """End the whole tree and verify it. Safe to call twice, half-started, or from a forked child (does nothing)."""
        if self._leash is None or os.getpid() != self._owner:
            return
        leftovers = shared_files(processes.pids(self.id)) | self._rendezvous_file()
        try:
            leashed.end(self._leash, self._rope, self.id)
        finally:
            self._leash = None
        remove_shared_files(leftovers)
        if self._gpu_memory is not None:
            self._gpu_memory.wait_until_free()

    def _rendezvous_file(self) -> set[str]:
        return set(DIST_FILE.findall(self._log_text()))
