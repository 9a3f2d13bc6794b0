"""The cards of the first screen: what they show and under which conditions stands in visible text."""

import json
import re
from dataclasses import asdict

import pandas as pd
import pytest

from kvlab import claims, facts, findings, pages, phrases, prose, report, store

DRAWN = dict.fromkeys(findings.listed(), "")


def cards(tables, own="mine", language="en"):
    writer = prose.Writer(facts.facts(own, tables), pages.words(language), pages.sources(), lambda name: {})
    return {card.key: card for card in findings.build(writer, language, prose.Notes("findings"), DRAWN)}


def table(*rows):
    stated = [claims.claim(*row, **values) for *row, values in rows]
    return pd.DataFrame([asdict(claim) for claim in stated])


def rows(card):
    return {row["machine"]: row for row in card.rows}


def test_a_readers_machine_has_its_number_whatever_the_conditions_of_its_profile():
    pool = ("kv_capacity", "capacity_tokens", {"server": "float32", "block": 32}, {"measured": 6816, "unit": "tokens"})
    other = ("preemption", "preemptions", {"c": 9, "in": 77, "out": 5}, {"measured": 3, "unit": "count"})
    shown = cards({"mine": table(pool, other), "h200": table(other)})
    assert "6,816" in rows(shown["capacity"])["mine"]["measured"]
    assert rows(shown["preemption"])["mine"]["conditions"] == "c=9, in=77, out=5"
    assert "not measured" in rows(shown["preemption"])["h200"]["measured"]  # its number is the one that is named


def test_of_several_conditions_those_with_a_number_come_first():
    claim = ("kv_capacity", "capacity_tokens", {"server": "x", "block": 16}, {"reason": "no memory", "unit": "tokens"})
    assert "not measured" in rows(cards({"mine": table(claim)})["capacity"])["mine"]["measured"]
    pool = ("kv_capacity", "capacity_tokens", {"server": "bf16", "block": 64}, {"measured": 64, "unit": "tokens"})
    assert rows(cards({"mine": table(claim, pool)})["capacity"])["mine"]["measured"] == "64 tokens"


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_each_card_says_in_words_what_its_picture_and_table_show(language):
    for key, (_, body, shown) in findings.texts(language).items():
        assert body and shown and "\n" not in shown, key


def test_rows_with_different_conditions_say_so():
    where = {"prefixes": 12, "c": 8, "workers": 6}
    claim = ("service_hit_rate", "hit_ratio", where, {"measured": 0.3, "unit": "ratio"})
    more = ("service_hit_rate", "hit_ratio", where | {"popularity": "even"}, {"measured": 0.2, "unit": "ratio"})
    same = cards({name: table(claim) for name in ("article", "mine")})["service"]
    other = cards({"article": table(claim), "mine": table(more)})["service"]
    assert not same.differ and other.differ
    assert rows(other)["mine"]["conditions"] == "prefixes=12, c=8, workers=6, popularity=even"


def test_a_number_of_two_claims_stands_where_a_machine_states_no_ratio():
    where = {"model": "Qwen3-0.6B", "c": 32}
    article = table(
        ("cuda_graphs", "throughput_tok_s", where | {"graphs": "on"}, {"measured": 300.0, "unit": "tok/s"}),
        ("cuda_graphs", "throughput_tok_s", where | {"graphs": "off"}, {"measured": 200.0, "unit": "tok/s"}),
    )
    assert ">+50%<" in rows(cards({"article": article})["graphs"])["article"]["measured"]


def test_the_picture_of_a_card_names_its_notebook_and_the_runs_of_every_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    monkeypatch.setattr(findings.behind, "machines_in", lambda svg, names: ["article", "mine"])
    where = {"prefixes": 12, "c": 8, "workers": 6}
    row = ("service_hit_rate", "hit_ratio", where, {"measured": 0.5, "unit": "ratio"})
    claims.write_section(store.machine_dir("mine"), "service_hit_rate", [])
    told = cards({"article": table(row), "mine": table(row).assign(runs="a;b;c;d;e")})["service"]
    assert told.notebook == "10_service_hit_rate.ipynb"
    assert [(one.machine, len(one.runs), one.published) for one in told.behind] == [
        ("article", 0, True),
        ("mine", 5, False),
    ]


def test_words_below_a_picture_are_filled_as_any_text():
    assert all("{" not in card.table + card.body for card in cards({}).values())


def test_a_further_machine_supports_a_card_and_the_readers_own_stays_last():
    where = {"arm": "one", "gpus": 1, "in": 512, "out": 128}
    ends = [
        ("several_gpus", "throughput_tok_s", where | {"c": c}, {"measured": n, "unit": "tok/s"})
        for c, n in ((32, 6000.0), (64, 5700.0))
    ]
    shown = cards({"h200-x2": table(*ends)})["load"].rows
    assert [row["machine"] for row in shown][-2:] == ["h200-x2", "mine"] and "0.95" in shown[-2]["measured"]
    assert "h200-x2" not in rows(cards({})["load"])


def test_times_of_a_client_over_its_limits_are_kept_out_and_say_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    kept, late = {"late": False, "client_cpu_share": 0.2}, {"late": True}
    for run, told in (("a", kept), ("b", late), ("c", {"client_cpu_share": 0.9}), ("d", {"added_itl_p99_s": 0.02})):
        for section in ("load", "service_hit_rate"):
            folder = tmp_path / "data" / "mine" / section / run
            folder.mkdir(parents=True)
            cell = {"name": run, "repeat": 0, "server": {}}
            manifest = {"schema_version": 1, "cell": cell, "key": run, "created_utc": "2026-11-01T00:00:00+00:00"}
            (folder / "run.json").write_text(json.dumps(manifest | {"certificate": told}))
    where = {"c": 96, "over_c": 48, "beyond": "pool", "in": 512, "out": 128}
    for runs, shown in (("a", True), ("a;b", False), ("c", False), ("d", False), ("gone", True)):
        stored = table(("load", "throughput_ratio", where, {"measured": 1.0625, "unit": "x"})).assign(runs=runs)
        row = rows(cards({"mine": stored})["load"])["mine"]
        assert ("1.062" in row["measured"]) is shown, runs
    assert phrases.known(findings.OVER, "zh") and "free core" in findings.OVER
    where = {"prefixes": 12, "c": 8, "workers": 6}
    of_count = table(("service_hit_rate", "hit_ratio", where, {"measured": 0.5, "unit": "ratio"})).assign(runs="b")
    assert "missing" not in rows(cards({"mine": of_count})["service"])["mine"]["measured"]


@pytest.mark.parametrize(("language", "end"), [("en", "</a>). Made"), ("zh", "</a>）。 生成于")])
def test_failures_lead_to_their_section_and_the_page_shows_every_condition(monkeypatch, tmp_path, language, end):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    failed = claims.claim("fp8_kv", "perplexity", {"kv_dtype": "fp8"}, unit="ppl", reason="it died", failed=True)
    claims.write_section(store.machine_dir("mine"), "fp8_kv", [failed])
    out = report.build("mine", tmp_path / "report.html", timings={}, failures={}, language=language, pictures=DRAWN)
    page = out.read_text()
    assert re.search(r'<a href="#limits">[^<]*' + re.escape(end), page)
    assert "it died" in page[page.index('id="limits"') :]
    assert page.count('<tr class="where') == 4 * len(DRAWN) and "<caption>" in page


def test_the_first_screen_shows_every_finding_with_its_picture_and_the_readers_own_number(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    own = claims.claim(
        "chunked_prefill", "itl_max_s", {"chunk": 2048, "in": 3500}, computed=0.4, measured=0.5, unit="s"
    )
    claims.write_section(store.machine_dir("mine"), "chunked_prefill", [own])
    gain = claims.claim(
        "cuda_graphs", "gain_throughput", {"model": "tiny", "c": 32}, computed=0.4, measured=0.5, unit="ratio"
    )
    claims.write_section(store.machine_dir("mine"), "cuda_graphs", [gain])
    page = report.build("mine", tmp_path / "report.html", timings={}, failures={}, pictures=DRAWN).read_text()
    tiles = re.findall(r'<li class="tile">.*?</li>', page, re.S)
    assert len(tiles) == len(DRAWN) == 8
    assert all(
        f'id="{link}"' in page and "<img" in tile for tile in tiles for link in re.findall(r'href="#([^"]*)', tile)
    )
    chunk = next(tile for tile in tiles if "#finding-chunk" in tile)
    assert "400 ms" in chunk and '<span class="measured">500 ms</span> (+25.0%)' in chunk
    assert "not measured" in next(tile for tile in tiles if "#finding-fp8" in tile)
    graphs = next(tile for tile in tiles if "#finding-graphs" in tile)
    assert "+40%" in graphs and '<span class="measured">+50%</span> (+25.0%)' in graphs
    bare = next(tile for tile in tiles if "#finding-load" in tile)
    assert "not measured" in bare
