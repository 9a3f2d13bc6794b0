"""Real routers in front of fake workers: who gets what, what is reported when a mode falls back, and how they end.

A router that is not installed skips its tests; `kvlab router install vllm-router smg` installs them.
"""

import os
import signal
import socket
from collections import Counter
from types import SimpleNamespace

import pytest
from live_for_tests import needs
from loads_for_tests import shared_prefixes
from typer.testing import CliRunner
from waiting_for_tests import until

from kvlab import cli, control, load, ports, processes, router, router_checks, router_packages, wording
from kvlab.client import Endpoint
from kvlab.errors import ConfigError, PortBusy, ServerDied, ServerError
from kvlab.fake_fleet import FakeFleet
from kvlab.router import Router
from kvlab.service import Service

LOAD = shared_prefixes(6, 128, 32, concurrency=4, requests=48)
NONCE = iter(range(1, 1000))


vllm, smg = needs("vllm-router"), needs("smg")


@pytest.fixture
def fleet():
    with FakeFleet(3, blocks=1000, block_size=16) as fleet:
        yield fleet


def sent(kind, fleet, tmp_path, **changes):
    """(rows, prefixes of each worker, the router's own decisions) of one load through a router."""
    with Router(kind, fleet.endpoints, log_dir=tmp_path) as one:
        for fake in fleet.fakes:
            fake.bodies.clear()
        service = Service(fleet.endpoints, f"router:{kind}", entrance=one.endpoint)
        result = load.run_load(service, LOAD.model_copy(update=changes), nonce=next(NONCE), progress=False)
        one.check()
        decisions = one.decisions()
    assert result.requests["ok"].all(), result.requests["error"].dropna().unique()
    seen = [{tuple(body["prompt"][:32]) for body in fake.bodies if len(body["prompt"]) == 160} for fake in fleet.fakes]
    return result.requests, seen, decisions


# -- who gets what ------------------------------------------------------------------------------------------------


@vllm
def test_round_robin_deals_out_evenly(fleet, tmp_path):
    _, _, decisions = sent("vllm-round-robin", fleet, tmp_path)
    assert max(decisions.workers.values()) - min(decisions.workers.values()) <= 1
    assert decisions.policies.keys() == {"round_robin"}


@vllm
def test_consistent_hash_keeps_a_prefix_on_one_worker(fleet, tmp_path):
    _, seen, decisions = sent("vllm-consistent-hash", fleet, tmp_path)
    assert sum(map(len, seen)) == 6  # no prefix on two workers
    assert decisions.policies.keys() == {"consistent_hash"}


@vllm
def test_cache_aware_puts_all_on_one_worker_when_warmed_one_after_another(fleet, tmp_path):
    _, seen, decisions = sent("vllm-cache-aware", fleet, tmp_path, warmup_concurrency=1, concurrency=1)
    assert sorted(map(len, seen)) == [0, 0, 6]
    assert decisions.outcomes["prefix_hit"] >= 48


@smg
def test_a_router_that_takes_text_only_gets_words_and_names_the_worker(fleet, tmp_path):
    rows, seen, decisions = sent("smg-cache-aware", fleet, tmp_path)
    assert (rows["prompt_tokens"] == 160).all() and sum(map(len, seen)) == 6
    assert Counter(rows["worker"]) == Counter(
        {
            f"w{i}": n
            for i, n in enumerate(sum(len(body["prompt"]) == 160 for body in fake.bodies) for fake in fleet.fakes)
            if n
        }
    )
    assert decisions.outcomes["tree_match"] >= 40


# -- a mode that falls back ---------------------------------------------------------------------------------------


@vllm
def test_cache_aware_without_tokens_is_reported(fleet, tmp_path):  # pitfall 34
    """Text prompts: it asks each worker's /v1/completions/render, gets 404 and goes by load from then on."""
    with Router("vllm-cache-aware", fleet.endpoints, log_dir=tmp_path) as one:
        values = {"model": "fake", "prompt": "t1 t2 t3", "max_tokens": 1}
        for _ in range(12):
            assert control.call(one.endpoint, "/v1/completions", values)[0] == 200
        with pytest.raises(ServerError, match="does not do what its mode says: only 0 of 13 requests|only 1 of 13"):
            one.check()


@vllm
def test_kv_aware_without_events_is_reported(fleet, tmp_path):  # pitfall 34
    with pytest.raises(ServerError, match="unverified_identity"):
        sent("vllm-kv-aware", fleet, tmp_path)


@vllm
def test_hashing_by_something_else_than_the_session_is_reported(fleet, tmp_path):  # pitfall 34
    with Router("vllm-consistent-hash", fleet.endpoints, log_dir=tmp_path) as one:
        values = {"model": "fake", "prompt": [1, 2, 3], "max_tokens": 1}
        for _ in range(12):
            control.call(one.endpoint, "/v1/completions", values)  # without the header
        with pytest.raises(ServerError, match="were not hashed by x-session-id"):
            one.check()


@vllm
def test_flags_that_change_the_mode_are_reported(fleet, tmp_path):
    flags = ("--policy", "random")
    with Router("vllm-round-robin", fleet.endpoints, flags, tmp_path) as one:
        for _ in range(12):
            control.call(one.endpoint, "/v1/completions", {"model": "fake", "prompt": [1], "max_tokens": 1})
        with pytest.raises(ServerError, match="decisions were made by random, not by round_robin"):
            one.check()
        assert one.report()["flags"] == flags


def test_few_requests_are_not_judged():
    found = router_checks.Decisions(9, {"random": 9})
    assert not router_checks.fallbacks("vllm-router", "cache_aware", found)


def test_requests_without_any_counted_decision_are_reported():
    problems = router_checks.fallbacks("smg", "cache_aware", router_checks.Decisions(50))
    assert "no decision of cache_aware was counted" in problems[0] and "none counted" in problems[1]


def test_a_cache_aware_router_that_knows_no_prefix_again_is_reported():  # pitfall 34
    def problems(hit_tokens, **outcomes):
        found = router_checks.Decisions(50, {"cache_aware": 50}, outcomes)
        return router_checks.fallbacks("vllm-router", "cache_aware", found, hit_tokens=hit_tokens)

    assert (
        "found 3200 cached tokens, and the router knew no prefix again (prefix_miss 50)"
        in problems(3200, prefix_miss=50)[0]
    )
    assert not problems(3200, prefix_miss=20, prefix_hit=30)
    assert not problems(0, prefix_miss=50)  # prompts that share nothing


def test_the_workers_own_counters_are_held_against_the_routers(fleet, tmp_path, monkeypatch):  # pitfall 34
    one = Router("vllm-cache-aware", fleet.endpoints, log_dir=tmp_path)
    monkeypatch.setattr(one, "_program", SimpleNamespace(running=True, log_text=str))
    blind = router_checks.Decisions(12, {"cache_aware": 12}, {"prefix_miss": 12})
    monkeypatch.setattr(one, "decisions", lambda: blind)
    one._hits_before = one._hit_tokens()
    for _ in range(2):
        control.complete(fleet.endpoints[0], list(range(64)))
    with pytest.raises(ServerError, match="the engines found 48 cached tokens, and the router knew no prefix again"):
        one.check()
    monkeypatch.setattr(one, "_hits_before", None)  # a worker that did not tell
    one.check()


# -- start and end ------------------------------------------------------------------------------------------------


@vllm
def test_nothing_is_left_behind_and_only_this_machine_can_reach_it(fleet, tmp_path):
    with Router("vllm-random", fleet.endpoints, log_dir=tmp_path) as one:
        assert one.version == router_packages.PRODUCTS["vllm-router"].version
        assert "--policy" in one.argv and one.pid and one.ready_s > 0
        program, port = one._program.id, one.port
        addresses = {
            c.laddr.ip for p in processes.members(program) for c in p.net_connections("tcp") if c.status == "LISTEN"
        }
        assert addresses == {"127.0.0.1"}
        assert any(server.id == program for server in processes.list_servers())
    assert not processes.members(program) and ports.is_free(port)


@vllm
def test_its_death_is_told_with_its_log(fleet, tmp_path):
    with Router("vllm-random", fleet.endpoints, log_dir=tmp_path) as one:
        os.kill(one.pid, signal.SIGKILL)
        until(lambda: not one._program.running)
        with pytest.raises(ServerDied, match="vllm-random ended while it was in use") as told:
            one.check()
        assert str(one.log_path) in str(told.value)


@vllm
def test_a_refused_flag_is_told_from_its_log(fleet, tmp_path):
    with pytest.raises(ServerDied, match="unrecognized arguments: --no-such-flag"):
        Router("vllm-random", fleet.endpoints, ("--no-such-flag",), tmp_path).start()


@vllm
def test_a_busy_port_is_refused(fleet, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(PortBusy):
            Router("vllm-random", fleet.endpoints, log_dir=tmp_path, port=taken.getsockname()[1]).start()


@vllm
def test_workers_that_do_not_answer_are_no_ready_router(tmp_path):
    nobody = [Endpoint(f"http://127.0.0.1:{ports.free_port()}", "fake", worker="w0")]
    with pytest.raises(ServerError, match="was not ready after 2 s"):
        Router("vllm-random", nobody, log_dir=tmp_path, ready_timeout_s=2).start()
    assert not any("vllm_router" in server.cmd for server in processes.list_servers())


def test_an_unknown_kind_names_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match="vllm-cache-aware"):
        Router("nginx", [], log_dir=tmp_path)
    assert {kind.product for kind in router.KINDS.values()} <= set(router_packages.PRODUCTS)


# -- packages -----------------------------------------------------------------------------------------------------


def test_a_missing_package_names_the_command(monkeypatch, tmp_path):
    monkeypatch.setenv(router_packages.FOLDER, str(tmp_path))
    with pytest.raises(ServerError, match="kvlab router install vllm-router"):
        Router("vllm-random", [], log_dir=tmp_path).start()
    told = CliRunner().invoke(cli.app, ["router", "list"]).stdout
    assert told.count("not installed") == len(router_packages.PRODUCTS)


def test_a_failed_install_says_why_and_leaves_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv(router_packages.FOLDER, str(tmp_path / "routers"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    told = CliRunner().invoke(cli.app, ["router", "install", "smg"])
    assert told.exit_code == 1 and "smg could not be installed" in told.output
    assert not list((tmp_path / "routers").iterdir())
    assert CliRunner().invoke(cli.app, ["router", "install", "no-such"]).exit_code == 2


@pytest.mark.parametrize(
    ("vllm", "dynamo"),
    [("0.26.0", "1.4.2"), ("0.26.1+cu130", "1.4.2"), ("0.31.0", "1.6.1"), ("0.100.0", "1.6.1"), (None, "1.6.1")],
)
def test_the_release_of_dynamo_follows_the_installed_vllm(monkeypatch, tmp_path, vllm, dynamo):
    monkeypatch.delenv(router_packages.FOLDER, raising=False)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))
    monkeypatch.setattr(router_packages, "_vllm_version", lambda: vllm)
    assert router_packages.place("dynamo").name == f"dynamo-{dynamo}"
    assert f"ai-dynamo-runtime=={dynamo}" in router_packages.pinned("dynamo").requirements
    assert router_packages.place("smg").name == "smg-1.13.0"


def test_a_vllm_too_old_for_dynamo_is_told_before_anything_is_downloaded(monkeypatch):
    monkeypatch.setattr(router_packages, "_vllm_version", lambda: "0.9.2")
    told = CliRunner().invoke(cli.app, ["router", "install", "dynamo"])
    assert told.exit_code == 2 and "Dynamo does not run here with vLLM 0.9.2" in told.output
    listed = CliRunner().invoke(cli.app, ["router", "list"])
    assert listed.exit_code == 0 and "vllm-router" in listed.stdout and "with vLLM 0.9.2" in listed.stdout


def test_dynamo_for_another_vllm_is_refused_and_installed_anew(monkeypatch, tmp_path):
    monkeypatch.setenv(router_packages.FOLDER, str(tmp_path))
    monkeypatch.setattr(router_packages, "_vllm_version", lambda: "0.26.0")
    for version in ("1.6.1", "1.4.2", "1.4.3"):
        metadata = tmp_path / "dynamo" / "ai_dynamo.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True, exist_ok=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: ai-dynamo\nVersion: {version}\n")
        if version != "1.6.1":  # one that somebody chose is kept
            assert router_packages.require("dynamo") == (tmp_path / "dynamo", version)
            continue
        with pytest.raises(ServerError, match=r"1\.6\.1 lies in .*vLLM 0\.26\.0 needs 1\.4\.2"):
            router_packages.require("dynamo")
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        with pytest.raises(ServerError, match="could not be installed"):  # it tries, where one that fits is kept
            router_packages.install("dynamo")


def test_words_are_one_token_each(fleet):
    words = wording.words(fleet.endpoints[0])
    assert len(words) == len(set(words)) >= wording.ENOUGH and all(word[0] == " " for word in words)


def test_a_worker_that_offers_no_tokenizer_is_told(monkeypatch, fleet):
    monkeypatch.setattr(control, "call", lambda *_, **__: (404, "Not Found"))
    with pytest.raises(ServerError, match="use a router that takes token ids"):
        wording.words(fleet.endpoints[0])
