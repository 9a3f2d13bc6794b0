"""The cells of the section on routers: the same order of the same requests through each route, and what a hop adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvlab import (
    config,
    dynamo,
    hit_grid,
    hit_simulation,
    hits,
    measure,
    profile,
    provenance,
    router,
    router_packages,
    store,
)
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import ConfigError
from kvlab.hit_grid import Blocks
from kvlab.hits import HitRatios
from kvlab.measure import Lab, Result
from kvlab.profile import Routing, ServiceHitRate
from kvlab.service import CLIENT_PICKS, PER_CONNECTION

ONE, TOGETHER = "one-by-one", "together"  # how the warm-up was sent
DIRECT = "fixed"  # the client's own connection to one worker: what a hop is compared with


class Arm(NamedTuple):
    """One bar of the comparison: its name, where it goes, how it was warmed up."""

    name: str
    cell: Cell
    warmup: str

    @property
    def conditions(self) -> dict[str, str]:
        """What its claims say beside the load."""
        return {"routing": self.name, "warmup": self.warmup}


def short(service: str) -> str:
    """A route in a condition: vllm-cache-aware, random-connection."""
    return (service.partition(":")[2] or service).replace("_", "-")


def grids(lab: Lab) -> tuple[Routing, ServiceHitRate]:
    """The routes, and the lengths that they are measured with; ConfigError where a profile has only the routes."""
    grid, lengths = lab.section_grid(), lab.profile.service_hit_rate
    if lab.profile.routing is None:
        lengths = profile.load_profile(measure.BORROWED[lab.profile.server.engine]).service_hit_rate
    if lengths is None:
        raise ConfigError(
            f"The profile {lab.profile.name} has [routing] and no [service_hit_rate], whose lengths it takes.",
            next_step="copy that table from a built-in profile",
        )
    return grid, lengths


def arms(server: ServerConfig, grid: Routing, lengths: ServiceHitRate) -> list[Arm]:
    """Every route, with one or both warm-ups; those with workers of their own come last."""
    found = []
    for route in sorted(grid.routes, key=lambda route: own_workers(route.service)):
        for warmup in (ONE, TOGETHER) if route.together else (ONE,):
            load = hit_grid.load_of(
                lengths,
                grid.prefixes,
                grid.concurrency,
                requests=grid.requests,
                new_connection=route.service in PER_CONNECTION,
                warmup_concurrency=1 if warmup == ONE else 0,
            )
            name = route.name or short(route.service)
            cell = Cell(
                name=f"{name}-{warmup}",
                server=server,
                load=load,
                workers=grid.workers,
                service=route.service,
                service_args=route.args,
            )
            found.append(Arm(name, cell, warmup))
    return found


def own_workers(service: str) -> bool:
    """Whether a router takes the place of the servers too."""
    return service.startswith("router:dynamo-")


def hop_cells(server: ServerConfig, grid: Routing) -> list[Cell]:
    """One request at a time that hits nothing: to one worker directly, twice, and through each router with `hop`."""
    load = LoadConfig(
        requests=grid.hop_requests, warmup_requests=4, input_tokens=grid.hop_input_tokens, output_tokens=1
    )
    hops = [route for route in grid.routes if route.hop]
    routes = [(DIRECT, (), 0), *((r.service, r.args, 0) for r in hops if not own_workers(r.service)), (DIRECT, (), 1)]
    routes += [(route.service, route.args, 0) for route in hops if own_workers(route.service)]
    return [
        Cell(
            name=f"hop-{short(service)}",
            server=server,
            load=load,
            workers=grid.workers,
            service=service,
            service_args=args,
            repeat=repeat,
        )
        for service, args, repeat in routes
    ]


def expected(arm: Arm, size: Blocks) -> HitRatios | None:
    """Hit ratios that follow from the route alone; None where a router decides by what it has seen.

    Cache-aware routers that are warmed up one request after another see idle workers only; vllm-router then keeps every
    prefix on the first one, which has to hold them all.
    """
    load, blocks = arm.cell.load, (size.usable, size.prefix, size.own)
    each, n = (load.prefixes, arm.cell.workers), load.requests
    if arm.name in ("random-connection", "random-request") or arm.name.endswith(("-random", "-round-robin")):
        return hits.run_hit_ratios(*blocks, *each, n, load.warmup_requests)
    if arm.name == "placed":
        return hits.placed_hit_ratios(*blocks, *each)
    if arm.name in ("hash", "vllm-consistent-hash"):
        return hits.placed_hit_ratios(*blocks, *each, hashed=True)
    if arm.name == "vllm-cache-aware" and arm.warmup == ONE:
        return hits.stack_hit_ratios(*blocks, load.prefixes)
    return None


def foretold(arm: Arm, size: Blocks) -> HitRatios | None:
    """Hit ratios of this very order of requests, block by block; None where a router goes by what it has seen.

    `expected` is what many orders come to: a few hundred requests of one seed may lie well off it.
    """
    how = "round_robin" if arm.cell.service.endswith("-round-robin") else arm.cell.service
    if how not in CLIENT_PICKS:
        return None
    return hit_simulation.simulate(arm.cell.model_copy(update={"service": how}), size.usable, size.size)


def missing(lab: Lab, cell: Cell) -> str | None:
    """Why a cell can be neither replayed nor measured here; None where it can."""
    if lab.mode == "replay" or store.find_run(lab.machine, lab.section, config.key(cell)) is not None:
        return None
    if lab.base_url:
        return "several workers are started here; one existing server is not enough"
    kind = cell.service.partition(":")[2]
    product = "dynamo" if kind in dynamo.MODES else router.KINDS[kind].product if kind in router.KINDS else None
    try:
        if product is not None and router_packages.version(product) is None:
            return f"the router {product} is not installed: kvlab router install {product}"
    except ConfigError as error:
        return error.what
    return None


def measured(lab: Lab, cells: list[Cell]) -> list[Result]:
    """One result a cell, in order; a router that is not installed, dies or falls back is a result with its reason.

    Routers with workers of their own come last, so that the fleet starts once and not twice.
    """
    why = [missing(lab, cell) for cell in cells]
    ready = sorted((i for i, w in enumerate(why) if w is None), key=lambda i: own_workers(cells[i].service))
    found = dict(zip(ready, lab.measure([cells[i] for i in ready], skip_refused=True), strict=True))
    return [found.get(i) or Result(cell, None, why[i]) for i, cell in enumerate(cells)]


def not_comparable(result: Result, direct: Sequence[Result]) -> str | None:
    """Why what a hop adds cannot be read off these direct runs; None where it can, or where a run is missing anyway."""
    runs = [r.run.manifest["provenance"] for r in (result, *direct) if r.run is not None]
    if all(provenance.same_host(runs[0], other) for other in runs[1:]):
        return None
    return "the direct runs are of another host, whose first token takes another time"
