"""The published values as claims: every line of the file, in our units, under our names."""

import csv

import pytest

from kvlab import article, claims
from kvlab.errors import StoreError


@pytest.fixture(autouse=True)
def committed(monkeypatch):
    monkeypatch.delenv("KVLAB_DATA", raising=False)


def lines() -> list[dict[str, str]]:
    with (article.folder() / article.VALUES).open(newline="") as file:
        return list(csv.DictReader(file))


def found(quantity: str, conditions: str) -> claims.Claim:
    every = claims.from_frame(claims.read(article.folder()))
    match = [c for c in every if c.quantity == quantity and c.conditions == conditions]
    assert len(match) == 1
    return match[0]


def test_every_line_is_understood():
    rows = lines()
    assert len(rows) == 128
    for row in rows:
        assert article.claims_of(row), row


def test_the_committed_file_is_a_rebuild(tmp_path):
    article.rebuild(tmp_path)
    assert (tmp_path / "claims.csv").read_bytes() == (article.folder() / "claims.csv").read_bytes()


def test_every_published_number_is_there_once():
    rows = lines()
    values = sum(len(article._split_values(row["value"])) for row in rows)
    # A range over two concurrencies is two claims, a bound from c=32 on stands at 32 and at 64.
    assert len(article.build(rows)) == values + 2


def test_units_are_those_of_our_claims():
    units = set(claims.read(article.folder())["unit"])
    assert units == {"s", "bytes", "tokens", "tok/s", "req/s", "ratio", "x", "count", "requests", "ppl"}


@pytest.mark.parametrize(
    ("quantity", "conditions", "measured", "unit"),
    [
        ("throughput_tok_s", "c=32;in=512;out=128;rep=2", 833, "tok/s"),
        ("throughput_tok_s", "c=8;in=512;out=128", 383, "tok/s"),
        ("ttft_p50_s", "c=64;in=512;out=128;kv_tokens=26560;server=3", 2.2, "s"),
        ("ttft_p50_s", "c=32;in=512;out=128", 0.668, "s"),
        ("itl_max_s", "chunk=2048;in=3500;inserts=3", 0.227, "s"),
        ("preemptions", "c=64;in=1500;out=256;requests=128", 22, "count"),
        ("throughput_change", "c=64;in=512;out=128;max_num_seqs=16;over_max_num_seqs=64", -0.23, "ratio"),
        ("ttft_p90_s", "prefixes=24;c=4;workers=6;kind=miss", 0.139, "s"),
        ("ttft_p99_s", "prefixes=24;c=16;workers=6", 1.508, "s"),
        ("requests_per_s", "prefixes=24;c=16;workers=3", 11.7, "req/s"),
        ("perplexity", "text=earlier;kv_dtype=fp8", 4.0148, "ppl"),
        ("ttft_hit_s", "prefix=3000;tail=32;block=16", 0.028, "s"),
        ("throughput_tok_s", "caching=off;c=32;in=2048;out=16", 59, "tok/s"),
        ("itl_p50_s", "c=64;in=512;out=128", 0.025, "s"),
        ("itl_p99_s", "c=64;in=512;out=128", 0.22, "s"),
        ("ready_s", "model=Qwen3-0.6B;graphs=off", 30, "s"),
    ],
)
def test_values_under_our_names(quantity, conditions, measured, unit):
    every = claims.from_frame(claims.read(article.folder()))
    match = [c for c in every if (c.quantity, c.conditions, c.measured) == (quantity, conditions, measured)]
    assert [(c.unit, c.state) for c in match] == [(unit, "measured")]


def test_a_range_is_its_midpoint_with_the_ends_as_interval():
    c = found("ttft_p95_s", "c=32;in=512;out=128")
    assert (c.ci_low, c.measured, c.ci_high, c.state, c.reason) == (1.606, 1.607, 1.608, "measured", None)


def test_the_published_formula_stands_beside_what_it_predicts():
    c = found("hit_ratio", "prefixes=7;c=8;workers=6")
    assert (c.computed, c.measured) == (0.564, 0.555)
    assert c.residual == pytest.approx(0.555 / 0.564 - 1)
    assert found("hit_ratio", "prefixes=7").state == "computed"


def test_sections_are_notebook_names():
    sections = set(claims.read(article.folder())["section"])
    assert {"repeatability", "kv_capacity", "load", "preemption", "max_num_seqs", "fp8_kv", "prefix_cache"} < sections
    assert {"chunked_prefill", "cuda_graphs", "service_hit_rate", "hit_and_miss"} < sections


@pytest.mark.parametrize(
    "change",
    [{"conditions": "on a rainy day"}, {"value": "fast"}, {"section": "9.9"}, {"value": "1|2|3"}],
)
def test_a_line_that_is_not_understood_is_an_error_not_a_gap(change):
    row = {"section": "1.3", "experiment": "capacity", "conditions": "bf16, first start", "quantity": "capacity"}
    row |= {"value": "1", "unit": "tokens", "kind": "measured", "note": ""}
    assert article.claims_of(row)
    with pytest.raises(StoreError):
        article.claims_of(row | change)


def test_lookup_for_marks_in_figures():
    assert article.lookup("throughput_tok_s", c=8, in_=512, out=128, section="load") == 383
    assert article.lookup("itl_max_s", chunk=512) == 0.069
    assert article.lookup("throughput_tok_s", model="Qwen3-0.6B", c=1, graphs=False) == 108
    assert article.lookup("stall_s", chunk=2048) == 0.25  # computed only
    assert article.lookup("throughput_tok_s", c=32, in_=512, out=128, restarts=3) == 831.5
    assert article.lookup("throughput_tok_s", c=7) is None
    assert article.lookup("no_such_quantity") is None


def test_lookup_takes_the_mean_of_repeats_and_nothing_where_conditions_differ():
    assert article.lookup("itl_max_s", load="insertion") == pytest.approx((0.227 + 0.226 + 0.226) / 3)
    assert article.lookup("throughput_tok_s", c=64) is None  # three servers with different capacities
    assert article.lookup("throughput_tok_s", c=64, server=1) == 792


# Where a measurement of ours has another name than the article's number.
OURS = {
    ("chunked_prefill", "stall_s"): ("chunked_prefill", "itl_max_s"),  # it is what that claim computes
    ("kv_capacity", "capacity_relative_error"): ("kv_capacity", "log_tokens"),  # its residual
    ("kv_capacity", "capacity_ratio"): ("fp8_kv", "capacity_ratio"),
    ("kv_capacity", "requests_that_fit"): ("kv_capacity", "requests_that_fit_low"),
    ("load", "requests_that_fit"): ("load", "requests_that_fit_low"),
    ("load", "capacity_tokens"): ("load", "capacity_blocks"),
}
SERVICE = {"service_hit_rate", "hit_and_miss"}


@pytest.mark.parametrize("machine", ["cpu-tiny", "h200"])
def test_every_kind_of_number_of_the_single_server_article_has_a_claim_of_ours(machine):
    """Measured, or not measured with its reason; never left out."""
    published = {(c.section, c.quantity) for c in claims.from_frame(claims.read(article.folder()))}
    stated = {(c.section, c.quantity) for c in claims.from_frame(claims.read(article.folder().parent / machine))}
    wanted = {OURS.get(kind, kind) for kind in published if kind[0] not in SERVICE}
    assert len(wanted) > 30 and not wanted - stated


@pytest.mark.parametrize("machine", ["cpu-tiny", "h200"])
def test_every_chunk_size_of_the_article_has_a_claim_of_ours(machine):
    def chunks(folder):
        stated = claims.from_frame(claims.read(folder))
        found = [claims.parse_conditions(c.conditions) for c in stated if c.quantity == "itl_max_s"]
        return {where["chunk"] for where in found if where.get("in") == "3500"}

    published = chunks(article.folder())
    assert len(published) == 5 and published <= chunks(article.folder().parent / machine)


@pytest.mark.parametrize("machine", ["cpu-tiny", "h200"])
def test_a_comparison_has_an_interval_or_says_why_it_has_none(machine):
    """And where its arms did not take turns, it says that."""
    every = claims.from_frame(claims.read(article.folder().parent / machine))
    of = {"prefix_cache": "caching_changes_", "fp8_kv": "fp8_changes_", "max_num_seqs": "throughput_change"}
    compared = [c for c in every if c.measured is not None and c.quantity.startswith(of.get(c.section, "gain_"))]
    assert {c.section for c in compared} > set(of) and not [c.id for c in compared if c.ci_low is None and not c.reason]
    one_start = [c for c in every if c.quantity == "gain_throughput" and c.measured is not None]
    alone = [c for c in every if c.section == "prefix_cache" and c.quantity == "ttft_s"]
    assert one_start and alone and all("one after the other" in c.reason for c in one_start)
    assert all("not in turns" in c.reason for c in alone)
