"""What the runs of several workers say, on fake workers with a real cache each."""

from types import SimpleNamespace

import fakes
import numpy as np
import pytest
from fakes import open_lab

from kvlab import fleet_rows, hit_grid, hit_simulation, hits, measure, profile
from kvlab.measure import Result

GRID = profile.load_profile("cpu-tiny").service_hit_rate


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("measured")
        fakes.install(patch, folder, cache_blocks=51, block_size=32, ttft_s=0.0, itl_s=0.0)
        lab = open_lab(section="service_hit_rate")
        server = lab.server(GRID.server)
        cells = {c.load.prefixes: c for c in hit_grid.point_cells(server, GRID)[:4] if c.repeat == 0}
        ample = hit_grid.limit_cells(server, GRID)["capacity=ample"]
        short = [
            cells[2],
            cells[12].model_copy(update={"load": cells[12].load.model_copy(update={"requests": 100})}),
            ample,
        ]
        results = lab.measure(short)
        lab.close()
        yield results


def test_hits_are_counted_in_three_readings(measured):
    two, twelve, _ = (fleet_rows.counted([result]) for result in measured)
    assert (two.requests, two.any, two.full) == (200, 190, 190)
    assert twelve.any > twelve.full and twelve.prefix_tokens == 100 * 352
    both = fleet_rows.counted(measured[:2])
    assert both.any == two.any + twelve.any
    found = fleet_rows.estimates(measured[1:2])
    assert found["any"].low < found["any"].value < found["any"].high and found["token"].low is None
    assert fleet_rows.estimates([Result(measured[0].cell, None)]) == {"any": None, "token": None, "full": None}


def test_lengths_and_pools_are_read_from_the_runs(measured):
    assert fleet_rows.prompt_tokens(measured[:2]) == measured[0].cell.load.input_tokens
    assert fleet_rows.cached_on_a_hit(measured[:1]) == 352  # the whole prefix, in blocks
    pools = [SimpleNamespace(manifest={"server": {"capacity": {"metric_tokens": n}}}) for n in (1632, 1632, 1664)]
    stated = [Result(measured[0].cell, pool) for pool in pools]
    assert fleet_rows.capacity_tokens(stated[:2]) == 1632 and fleet_rows.capacity_tokens(stated) is None
    missing = [Result(measured[0].cell, None)]
    assert fleet_rows.prompt_tokens(missing) is fleet_rows.cached_on_a_hit(missing) is None
    assert fleet_rows.capacity_tokens(missing) is None


def test_every_hit_was_foretold(measured):
    for result in measured[1:]:
        foretold = hit_simulation.simulate(result.cell, 51, 32)
        found = fleet_rows.counted([result])
        assert (found.any / found.requests, found.full / found.requests) == pytest.approx((foretold.any, foretold.full))


def test_rows_and_counters_agree_and_a_difference_is_seen(measured):
    assert fleet_rows.disagreement(measured) == {"hits": 0, "queries": 0, "runs": 3}
    assert fleet_rows.lookups(measured) == 1
    table = measured[0].run.requests()
    table.loc[table["cached_tokens"] > 0, "cached_tokens"] += 32

    class Changed:
        id = "x"
        requests, samples = (lambda self: table), (lambda self: measured[0].run.samples())

    assert fleet_rows.disagreement([Result(measured[0].cell, Changed())])["hits"] > 0
    assert fleet_rows.disagreement([]) == {"hits": None, "queries": None, "runs": 0} and fleet_rows.lookups([]) is None


def test_runs_whose_requests_were_looked_up_again_are_not_compared(measured):
    samples = measured[0].run.samples()
    last = samples.groupby("worker")["t_s"].transform("max") == samples["t_s"]
    samples.loc[last, ["prefix_queries", "prefix_hits"]] += 416.0

    class Waited:
        id = "x"

        def requests(self):
            return measured[0].run.requests()

        def samples(self):
            return samples

    again = Result(measured[0].cell, Waited())
    assert fleet_rows.disagreement([again])["runs"] == 0 and fleet_rows.lookups([again]) > 1


def test_the_busiest_worker_has_more_than_its_share(measured):  # pitfall 35
    share = fleet_rows.busiest_share(measured[:1])
    assert 1.0 < share < 2.0
    assert fleet_rows.expected_busiest_share(202, 6) == pytest.approx(share, rel=0.35)
    assert fleet_rows.expected_busiest_share(100_000, 6) == pytest.approx(1, abs=0.02)
    assert fleet_rows.busiest_share([]) is None


def test_the_first_requests_hit_one_nth_and_later_ones_all(measured):  # pitfall 32
    ample = measured[2]
    curve = fleet_rows.first_hits(ample, bins=6)
    computed = hits.first_hit_share(12, 6, curve["sent"])
    assert curve["share"].iloc[0] < 0.6 and curve["share"].iloc[-1] > 0.85
    assert np.abs(curve["share"] - computed).max() < 0.25
    assert hits.first_hit_share(12, 6, np.array([0]))[0] == pytest.approx(1 / 6)
    assert fleet_rows.first_hits(Result(ample.cell, None)).empty
    (first, begun, share), (last, steady, end) = fleet_rows.first_and_last(ample)
    assert (first, last) == ("first-30", "last-30") and 1 / 6 < begun < 0.4 < 0.9 < steady < 1
    assert share.low < begun < share.high and share.n == 30 and end.value > 0.85
    assert [one[1:] for one in fleet_rows.first_and_last(Result(ample.cell, None))] == [(begun, None), (steady, None)]


def test_models_are_told_apart_by_their_misfit():
    right = hits.misfit([(50, 100, 0.5), (21, 100, 0.2), (3, 3, 1.0)])
    assert right.points == 2 and right.p_value > 0.5
    assert hits.misfit([(50, 100, 0.8)]).p_value < 1e-6
    assert hits.misfit([(3, 3, 1.0)]) is None
    assert hits.requests_to_tell_apart(0.55, 0.52) > 500


def test_the_grid_keeps_the_articles_ratio():
    cpu = profile.load_profile("cpu-tiny")
    blocks = hit_grid.blocks("tiny", cpu.server_with(GRID.server), 352, 64, 1)
    assert (blocks.prefix, blocks.own, blocks.usable) == (11, 2, 51) and blocks.fit == pytest.approx(3.95, abs=0.03)
    gpu = profile.load_profile("h200")
    grid = gpu.service_hit_rate
    there = hit_grid.blocks("Qwen3-0.6B", gpu.server_with(grid.server), 2000, 300, 64)
    assert (there.prefix, there.own, there.usable) == (125, 23, 584)


def test_points_come_before_their_repeats():
    cells = hit_grid.point_cells(profile.load_profile("cpu-tiny").server_with(GRID.server), GRID)
    repeats = [cell.repeat for cell in cells]
    assert repeats == sorted(repeats) and max(repeats) == 2
    assert len({(c.load.pick_seed, c.load.seed) for c in cells if c.name == "w6-k7-c8"}) == 3
    assert all(c.load.requests == max(200, 20 * c.load.prefixes) and c.load.new_connection for c in cells)
    measure._check_unique(cells)
