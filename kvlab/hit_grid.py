"""The cells of the sections on several workers, from a profile: what is sent to how many workers, in which order."""

from __future__ import annotations

from typing import NamedTuple

from kvlab import geometry, predict
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.profile import Lengths, ServiceHitRate

PREFILL_LENGTHS = (0.125, 0.25, 0.5, 1.0)  # of the whole prompt


class Blocks(NamedTuple):
    """What a hit ratio follows from, in blocks: of a prefix, of a request's own tail and output, usable ones."""

    prefix: int
    own: int
    usable: int
    size: int  # tokens in a block

    @property
    def fit(self) -> float:
        """Requests that one worker holds: C / (P + T)."""
        return self.usable / (self.prefix + self.own)


def blocks(model: str, server: ServerConfig, prefix_tokens: int, tail_tokens: int, output_tokens: int) -> Blocks:
    """Blocks of these lengths on a worker whose pool is pinned. `model`: the name of its geometry."""
    size, per_token = server.block_size, bytes_per_token(model, server)
    usable = predict.usable_blocks(predict.num_blocks(server.kv_cache_memory_bytes, per_token, size))
    whole = predict.blocks_per_request(prefix_tokens + tail_tokens, output_tokens, size)
    return Blocks(prefix_tokens // size, whole - prefix_tokens // size, usable, size)


def bytes_per_token(model: str, server: ServerConfig) -> float:
    """KV bytes that a token takes on a worker."""
    return predict.kv_bytes_per_token(geometry.load(model), 4 if server.dtype == "float32" else None)


def load_of(grid: ServiceHitRate, prefixes: int, concurrency: int, **changes) -> LoadConfig:
    """The article's load: each prefix once as warm-up, a connection a request, at least 20 requests a prefix."""
    values = {
        "workload": "shared_prefix",
        "concurrency": concurrency,
        "requests": max(grid.min_requests, grid.requests_per_prefix * prefixes),
        "warmup_requests": prefixes,
        "prefixes": prefixes,
        "prefix_tokens": grid.prefix_tokens,
        "input_tokens": grid.prefix_tokens + grid.tail_tokens,
        "output_tokens": grid.output_tokens,
        "pick_seed": concurrency,
        "new_connection": True,
        "sample_interval_s": 0.5,
    }
    return LoadConfig(**(values | changes))


def point_cells(server: ServerConfig, grid: ServiceHitRate) -> list[Cell]:
    """Every point once, in the order of importance, then the repeats: other picks of the same order of requests."""
    cells = []
    for repeat in range(max(points.repeats for points in grid.points)):
        for points in grid.points:
            for prefixes in points.prefixes if repeat < points.repeats else ():
                seed = points.concurrency + 100 * repeat
                load = load_of(grid, prefixes, points.concurrency, pick_seed=seed)
                name = f"w{points.workers}-k{prefixes}-c{points.concurrency}"
                cells.append(_cell(name, server, load, points.workers, repeat))
    return cells


def _cell(name: str, server: ServerConfig, load: LoadConfig, workers: int, repeat: int = 0, how="random_connection"):
    return Cell(name=name, server=server, load=load, workers=workers, service=how, repeat=repeat)


def limit_cells(server: ServerConfig, grid: ServiceHitRate) -> dict[str, Cell]:
    """One cell for each limit of the plain law, by name: zipf=0.8, order=cycle, lengths=mixed, capacity=ample."""
    limits, first = grid.limits, grid.points[0]
    if limits is None:
        return {}
    changes: dict[str, dict] = {f"zipf={exponent:g}": {"zipf": exponent} for exponent in limits.zipf}
    changes |= {f"order={order}": {"prefix_order": order} for order in limits.orders}
    changes |= {"lengths=mixed": {"prefix_step_tokens": limits.step_tokens}} if limits.step_tokens else {}
    loads = {name: load_of(grid, limits.prefixes, first.concurrency, **change) for name, change in changes.items()}
    if limits.ample:
        loads["capacity=ample"] = with_lengths(grid, limits.ample, first.concurrency)
    return {name: _cell(name.replace("=", "-"), server, load, first.workers) for name, load in loads.items()}


def with_lengths(grid: ServiceHitRate, lengths: Lengths, concurrency: int) -> LoadConfig:
    """The same kind of load with other lengths."""
    whole = lengths.prefix_tokens + lengths.tail_tokens
    changes = {"prefix_tokens": lengths.prefix_tokens, "input_tokens": whole, "output_tokens": lengths.output_tokens}
    return load_of(grid, lengths.prefixes, concurrency, **changes)


def proxy_cell(server: ServerConfig, grid: ServiceHitRate, kind: str) -> Cell:
    """The limits' number of prefixes through a service that picks by itself."""
    first = grid.points[0]
    load = load_of(grid, grid.limits.prefixes, first.concurrency)
    return _cell(kind.replace(":", "-"), server, load, first.workers, how=kind)


def scaled_cell(server: ServerConfig, grid: ServiceHitRate) -> Cell:
    """Other lengths and another pool with the same ratios, on one server: the law names no number of workers."""
    return _cell("scaled", server, with_lengths(grid, grid.limits.scaled, grid.points[0].concurrency), 1)


def alone_cells(server: ServerConfig, grid: ServiceHitRate) -> list[Cell]:
    """One worker, one request at a time: prompts of several lengths that share nothing, then shared prefixes."""
    whole = grid.prefix_tokens + grid.tail_tokens
    cells = []
    for share in PREFILL_LENGTHS:
        n = round(whole * share)
        load = LoadConfig(requests=6, warmup_requests=2, input_tokens=n, output_tokens=1, new_connection=True)
        cells.append(_cell(f"alone-in{n}", server, load, 1))
    shared = load_of(grid, 7, 1, requests=40, output_tokens=1)
    return [*cells, _cell("alone-shared", server, shared, 1)]
