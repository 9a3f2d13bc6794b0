"""Two real workers behind a service: first touches, counters, and one that dies takes the other with it."""

import os
import signal

import pytest

from kvlab import engine, fleet_rows, hit_simulation, hits, load, service
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import EngineMissing, ServerDied
from kvlab.fleet import Fleet
from kvlab.service import Service

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK, BLOCKS = 32, 51
SERVER = ServerConfig(
    model="tiny",
    engine="cpu",
    dtype="float32",
    max_model_len=1024,
    block_size=BLOCK,
    kv_cache_memory_bytes=(BLOCKS + 1) * BLOCK * 6144,
    max_num_seqs=16,
    enforce_eager=True,
)
LOAD = LoadConfig(
    workload="shared_prefix",
    new_connection=True,
    concurrency=2,
    requests=60,
    prefixes=2,
    warmup_requests=2,
    prefix_tokens=11 * BLOCK,
    input_tokens=13 * BLOCK,
    output_tokens=1,
)


@pytest.fixture(scope="module", autouse=True)
def _engine():
    try:
        build, _ = engine.installed_build()
    except EngineMissing:
        build = None
    if build != "cpu":
        pytest.skip("the CPU build of vLLM is not installed")


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


def test_one_that_is_killed_is_named_and_the_other_ends(tmp_path):
    with Fleet(SERVER, workers=2, log_dir=tmp_path) as fleet:
        os.kill(fleet.servers[1].pid, signal.SIGKILL)
        fleet.servers[1]._leash.wait(30)
        with pytest.raises(ServerDied, match="Worker w1 of 2"):
            fleet.check_alive()
        assert fleet.servers == []
