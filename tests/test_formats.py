"""KV formats against their base: what a run shows decides, not the flag; the article's pairs beside one's own."""

import matplotlib
import pytest

matplotlib.use("agg")

from kvlab import beside, claims, formats, measure, perplexity, plot, store
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.profile import KvFormat
from kvlab.results import Result

LOAD = LoadConfig(workload="perplexity", requests=3, input_tokens=101, output_tokens=1)
CELL = Cell(name="ppl", server=ServerConfig(model="tiny"), load=LOAD)
FP8 = KvFormat(name="fp8_e4m3", base="bf16")


class Run:
    def __init__(self, *nll):
        sums = [100 * v for v in nll]
        summary = {"window_nll_sum": sums, "window_tokens": [100] * len(nll), "windows_sha256": "a", "weights": "w"}
        summary["token_nll_packed"] = [perplexity.pack([v] * 100) for v in nll]
        capacity = {"metric_blocks": 10, "metric_block_size": 32}
        server = {"capacity": capacity, "startup": {"attention_backend": "TRITON_ATTN"}}
        self.manifest, self.id = {"summary": summary, "server": server}, "run"


def ran(*nll):
    return [Result(CELL, Run(*nll))] * 2


BASE = ran(2.0, 3.0, 4.0)
REFUSED = [Result(CELL, None, "no server with these flags: ValueError: no fp4", failed=True)] * 2


def stated(tried, base=BASE):
    lab = measure.open_lab("fp8_kv", profile_name="cpu-tiny", machine="fake", mode="replay")
    found = formats.compare(tried, base)
    return found, {c.quantity: c for c in formats.state(lab, FP8, found, tried, {"text": "heldout"})}


def test_a_format_that_works_has_a_paired_change():
    found, rows = stated(ran(2.01, 3.011, 4.009))
    assert found.verdict.state == "ok" and found.capacity_tokens == 320 and found.backend == "TRITON_ATTN"
    change = rows["perplexity_change"]
    assert change.state == "measured" and change.ci_low < change.measured < change.ci_high
    assert change.conditions == "text=heldout;kv_dtype=fp8_e4m3;over=bf16"
    assert rows["perplexity"].measured == pytest.approx(20.1, rel=0.01)
    assert rows["token_logprob_change"].measured == pytest.approx(0.01)
    assert "fp8_e4m3 0.010" in formats.single_tokens(rows.values())


@pytest.mark.parametrize(
    ("tried", "said"),
    [
        (BASE, "ignored by the engine"),
        (ran(4.0, 5.0, 6.0), "wrong: the text costs 2 nats"),
        (REFUSED, "no server with"),
    ],
)
def test_what_is_ignored_wrong_or_refused_has_failed_and_has_no_number(tried, said):  # pitfall 24
    found, rows = stated(tried)
    assert {c.state for c in rows.values()} == {"failed"}
    assert all(c.measured is None and c.reason.startswith(said) for c in rows.values())
    assert formats.direction(rows.values()) is None


def test_a_format_whose_base_is_missing_is_not_measured():
    missing = [Result(CELL, None, "no run is stored")]
    _, rows = stated(ran(2.0, 3.0, 4.0), missing)
    assert {(c.state, c.reason) for c in rows.values()} == {("not measured", "no run is stored")}


def test_the_verdicts_are_said_in_words():
    lists = [FP8, KvFormat(name="float16", base="bf16")]
    found = {"fp8_e4m3": formats.compare(ran(2.01, 3.0, 4.0), BASE), "float16": formats.compare(BASE, BASE)}
    assert "float16 is ignored by the engine" in formats.verdicts(lists, found)
    assert "fp8_e4m3" not in formats.verdicts(lists, found)
    assert list(formats.table(lists, found)["verdict"]) == ["ok", "ignored"]


def test_the_direction_says_where_the_interval_leaves_no_doubt():
    def claim(name, value, low, high):
        where = f"kv_dtype={name};over=bf16"
        return claims.claim("fp8_kv", "perplexity_change", where, measured=value, ci=(low, high), unit="ratio")

    said = formats.direction(
        [claim("a", -0.02, -0.03, -0.01), claim("b", 0.01, -0.01, 0.03), claim("c", 0.1, 0.05, 0.2)]
    )
    assert "a -2.00% (-3.00% to -1.00%): lower" in said
    assert "b +1.00% (-1.00% to +3.00%): no difference can be told" in said
    assert "c +10.00% (+5.00% to +20.00%): higher" in said


def test_the_article_stands_beside_as_pairs_of_its_perplexities(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    published = [
        claims.claim("fp8_kv", "perplexity", f"text=wiki;kv_dtype={k};backend={b}", measured=v, unit="ppl")
        for k, b, v in [("bf16", 1, 20.0), ("fp8", 1, 19.0), ("fp8", 2, 19.0)]
    ]
    waits = [
        claims.claim("fp8_kv", "ttft_p50_s", f"input=long;kv_dtype={k}", measured=v, unit="s")
        for k, v in [("bf16", 4.0), ("fp8", 0.94)]
    ]
    claims.write_section(store.machine_dir("article"), "fp8_kv", [*published, *waits])
    rows = formats.rows("mine", [])
    assert [(r.machine, r.change) for r in rows] == [("article", pytest.approx(-0.05))]
    assert formats.base_and_fp8("article", "ttft_p50_s", input="long") == (4.0, 0.94)
    assert formats.base_and_fp8("article", "ttft_p50_s", input="short") is None
    assert beside.relative("article", "fp8_kv", "ttft_p50_s", "kv_dtype", "fp8", "bf16") == pytest.approx(-0.765)
    assert beside.relative("article", "fp8_kv", "ttft_p50_s", "kv_dtype", "fp4", "bf16") is None
    _, (axis,) = plot.panels(1)
    formats.draw_changes(axis, [*rows, formats.Row("fp4", None, None, None, "wrong", "mine")])
    assert [label.get_text() for label in axis.get_yticklabels()] == ["article: fp8, wiki backend 1", "mine: fp4"]
    assert "wrong" in [text.get_text() for text in axis.texts]
