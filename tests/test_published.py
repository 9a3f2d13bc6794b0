"""Every number of the article stands beside one of ours, or beside the reason why there is none."""

import re
from html import escape
from pathlib import Path

import pytest

from kvlab import claims, facts, pages, prose, published
from kvlab.prose import Notes

ROOT = Path(__file__).parent.parent
LEFT_OUT = "fp8_kv/perplexity/text=earlier;kv_dtype=bf16"  # it has a reason


@pytest.fixture
def tables():
    names = (published.ARTICLE, *published.MACHINES)
    if not all((ROOT / "data" / name / "claims.csv").is_file() for name in names):
        pytest.skip("the committed machines are not here")
    found = facts.facts("h200", {name: claims.read(ROOT / "data" / name) for name in names}).claims
    return {name: list(rows) for name, rows in found.items()}


def of(tables):
    return facts.Facts("h200", {name: tuple(rows) for name, rows in tables.items()})


def like(row, section, quantity, conditions, **values):
    told = {"id": f"{section}/{quantity}/{conditions}", "section": section, "quantity": quantity}
    return dict(row) | told | {"conditions": conditions} | values


def test_every_number_of_the_article_has_one_of_ours_or_a_reason(tables):
    assert not published.problems(of(tables))


def test_a_number_without_either_is_told(tables):
    new = like(tables["article"][0], "load", "warmth_k", "c=1")
    assert published.problems(of(tables | {"article": [*tables["article"], new]})) == [
        "load/warmth_k/c=1: neither a claim of ours nor a reason"
    ]


def test_a_claim_of_ours_that_is_gone_is_told(tables):
    gone = [row for row in tables["h200"] if row["quantity"] != "variant_itl_p50_s"]
    (said,) = published.problems(of(tables | {"h200": gone}))
    assert said == "cuda_graphs/itl_p50_s/model=Qwen3-4B-FP8;c=1;graphs=on: neither a claim of ours nor a reason"


def test_a_line_for_no_number_of_the_article_is_told(tables):
    fewer = [row for row in tables["article"] if "text=earlier" not in row["id"]]
    assert published.problems(of(tables | {"article": fewer})) == [
        "fp8_kv/perplexity/text=earlier;*: no number of the article has such an id"
    ]


@pytest.mark.parametrize(
    ("number", "more"),
    [(LEFT_OUT, ""), (LEFT_OUT, ";backend=1"), ("prefix_cache/ttft_s/caching=on;c=1", "")],
)
def test_what_has_been_measured_since_needs_no_line(tables, number, more):
    """A reason is outdated by a claim that says more, too; a claim of another name by one of the same id."""
    section, quantity, conditions = number.split("/")
    ours = like(tables["h200"][0], section, quantity, conditions + more, measured=1.0, state="measured")
    said = published.problems(of(tables | {"h200": [*tables["h200"], ours]}))
    assert said == [f"{number}: measured since, as h200 {ours['id']}"]


def test_a_number_listed_twice_is_told(tables, monkeypatch):
    listed = published.listed()
    again = {"article": [LEFT_OUT], "why": {"en": "x", "zh": "x"}}
    monkeypatch.setattr(published, "listed", lambda: {**listed, "unmeasured": [*listed["unmeasured"], again]})
    assert published.problems(of(tables)) == [f"{LEFT_OUT}: listed more than once"]


def test_our_own_reason_stands_where_our_claim_holds_no_number(tables):
    number, why = (
        "load/throughput_tok_s/c=1;in=512;out=128",
        "no run of this point is stored; measure it with: kvlab measure x",
    )
    rows = [
        row | {"measured": None, "computed": 9.0, "reason": why} if row["id"] == number else row
        for row in tables["h200"]
    ]
    rows = [row | {"state": "not measured"} if row["id"] == number else row for row in rows]
    (found,) = [row for row in published.rows(of(tables | {"h200": rows})) if row.article["id"] == number]
    assert found.kind == published.UNMEASURED and found.said["en"] == why and found.said["zh"].startswith("这一点")


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_page_counts_them_and_shows_every_one(tables, language):
    known = of(tables)
    writer = prose.Writer(known, pages.words(language), {}, lambda name: {})
    page = pages.block("```article\n```\n", writer, Notes("x"))
    found = published.rows(known)
    n = published.counts(found)
    assert n["n"] == len(tables["article"]) == n["same"] + n["beside"] + n["without"] > n["same"] > n["without"] > 0
    first, reasons = page.split("</ul>")[0].split("<ul>")
    assert [int(k) for k in re.findall(r"(?<!h)\d+", re.sub(r"<[^>]*>", "", first))] == list(n.values())
    listed = [int(k) for k in re.findall(r"[（(](\d+)(?: 个：|: )", reasons)]
    assert sum(listed) == n["without"] and len(listed) == len(set(reasons.split("<li>"))) - 1
    assert page.count("<tr") == n["n"] + 1 and page.count('class="missing"') == n["without"]
    assert all(escape(words) in page for words in published.said(language))


def test_a_ratio_is_given_where_both_mean_the_same(tables):
    writer = prose.Writer(of(tables), pages.words("en"), {}, lambda name: {})
    lines = published.block(writer, Notes("x")).split("<tr>")

    def times(number, conditions):
        row = next(line for line in lines if f">{number}</td>" in line and f">{conditions}" in line)
        return re.search(r'data-label="ours ÷ article">([^<]*)<', row)[1]

    assert times("load/throughput_tok_s", "c=1, in=512, out=128").endswith("×")
    assert times("fp8_kv/perplexity", "text=wikitext-2") == ""  # another text and another model
