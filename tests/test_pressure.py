"""What notebooks say of a KV pool under pressure, from runs and claims made by hand."""

import pandas as pd
import pytest
from tables_for_tests import request, requests
from test_iterations import PAIR, PROBE, log

from kvlab import blocks, claims, measure, plot, plot_preemption, predict, pressure, profile, store
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import ConfigError
from kvlab.pauses import Pause
from kvlab.predict import PrefillModel
from kvlab.results import Result


class Run:
    """A stored pair: two requests of 4 + 6 tokens, of which the second one was evicted after its fourth token."""

    def __init__(self, text):
        stays = request(events=[(0.1 * k, 1) for k in range(1, 7)], request=0, latency_s=0.6)
        evicted = request(
            events=[(0.2, 1), (0.3, 1), (0.4, 1), (0.5, 1), (0.65, 1), (0.75, 1)], request=1, latency_s=0.8
        )
        self.rows, self.text = requests(stays, evicted), text
        self.manifest = {"summary": {"prefix_hits": 0.0, "queue_mean_s": 0.05}}

    def requests(self):
        return self.rows

    def log(self):
        return self.text


def pair(text=""):
    load = LoadConfig(concurrency=2, requests=2, input_tokens=4, output_tokens=6)
    return Result(Cell(name="pair", server=ServerConfig(model="tiny"), load=load), Run(text))


def test_a_measured_pair_equals_its_account():
    account = blocks.closed_loop(blocks.Engine(4, 4), 2, [blocks.Job(4, 6)] * 2)
    computed = pressure.pair_computed(account, PrefillModel(0.01, 0.01, 0.0))
    measured = pressure.pair_measured(pair(log(PROBE, *PAIR)))
    assert computed == pytest.approx(
        {"recomputed_tokens": 3, "found_tokens": 4, "found_share": 4 / 7, "resume_s": 0.05, "counted_hits": 0}
    )
    assert measured == pytest.approx(computed)


def test_a_pair_after_a_warm_up_is_counted_alone():
    result = pair(log(PROBE, (1, 4, 0, 0), (0, 0, 1, 1), *PAIR))
    warm = request(events=[(0.1, 1), (0.2, 1)], request=0, phase="warmup", prompt_tokens=4)
    result.run.rows = pd.concat([requests(warm), result.run.rows], ignore_index=True)
    assert pressure.recomputed(result) == 3


def test_without_step_lines_the_client_still_sees_the_pause():
    measured = pressure.pair_measured(pair("INFO: nothing"))
    assert measured["recomputed_tokens"] is None and measured["found_share"] is None
    assert measured["resume_s"] == pytest.approx(0.05)


def test_a_run_that_is_missing_gives_nothing():
    result = Result(pair().cell, None, "not measured")
    assert pressure.recomputed(result) is None
    assert set(pressure.pair_measured(result).values()) == {None}


def test_evictions_are_found_at_their_requests():
    account = blocks.closed_loop(blocks.Engine(31, 32, 32), 4, [blocks.Job(128, 256)] * 8)
    assert [e.request for e in account.evictions] == [2, 3, 5, 6, 6, 7]
    seen = [Pause(request, 0.0, 1.0) for request in (2, 6, 6, 6, 0)]
    assert pressure.same_requests(account, seen) == 3


def test_time_is_split_without_a_rest():
    parts = pressure.spent([pair()], lambda run: 0.1)
    assert parts == pytest.approx({"engine queue": 0.05, "preempted": 0.1, "served": 0.55})
    assert pressure.spent([pair()], lambda run: None) == {}


def resume_claims(on, off):
    return [
        claims.claim("preemption", "found_share", {"in": 9, "caching": arm}, measured=share, unit="ratio")
        for arm, share in (("on", on), ("off", off))
    ]


def test_the_answer_follows_the_numbers():
    assert "hits the prefix cache: it found 97.0%" in pressure.resumed(resume_claims(0.97, 0.0))
    assert "does not hit" in pressure.resumed(resume_claims(0.0, 0.0))
    assert pressure.resumed([]) is None


def test_the_capacity_that_explains_the_counts_best():
    computed = [
        claims.claim("preemption", "article_preemptions", {"c": 32, "in": 9, "capacity": k}, computed=n, unit="count")
        for k, n in ((22048, 0), (27504, 6))
    ]
    published = pd.DataFrame([{"conditions": "c=32;in=9;requests=64", "measured": 7.0}])
    assert "27,504 tokens explain its counts best (computed for published: 6 for 7)" in pressure.closest_capacity(
        computed, published
    )


def test_sentences_on_the_caps_hold_the_claims_numbers():
    at = {"c": 24, "max_num_seqs": 5}
    rows = [
        claims.claim("max_num_seqs", "throughput_change", at, computed=-0.27, measured=-0.25, unit="ratio"),
        claims.claim("max_num_seqs", "ttft_ratio", at, computed=1.7, measured=1.6, unit="x"),
        claims.claim("max_num_seqs", "queue_s", at, measured=5.9, unit="s"),
        claims.claim("max_num_seqs", "preemptions", at, measured=0, unit="count"),
        claims.claim("max_num_seqs", "throughput_tok_s", at, measured=300, unit="tok/s"),
    ]
    assert "5: throughput -25.0%, time to the first token 1.60x (computed -27.0% and 1.70x)" in pressure.cap_changes(
        rows
    )
    assert "at max_num_seqs 5 a request waits 5.9 s in the engine, 0 requests are evicted" in pressure.where_it_waits(
        rows
    )
    assert pressure.cap_changes([]) is None and pressure.where_it_waits([]) is None


def test_computed_and_counted_evictions_stand_per_100_requests_the_articles_by_its_smallest_pool(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    at = {"c": 20, "in": 512, "out": 128, "requests": 40}
    rows = [
        claims.claim("preemption", "preemptions", at, computed=4, measured=6, unit="count"),
        claims.claim("preemption", "preemptions", at | {"caching": "off"}, computed=9, measured=9, unit="count"),
        claims.claim("preemption", "article_preemptions", at | {"capacity": 900}, computed=8, unit="count"),
        claims.claim("preemption", "article_preemptions", at | {"capacity": 1000}, computed=2, unit="count"),
    ]
    claims.write_section(store.machine_dir("here"), "preemption", rows)
    assert pressure.counted("here").to_dict("records") == [{"computed": 10.0, "measured": 15.0}]
    assert not len(pressure.published("here"))
    article = claims.claim("preemption", "preemptions", {"c": 20, "in": 512}, measured=10, unit="count")
    claims.write_section(store.machine_dir("article"), "preemption", [article])
    assert pressure.published("here").to_dict("records") == [{"computed": 20.0, "measured": 25.0}]


def test_the_picture_of_all_machines_says_how_many_loads_evict_nobody(tmp_path):
    rates = pd.DataFrame({"computed": [10.0, 0.0, 0.0], "measured": [15.0, 0.0, 2.0]})
    figure, (axis,) = plot.panels(1)
    plot_preemption.counted_points(axis, rates, "here", own="here")
    plot_preemption.counted_points(axis, rates[:0], "nobody", own="here")
    plot_preemption.counted_line(axis)
    said = [text.get_text() for text in axis.get_legend().get_texts()]
    assert said == ["here, 3 loads (1 without eviction)", "measured as computed"]
    empty, (bare,) = plot.panels(1)
    plot_preemption.counted_line(bare)
    assert [text.get_text() for text in bare.texts] == ["not measured"] and not bare.lines


def lab_of(section):
    return measure.Lab(section, profile.load_profile("cpu-tiny"), "here", "auto")


def test_the_account_sees_the_servers_blocks():
    lab = lab_of("preemption")
    assert pressure.engine(lab, lab.server()) == blocks.Engine(212, 32, 64, 2048, True)
    with pytest.raises(ConfigError, match="not pinned"):  # pitfall 20
        pressure.engine(lab, lab.server({"kv_cache_memory_bytes": None}))


@pytest.mark.parametrize("name", profile.built_in())
@pytest.mark.parametrize("caching", [True, False])
def test_each_profile_has_a_pair_that_evicts_once(name, caching):
    lab = measure.Lab("preemption", profile.load_profile(name), "here", "auto")
    grid = lab.profile.preemption
    server = lab.server(grid.pair_server | {"enable_prefix_caching": caching})
    pool = pressure.engine(lab, server)
    job = blocks.Job(pressure.pair_input(pool, server.max_model_len, grid.pair_output_tokens), grid.pair_output_tokens)
    numbers = pressure.pair_computed(blocks.closed_loop(pool, 2, [job] * 2))
    assert numbers["found_share"] > 0.9 if caching else numbers["found_share"] == 0


def test_a_pair_that_does_not_fill_the_pool_is_explained():
    account = blocks.closed_loop(blocks.Engine(100, 32), 2, [blocks.Job(320, 64)] * 2)
    with pytest.raises(ConfigError, match="0 preemptions instead of one"):
        pressure.pair_computed(account)


@pytest.mark.parametrize("name", profile.built_in())
def test_each_profile_has_loads_on_both_sides_of_the_border(name):
    lab = measure.Lab("preemption", profile.load_profile(name), "here", "auto")
    engine = pressure.engine(lab, lab.server(lab.profile.preemption.server))
    accounts = [
        blocks.closed_loop(engine, p.concurrency, [blocks.Job(p.input_tokens, p.output_tokens)] * p.requests)
        for p in lab.profile.preemption.points
    ]
    assert accounts[0].preemptions > 0  # the one that is drawn over time
    assert "queue" in {account.verdict for account in accounts}
    caps, load = lab.profile.max_num_seqs.caps, lab.profile.max_num_seqs.load
    fits = engine.usable_blocks // -(-(load.input_tokens + load.output_tokens - 1) // engine.block_size)
    assert min(caps) < fits <= max(caps) and any(abs(cap - fits) <= 1 for cap in caps)


def test_the_best_cap_is_told_as_it_was_measured_and_not_as_it_was_hoped():
    at = {"c": 64, "in": 512}
    found = claims.claim(
        "max_num_seqs", "best_max_num_seqs", at | {"among": "16-34-64"}, computed=34, measured=64, unit="requests"
    )
    wide = claims.claim(
        "max_num_seqs", "throughput_change", {"max_num_seqs": 34}, measured=-0.4, ci=(-0.9, 0.1), unit="ratio"
    )
    text = pressure.best_cap([found, wide])
    assert "Of the caps 16, 34, 64 the best one measured is 64, computed was 34" in text
    assert "against the highest cap no difference can be told for 34" in text
    same = claims.claim("max_num_seqs", "best_max_num_seqs", {"among": "5-9"}, computed=9, measured=9, unit="requests")
    assert pressure.best_cap([same]) == "Of the caps 5, 9 the best one measured is 9, as computed."
    assert pressure.best_cap([]) is None


def graph_claims(cap, running, graph, step_s):
    at = {"max_num_seqs": cap}
    values = (
        ("running_max", running, "requests"),
        ("largest_full_graph", graph, "requests"),
        ("itl_p50_s", step_s, "s"),
    )
    return [claims.claim("max_num_seqs", name, at, measured=value, unit=unit) for name, value, unit in values]


def test_a_cap_that_lets_more_run_than_a_graph_holds_is_told_with_its_price():
    told = pressure.outside_of_graphs(graph_claims(34, 34, 32, 0.0107) + graph_claims(40, 37, 40, 0.0033))
    assert "max_num_seqs 34" in told and "10.7 ms against 3.3 ms at cap 40" in told
    assert pressure.outside_of_graphs(graph_claims(32, 32, 32, 0.003) + graph_claims(40, 37, 40, 0.0033)) is None


@pytest.mark.parametrize(("cap", "size"), [(1, 1), (3, 2), (7, 4), (16, 16), (34, 32), (40, 40), (64, 64), (300, 288)])
def test_full_graphs_end_at_the_largest_capture_size_below_the_cap(cap, size):
    assert predict.largest_full_graph(cap) == size
