"""Hits request by request: against the stack model, and against workers with real caches."""

import numpy as np
import pytest
from loads_for_tests import shared_prefixes

from kvlab import hit_simulation, hits, load, workload
from kvlab.config import Cell, ServerConfig
from kvlab.fake_fleet import FakeFleet
from kvlab.service import Service

BLOCK = 16
SERVER = ServerConfig(model="tiny", engine="cpu")


def cell(prefixes=12, workers=3, service="random_connection", **changes):
    changes = {"requests": 240} | changes
    load = shared_prefixes(prefixes, 11 * BLOCK, 2 * BLOCK, new_connection=True, **changes)
    return Cell(name="point", server=SERVER, load=load, workers=workers, service=service)


def test_what_is_left_of_a_prefix_is_its_beginning():
    found = hit_simulation.found_blocks([0, 1, 0, 0], [0] * 4, [4, 4], 1, 8)
    assert list(found) == [0, 0, 3, 4]  # the fifth block that prefix 1 and its tail took was prefix 0's last one


def test_it_agrees_with_the_stack_model():
    long = cell(workers=1, requests=6000)
    simulated, model = hit_simulation.simulate(long, 51, BLOCK), hits.stack_hit_ratios(51, 11, 2, 12)
    assert list(simulated) == pytest.approx(model, abs=0.02)


@pytest.mark.parametrize("changes", [{}, {"zipf": 1.0}, {"prefix_order": "cycle"}, {"prefix_step_tokens": 4 * BLOCK}])
def test_every_hit_of_workers_with_a_cache_is_foretold(changes):
    point = cell(**changes)
    with FakeFleet(3, blocks=51, block_size=BLOCK) as fleet:
        service = Service(fleet.endpoints, point.service, seed=point.load.pick_seed)
        result = load.run_load(service, point.load, nonce=3, progress=False)
    rows = result.requests[result.requests["phase"] == "measure"]
    lengths = np.array(workload.prefix_lengths(point.load))[rows["prefix"].to_numpy(dtype=int)]
    foretold = hit_simulation.simulate(point, 51, BLOCK)
    assert (rows["cached_tokens"] > 0).mean() == foretold.any
    assert rows["cached_tokens"].sum() / lengths.sum() == pytest.approx(foretold.token)
    assert result.certificate["failures"] == []


def test_placement_decides():
    spread, placed = (hit_simulation.simulate(cell(service=how), 51, BLOCK) for how in ("random_connection", "placed"))
    assert spread.any < 0.5 and placed.any > 0.8


def test_other_picks_are_averaged_where_somebody_else_picks():
    proxied = cell(service="l4:nginx")
    mean = hit_simulation.simulate(proxied, 51, BLOCK, seeds=30)
    assert mean.any == pytest.approx(hits.run_hit_ratios(51, 11, 2, 12, 3, 240, 12).any, abs=0.02)
