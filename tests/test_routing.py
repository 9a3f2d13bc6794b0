"""The section on routers: its cells, what follows from a route alone, its sentences, routers behind a laboratory."""

import json
import os
import time
from pathlib import Path
from types import SimpleNamespace

import fakes
import pytest
from fakes import open_lab
from live_for_tests import needs
from loads_for_tests import shared_prefixes

from kvlab import (
    claims,
    deployment,
    dynamo,
    dynamo_worker,
    explain_routes,
    hit_grid,
    hits,
    profile,
    router,
    router_checks,
    router_grid,
    router_packages,
    servers,
)
from kvlab.config import Cell, ServerConfig
from kvlab.errors import ConfigError, ServerError
from kvlab.router_grid import ONE, TOGETHER

CPU = ServerConfig(model="tiny", engine="cpu", kv_cache_memory_bytes=2**20, block_size=32)
LOAD = shared_prefixes(2, 64, 16, concurrency=2, requests=24)
PROFILE = profile.load_profile("cpu-tiny")
LENGTHS = PROFILE.service_hit_rate
SERVER = PROFILE.server_with(LENGTHS.server)
SIZE = hit_grid.blocks(LENGTHS.geometry, SERVER, LENGTHS.prefix_tokens, LENGTHS.tail_tokens, LENGTHS.output_tokens)


INSTALLED = router_packages.place("vllm-router")
needs_router = needs("vllm-router")


def with_routers(monkeypatch, tmp_path):
    """Fakes in place of vLLM, in a cache of their own, and the real router of this machine."""
    fakes.install(monkeypatch, tmp_path, cache_blocks=100, block_size=32)
    (tmp_path / "routers").mkdir()
    (tmp_path / "routers" / "vllm-router").symlink_to(INSTALLED)
    monkeypatch.setenv(router_packages.FOLDER, str(tmp_path / "routers"))


def cell(service, **values):
    return Cell(name="route", server=CPU, load=LOAD, workers=2, service=service, **values)


# -- cells --------------------------------------------------------------------------------------------------------


def test_every_route_sends_the_same_requests():
    arms = router_grid.arms(SERVER, PROFILE.routing, LENGTHS)
    same = {arm.cell.load.model_copy(update={"new_connection": True, "warmup_concurrency": 0}) for arm in arms}
    assert len(same) == 1
    assert {arm.cell.load.new_connection for arm in arms if arm.name == "random-connection"} == {True}
    warm = {(arm.name, arm.warmup): arm.cell.load.warmup_concurrency for arm in arms}
    assert warm["vllm-cache-aware", ONE] == 1 and warm["vllm-cache-aware", TOGETHER] == 0
    # The fleet stays up for all of them; Dynamo's own workers start once, after it.
    owns = [router_grid.own_workers(arm.cell.service) for arm in arms]
    assert owns == sorted(owns) and True in owns


def test_the_hop_is_measured_between_two_direct_runs():
    cells = router_grid.hop_cells(SERVER, PROFILE.routing)
    direct = [(i, c.repeat) for i, c in enumerate(cells) if c.service == router_grid.DIRECT]
    assert [repeat for _, repeat in direct] == [0, 1] and direct[0][0] == 0
    assert all(c.load.workload == "unique" and c.load.concurrency == 1 for c in cells)


def test_each_built_in_profile_has_routes_and_their_lengths():
    for name in profile.built_in():
        found = profile.load_profile(name)
        assert found.routing and found.service_hit_rate, name
        kinds = {route.service.partition(":")[2] for route in found.routing.routes if ":" in route.service}
        assert {"vllm-cache-aware", "smg-cache-aware", "dynamo-kv"} <= kinds


def test_routes_without_lengths_are_refused(monkeypatch, tmp_path):
    fakes.install(monkeypatch, tmp_path)
    lab = open_lab(section="routing")
    lab.profile = PROFILE.model_copy(update={"service_hit_rate": None})
    with pytest.raises(ConfigError, match="no .service_hit_rate."):
        router_grid.grids(lab)


# -- computed -----------------------------------------------------------------------------------------------------


def test_placements_lie_below_their_bounds():
    blocks = (SIZE.usable, SIZE.prefix, SIZE.own)
    perfect = hits.placed_hit_ratios(*blocks, 24, 6)
    hashed = hits.placed_hit_ratios(*blocks, 24, 6, hashed=True)
    assert hashed.any < perfect.any <= hits.affinity_bound(SIZE.fit, 24, 6) + 1e-9
    assert perfect == pytest.approx(hits.stack_hit_ratios(*blocks, 4))  # four prefixes on each
    assert hits.placed_hit_ratios(*blocks, 24, 1, hashed=True) == pytest.approx(hits.stack_hit_ratios(*blocks, 24))


def test_unequal_numbers_of_prefixes_are_weighed_by_their_requests():
    blocks = (SIZE.usable, SIZE.prefix, SIZE.own)
    three, four = (hits.stack_hit_ratios(*blocks, k).full for k in (3, 4))
    assert hits.placed_hit_ratios(*blocks, 7, 2).full == pytest.approx((3 * three + 4 * four) / 7)


def test_what_follows_from_a_route_alone():
    found = {
        (a.name, a.warmup): router_grid.expected(a, SIZE) for a in router_grid.arms(SERVER, PROFILE.routing, LENGTHS)
    }
    assert found["random-connection", ONE].any == found["vllm-round-robin", ONE].any < 0.2
    assert found["placed", ONE].any > 0.9 > found["vllm-consistent-hash", ONE].any > 0.7
    assert found["vllm-cache-aware", ONE].any < 0.2  # all on one worker
    assert found["vllm-cache-aware", TOGETHER] is None and found["dynamo-kv", ONE] is None


# -- through a laboratory -----------------------------------------------------------------------------------------


def test_this_very_order_is_foretold_where_the_picks_are_known():
    """As many requests as are measured: one seed's order lies off what many come to."""
    found = {a.name: router_grid.foretold(a, SIZE) for a in router_grid.arms(SERVER, PROFILE.routing, LENGTHS)}
    assert {name for name, one in found.items() if one} == {"random-connection", "placed", "vllm-round-robin"}
    assert found["random-connection"].any == pytest.approx(34 / 240) and found["placed"].any > 0.9
    law = hits.run_hit_ratios(SIZE.usable, SIZE.prefix, SIZE.own, 24, 6, 240, 24).any
    assert found["vllm-round-robin"].any > law + 0.03


@needs_router
def test_a_router_is_started_for_its_cell_and_told_in_the_run(monkeypatch, tmp_path):
    with_routers(monkeypatch, tmp_path)
    lab = open_lab(section="routing")
    (result,) = router_grid.measured(lab, [cell("router:vllm-consistent-hash", service_args=("--log-level", "info"))])
    lab.close()
    told = result.run.manifest["server"]["service"]
    assert told["version"] == router_packages.PRODUCTS["vllm-router"].version and "--log-level" in told["flags"]
    assert sum(told["decisions"]["workers"].values()) >= 24 and set(told["decisions"]["workers"]) <= {"w0", "w1"}


@needs_router
def test_a_router_that_falls_back_is_no_result_and_ends_nothing(monkeypatch, tmp_path):  # pitfall 34
    with_routers(monkeypatch, tmp_path)
    lab = open_lab(section="routing")
    bad, good = router_grid.measured(lab, [cell("router:vllm-kv-aware"), cell("router:vllm-random")])
    lab.close()
    assert bad.run is None and bad.failed and "does not do what its mode says" in bad.reason
    assert good.run is not None


def test_a_router_that_is_not_installed_is_a_reason(monkeypatch, tmp_path):
    fakes.install(monkeypatch, tmp_path, cache_blocks=100, block_size=32)
    monkeypatch.setenv(router_packages.FOLDER, str(tmp_path))
    lab = open_lab(section="routing")
    cells = [cell("router:smg-cache-aware"), cell("router:dynamo-kv"), cell("random_request")]
    smg, nvidia, none = router_grid.measured(lab, cells)
    lab.close()
    assert "kvlab router install smg" in smg.reason and "kvlab router install dynamo" in nvidia.reason
    assert not smg.failed and none.run is not None


# -- Dynamo -------------------------------------------------------------------------------------------------------


def test_dynamo_takes_the_place_of_the_fleet(monkeypatch, tmp_path):
    assert (
        dynamo.is_kind("router:dynamo-kv") and not dynamo.is_kind("router:vllm-random") and not dynamo.is_kind("placed")
    )
    monkeypatch.setenv(router_packages.FOLDER, str(tmp_path))
    with pytest.raises(ServerError, match="kvlab router install dynamo"):
        servers.Servers()._fleet_for(cell("router:dynamo-kv"), _Quiet(), _Bar())


class _Quiet:
    turns = False

    def starting(self):
        import contextlib

        return contextlib.nullcontext()


class _Bar:
    n, total = 0, 1

    def set_postfix_str(self, text):
        pass


def test_a_dead_program_of_dynamo_is_told_with_its_log(monkeypatch, tmp_path):
    there = dynamo.DynamoDeployment(CPU, 1, tmp_path)
    program = dynamo.Leashed(["false"], port=1, log_dir=tmp_path, name="w0", env={})
    program.start()
    there.programs = [program]
    program._leash.wait()
    with pytest.raises(ServerError, match=r"A program of Dynamo ended while it was in use \(exit code 1\)"):
        there.check_alive()
    there.stop()


@pytest.fixture
def launched(monkeypatch, tmp_path):
    """The programs of Dynamo that would have been launched."""
    programs = []

    class Recorded(dynamo.Leashed):
        def start(self):
            programs.append(self)

    monkeypatch.setattr(dynamo, "Leashed", Recorded)
    monkeypatch.setattr("tempfile.tempdir", "/tmp")  # the path of a socket has to be short
    monkeypatch.setattr(dynamo.engine, "check", lambda config: None)
    monkeypatch.setattr(dynamo.engine, "metadata_stub", lambda: None)
    monkeypatch.setattr(dynamo, "_has_engine", lambda endpoint: True)
    monkeypatch.setattr(dynamo.control, "read_capacity", lambda endpoint: None)
    monkeypatch.setattr(router_packages, "require", lambda product: (tmp_path, "1"))
    yield programs
    for program in programs:
        Path(program._remove).rmdir()


@pytest.mark.parametrize(("placement", "wanted"), [("spread", ["0", "1", "0"]), ("one", ["0", "0", "0"])])
def test_the_workers_of_dynamo_have_their_gpus_as_those_of_a_fleet(monkeypatch, tmp_path, launched, placement, wanted):
    monkeypatch.setattr("kvlab.gpu.gpus", lambda: [{}, {}])
    monkeypatch.setattr("kvlab.gpu.on_host", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = ServerConfig(model="tiny", kv_cache_memory_bytes=2**30, gpu_memory_utilization=0.01, env={"MINE": "1"})
    there = dynamo.DynamoDeployment(config, 3, tmp_path, placement).start()
    assert [program._env["CUDA_VISIBLE_DEVICES"] for program in launched] == wanted
    assert [place.told()["gpu"] for place in there.places] == wanted
    assert all(program._env["NCCL_NVLS_ENABLE"] == "0" and program._env["MINE"] == "1" for program in launched)
    load = LOAD.model_copy(update={"new_connection": False})
    asked = Cell(name="x", server=config, load=load, workers=3, service="router:dynamo-kv", placement=placement)
    assert there.serves(asked) and not there.serves(asked.model_copy(update={"placement": "packed"}))


@pytest.mark.parametrize(("version", "host"), [("1.4.2", "lo"), ("1.6.1", "127.0.0.1")])
def test_an_older_dynamo_is_told_the_interface_and_not_the_address(monkeypatch, tmp_path, launched, version, host):
    monkeypatch.setattr(router_packages, "require", lambda product: (tmp_path, version))
    dynamo.DynamoDeployment(CPU, 1, tmp_path).start()
    assert launched[0]._env["DYN_TCP_RESPONSE_STREAM_HOST"] == host
    assert launched[0]._env["PYTHONHASHSEED"] == "0"  # engines that share a prefix name its blocks alike


def test_a_frontend_that_refuses_the_model_is_told_instead_of_waited_for(monkeypatch, tmp_path):
    said = 'Error adding model from discovery model_name="kvlab" error="chat_template field is required"'
    monkeypatch.setattr(dynamo, "REFUSED_S", 0.0)
    monkeypatch.setattr(dynamo, "READY_S", 2.0)
    there = dynamo.DynamoDeployment(CPU, 1, tmp_path)
    there._frontend, there._began = SimpleNamespace(running=True, log_text=lambda: f"ERROR {said}\n"), time.monotonic()
    with pytest.raises(ServerError, match=r"does not take the model: chat_template field is required"):
        there._wait([there._frontend], lambda: False)
    there._frontend.log_text = lambda: "INFO all is well"
    with pytest.raises(ServerError, match="not ready after 2 s"):
        there._wait([there._frontend], lambda: False)


def test_workers_of_dynamo_that_would_take_a_whole_gpu_do_not_share_one(monkeypatch, tmp_path, launched):
    monkeypatch.setattr("kvlab.gpu.gpus", lambda: [{}])
    with pytest.raises(ConfigError, match="2 workers share 1 GPU"):
        dynamo.DynamoDeployment(ServerConfig(model="tiny"), 2, tmp_path).start()
    assert launched == []


def test_a_worker_tells_its_blocks_where_it_binds_and_dynamo_listens(tmp_path, launched):
    dynamo.DynamoDeployment(CPU, 1, tmp_path).start()
    (worker,) = launched
    told = json.loads(worker.argv[worker.argv.index("--kv-events-config") + 1])
    # vLLM connects to tcp://127.0.0.1:N, and so does Dynamo: nobody binds it, and no event arrives. pitfall 34
    assert told["enable_kv_cache_events"] and told["endpoint"].startswith("ipc:///")
    folder = Path(told["endpoint"].removeprefix("ipc://")).parent
    assert folder.is_dir() and len(told["endpoint"]) < 100  # a path of more than 107 bytes is no socket
    assert worker._env["VLLM_RPC_BASE_PATH"] == worker._remove == str(folder)


def test_the_folder_of_a_program_goes_with_it(tmp_path):
    folder = tmp_path / "sockets"
    folder.mkdir()
    program = dynamo.Leashed(
        ["sleep", "60"], port=1, log_dir=tmp_path, name="w0", env=dict(os.environ), remove=str(folder)
    )
    program.start()
    assert program.running and folder.is_dir()
    program.stop()
    assert not folder.exists()


def test_missing_parts_are_stood_in_for(monkeypatch):
    monkeypatch.setattr(dynamo_worker.importlib.util, "find_spec", lambda name: None)
    for name in (*dynamo_worker.TRANSFER, dynamo_worker.IMAGES):
        monkeypatch.setitem(dynamo_worker.sys.modules, name, None)
    dynamo_worker.stand_in()
    import nixl._api  # noqa: F401

    assert dynamo_worker.sys.modules[dynamo_worker.IMAGES].smart_resize is None


# -- sentences ----------------------------------------------------------------------------------------------------


def routed(quantity, routing, warmup, value, unit="ratio"):
    where = {"routing": routing, "warmup": warmup, "prefixes": 24}
    return claims.claim("routing", quantity, where, measured=value, unit=unit, reason="none")


def test_sentences_name_routes_and_numbers():
    made = [
        routed("hit_ratio", "a", ONE, 0.19),
        routed("hit_ratio", "a", TOGETHER, 0.85),
        routed("busiest_worker_share", "a", ONE, 6.0, "x"),
        routed("busiest_worker_share", "a", TOGETHER, 1.5, "x"),
        routed("ttft_p50_s", "a", ONE, 0.2, "s"),
        routed("ttft_p50_s", "a", TOGETHER, 0.1, "s"),
        routed("requests_per_s", "a", ONE, 10, "req/s"),
        routed("requests_per_s", "a", TOGETHER, 30, "req/s"),
        routed("hop_adds_ttft_s", "a", None, 0.001, "s"),
    ]
    order = claims.claim("routing", "order_hit_ratio", {"routing": "b"}, computed=0.204, measured=0.246, unit="ratio")
    assert "b 20.4% (measured 24.6%)" in explain_routes.foretold([*made, order])
    assert "1 of 2 routes pass the hash. Hits: a (together) 85%, a (one-by-one) 19%" in explain_routes.reached(
        made, 0.98, 0.81
    )
    assert "19.0% after a warm-up one by one, 85.0% after one together" in explain_routes.warmed(made)
    assert "6.0 and 1.5 times its share" in explain_routes.warmed(made)
    assert "2.0 times as fast, and 3.0 times as many" in explain_routes.quicker(made)
    assert "a +1.00 ms; two runs without a router differ by 0.30 ms" in explain_routes.hop(made, 0.0003)


def test_a_sentence_tells_what_a_router_expected_and_what_was_found():
    counted = {"completions": 264, "looked": 264, "expected_tokens": 67584, "mismatched": 0, "found_tokens": 66000}
    run = SimpleNamespace(manifest={"server": {"service": {"decisions": counted}}})
    told = explain_routes.decided([("dynamo-kv (together)", SimpleNamespace(run=run))])
    assert (
        "dynamo-kv (together): it expected 67,584 cached tokens where it sent requests, and 66,000 were found" in told
    )
    counted["estimated"] = 1
    assert "expected about 67,584" in explain_routes.decided([("dynamo-kv", SimpleNamespace(run=run))])


def test_without_measurements_there_is_nothing_to_say():
    assert explain_routes.reached([], 1, 1) is explain_routes.warmed([]) is explain_routes.quicker([]) is None
    assert explain_routes.hop([], None) is explain_routes.decided([]) is explain_routes.foretold([]) is None


def test_dynamo_that_hears_no_events_is_reported():  # pitfall 34
    text = (
        'dynamo_frontend_input_sequence_tokens_count{model="m"} 40\n'
        'dynamo_router_overhead_indexer_find_matches_ms_count{router_id="1"} 40\n'
        'dynamo_component_router_kv_selected_cached_prefix_tokens_total{worker_id="a"} EXPECTED\n'
        'dynamo_component_router_kv_selected_cached_prefix_tokens_total{worker_id="b"} EXPECTED\n'
        "this line is no metric of it\n"
    )
    heard = router_checks.dynamo_counts(text.replace("EXPECTED", "4000"))
    deaf = router_checks.dynamo_counts(text.replace("EXPECTED", "0"))
    assert heard["expected_tokens"] == 8000 and not router_checks.dynamo_fallbacks(heard, 9000.0)
    assert "hears no events" in router_checks.dynamo_fallbacks(deaf, 9000.0)[0]
    assert not router_checks.dynamo_fallbacks(deaf, 0.0)  # nothing to hit
    assert "expected 8000: it misses events" in router_checks.dynamo_fallbacks(heard, 20_000.0)[0]
    # A release without that counter tells shares of the input.
    older = text.replace("kv_selected_cached_prefix_tokens_total", "no_such_total").replace("EXPECTED", "4000") + (
        'dynamo_frontend_input_sequence_tokens_sum{model="m"} 12800\n'
        'dynamo_component_router_kv_hit_rate_sum{worker_id="a"} SHARES\n'
    )
    heard = router_checks.dynamo_counts(older.replace("SHARES", "28.0"))
    assert heard["expected_tokens"] == 8960 and heard["estimated"] and not router_checks.dynamo_fallbacks(heard, 9000.0)
    deaf = router_checks.dynamo_counts(older.replace("SHARES", "0"))
    assert "hears no events" in router_checks.dynamo_fallbacks(deaf, 9000.0)[0]
    random = router_checks.dynamo_counts('dynamo_frontend_input_sequence_tokens_count{model="m"} 40\n')
    assert "only 0 of 40 requests had their blocks looked up" in router_checks.dynamo_fallbacks(random, 9000.0)[0]


@pytest.mark.parametrize(
    ("service", "said"),
    [
        ("router:dynamo-kx", "There is no router 'dynamo-kx'"),
        ("router:foo", "There is no router 'foo'"),
        ("rendom_connection", "There is no service 'rendom_connection'"),
        ("l4:haproxy", "There is no service 'l4:haproxy'"),
    ],
)
def test_a_service_that_does_not_exist_is_an_error_before_any_server_starts(monkeypatch, tmp_path, service, said):
    fakes.install(monkeypatch, tmp_path)
    lab = open_lab(section="routing")
    cells = [Cell(name="a", server=lab.server(), load=LOAD, workers=2, service=service)]
    with pytest.raises(ConfigError, match=said):
        router_grid.measured(lab, cells)
    assert not fakes.EVENTS


def test_every_service_that_exists_is_taken():
    known = (*deployment.CLIENT_PICKS, *deployment.PROXIES, *(f"router:{n}" for n in (*router.KINDS, *dynamo.MODES)))
    for service in ("", *known):
        deployment.check_kind(service)


def on_host(memory_bytes):
    known = {"kernel": "6.1", "cpu": "X", "cores": {"usable": 16}, "memory_bytes": memory_bytes}
    return SimpleNamespace(run=SimpleNamespace(manifest={"provenance": known}))


def test_what_a_hop_adds_is_not_read_off_direct_runs_of_another_host():
    assert router_grid.not_comparable(on_host(1), [on_host(1), on_host(1)]) is None
    assert "another host" in router_grid.not_comparable(on_host(1), [on_host(1), on_host(2)])
    missing = SimpleNamespace(run=None)
    assert router_grid.not_comparable(missing, [missing]) is None


def test_routes_of_another_host_are_named():
    said = explain_routes.hosts([("a", on_host(1)), ("b", on_host(2)), ("c", SimpleNamespace(run=None))])
    assert said.startswith("Measured on another host than the rest: b.")
    assert explain_routes.hosts([("a", on_host(1)), ("b", on_host(1))]) is explain_routes.hosts([]) is None
