"""Several workers behind a service: who picks, what the rows say, and which workers do not belong together."""

from collections import Counter

import pytest
from loads_for_tests import shared_prefixes

from kvlab import hits, load, service
from kvlab.client import Endpoint
from kvlab.errors import ConfigError, ServerError
from kvlab.fake_fleet import FakeFleet
from kvlab.fake_server import Behaviour, FakeServer
from kvlab.service import Service
from kvlab.workload import Request

BLOCK = 16
LOAD = shared_prefixes(2, 11 * BLOCK, 2 * BLOCK, new_connection=True, requests=200)


def endpoints(n):
    return [Endpoint(f"http://127.0.0.1:{1 + i}", "m", worker=f"w{i}") for i in range(n)]


def requests(n, prefixes=None):
    return [Request(i, [1], 1, "unique", None if prefixes is None else i % prefixes) for i in range(n)]


def picks(how, n=600, workers=6, seed=0, prefixes=24):
    chosen = Service(endpoints(workers), how, seed=seed).targets(requests(n, prefixes), "measure")
    return [int(endpoint.worker[1:]) for endpoint in chosen]


def test_random_is_seeded_and_uniform():
    assert picks("random_connection") == picks("random_connection") != picks("random_connection", seed=1)
    assert all(abs(count - 1000) < 120 for count in Counter(picks("random_request", 6000)).values())


def test_warm_up_and_measurement_are_picked_independently():
    one = Service(endpoints(6), "random_connection")
    assert one.targets(requests(50), "warmup") != one.targets(requests(50), "measure")


def test_other_ways_of_picking():
    assert picks("round_robin", 8, 3) == [0, 1, 2, 0, 1, 2, 0, 1]
    assert picks("placed", 8, 3, prefixes=4) == [0, 1, 2, 0, 0, 1, 2, 0]
    assert set(picks("fixed")) == {0}
    by_hash = picks("hash", 48)
    assert by_hash[:24] == by_hash[24:]  # a prefix stays where it is
    assert len(set(by_hash)) > 3 and picks("hash", 24, seed=1) != by_hash[:24]


def test_an_entrance_gets_every_request():
    entrance = Endpoint("http://127.0.0.1:99", "m")
    one = Service(endpoints(2), "url", entrance=entrance)
    assert set(one.targets(requests(5), "measure")) == {entrance} and one.addresses == [entrance]
    with pytest.raises(ConfigError, match="has no address"):
        Service(endpoints(2), "l4:nginx")


def test_workers_need_names_and_a_service_needs_workers():
    with pytest.raises(ConfigError, match="names of their own"):
        Service([Endpoint("http://a", "m"), Endpoint("http://b", "m")])
    with pytest.raises(ConfigError, match="without workers"):
        Service([])


def test_a_client_that_reuses_connections_is_refused():  # pitfall 31
    reusing = LOAD.model_copy(update={"new_connection": False})
    with pytest.raises(ConfigError, match="reuses connections"):
        load.run_load(Service(endpoints(2)), reusing, nonce=1)
    Service(endpoints(2), "random_request").check_load(reusing)


# -- through the load generator -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "expected"), [(6, 190), (3, 196)])
def test_first_touches_are_all_that_two_prefixes_miss(workers, expected):  # pitfall 32
    with FakeFleet(workers, blocks=51, block_size=BLOCK) as fleet:
        result = load.run_load(Service(fleet.endpoints, seed=3), LOAD, nonce=5, progress=False)
    rows = result.requests[result.requests["phase"] == "measure"]
    assert int((rows["cached_tokens"] > 0).sum()) == expected
    assert hits.first_touch_misses(2, workers) == 200 - expected
    assert rows["worker"].nunique() == workers and (rows["connect_s"] > 0).all()
    assert set(result.samples["worker"]) == {f"w{i}" for i in range(workers)}


def test_hits_of_the_rows_and_of_every_workers_counters_agree():
    with FakeFleet(3, blocks=51, block_size=BLOCK) as fleet:
        busy = LOAD.model_copy(update={"prefixes": 12, "concurrency": 4, "warmup_requests": 12})
        result = load.run_load(Service(fleet.endpoints), busy, nonce=6, progress=False)
    table = service.by_worker(result.requests, result.samples)
    assert list(table["worker"]) == ["w0", "w1", "w2"] and table["requests"].sum() == 212
    assert (table["cached_tokens"] == table["prefix_hits"]).all() and table["cached_tokens"].sum() > 0
    assert (table["prompt_tokens"] == table["prefix_queries"]).all()


def test_several_processes_send_to_the_same_workers():
    with FakeFleet(3) as fleet:
        split = LOAD.model_copy(update={"concurrency": 4, "requests": 20, "processes": 2})
        one = load.run_load(Service(fleet.endpoints), split.model_copy(update={"processes": 1}), nonce=7)
        two = load.run_load(Service(fleet.endpoints), split, nonce=8)
    assert list(one.requests["worker"]) == list(two.requests["worker"])


# -- workers that do not belong together --------------------------------------------------------------------------


def test_workers_that_belong_together_are_measured_for_their_capacity():
    with FakeFleet(2, blocks=51, block_size=32) as fleet:
        assert [c.metric_blocks for c in service.check_workers(fleet.endpoints)] == [52, 52]


def test_an_unreachable_worker_is_named():
    with FakeFleet(1) as fleet, pytest.raises(ServerError, match="w1 at http://127.0.0.1:1 does not answer"):
        service.check_workers([*fleet.endpoints, Endpoint("http://127.0.0.1:1", "fake", worker="w1")])


def test_a_foreign_worker_is_named():
    with FakeFleet(1) as fleet, pytest.raises(ServerError, match="serves fake, not other"):
        service.check_workers([Endpoint(fleet.endpoints[0].base_url, "other", worker="w0")])


def test_a_router_is_no_worker():
    router = Behaviour(metrics_text="router_requests 3\n")
    with FakeServer(router) as fake, pytest.raises(ServerError, match="no counters of vLLM"):
        service.check_workers([fake.endpoint])


def test_different_block_sizes_are_refused():
    with FakeFleet(1, block_size=16) as a, FakeFleet(1, block_size=32) as b:
        other = Endpoint(b.endpoints[0].base_url, "fake", worker="w1")
        with pytest.raises(ServerError, match="differ in block_size: w0: 16, w1: 32"):
            service.check_workers([*a.endpoints, other])


def test_different_models_are_refused():
    with FakeFleet(2) as fleet, pytest.raises(ServerError, match="different models"):
        service.check_alike([fleet.endpoints[0], Endpoint("http://b", "other", worker="w1")], [])


def test_workers_that_hide_their_hits_are_refused():
    with FakeFleet(2, cached_tokens=None) as fleet, pytest.raises(ServerError, match="look like a miss"):
        service.check_workers(fleet.endpoints)


def test_answers_that_lose_their_cached_tokens_on_the_way_spoil_a_cell():
    """A proxy or router may leave out what each worker tells: no row would be a hit."""
    with FakeFleet(2, cached_tokens=None) as fleet:
        result = load.run_load(Service(fleet.endpoints), LOAD, nonce=10, progress=False)
    assert any("every request would look like a miss" in failure for failure in result.certificate["failures"])


def test_a_worker_that_restarts_inside_a_cell_spoils_it():
    with FakeFleet(2, ttft_s=0.02) as fleet:
        first = fleet.fakes[0]
        forgetful = type(first.counts)

        def forget(prompt, output_tokens, use=first.cache.use):
            if len(first.bodies) == 60:
                first.counts = forgetful(running=1)
            return use(prompt, output_tokens)

        first.cache.use = forget
        result = load.run_load(Service(fleet.endpoints), LOAD.model_copy(update={"concurrency": 2}), nonce=9)
    assert any("w0 fell while it was watched" in failure for failure in result.certificate["failures"])
