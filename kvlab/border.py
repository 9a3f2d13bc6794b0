"""Pools that differ from start to start, at the number of clients where that decides between room and eviction.

The border is the fewest clients that the first server does not hold to their end. What the blocks of each server say
of exactly this number is stored before the load is sent to it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from kvlab import blocks, claims, predict
from kvlab.claims import Claim
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.load_grid import Border
from kvlab.measure import Lab, Result
from kvlab.predict import Interval

TIMES = {"throughput_tok_s": "tok/s", "ttft_p50_s": "s"}
UNITS = {"requests_that_fit_low": "requests", "requests_that_fit_high": "requests", "preemptions": "count"} | TIMES

# (request shape, clients, requests that fit) -> quantities of TIMES that a step-time model gives
Model = Callable[[Border, int, Interval], Mapping[str, float | None]]


class Pool(NamedTuple):
    """One server: what its claims say of it, and its configuration."""

    where: dict[str, Any]
    server: ServerConfig


def pools(lab: Lab, changes: Mapping[str, Any], grid: Border | None) -> list[Pool]:
    """The servers in the order of measuring; none where the profile has no such grid."""
    if grid is None:
        return []
    base = lab.server(dict(changes) | grid.server)
    if grid.pools:
        sizes = [({"pool": "by-hand", "kv_bytes": size}, {"kv_cache_memory_bytes": size}) for size in grid.pools]
    else:
        caches = ["cold", *["kept"] * (grid.starts - 1)]
        left = [{"kv_cache_memory_bytes": None, "caches": kind} for kind in caches]
        sizes = [({"pool": "unpinned", "start": n}, changed) for n, changed in enumerate(left, 1)]
    return [Pool(where, base.model_copy(update=changed)) for where, changed in sizes]


def size_cell(pool: Pool, grid: Border) -> Cell:
    """Two requests, one by one, on the first server: then its blocks are known, and the border with them."""
    load = LoadConfig(requests=2, input_tokens=grid.input_tokens, output_tokens=grid.output_tokens)
    return Cell(name="border-size", server=pool.server, load=load)


def load_cell(pool: Pool, grid: Border, clients: int) -> Cell:
    """The load at the border. Each start after the first one is a server of its own."""
    load = LoadConfig(
        concurrency=clients,
        requests=grid.rounds * clients,
        warmup_requests=min(clients, 4),
        input_tokens=grid.input_tokens,
        output_tokens=grid.output_tokens,
    )
    start = pool.where.get("start", 1)
    return Cell(name=f"border-c{clients}", server=pool.server, load=load, repeat=start - 1, fresh=start > 1)


def ahead(lab: Lab, grid: Border | None, servers: Sequence[Pool]) -> list[Cell]:
    """The loads that are known before any start, those on pools of a given size: their servers start with others."""
    if not servers or not grid.pools:
        return []
    clients, _ = border_clients(grid, servers[0].server, pinned_blocks(lab, servers[0].server))
    return [] if clients is None else [load_cell(pool, grid, clients) for pool in servers]


def measured(
    lab: Lab, grid: Border, servers: Sequence[Pool], model: Model, *, side_by_side: bool = False
) -> tuple[int | None, list[Result]]:
    """The border, and a result for each server; no border where the first server's blocks are not known.

    `side_by_side`: servers with pools of a given size may be up together; others are alone in any case.
    """
    first = servers[0]
    if grid.pools:
        size, (clients, why) = None, border_clients(grid, first.server, pinned_blocks(lab, first.server))
    else:
        lab.close()  # a start sizes its pool by the memory that it finds, and others must not be in it
        (size,) = lab.measure([size_cell(first, grid)], skip_refused=True)
        clients, why = border_clients(grid, first.server, stated_blocks(size))
    if clients is None:
        nothing = Result(size_cell(first, grid), None, size.reason if size and size.reason else why)
        return None, [nothing] * len(servers)
    found = []
    for pool in servers:

        def store(_, server, pool=pool):
            lab.predict(_before(lab, grid, pool, foretold(grid, pool, server.capacity.metric_blocks, clients, model)))

        together = side_by_side and bool(grid.pools)
        found += lab.measure([load_cell(pool, grid, clients)], side_by_side=together, skip_refused=True, up=store)
        if not grid.pools:
            lab.close()
    return clients, found


def pinned_blocks(lab: Lab, server: ServerConfig) -> int:
    """Blocks of a pinned pool by its bytes, the null block included."""
    width = predict.kv_dtype_bytes(lab.geometry, server.kv_cache_dtype, server.dtype)
    per_token = predict.kv_bytes_per_token(lab.geometry, width)
    return predict.num_blocks(server.kv_cache_memory_bytes, per_token, server.block_size)


def stated_blocks(result: Result) -> int | None:
    """Blocks of a run's server as it states them, the null block included."""
    server = result.run.manifest.get("server") if result.run is not None else None
    return ((server or {}).get("capacity") or {}).get("metric_blocks")


def room(grid: Border, server: ServerConfig, size: int) -> Interval:
    """Requests that a pool of `size` blocks holds: all to their end, and on average."""
    return predict.requests_that_fit(size, grid.input_tokens, grid.output_tokens, server.block_size)


def border_clients(grid: Border, server: ServerConfig, size: int | None) -> tuple[int | None, str | None]:
    """The fewest clients that a pool of `size` blocks does not hold to their end; or null, and why there is none."""
    if size is None:
        return None, "the first server does not state its blocks"
    clients = int(room(grid, server, size).low) + 1
    if server.max_num_seqs is not None and clients > server.max_num_seqs:
        fits = f"the pool holds {clients - 1} requests, of which max_num_seqs lets {server.max_num_seqs} run"
        return None, f"{fits}: raise it in [load.border], or lower gpu_memory_utilization there"
    return clients, None


def foretold(
    grid: Border, pool: Pool, size: int | None, clients: int | None, model: Model
) -> dict[str, float | int | None]:
    """What follows from the blocks of one server, by quantity of UNITS; nothing where they are not known."""
    if size is None or clients is None:
        return {}
    fit = room(grid, pool.server, size)
    engine = blocks.engine_of(pool.server, predict.usable_blocks(size))
    jobs = [blocks.Job(grid.input_tokens, grid.output_tokens)] * (grid.rounds * clients)
    counted = {"preemptions": blocks.closed_loop(engine, clients, jobs).preemptions}
    timed = {name: value for name, value in model(grid, clients, fit).items() if name in TIMES}
    return {"requests_that_fit_low": fit.low, "requests_that_fit_high": fit.high} | counted | timed


# -- claims -------------------------------------------------------------------------------------------------------


def stated(
    lab: Lab, grid: Border, servers: Sequence[Pool], clients: int | None, results: Sequence[Result], model: Model
) -> list[Claim]:
    """The border, the blocks of each server, what was computed from them and measured, and how far they differ."""
    of = {"pool": servers[0].where["pool"], "in": grid.input_tokens, "out": grid.output_tokens}
    why = {} if clients is not None else {"results": results[:1]}
    made = [lab.claim("border_clients", of, computed=clients, unit="requests", **why)]
    sizes = [stated_blocks(result) for result in results]
    wanted = [None, *sizes[:1] * (len(servers) - 1)]  # the first start's blocks, again
    if grid.pools:
        wanted = [pinned_blocks(lab, pool.server) for pool in servers]
    for pool, result, size, computed in zip(servers, results, sizes, wanted, strict=True):
        seen = {"measured": size, "results": [result]}
        made.append(lab.claim("capacity_blocks", pool.where, computed=computed, unit="blocks", **seen))
        known = computed if size is None and grid.pools else size
        made += _of_one(lab, grid, pool, result, foretold(grid, pool, known, clients, model))
    differ = {"measured": None if None in sizes else max(sizes) - min(sizes), "results": results}
    computed = max(wanted) - min(wanted) if grid.pools else 0
    where = {"pool": of["pool"], "servers": len(servers)}
    return [*made, lab.claim("capacity_range_blocks", where, computed=computed, unit="blocks", **differ)]


def _before(lab: Lab, grid: Border, pool: Pool, numbers: Mapping[str, float | None]) -> list[Claim]:
    known = {name: value for name, value in numbers.items() if value is not None}
    return [lab.claim(f"border_{name}", _at(grid, pool), computed=v, unit=UNITS[name]) for name, v in known.items()]


def _of_one(lab: Lab, grid: Border, pool: Pool, result: Result, numbers: Mapping[str, float | None]) -> list[Claim]:
    made = []
    for name, unit in UNITS.items():
        computed = numbers.get(name)
        only_computed = name.startswith("requests") and computed is not None
        seen = {} if only_computed else {"measured": result.estimate(name), "results": [result]}
        made.append(lab.claim(f"border_{name}", _at(grid, pool), computed=computed, unit=unit, **seen))
    return made


def _at(grid: Border, pool: Pool) -> dict[str, Any]:
    return pool.where | {"in": grid.input_tokens, "out": grid.output_tokens}


# -- in words -----------------------------------------------------------------------------------------------------


class _Side(NamedTuple):
    """One server, as its claims say."""

    name: str
    blocks: float
    computed: float
    preemptions: float
    times: dict[str, float]


def told(made: Sequence[Claim]) -> list[str]:
    """How far the pools differ, and whether that decides between room and eviction at the border; from claims alone."""
    border = next(c for c in made if c.quantity == "border_clients")
    sides = [side for c in made if c.quantity == "capacity_blocks" and (side := _side(c, made))]
    if len(sides) < 2 or border.computed is None:
        reason = next((c.reason for c in made if c.state != "measured" and c.reason), "two servers are needed")
        return [f"The pool at the border is not measured: {reason}."]
    at = claims.parse_conditions(border.conditions)
    hand = at["pool"] == "by-hand"
    who = "pools set by hand" if hand else "servers of one configuration, started one after another,"
    low, high = min(side.blocks for side in sides), max(side.blocks for side in sides)
    size = f"{low:,.0f} to {high:,.0f} blocks, {high / low - 1:.1%} apart" if high > low else f"{low:,.0f} blocks each"
    counted = "; ".join(f"{s.name}: {s.computed:g} computed, {s.preemptions:g} measured" for s in sides)
    load = f"{border.computed:g} clients with {at['in']} + {at['out']} tokens"
    return [f"{len(sides)} {who} hold {size}.", f"Preemptions at {load}: {counted}. {_verdict(sides)}"]


def _side(capacity: Claim, made: Sequence[Claim]) -> _Side | None:
    own = {c.quantity.removeprefix("border_"): c for c in made if c.conditions.startswith(f"{capacity.conditions};in=")}
    counted = own.get("preemptions")
    if capacity.measured is None or counted is None or None in (counted.computed, counted.measured):
        return None
    times = {name: own[name].measured for name in TIMES if name in own and own[name].measured is not None}
    name, _, value = capacity.conditions.split(";")[-1].partition("=")
    label = f"start {value}" if name == "start" else f"{capacity.measured:,.0f} blocks"
    return _Side(label, capacity.measured, counted.computed, counted.measured, times)


def _verdict(sides: Sequence[_Side]) -> str:
    evicting, free = ([s for s in sides if (s.preemptions > 0) == wanted] for wanted in (True, False))
    right = sum((s.computed > 0) == (s.preemptions > 0) for s in sides)
    account = f"The blocks of a server foretold its side in {right} of {len(sides)} cases."
    if not evicting or not free:
        side = "evicts" if evicting else "has room for all"
        return f"Each of them {side}: here the pool does not decide on which side of the border one is. {account}"
    changes = []
    for name, what in (("throughput_tok_s", "throughput"), ("ttft_p50_s", "the median time to the first token")):
        means = [[s.times[name] for s in group if name in s.times] for group in (evicting, free)]
        if all(means):
            one, other = (sum(values) / len(values) for values in means)
            changes.append(f"{what} {one / other - 1:+.1%}")
    cost = f" Those that evict have {' and '.join(changes)} against those that do not." if changes else ""
    return f"The same load is on both sides of the border: the size of the pool decides. {account}{cost}"
