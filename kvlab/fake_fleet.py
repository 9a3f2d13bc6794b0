"""Fake workers with a real prefix cache each, for fast tests of services and routers: every hit follows from LRU."""

from __future__ import annotations

import contextlib
from dataclasses import replace

from kvlab.client import Endpoint
from kvlab.fake_server import Behaviour, FakeServer


class FakeFleet:
    """`with FakeFleet(workers=3, blocks=51, block_size=16) as fleet:` serves; `fleet.endpoints` are w0, w1, ...

    `blocks` usable ones in each worker. What it answers is marked as fake and cannot be stored as measured.
    """

    def __init__(self, workers: int = 3, *, blocks: int = 51, block_size: int = 16, **behaviour):
        values = {"ttft_s": 0.0, "itl_s": 0.0} | behaviour
        kinds = [Behaviour(cache_blocks=blocks, block_size=block_size, **values) for _ in range(workers)]
        self.fakes = [FakeServer(kind) for kind in kinds]
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> FakeFleet:
        for fake in self.fakes:
            self._stack.enter_context(fake)
        return self

    def __exit__(self, *_) -> None:
        self._stack.close()

    @property
    def endpoints(self) -> list[Endpoint]:
        """Where each worker listens, with its name."""
        return [replace(fake.endpoint, worker=f"w{i}") for i, fake in enumerate(self.fakes)]

    def check_alive(self) -> None:
        """Fakes do not die."""

    def reset_prefix_caches(self) -> None:
        """Empties the cache of every worker."""
        for fake in self.fakes:
            fake.cache.clear()
