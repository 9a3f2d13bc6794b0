"""Fleets without vLLM: where workers are placed, and what happens when one does not start or dies."""

import fakes
import pytest
from fakes import EVENTS, open_lab
from loads_for_tests import shared_prefixes

from kvlab import fleet, measure
from kvlab.config import Cell, ServerConfig, key
from kvlab.errors import ConfigError, ServerDied
from kvlab.fake_server import Behaviour
from kvlab.fleet import Fleet, places

CPU = ServerConfig(model="tiny", engine="cpu", kv_cache_memory_bytes=2**20, block_size=32)
GPU = ServerConfig(model="tiny", kv_cache_memory_bytes=2**30, gpu_memory_utilization=0.01)
LOAD = shared_prefixes(2, 64, 16, new_connection=True, requests=12)


@pytest.fixture(autouse=True)
def _fakes(monkeypatch, tmp_path):
    fakes.install(monkeypatch, tmp_path, cache_blocks=100, block_size=32)


def cell(workers=2, service="random_connection", server=CPU, repeat=0, placement="spread", **load):
    load, more = LOAD.model_copy(update=load), {"service": service, "placement": placement}
    return Cell(name="point", server=server, load=load, workers=workers, repeat=repeat, **more)


# -- placement ----------------------------------------------------------------------------------------------------


def test_each_cpu_worker_has_cores_of_its_own_where_there_are_enough():
    assert [p.cores for p in places([CPU] * 3, range(6), [], "spread")] == [(0, 1), (2, 3), (4, 5)]
    assert [p.cores for p in places([CPU] * 3, range(2), [], "spread")] == [None] * 3


def test_workers_are_spread_over_the_gpus():
    assert [p.gpus for p in places([GPU] * 3, [], ["0", "1"], "spread")] == [("0",), ("1",), ("0",)]
    assert [p.gpus for p in places([GPU] * 3, [], ["0", "1"], "packed")] == [("0",), ("0",), ("1",)]
    assert [p.gpus for p in places([GPU] * 3, [], ["0", "1"], "one")] == [("0",)] * 3


def test_tensor_parallel_workers_take_neighbouring_gpus():
    wide = GPU.model_copy(update={"tensor_parallel_size": 2})
    assert [p.gpus for p in places([wide] * 2, [], list("4567"), "spread")] == [("4", "5"), ("6", "7")]
    with pytest.raises(ConfigError, match="does not fit on 1 GPU"):
        places([wide], [], ["0"], "spread")


def test_a_placed_worker_sees_its_gpus_only():
    assert fleet.placed(GPU, fleet.Place("w1", ("1",))).env == {"CUDA_VISIBLE_DEVICES": "1"}
    own = GPU.model_copy(update={"env": {"CUDA_VISIBLE_DEVICES": "3"}})
    assert fleet.placed(own, fleet.Place("w1", ("1",))).env == {"CUDA_VISIBLE_DEVICES": "3"}
    assert fleet.placed(CPU, fleet.Place("w0")) == CPU


def test_gpus_are_named_as_this_process_sees_them(monkeypatch):
    monkeypatch.setattr("kvlab.gpu.gpus", lambda: [{}, {}])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert fleet.gpu_names() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert fleet.gpu_names() == ["5", "7"]


def test_workers_that_share_a_gpu_need_pinned_pools(monkeypatch, tmp_path):
    monkeypatch.setattr("kvlab.gpu.gpus", lambda: [{}])
    greedy = ServerConfig(model="tiny")
    with pytest.raises(ConfigError, match="not pinned"):
        Fleet(greedy, workers=2, log_dir=tmp_path).start()


# -- together -----------------------------------------------------------------------------------------------------


def test_a_fleet_names_its_workers_and_where_they_are(tmp_path):
    with Fleet(CPU, workers=2, log_dir=tmp_path) as running:
        assert [e.worker for e in running.endpoints] == ["w0", "w1"]
        assert [row["worker"] for row in running.placement] == ["w0", "w1"]
        assert {"port", "pid", "gpu", "cores", "model", "version"} < set(running.placement[0])
        assert len(running.capacities) == 2
    assert EVENTS == ["start", "start", "stop", "stop"]


def test_one_that_does_not_start_ends_the_others(tmp_path):
    fakes.FAILS_TO_START[:] = [False, True, False]
    with pytest.raises(ServerDied, match=r"Worker w\d of 3: .*the others were stopped") as error:
        Fleet(CPU, workers=3, log_dir=tmp_path).start()
    assert error.value.cause == "no memory was left"
    assert EVENTS.count("stop") == 2


def test_one_that_dies_is_named_and_ends_the_others(tmp_path):
    with Fleet(CPU, workers=2, log_dir=tmp_path) as running:
        running.servers[1].fake.behaviour = Behaviour(die_after=-1)
        with pytest.raises(ServerDied, match="Worker w1 of 2"):
            running.check_alive()
        assert EVENTS.count("stop") == 2
        with pytest.raises(ServerDied, match="not running"):
            running.check_alive()


def test_configurations_and_workers_must_agree(tmp_path):
    with pytest.raises(ConfigError, match="2 configurations do not make 3 workers"):
        Fleet([CPU, CPU], workers=3, log_dir=tmp_path)


# -- cells --------------------------------------------------------------------------------------------------------


def test_cells_without_a_service_keep_their_keys():
    plain = Cell(name="a", server=CPU, load=LOAD)
    assert key(plain) == key(plain.model_copy(update={"workers": 1, "service": ""}))
    assert len({key(cell(w, s)) for w in (2, 3) for s in ("hash", "round_robin")}) == 4
    assert key(cell(pick_seed=1)) != key(cell()) == key(cell(pick_seed=0))
    with pytest.raises(ConfigError, match="need a service"):
        Cell(name="a", server=CPU, load=LOAD, workers=2)


def test_a_fleet_stays_up_between_its_cells_and_a_part_of_it_is_used():
    lab = open_lab(section="service_hit_rate")
    results = lab.measure([cell(2), cell(3), cell(3, "round_robin")])
    assert EVENTS == ["start"] * 3  # as many as the largest cell wants, once
    assert [len(r.run.manifest["server"]["workers"]) for r in results] == [2, 3, 3]
    assert results[0].run.manifest["server"]["idle_workers"] == 1
    assert results[2].run.manifest["server"]["service"]["how"] == "round_robin"
    assert set(measure.rows(results[0])["worker"]) == {"w0", "w1"}
    assert "== w0" in results[0].run.log() and "== w2" not in results[0].run.log()
    lab.close()
    assert EVENTS.count("stop") == 3


def test_caches_are_emptied_between_cells():
    lab = open_lab(section="service_hit_rate")
    lab.measure([cell(2)])
    kept = [len(one.fake.cache._kept) for one in next(iter(lab._servers._fleets.values())).fleet.servers]
    lab.measure([cell(2, requests=2, repeat=1)])
    assert sum(kept) >= 6
    servers = next(iter(lab._servers._fleets.values())).fleet.servers
    assert sum(len(one.fake.cache._kept) for one in servers) <= sum(kept)  # without a reset both would be there
    lab.close()


def test_stored_cells_are_replayed_without_servers():
    lab = open_lab(section="service_hit_rate")
    (first,) = lab.measure([cell(2)])
    lab.close()
    EVENTS.clear()
    (again,) = open_lab(mode="replay", section="service_hit_rate").measure([cell(2)])
    assert again.run.id == first.run.id and not EVENTS


def test_a_refused_load_leaves_no_server():
    lab = open_lab(section="service_hit_rate")
    with pytest.raises(ConfigError, match="reuses connections"):
        lab.measure([cell(2, new_connection=False)])
    assert EVENTS.count("stop") == 2


def test_a_worker_that_dies_inside_a_cell_is_named_and_what_was_measured_is_kept():
    lab = open_lab(section="service_hit_rate")
    lab.measure([cell(2)])
    victim = next(iter(lab._servers._fleets.values())).fleet.servers[1].fake
    victim.behaviour = Behaviour(die_after=len(victim.bodies) + 4, cache_blocks=100, block_size=32)
    with pytest.raises(ServerDied, match="Worker w1 of 2"):
        lab.measure([cell(2, repeat=1, requests=40)])
    assert EVENTS.count("stop") == 2
    replayed = open_lab(mode="replay", section="service_hit_rate").measure([cell(2), cell(2, repeat=1, requests=40)])
    assert [r.run is not None for r in replayed] == [True, False]
    assert "Worker w1 of 2" in replayed[1].reason and replayed[1].failed


def test_an_unknown_service_is_an_error_of_its_own():
    with pytest.raises(ConfigError, match="There is no service 'magic'"):
        open_lab(section="service_hit_rate").measure([cell(2, "magic")])


def test_workers_that_somebody_else_runs_are_used():
    lab = open_lab(section="service_hit_rate")
    asked = []

    def outside(wanted):
        asked.append(wanted.name)
        raise ServerDied("no pod is ready")

    lab._servers.outside = outside
    (result,) = lab.measure([cell(2)], skip_refused=True)
    assert asked == ["point"] and result.failed and not EVENTS
