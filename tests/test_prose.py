"""Places for claims in prose, and numbers that no claim supports."""

import pytest

from kvlab import claims, facts, prose, prose_check
from kvlab.prose import Notes, ProseError

WORDS = {
    "not_measured": "not measured",
    "no_claim": "nothing on {machine} of {section}",
    "not_in_article": "the article is silent",
    "only_other": "no {column}",
    "not_known": "{machine} does not say",
    "no_interval": "no interval",
    "divided_by_zero": "zero below",
    "read": {"abstract": "(its abstract)"},
}
SOURCES = {
    "paper": {"title": "A <paper>", "url": "https://example.org/paper", "read": "abstract", "numbers": ["2.6×"]},
}


@pytest.fixture
def writer(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    stated = {
        "h200": [
            claims.claim("load", "tok_s", {"c": 8, "in": 512}, computed=200, measured=210, unit="tok/s"),
            claims.claim("load", "tok_s", {"c": 16, "in": 512}, computed=400, measured=105, unit="tok/s"),
            claims.claim("load", "ttft_s", {"c": 8}, measured=0.5, ci=(0.4, 0.6), unit="s"),
            claims.claim("load", "fit", {"in": 512}, computed=34.4, unit="requests"),
            claims.claim("load", "fit", {"in": 2048}, computed=10.1, unit="requests"),
            claims.claim("load", "change", {"c": 1}, measured=-0.2, ci=(-0.3, -0.1), unit="ratio"),
            claims.claim("load", "change", {"c": 2}, measured=0.02, ci=(-0.3, 0.4), unit="ratio"),
            claims.claim("load", "ratio", {"c": 8}, measured=2.5, ci=(1.5, 3.5), unit="x"),
            claims.claim("load", "p95_s", {"c": 8}, unit="s", reason="n too small <4>"),
            claims.claim("load", "later", {"c": 8}, computed=2, unit="s", reason="no GPU yet"),
            claims.claim("load", "nothing", measured=0, unit="count"),
            claims.claim("load", "near", computed=2.0, measured=2.0 - 1e-9, unit="ppl"),
        ],
        "article": [claims.claim("load", "tok_s", {"c": 8, "in": 512}, measured=70, unit="tok/s")],
        "cpu-tiny": [claims.claim("load", "tok_s", {"c": 2, "in": 512}, measured=7, unit="tok/s")],
    }
    tables = {}
    for machine, rows in stated.items():
        claims.write_section(tmp_path / machine, "load", rows)
        tables[machine] = claims.read(tmp_path / machine)
    about = {"h200": {"engine": "vLLM 0.26", "runs": 1234, "gpu_minutes": 21.7}}
    return prose.Writer(facts.facts("h200", tables), WORDS, SOURCES, lambda name: about.get(name, {}))


def said(body, writer, notes=None):
    """What a place becomes, without its tags."""
    text = prose.fill_one(body, writer, notes or Notes("p"))
    return prose.html.unescape(prose.re.sub(r"<[^>]*>", "", text))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("h200 load tok_s c=8", "210 tok/s"),
        ("here load tok_s c=8;in=512", "210 tok/s"),
        ("h200 load tok_s c=8 computed", "200 tok/s"),
        ("h200 load tok_s c=8 | plain", "210"),
        ("h200 load tok_s c=8 | residual", "+5.0%"),
        ("h200 load tok_s c=8 | pair", "200 tok/s → 210 tok/s (+5.0%)"),
        ("article load tok_s c=8 | pair", "70 tok/s"),
        ("h200 load near | pair", "2 ppl → 2 ppl (+0.0%)"),
        ("h200 load change c=1 | pair", "-20%"),  # a relative change has no residual
        ("h200 load ttft_s c=8 | interval", "400 ms … 600 ms"),
        ("h200 load ratio c=8 | interval", "1.5× … 3.5×"),
        ("h200 load tok_s c=8 | interval", "no interval"),
        ("h200 load tok_s c=8 / article load tok_s c=8", "3×"),
        ("h200 load tok_s c=16 / h200 load tok_s c=8 | percent", "-50%"),
        ("h200 load tok_s c=16 / h200 load tok_s c=16 computed | share", "26%"),
        ("h200 load tok_s c=8 - h200 load tok_s c=16", "105 tok/s"),
        ("h200 load change c=1 | percent", "-20%"),
        ("say h200 load tok_s c=8 > article load tok_s c=8 | faster | slower", "faster"),
        ("say h200 load tok_s c=8 < article load tok_s c=8 | slower | not slower", "not slower"),
        ("holds h200 load tok_s c=8 | holds | does not", "holds"),
        ("holds h200 load tok_s c=16 | holds | does not", "does not"),
        ("told h200 load change c=1 | up | down | unclear", "down"),
        ("told h200 load change c=2 | up | down | unclear", "unclear"),
        ("about h200 engine", "vLLM 0.26"),
        ("about here runs", "1,234"),
        ("about h200 gpu_minutes", "22"),
        ("machine here", "h200"),
        ("ref paper", "A <paper> (its abstract)"),
        ("cited 2.6× | paper", "2.6×"),
        ("lit 2 | formula", "2"),
        ("lit 512 | setting", "512"),
        ("lit 2048 | setting", "2,048"),
    ],
)
def test_a_place_is_filled(body, text, writer):
    assert said(body, writer) == text


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("h200 load p95_s c=8", "n too small <4>"),
        ("h200 load fit in=512", "no measured"),
        ("article load ttft_s c=8", "the article is silent"),
        ("cpu-tiny load ttft_s", "nothing on cpu-tiny of load"),
        ("h200 fleet hits", "nothing on h200 of fleet"),
        ("h200 load tok_s c=8 / h200 load p95_s", "n too small <4>"),
        ("h200 load tok_s c=8 / h200 load nothing", "zero below"),
        ("told h200 load p95_s | a | b | c", "n too small <4>"),
        ("about cpu-tiny engine", "cpu-tiny does not say"),
    ],
)
def test_what_is_missing_says_so_and_why(body, reason, writer):  # pitfall 6
    notes = Notes("p")
    assert said(body, writer, notes) == "not measured1" and notes.reasons == [reason]
    said(body, writer, notes)
    assert notes.reasons == [reason]  # the same reason stands once


def test_a_computed_value_stands_where_the_measured_one_is_missing(writer):
    assert said("h200 load later c=8 | pair", writer) == "2,000 ms → not measured1"
    assert said("h200 load fit in=512 | pair", writer) == "34.4 requests"  # a bound: nobody meant to measure it


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("It served 5,629 tokens.", "5,629"),
        ("At c=8 it is fast: 14 times.", "8"),
        ("A gain of 1.9×", "1.9"),
        ("# 14 times faster", "14"),
        ("容量达到32个请求", "32"),
        ("快十四倍", "十四倍"),
        ("- item\n- gains ３ times", "３"),
        ("It is fourteen times faster.", "fourteen"),
        ("It doubles.", "doubles"),
        ("It is ½ as long, or Ⅷ, or ②.", "½"),
        ("A gain of x14, ten14 or 14x", "14"),
        ("It is `14×` faster.", "14"),
        ("It is `{14}` faster.", "14"),
        ("```text\ngain = 14 × size\n```", "14"),
        ("```text\ngain = twenty\n```", "twenty"),
        ("14. times faster", "14"),
        ("1. one\n14. two", "14"),
        ("[14 times](https://example.org)", "14"),
        ("<b title='14'>faster</b>", "14"),
        ("Served by twelve clients.", "twelve"),  # no claim has so many
        ("{say h200 load tok_s c=8 < article load tok_s c=8 | 14 times | slower}", "14"),
        ("{holds h200 load tok_s c=8 | ten times | no}", "ten"),
    ],
)
def test_a_number_without_a_claim_fails(text, found, writer):
    with pytest.raises(ProseError, match=f"the number {found}.* comes from no claim"):
        prose_check.check(text, "text.md", writer)


@pytest.mark.parametrize(
    "text",
    [
        "Qwen3-1.7B in fp8 on an H200, p95 and vLLM V1",
        "`--max-num-seqs` and\n```text\n2 × layers, min(1, x) − 1\n```",
        "one of the four limits with eight clients, or from two to sixteen clients",
        "[a paper](https://example.org/2309.06180) or https://example.org/2024",
        "1. first\n2. second\n\nText.\n\n1. again",
        "{lit 2026-10-07 | date} and {h200 load tok_s c=8}",
    ],
)
def test_names_code_links_and_places_may_hold_digits(text, writer):
    prose_check.check(text, "text.md", writer)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{lit 14}", "does not say what it is"),
        ("{lit 14 | result}", "does not say what it is"),
        ("{lit 777 | setting}", "no claim has such a condition"),
        ("{lit 14 | formula}", "nobody has said why it may stand"),
        ("{lit 14 × | rule}", "nobody has said why it may stand"),
        ("{cited 99× | paper}", "the source is not known to say so"),
        ("{cited 5× | nobody}", "source 'nobody' is unknown"),
        ("{ref nobody}", "source 'nobody' is unknown"),
        ("{h200 load}", "is no claim"),
        ("{about h200 colour}", "is unknown"),
        ("{say h200 load tok_s c=8 | a | b}", "compares nothing"),
        ("{holds h200 load tok_s c=8 | a}", "needs 2 texts"),
        ("{h200 load tok_s 8}", "is no claim"),
    ],
)
def test_a_place_that_cannot_be_read_fails_with_its_line(text, message, writer):
    with pytest.raises(ProseError, match=f"text.md, line 3: .*{message}"):
        prose_check.check(f"\n\n{text}", "text.md", writer)


def test_words_of_a_choice_belong_to_the_language_and_its_claim_does_not():
    english = "{holds h200 load x c=8 | holds | fails} {h200 load x | pair}"
    chinese = "{holds h200 load x c=8 | 成立 | 不成立} {h200 load x | pair}"
    assert prose.places(english) == prose.places(chinese) == ["holds h200 load x c=8", "h200 load x | pair"]


def test_markdown_cannot_eat_a_filled_place(writer):
    text, tokens = prose.fill("**{h200 load p95_s}** and `{x}`", writer, Notes("p"))
    assert "n too" not in text and len(tokens) == 1 and "`{x}`" in text
