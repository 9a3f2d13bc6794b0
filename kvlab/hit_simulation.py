"""Prefix-cache hits request by request: the same order of prefixes and the same picks, through simulated block queues.

Exact where requests come one at a time; concurrent ones hold blocks and miss together, which is left out.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from kvlab import workload
from kvlab.client import Endpoint
from kvlab.config import Cell
from kvlab.hits import HitRatios
from kvlab.service import CLIENT_PICKS, Service
from kvlab.workload import Request


@dataclass
class Worker:
    """The free queue of one worker, oldest first: [prefix or None, blocks]. A prefix loses its end first."""

    usable_blocks: int
    _queue: deque = field(default_factory=deque)

    def __post_init__(self):
        self._queue.append([None, self.usable_blocks])

    def request(self, prefix: int, prefix_blocks: int, own_blocks: int) -> int:
        """Blocks of the prefix that were found; the request's own ones are lost before them."""
        found = sum(blocks for name, blocks in self._queue if name == prefix)
        self._queue = deque(entry for entry in self._queue if entry[0] != prefix)
        self._take(prefix_blocks - found + own_blocks)
        self._queue.append([None, own_blocks])
        self._queue.append([prefix, prefix_blocks])
        return found

    def _take(self, blocks: int) -> None:
        while blocks and self._queue:
            taken = min(blocks, self._queue[0][1])
            self._queue[0][1] -= taken
            blocks -= taken
            if not self._queue[0][1]:
                self._queue.popleft()


def found_blocks(
    order: Sequence[int], picks: Sequence[int], sizes: Sequence[int], own_blocks: int, usable_blocks: int
) -> np.ndarray:
    """Blocks found for each request: `order` names its prefix, `picks` its worker; `sizes`: blocks of each prefix."""
    workers = {pick: Worker(usable_blocks) for pick in set(picks)}
    pairs = zip(order, picks, strict=True)
    return np.array([workers[pick].request(prefix, sizes[prefix], own_blocks) for prefix, pick in pairs])


def simulate(cell: Cell, usable_blocks: int, block_size: int, *, seeds: int = 1) -> HitRatios:
    """The hit ratios of a cell's measured requests, with its own picks.

    `seeds` > 1, or a service that this client does not pick for: the mean over so many other random picks.
    """
    own = cell.service in CLIENT_PICKS and seeds == 1
    kind = cell.service if cell.service in CLIENT_PICKS else "random_connection"
    each = [
        _once(cell, kind, cell.load.pick_seed if own else 10_000 + s, usable_blocks, block_size) for s in range(seeds)
    ]
    return HitRatios(*np.mean(each, axis=0).tolist())


def _once(cell: Cell, kind: str, pick_seed: int, usable_blocks: int, block_size: int) -> HitRatios:
    load = cell.load
    warmup, order = workload.prefix_sequence(load)
    nobody = [Endpoint("http://127.0.0.1", "", worker=str(i)) for i in range(cell.workers)]
    service = Service(nobody, kind, seed=pick_seed)
    picks = [*_picks(service, warmup, "warmup"), *_picks(service, order, "measure")]
    lengths = np.array(workload.prefix_lengths(load))
    sizes = lengths // block_size
    own = math.ceil((load.input_tokens + load.output_tokens - 1) / block_size) - load.prefix_tokens // block_size
    found = found_blocks([*warmup, *order], picks, sizes.tolist(), own, usable_blocks)[len(warmup) :]
    asked = sizes[np.array(order)]
    return HitRatios(float((found > 0).mean()), float(found.sum() / asked.sum()), float((found == asked).mean()))


def _picks(service: Service, order: Sequence[int], phase: str) -> list[int]:
    requests = [Request(i, [], 1, prefix=prefix) for i, prefix in enumerate(order)]
    return [int(endpoint.worker) for endpoint in service.targets(requests, phase)]
