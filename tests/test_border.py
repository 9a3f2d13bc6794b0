"""Pools that differ from start to start: what each start's own blocks foretell, and what the claims say of it."""

import json
from dataclasses import asdict

import fakes
import pytest

from kvlab import border, claims, measure, store
from kvlab.config import Cell, LoadConfig, build
from kvlab.control import Capacity
from kvlab.errors import ConfigError
from kvlab.load_grid import Border

SHAPE = {"input_tokens": 64, "output_tokens": 2, "rounds": 1}  # 65 tokens: three blocks of 32


def no_model(shape, clients, fit):
    return {}


def open_lab(profile="cpu-tiny", mode="replay"):
    return measure.open_lab("load", profile_name=profile, machine="fake", mode=mode)


@pytest.fixture
def blocks_of_starts(monkeypatch, tmp_path):
    """Fake servers whose pools have these blocks, start by start."""
    fakes.install(monkeypatch, tmp_path, ttft_s=0.0, itl_s=0.0)
    left: list[int] = []

    class Sized(fakes.FakeVllm):
        def start(self):
            size = self.config.kv_cache_memory_bytes
            blocks = left.pop(0) if size is None else size // (32 * 6144)
            self.capacity = Capacity(metric_blocks=blocks, metric_block_size=32)
            return super().start()

        def describe(self):
            return super().describe() | {"capacity": asdict(self.capacity)}

    monkeypatch.setattr("kvlab.server.VllmServer", Sized)
    return left


def computed_before(section):
    """Every number that was stored before a load, in order."""
    stored = json.loads((store.machine_dir("fake") / section / "computed.json").read_text())["stored"]
    return [{row["id"].removeprefix("load/"): row["computed"] for row in entry["rows"]} for entry in stored]


# -- what follows from the blocks ---------------------------------------------------------------------------------


def test_one_start_evicts_at_the_border_and_a_start_with_two_percent_more_does_not():  # pitfall 19
    lab = open_lab("h200")
    grid = lab.profile.load.border
    first = border.pools(lab, {}, grid)[0]
    small, large = 92656 // 16, 94864 // 16
    clients, _ = border.border_clients(grid, first.server, small)
    assert clients == 43
    foretold = [border.foretold(grid, first, size, clients, no_model) for size in (small, large)]
    assert [numbers["preemptions"] for numbers in foretold] == [4, 0]
    assert [round(numbers["requests_that_fit_low"], 1) for numbers in foretold] == [42.6, 43.6]


def test_starts_are_unpinned_and_only_the_first_is_cold():
    pools = border.pools(open_lab("h200"), {}, open_lab("h200").profile.load.border)
    assert {pool.server.kv_cache_memory_bytes for pool in pools} == {None}
    assert [pool.server.caches for pool in pools] == ["cold", "kept", "kept"]
    assert {pool.server.gpu_memory_utilization for pool in pools} == {0.1}


def test_a_pool_above_the_cap_has_no_border_and_says_what_to_change():
    lab = open_lab()
    grid = Border(pools=(1, 2), **SHAPE)
    clients, why = border.border_clients(grid, lab.server(), 1000)
    assert clients is None and "max_num_seqs lets 64 run" in why and "gpu_memory_utilization" in why


@pytest.mark.parametrize("given", [{}, {"starts": 1}, {"pools": [5]}, {"starts": 2, "pools": [5, 6]}])
def test_either_starts_or_pools_are_asked_for(given):
    with pytest.raises(ConfigError, match="either two or more starts, or two or more pools"):
        build(Border, SHAPE | given, "a profile")


# -- on fake servers ----------------------------------------------------------------------------------------------


def test_starts_follow_one_another_and_each_one_is_foretold_from_its_own_blocks(blocks_of_starts):
    blocks_of_starts += [11, 13]  # 10 and 12 usable: 3.3 and 4 requests
    lab, grid = open_lab(mode="auto"), Border(starts=2, **SHAPE)
    pools = border.pools(lab, {}, grid)
    clients, results = border.measured(lab, grid, pools, no_model)
    assert fakes.EVENTS == ["start", "stop", "start", "stop"] and clients == 4
    assert [result.cell.load.concurrency for result in results] == [4, 4]
    told = computed_before("load")
    assert [next(iter(numbers.values())) for numbers in told] == [pytest.approx(10 / 3), 4]
    assert all(result.run.manifest["predictions"]["numbers"] == 3 for result in results)
    found = {c.id: c for c in border.stated(lab, grid, pools, clients, results, no_model)}
    assert found["load/capacity_blocks/pool=unpinned;start=2"].measured == 13
    assert found["load/capacity_blocks/pool=unpinned;start=2"].computed == 11
    assert found["load/capacity_range_blocks/pool=unpinned;servers=2"].measured == 2
    again = border.measured(open_lab(), grid, pools, no_model)  # a replay starts nothing and finds the same
    assert [r.run.id for r in again[1]] == [r.run.id for r in results] and len(fakes.EVENTS) == 4


def test_pools_set_by_hand_say_so_and_are_computed_without_any_run(blocks_of_starts):
    lab, grid = open_lab(), Border(pools=(11 * 32 * 6144, 13 * 32 * 6144), **SHAPE)
    pools = border.pools(lab, {}, grid)
    clients, results = border.measured(lab, grid, pools, no_model)
    made = border.stated(lab, grid, pools, clients, results, no_model)
    by_id = {c.id: c for c in made}
    assert clients == 4 and by_id["load/border_clients/pool=by-hand;in=64;out=2"].computed == 4
    assert by_id["load/capacity_range_blocks/pool=by-hand;servers=2"].computed == 2
    assert by_id[f"load/capacity_blocks/pool=by-hand;kv_bytes={grid.pools[1]}"].state == "not measured"
    assert border.told(made)[0].startswith("The pool at the border is not measured: no run is stored")


def test_pools_set_by_hand_start_together_with_what_is_measured_before_them(blocks_of_starts):
    lab = open_lab(mode="auto")
    main = lab.server({"kv_cache_memory_bytes": 11 * 32 * 6144})
    grid = Border(pools=(11 * 32 * 6144, 13 * 32 * 6144), **SHAPE)
    pools = border.pools(lab, {}, grid)
    first = Cell(name="c1", server=main, load=LoadConfig(requests=1, input_tokens=64, output_tokens=2))
    lab.measure([first], side_by_side=True, ahead=border.ahead(lab, grid, pools))
    assert fakes.EVENTS == ["start", "start"]  # the first pool is the server of the cell before
    border.measured(lab, grid, pools, no_model, side_by_side=True)
    assert fakes.EVENTS == ["start", "start"]
    lab.close()
    assert fakes.EVENTS == ["start", "start", "stop", "stop"]
    assert border.ahead(lab, Border(starts=2, **SHAPE), border.pools(lab, {}, Border(starts=2, **SHAPE))) == []


def test_without_the_first_start_every_claim_says_why(blocks_of_starts):
    lab, grid = open_lab(), Border(starts=2, **SHAPE)
    pools = border.pools(lab, {}, grid)
    made = border.stated(lab, grid, pools, *border.measured(lab, grid, pools, no_model), no_model)
    assert {c.state for c in made} == {"not measured"} and all("kvlab measure load" in c.reason for c in made)


def test_a_start_that_fails_is_a_reason_and_not_the_end(blocks_of_starts):
    blocks_of_starts += [11, 13]
    lab, grid = open_lab(mode="auto"), Border(starts=2, **SHAPE)
    fakes.FAILS_TO_START += [False, True]
    _, results = border.measured(lab, grid, border.pools(lab, {}, grid), no_model)
    assert [result.failed for result in results] == [False, True] and "no server" in results[1].reason


# -- in words -----------------------------------------------------------------------------------------------------


def claim(quantity, where, measured=None, computed=None):
    at = where if quantity.startswith("capacity") else f"{where};in=64;out=2"
    given = {} if measured is None and computed is not None else {"reason": "no run"} if measured is None else {}
    return claims.claim("load", quantity, at, unit="count", measured=measured, computed=computed, **given)


def of_starts(*servers):
    made = [claims.claim("load", "border_clients", "pool=unpinned;in=64;out=2", unit="requests", computed=4)]
    for n, (size, computed, measured, tok_s, ttft_s) in enumerate(servers, 1):
        where = f"pool=unpinned;start={n}"
        made.append(claim("capacity_blocks", where, size))
        made.append(claim("border_preemptions", where, measured, computed))
        made += [claim("border_throughput_tok_s", where, tok_s), claim("border_ttft_p50_s", where, ttft_s)]
    return made


def test_words_say_that_the_start_decides_and_what_it_costs():
    first, second = border.told(of_starts((100, 5, 6, 90.0, 0.3), (103, 0, 0, 100.0, 0.2)))
    assert first == "2 servers of one configuration, started one after another, hold 100 to 103 blocks, 3.0% apart."
    assert "start 1: 5 computed, 6 measured; start 2: 0 computed, 0 measured" in second
    assert "both sides of the border: the size of the pool decides" in second and "in 2 of 2 cases" in second
    assert "throughput -10.0% and the median time to the first token +50.0%" in second


@pytest.mark.parametrize(("seen", "words"), [(0, "has room for all"), (3, "evicts")])
def test_words_say_that_the_start_does_not_decide(seen, words):
    text = " ".join(border.told(of_starts((100, 3, seen, 90.0, 0.3), (100, 3, seen, 91.0, 0.3))))
    assert "100 blocks each" in text and f"Each of them {words}" in text and "does not decide" in text
    assert f"in {2 if seen else 0} of 2 cases" in text


def test_words_name_pools_set_by_hand():
    made = of_starts((100, 5, 6, 90.0, 0.3), (103, 0, 0, 100.0, 0.2))
    for n, c in enumerate(made):
        at = c.conditions.replace("unpinned", "by-hand").replace("start", "kv_bytes")
        made[n] = claims.claim("load", c.quantity, at, unit=c.unit, measured=c.measured, computed=c.computed)
    text = " ".join(border.told(made))
    assert text.startswith("2 pools set by hand hold 100 to 103 blocks") and "100 blocks: 5 computed" in text
