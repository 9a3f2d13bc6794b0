"""The null server and the least reader: small C programs, compiled on demand into the user's cache."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import urllib.request
from pathlib import Path

from kvlab.engine import cache_dir
from kvlab.errors import KvlabError

HERE = Path(__file__).parent


def compiled(name: str) -> Path:
    """The program made of NAME.c; raises KvlabError where there is no C compiler."""
    source = HERE / f"{name}.c"
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:8]
    program = cache_dir() / "bench" / f"{name}-{digest}"
    if program.exists():
        return program
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    if compiler is None:
        raise KvlabError(
            "The null server cannot be compiled: there is no C compiler.",
            cause="a server that is faster than every client is written in C",
            next_step="install one (Debian: apt-get install gcc libc6-dev)",
        )
    program.parent.mkdir(parents=True, exist_ok=True)
    draft = program.with_suffix(f".{os.getpid()}")
    done = subprocess.run([compiler, "-O2", "-o", draft, source], capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["the compiler says nothing"])[0]
        raise KvlabError(
            f"The null server cannot be compiled: {said}",
            cause="the C library's headers are missing",
            next_step="install them (Debian: apt-get install libc6-dev)",
        )
    draft.rename(program)
    return program


REALTIME = "KVLAB_BENCH_REALTIME"  # in the environment: server and clients go before all other programs (root)


def pinned(core: int | None) -> list[str]:
    """The beginning of a command that keeps a program on one core, and before others where that is asked for."""
    first = ["chrt", "-r", "10"] if os.environ.get(REALTIME) else []
    return first + (["taskset", "-c", str(core)] if core is not None and shutil.which("taskset") else [])


class NullServer:
    """`with NullServer(ttft_s, itl_s) as server:` streams tokens at known times from 127.0.0.1:`server.port`."""

    def __init__(self, ttft_s: float, itl_s: float, events_per_write: int = 1, core: int | None = None):
        program = [str(compiled("null_server")), str(ttft_s), str(itl_s), str(events_per_write)]
        self._command = [*pinned(core), *program]

    def __enter__(self) -> NullServer:
        self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        line = self._process.stdout.readline()
        if not line.strip():
            status = self._process.wait()
            self._process.stdin.close()
            self._process.stdout.close()
            raise KvlabError(
                f"The null server did not start (exit code {status}); its message stands above.",
                "--realtime needs the right to it, as root has" if os.environ.get(REALTIME) else None,
                "leave --realtime out, or run as root" if os.environ.get(REALTIME) else None,
            )
        self.port = int(line)
        self.base_url = f"http://127.0.0.1:{self.port}"
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()  # it ends with its input, and so with its parent
        self._process.wait(10)
        self._process.stdout.close()

    def reset(self) -> None:
        """Forgets the counters."""
        self._get("/reset", "POST")

    def stats(self) -> dict[str, float]:
        """requests, events, writes, open, open_max, cpu_s, late_p50_s, late_p99_s, late_max_s."""
        return json.loads(self._get("/stats"))

    def arrivals_s(self) -> list[float]:
        """When each request arrived, on CLOCK_MONOTONIC."""
        return [float(line) for line in self._get("/arrivals").split()]

    def _get(self, path: str, method: str = "GET") -> str:
        with urllib.request.urlopen(urllib.request.Request(self.base_url + path, method=method), timeout=30) as answer:
            return answer.read().decode()
