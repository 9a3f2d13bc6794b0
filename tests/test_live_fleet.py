"""Two real workers behind a service: first touches, counters, routers, and one that dies takes the other with it."""

import os
import signal

import live_for_tests
import pytest
from live_for_tests import BLOCK, ROUTED, needs, tiny_server
from loads_for_tests import shared_prefixes

from kvlab import fleet_rows, hit_simulation, hits, load, service
from kvlab.config import Cell
from kvlab.errors import ServerDied
from kvlab.fleet import Fleet
from kvlab.router import Router
from kvlab.service import Service

pytestmark = live_for_tests.MARKS

BLOCKS = 51
SERVER = tiny_server(
    dtype="float32",
    max_model_len=1024,
    kv_cache_memory_bytes=(BLOCKS + 1) * BLOCK * 6144,
    max_num_seqs=16,
)
LOAD = shared_prefixes(2, 11 * BLOCK, 2 * BLOCK, new_connection=True, concurrency=2, requests=60)


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    with Fleet(SERVER, workers=2, log_dir=tmp_path_factory.mktemp("fleet")) as fleet:
        yield fleet


def measured(fleet, config, how="random_connection"):
    fleet.reset_prefix_caches()
    target = Service(fleet.endpoints, how, seed=config.pick_seed)
    return load.run_load(target, config, nonce=int.from_bytes(os.urandom(5), "big"), progress=False)


def test_two_prefixes_miss_their_first_touches_only(running):  # pitfall 32
    result = measured(running, LOAD)
    rows = result.requests[result.requests["phase"] == "measure"]
    assert rows["ok"].all() and result.certificate["failures"] == []
    assert (rows["cached_tokens"] == 0).sum() == hits.first_touch_misses(2, 2) == 2
    assert set(rows["cached_tokens"]) == {0, 11 * BLOCK}
    table = service.by_worker(result.requests, result.samples)
    assert (table["cached_tokens"] == table["prefix_hits"]).all()
    assert (table["prompt_tokens"] == table["prefix_queries"]).all()


def test_every_hit_of_a_crowded_cache_is_foretold(running):
    one = LOAD.model_copy(update={"prefixes": 6, "warmup_requests": 6, "concurrency": 1})
    rows = measured(running, one).requests
    found = (rows.loc[rows["phase"] == "measure", "cached_tokens"] > 0).mean()
    cell = Cell(name="x", server=SERVER, load=one, workers=2, service="random_connection")
    assert found == hit_simulation.simulate(cell, BLOCKS, BLOCK).any
    assert 0.3 < found < 0.95


def test_workers_that_run_are_checked_and_alike(running):
    assert [c.metric_blocks for c in service.check_workers(running.endpoints)] == [BLOCKS + 1] * 2
    assert len({row["pid"] for row in running.placement}) == 2
    assert fleet_rows.expected_busiest_share(60, 2) > 1


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("vllm-cache-aware", marks=needs("vllm-router")),
        pytest.param("smg-cache-aware", marks=needs("smg")),
    ],
)
def test_a_cache_aware_router_finds_every_prefix_again(kind, running, tmp_path):
    """Prompts of exact length as tokens and as words."""
    with Router(kind, running.endpoints, log_dir=tmp_path) as router:
        entered = Service(running.endpoints, f"router:{kind}", entrance=router.endpoint)
        result = load.run_load(entered, ROUTED, nonce=hash(kind) % 2**40, progress=False)
        router.check()
    rows = result.requests[result.requests["phase"] == "measure"]
    assert rows["ok"].all() and (rows["prompt_tokens"] == ROUTED.input_tokens).all(), rows["error"].dropna().unique()
    # A prefix stays where the warm-up put it, but for the few that a busy worker passes on.
    assert (rows["cached_tokens"] == ROUTED.prefix_tokens).mean() > 0.8


def test_one_that_is_killed_is_named_and_the_other_ends(running):
    """The last one: nothing is left of the fleet."""
    os.kill(running.servers[1].pid, signal.SIGKILL)
    running.servers[1]._leash.wait(60)
    with pytest.raises(ServerDied, match="Worker w1 of 2"):
        running.check_alive()
    assert running.servers == []
