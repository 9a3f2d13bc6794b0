"""The language of what claims and figures say: complete, and never half in one and half in the other."""

import json
import re
from pathlib import Path

import pytest

from kvlab import claim_words, claims, explain, phrases, plot_small, report, results, store

ROOT = Path(__file__).parent.parent
MACHINES = sorted(path.parent.name for path in (ROOT / "data").glob("*/claims.csv"))


def test_both_languages_have_the_same_sentences_and_holes():
    english, chinese = phrases.sentences("en"), phrases.sentences("zh")
    assert english.keys() == chinese.keys()
    holes = {key: sorted(phrases.HOLE.findall(text)) for key, text in english.items()}
    assert holes == {key: sorted(phrases.HOLE.findall(text)) for key, text in chinese.items()}
    for entry in phrases.templates("zh"):
        assert sorted(phrases.HOLE.findall(entry["en"])) == sorted(phrases.HOLE.findall(entry["zh"])), entry["en"]


def test_every_stored_reason_and_every_figure_has_a_chinese_form():
    texts = {json.loads(path.read_text())["alt"] for path in (ROOT / "figures").glob("*/*.json")}
    for machine in MACHINES:
        table = claims.read(ROOT / "data" / machine)
        texts |= set(table.loc[table["state"] != "failed", "reason"].dropna())  # how a program died is quoted
    assert texts and not [text for text in texts if phrases.known(text, "zh") is None]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("n too small (4, needs 72)", "样本太少（4 个，需要 72 个）"),
        ("n too small (4, needs 72); one run", "样本太少（4 个，需要 72 个）；只有一次运行"),
        ("2026-01-02 to 2026-01-05", "2026-01-02 至 2026-01-05"),
        ("a GPU, 2 cores, 3 GiB memory; b, 4 cores, 5 GiB memory", "a GPU，2 核，内存 3 GiB；b，4 核，内存 5 GiB"),
        ("unable to start", "原文是“unable to start”"),
        ("no server with these flags: TypeError", "用这些参数启动不了服务器，程序的原话是 TypeError"),
        ("one run; it died", "原文是“one run; it died”"),
    ],
)
def test_what_is_stored_in_english_is_said_in_chinese_or_quoted_whole(text, said):
    assert phrases.said(text, "zh") == said and phrases.said(text, "en") == text


def test_an_error_without_a_message_is_said_in_words_and_the_error_named():
    stored = "no server with these flags: AssertionError at `^^^^^`"
    said = results.readable(stored)
    assert said == (
        "no server with these flags: the engine ended with AssertionError and no message; "
        "the statement that failed is not stored"
    )
    assert results.readable(stored.replace(" at `^^^^^`", "")) == said
    assert phrases.said(said, "zh").startswith("用这些参数启动不了服务器：引擎以 AssertionError 结束")
    for known in ("AssertionError at `assert tp <= nodes`", "ValueError: no fp4", "one of 4 failed"):
        assert results.readable(f"no server with these flags: {known}").endswith(known)


def test_of_a_stored_error_what_to_do_next_is_left_out():
    said = "The router is deaf: it hears no events Likely cause: events are off Next: read its logs: /logs/x"
    assert phrases.said(said, "en") == "The router is deaf: it hears no events Likely cause: events are off"
    assert phrases.said(said, "zh").startswith("程序的原话是“The router is deaf") and "/logs" not in phrases.said(
        said, "zh"
    )


def test_a_unit_is_said_in_the_language():
    assert phrases.with_unit("22,048 tokens", "tokens", "zh") == "22,048 个 token"
    assert phrases.with_unit("22,048 tokens", "tokens", "en") == "22,048 tokens"
    assert phrases.with_unit("14 requests … 15 requests", "requests", "zh") == "14 个请求 … 15 个请求"
    assert phrases.with_unit("71 ms", "s", "zh") == "71 ms" and phrases.with_unit("", "tokens", "zh") == ""


def test_claims_write_their_sentences_in_each_language():
    stated = [
        claims.claim("load", "ttft_s", {"c": 1}, computed=1.0, measured=1.5, unit="s"),
        claims.claim("load", "hits", {"c": 1}, computed=0, measured=1, unit="count"),
        claims.claim("load", "p95_s", {"c": 1}, unit="s", reason="n too small (4, needs 72)"),
    ]
    off = explain.residuals(stated, tolerance=0.1, language="zh")
    held = "2 个预测中有 0 个成立（误差在 10% 以内）。"
    listed = "命中的请求数：实测 1，计算 0（1 个客户端）；首个 token 时间：+50%（1 个客户端）。"
    assert off == f"{held}不成立的：{listed}"
    missing = explain.not_measured(stated, language="zh")
    assert missing == "1 条数据未实测：p95_s：样本太少（4 个，需要 72 个）。"


def test_every_stored_quantity_and_every_condition_of_a_prediction_has_words_in_each_language():
    english, chinese = claim_words.words("en"), claim_words.words("zh")
    assert {kind: list(named) for kind, named in english.items()} == {kind: list(n) for kind, n in chinese.items()}
    for kind, named in english.items():
        assert {n for n, w in named.items() if "{v}" in w} == {n for n, w in chinese[kind].items() if "{v}" in w}
    raw = set()
    for machine in MACHINES:
        table = claims.read(ROOT / "data" / machine)
        raw |= {name for name in table["quantity"] if claim_words.quantity(name) == name} - {"preemptions", "hits"}
        compared = table[table["computed"].notna() & table["measured"].notna()]["conditions"].dropna()
        raw |= {said for text in compared for said in claim_words.conditions(text) if "=" in said}
    assert raw <= {"perplexity", "requests"}


@pytest.mark.parametrize(
    ("language", "said"),
    [
        ("en", ["chunks of 1,024", "without graphs", "against 1 client", "own=x"]),
        ("zh", ["块 1,024", "不用图", "对比：1 个客户端", "own=x"]),
    ],
)
def test_conditions_are_said_in_words_and_an_unknown_one_stays(language, said):
    assert claim_words.conditions("chunk=1024;graphs=off;over_c=1;own=x", language) == said


ENGLISH = re.compile(r"(?:\b[A-Za-z][a-z']+\b[ ,]+){3,}[A-Za-z][a-z']+")
OWN = r"<(style|script|code|pre|svg)\b.*?</\1>|<a href=\"https?://.*?</a>|<([a-z]+)[^>]* lang=\"en\".*?</\2>"


@pytest.mark.slow
@pytest.mark.parametrize("machine", [name for name in MACHINES if name != "article"])
def test_no_english_sentence_stands_on_the_chinese_page(machine, monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    monkeypatch.setattr(plot_small, "draw", lambda *_: "")
    out = report.build(machine, tmp_path / "report.html", timings={}, failures={}, language="zh")
    text = re.sub(OWN, " ", out.read_text(), flags=re.S)
    alts = " ".join(re.findall(r'alt="([^"]*)"', text))
    plain = re.sub(r"<[^>]*>", " ", re.sub(r"</t[dh]>", " ; ", text)) + alts
    plain = re.sub(r"原文是“[^”]*”|原话是 [^；;。]*|原话是“[^”]*”，它估计的原因是“[^”]*”", " ", plain)
    assert not [found[0] for found in ENGLISH.finditer(plain)]
    assert store.machine_dir(machine).is_dir()
