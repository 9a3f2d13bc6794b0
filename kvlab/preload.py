"""How a CPU server starts without importing twice: which servers may, and what runs in place of vLLM's command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from kvlab.config import ServerConfig

FORKED_ENGINE = Path(__file__).with_name("forked_engine.py")
MODULE = ["-m", "vllm.entrypoints.cli.main"]


def possible(config: ServerConfig) -> bool:
    """Whether such a server is the same however it started.

    Only without compilation, which is what reads most of the environment, and where the start is not what is measured.
    """
    return (
        config.preload
        and config.engine == "cpu"
        and config.enforce_eager
        and config.caches == "user"
        and config.tensor_parallel_size == 1
    )


def forked_engine(argv: Sequence[str]) -> list[str] | None:
    """The command with an engine process that is forked; None where it does not run vLLM's command line."""
    for i in range(len(argv) - 1):
        if list(argv[i : i + 2]) == MODULE:
            return [*argv[:i], "-P", str(FORKED_ENGINE), *argv[i + 2 :]]
    return None
