"""A router from a package in front of several workers: started, waited for, watched, stopped.

with Router("vllm-cache-aware", endpoints, log_dir=folder) as router:
    run_load(Service(endpoints, "router", entrance=router.endpoint), load, nonce=1)
    router.check()    # ServerError where it does not do what its kind says
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kvlab import control, ports, router_checks, router_packages, scrape, wording
from kvlab.client import Endpoint
from kvlab.errors import ConfigError, ScrapeError, ServerDied, ServerError
from kvlab.leashed import Leashed
from kvlab.router_checks import Decisions

POLL_S = 0.1
SESSION = "x-session-id"


@dataclass(frozen=True)
class Kind:
    """One mode of one product. `text`: it takes text only; `answered_by`: its header with the worker's address."""

    product: str
    module: str
    policy: str
    session_header: str | None = None
    text: bool = False
    answered_by: str | None = None


VLLM, SMG = ("vllm-router", "vllm_router.launch_router"), ("smg", "smg.launch_router")
KINDS = {
    "vllm-random": Kind(*VLLM, "random"),
    "vllm-round-robin": Kind(*VLLM, "round_robin"),
    "vllm-consistent-hash": Kind(*VLLM, "consistent_hash", session_header=SESSION),
    "vllm-cache-aware": Kind(*VLLM, "cache_aware"),
    "vllm-kv-aware": Kind(*VLLM, "kv_aware"),
    "smg-cache-aware": Kind(*SMG, "cache_aware", text=True, answered_by="x-smg-routed-worker-id"),
    "smg-round-robin": Kind(*SMG, "round_robin", text=True, answered_by="x-smg-routed-worker-id"),
}


class Router:
    """A router of this process; it ends with `stop`, with the `with` block, or with this process.

    `endpoints`: the workers, each with its name. `flags` are added to its command line. Every address it opens is
    127.0.0.1.
    """

    def __init__(
        self,
        kind: str,
        endpoints: Sequence[Endpoint],
        flags: Sequence[str] = (),
        log_dir: Path = Path("logs"),
        *,
        port: int | None = None,
        ready_timeout_s: float = 300.0,
    ):
        if kind not in KINDS:
            raise ConfigError(f"There is no router {kind!r}.", next_step=f"use one of: {', '.join(KINDS)}")
        self.kind, self.spec, self.endpoints, self.flags = kind, KINDS[kind], list(endpoints), tuple(flags)
        self.log_dir, self.ready_timeout_s = Path(log_dir), ready_timeout_s
        self.port, self.ready_s, self.version = port, None, None
        self.argv: list[str] = []
        self._asked_port = port
        self._hits_before: float | None = None
        self.log_path: Path | None = None
        self._program: Leashed | None = None

    def __enter__(self) -> Router:
        return self if self._program is not None else self.start()

    def __exit__(self, *_) -> None:
        self.stop()

    def start(self) -> Router:
        """Starts it and waits until a completion came through. PortBusy, or ServerError with the cause of its log."""
        if self._program is not None:
            raise ServerError("This router was started already", next_step="stop it first, or make another Router")
        _, self.version = router_packages.require(self.spec.product)
        self.port = ports.free_port() if self._asked_port is None else self._asked_port
        ports.refuse_busy(self.port)
        self._metrics_port = ports.free_port()
        self._words = wording.words(self.endpoints[0]) if self.spec.text else None
        self.argv = self._command()
        environment = router_packages.environment(self.spec.product)
        self._program = Leashed(self.argv, port=self.port, log_dir=self.log_dir, name=self.kind, env=environment)
        self.log_path = self._program.log_path
        try:
            self._program.start()
            self._wait_until_ready()
            self._hits_before = self._hit_tokens()
        except BaseException:
            self.stop()
            raise
        return self

    def _command(self) -> list[str]:
        urls = [endpoint.base_url for endpoint in self.endpoints]
        return [
            *(sys.executable, "-m", self.spec.module, "--host", "127.0.0.1", "--port", str(self.port)),
            *("--worker-urls", *urls, "--policy", self.spec.policy, "--worker-startup-check-interval", "1"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(self._metrics_port), *self.flags),
        ]

    def _wait_until_ready(self) -> None:
        began = time.monotonic()
        while not self._answers():
            if not self._program.running:
                raise self._died("while it started")
            if time.monotonic() - began > self.ready_timeout_s:
                raise ServerError(
                    f"The router {self.kind} was not ready after {self.ready_timeout_s:g} s: {self._last_answer}",
                    "it waits for a worker that does not answer, or it refuses what is sent",
                    f"read its log: {self.log_path}",
                )
            time.sleep(POLL_S)
        self.ready_s = round(time.monotonic() - began, 3)

    def _answers(self) -> bool:
        self._last_answer = "it does not listen"
        if ports.listens(self._program.leash_pid, self.port) is False:  # somebody else may listen there
            return False
        prompt = [self.endpoint.vocab[0]] if self._words is None else self._words[0]
        values = {"model": self.endpoint.model, "prompt": prompt, "max_tokens": 1, "stream": False}
        try:
            status, text = control.call(self.endpoint, "/v1/completions", values)
        except OSError as error:
            status, text = 0, str(error)
        self._last_answer = f"HTTP {status}: {text[:200]}"
        return status == 200

    @property
    def endpoint(self) -> Endpoint:
        """Where requests go, and in which form it takes them; the worker behind it is not known before it answers."""
        names = tuple((endpoint.base_url, endpoint.worker) for endpoint in self.endpoints)
        spec = self.spec
        form = {} if self._words is None else {"words": self._words, "vocab": (0, len(self._words))}
        return replace(
            self.endpoints[0],
            base_url=f"http://127.0.0.1:{self.port}",
            worker=None,
            session_header=spec.session_header,
            answered_by=(spec.answered_by, names) if spec.answered_by else None,
            **form,
        )

    @property
    def pid(self) -> int | None:
        """Its main process; None where it does not run."""
        return None if self._program is None else self._program.pid

    def decisions(self) -> Decisions:
        """What it has counted since its start; nothing where its metrics cannot be read."""
        try:
            status, text = control.call(Endpoint(f"http://127.0.0.1:{self._metrics_port}", ""), "/metrics")
            return router_checks.decisions(self.spec.product, text) if status == 200 else Decisions()
        except (OSError, ValueError):
            return Decisions()

    def _hit_tokens(self) -> float | None:
        """Cached tokens that the workers have counted; None where one does not tell."""
        try:
            return sum(scrape.fetch(endpoint)["prefix_hits"] or 0.0 for endpoint in self.endpoints)
        except ScrapeError:
            return None

    def check(self) -> None:
        """ServerDied where it has ended; ServerError where it places requests otherwise than its kind says."""
        if self._program is None or not self._program.running:
            raise self._died("while it was in use")
        log = self._program.log_text() if self.spec.session_header else ""
        spec, now = self.spec, self._hit_tokens()
        hits = 0.0 if now is None or self._hits_before is None else now - self._hits_before
        problems = router_checks.fallbacks(spec.product, spec.policy, self.decisions(), log, spec.session_header, hits)
        if problems:
            raise ServerError(
                f"The router {self.kind} does not do what its mode says: {'; '.join(problems)}",
                "a mode that lacks what it needs falls back to another one and says so nowhere but in its counters",
                f"read its log: {self.log_path}",
            )

    def _died(self, when: str) -> ServerDied:
        log = self._program.log_text() if self._program else ""
        code = self._program.exit_code if self._program else None
        said = router_checks.death(log)
        return ServerDied(
            f"The router {self.kind} ended {when}" + (f" (exit code {code})" if code is not None else ""),
            f"its log says: {said}" if said else None,
            f"read its log: {self.log_path}",
        )

    def report(self) -> dict[str, Any]:
        """What a stored run says of it beside version and command: kind, flags, seconds to ready, its own counters."""
        names = {endpoint.base_url: endpoint.worker for endpoint in self.endpoints}
        found = asdict(self.decisions())
        found["workers"] = {names.get(url, url): n for url, n in found["workers"].items()}
        return {"kind": self.kind, "product": self.spec.product, "flags": self.flags, "ready_s": self.ready_s} | {
            "decisions": found
        }

    def stop(self) -> None:
        """Ends it and verifies it. Safe to call twice, or half-started."""
        if self._program is not None:
            self._program.stop()
            self._program = None
