"""Sentences about hits: they say what the claims say, and nothing where nothing was measured."""

from types import SimpleNamespace

from kvlab import claims, explain_hits
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.measure import Result
from kvlab.stats import Estimate


def hit(k, w, value, computed, low=None, high=None, quantity="hit_ratio", c=8):
    where = {"prefixes": k, "c": c, "workers": w}
    estimate = None if value is None else Estimate(value, low, high, 200)
    return claims.claim(
        "service_hit_rate", quantity, where, measured=estimate, computed=computed, unit="ratio", reason="no GPU"
    )


def ttft(k, value, computed=None, kind=None, c=4, quantity="ttft_p50_s"):
    where = {"prefixes": k, "c": c, "workers": 6, "kind": kind}
    return claims.claim("hit_and_miss", quantity, where, measured=value, computed=computed, unit="s")


def test_points_outside_their_interval_are_listed():
    inside, outside = hit(7, 6, 0.55, 0.53, 0.5, 0.6), hit(12, 6, 0.2, 0.33, 0.15, 0.25)
    assert explain_hits.within([inside], "hit_ratio", "of it").startswith("1 of 1 points")
    said = explain_hits.within([inside, outside], "hit_ratio", "of it")
    assert "1 of 2" in said and "20.0% instead of 33.0% at prefixes=12" in said
    assert explain_hits.within([hit(7, 6, None, 0.5)], "hit_ratio", "of it") is None


def test_fleets_are_compared_at_equal_prefixes():
    pairs = [hit(7, 6, 0.55, 0.5, 0.5, 0.6), hit(7, 3, 0.59, 0.5, 0.53, 0.65)]
    assert "55.0% and 59.0% at 7 prefixes: all their intervals overlap" in explain_hits.more_workers(pairs, [6, 3], 8)
    apart = [pairs[0], hit(7, 3, 0.9, 0.5, 0.85, 0.95)]
    assert "apart at 7 prefixes" in explain_hits.more_workers(apart, [6, 3], 8)
    assert explain_hits.more_workers(pairs, [6], 8) is None and explain_hits.more_workers([], [6, 3], 8) is None


def test_models_fall_or_stay_by_their_p_value():
    def p(model, value):
        where = {"model": model, "points": 9}
        return claims.claim("service_hit_rate", "model_p_value", where, measured=value, unit="ratio", reason="none")

    said = explain_hits.told_apart([p("any", 0.6), p("fit", 0.2), p("full", 1e-7)])
    assert "excluded by the counted hits: its share of whole prefixes" in said and "cannot be told apart" in said
    assert "cannot be told apart" not in explain_hits.told_apart([p("any", 0.6), p("full", 0.001)])
    assert explain_hits.told_apart([p("any", None)]) is None


def test_requests_that_would_tell_two_laws_apart():
    said = explain_hits.more_requests({2: (1.0, 0.95), 7: (0.564, 0.537)})
    assert "at 7 prefixes" in said and "at 2 prefixes" not in said


def limit(value, quantity="limit_hit_ratio", computed=0.3, **where):
    where = {"prefixes": 12, "c": 8, "workers": 6} | where
    values = {"measured": value, "computed": computed, "unit": "ratio"}
    return claims.claim("service_hit_rate", quantity, where, **values)


def test_order_lengths_and_popularity_stand_beside_the_law():
    made = [limit(0.33, order="cycle"), limit(0.64, order="runs"), limit(0.29, lengths="mixed"), limit(0.55, zipf=1)]
    said = explain_hits.limits([*made, limit(0.36, service="l4-nginx")], 0.327)
    assert "c ÷ K says 32.7%" in said and "64.0% in runs of ten, 29.0% with two prefix lengths, 55.0% for" in said
    assert explain_hits.limits([], 0.3) is explain_hits.limits(made, None) is None


def test_one_over_the_workers_is_told_as_a_start():
    ends = [limit(value, "transient_hit_ratio", part=part) for part, value in (("first-30", 0.27), ("last-30", 0.97))]
    said = explain_hits.transient(ends)
    assert "the first 30 requests hit 27% (computed 30%) and the last 30 requests hit 97%" in said and "1 ÷ 6" in said
    assert explain_hits.transient(ends[:1]) is None


def test_a_proxy_that_is_not_here_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(explain_hits.kube_rules, "why_not", lambda: "only root may")
    monkeypatch.setattr(explain_hits.l4, "find_nginx", lambda: None)
    asked = []
    values = {"machine": "x", "section": "service_hit_rate", "no_grid": None, "mode": "auto", "base_url": ""}
    lab = SimpleNamespace(**values, measure=lambda cells, **_: asked.extend(cells) or [Result(c, None) for c in cells])
    server = ServerConfig(model="tiny", engine="cpu", kv_cache_memory_bytes=2**20)
    kinds = ("kube_proxy", "random_connection", "l4:nginx")
    load = LoadConfig(requests=2, input_tokens=8, output_tokens=1)
    cells = [Cell(name=kind[-5:], server=server, load=load, workers=2, service=kind) for kind in kinds]
    rules, plain, nginx = explain_hits.measured(lab, cells)
    assert rules.reason == explain_hits.NO_RULES and nginx.reason == explain_hits.NO_NGINX and asked == [plain.cell]
    lab.base_url = "kubernetes://a/b"
    assert explain_hits.measured(lab, cells)[0].reason == explain_hits.OWN_SERVICE
    lab.mode = "replay"  # it says itself that nothing is stored
    assert [one.reason for one in explain_hits.measured(lab, cells)] == [None] * 3


def test_counts_that_were_foretold():
    exact = hit(7, 6, 107, 107, quantity="requests_with_hit")
    off = hit(12, 6, 80, 83, quantity="requests_with_hit")
    assert explain_hits.foretold([exact]).endswith("1 of 1 counts to the last hit.")
    assert "1 of 2" in explain_hits.foretold([exact, off]) and "at most 3 requests" in explain_hits.foretold(
        [exact, off]
    )
    assert explain_hits.foretold([]) is None


def test_counters_that_count_lookups():
    def lookups(k, value):
        return hit(k, 6, value, 1.0, quantity="lookups_per_request", c=16)

    said = explain_hits.looked_up_again([lookups(2, 1.0), lookups(24, 8.2)])
    assert "At 1 of 2 points" in said and "8.2 lookups a request (prefixes=24;c=16;workers=6)" in said
    assert explain_hits.looked_up_again([lookups(2, 1.0)]) is None


def test_hits_and_misses_apart():
    both = [
        ttft(2, 0.04, kind="hit"),
        ttft(2, 0.10, kind="miss"),
        ttft(24, 0.041, kind="hit"),
        ttft(24, 0.12, kind="miss"),
    ]
    said = explain_hits.apart(both, 6, 4)
    assert "hits takes 40 to 41 ms" in said and "2.5 to 2.9 times" in said
    assert explain_hits.apart(both, 3, 4) is None


def test_the_mixture_and_its_worst_residual():
    said = explain_hits.mixture([ttft(2, 0.04, 0.042), ttft(24, 0.10, 0.101)], 6, 4)
    assert "2.5-fold" in said and "5%" in said
    assert explain_hits.mixture([ttft(2, 0.04, 0.042)], 6, 4) is None


def test_time_saved_alone_and_under_load():
    single = claims.claim(
        "hit_and_miss", "ttft_saved_s", {"c": 1, "workers": 1}, measured=0.07, computed=0.068, unit="s"
    )
    loaded = ttft(7, 0.14, 0.07, quantity="ttft_saved_s")
    assert explain_hits.saved([single]).endswith("(computed 68 ms).")
    assert "2.0 to 2.0 times" in explain_hits.saved([single, loaded])
    assert explain_hits.saved([loaded]) is None


def test_the_tail_and_the_rate():
    said = explain_hits.slower_tail([ttft(2, 0.3, quantity="ttft_p99_s"), ttft(24, 1.5, quantity="ttft_p99_s")], 6, 4)
    assert "ttft_p99_s changes 5.00-fold from 2 to 24 prefixes" in said
    assert explain_hits.slower_tail([], 6, 4) is None


def test_workers_that_share_cores_are_told_apart_from_those_with_their_own():
    def result(**place):
        manifest = {"server": {"workers": [place] * 6}, "provenance": {"cores": {"usable": 2}}}
        return SimpleNamespace(run=SimpleNamespace(manifest=manifest))

    assert "6 workers and the client share 2 cores" in explain_hits.crowded([result(gpu=None, cores=None)])
    assert explain_hits.crowded([result(gpu="0", cores=None)]) is None
    assert explain_hits.crowded([SimpleNamespace(run=None)]) is None
