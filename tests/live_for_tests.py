"""What the tests with real vLLM share: they need its CPU build, and servers start side by side where they can."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import pytest
from loads_for_tests import shared_prefixes

from kvlab import engine, router_packages
from kvlab.config import ServerConfig
from kvlab.errors import EngineMissing
from kvlab.server import VllmServer


def has_cpu_build() -> bool:
    """Whether the vLLM of this Python is the CPU build."""
    try:
        return engine.installed_build()[0] == "cpu"
    except EngineMissing:
        return False


BLOCK = 32
# For routers: a prefix stays where it came first.
ROUTED = shared_prefixes(3, 8 * BLOCK, 2 * BLOCK, concurrency=2, requests=24)
MARKS = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.timeout(600),  # four servers that start at once on a slow machine
    pytest.mark.skipif(not has_cpu_build(), reason="the CPU build of vLLM is not installed"),
]


def needs(product: str) -> pytest.MarkDecorator:
    """For a test of a router: skips it where that one is not installed."""
    missing = router_packages.version(product) is None
    return pytest.mark.skipif(missing, reason=f"not installed: kvlab router install {product}")


def tiny_server(**more) -> ServerConfig:
    """The embedded model on the CPU, ready as soon as can be: nothing is compiled."""
    return ServerConfig(**({"model": "tiny", "engine": "cpu", "block_size": BLOCK, "enforce_eager": True} | more))


@contextlib.contextmanager
def side_by_side(configs, log_dir):
    """The server of each configuration, started at once: a start keeps one core busy, and an idle server none."""
    servers = {key(config): VllmServer(config, log_dir=log_dir) for config in configs}
    with ThreadPoolExecutor(len(servers)) as pool, contextlib.ExitStack() as ends:
        for server in servers.values():
            ends.callback(server.stop)
        list(pool.map(VllmServer.start, servers.values()))
        yield lambda config: servers[key(config)]


def key(config) -> str:
    """Tells configurations apart."""
    return config.model_dump_json()
