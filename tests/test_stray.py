"""Numbers in prose: what is found, what may stand, and that nothing is listed for nothing."""

import json

import pytest

from kvlab import pages, phrases, stats, stray

VALUES = {"workers": {"6", "3"}, "c": {"4", "16"}, "prefixes": {"24"}, "gpus": {"2"}}


@pytest.mark.parametrize(
    ("language", "text", "found"),
    [
        ("en", "six workers on two GPUs", ""),
        ("en", "twenty-four prefixes", ""),
        ("en", "twelve workers", "twelve"),
        ("en", "six times as many workers", "six"),
        ("en", "from four to sixteen clients", ""),
        ("en", "from four to twenty clients", "four"),
        ("en", "Qwen3-1.7B in fp8 on the H200.", ""),
        ("en", "a speed-up-14.2 of x14", "14.2"),
        ("en", "threefold, or thrice", "threefold"),
        ("en", "one of them, none, zero, and someone in weight", ""),
        ("zh", "六个副本，一个客户端", ""),
        ("zh", "七个副本", "七"),
        ("zh", "什么都快三倍", "三倍"),
        ("zh", "八位 KV 缓存", ""),
        ("zh", "壹佰", "壹佰"),
    ],
)
def test_numbers_are_found_in_both_languages(language, text, found):
    assert stray.number_in(text, language, VALUES) == found


def test_digits_of_a_condition_may_stand_alone_and_measure_nothing():
    assert stray.number_in("blocks of 128 tokens", "en", VALUES, settings={"128"}) == ""
    for text in ("128 %", "128 times", "128×", "1.128", "128 percent"):
        assert stray.number_in(text, "en", VALUES, settings={"128"}), text


@pytest.mark.parametrize(
    ("text", "value"), [("six", "6"), ("twenty-four", "24"), ("十二", "12"), ("两", "2"), ("24", "24"), ("many", None)]
)
def test_the_value_of_a_word(text, value):
    assert stray.value_of(text) == value


def test_what_is_listed_is_used_and_has_a_reason():
    """A list that only grows is a way around the check."""
    listed, figures = stray.literals(), " ".join(entry["en"] + entry["zh"] for entry in phrases.templates("zh"))
    for language in pages.LANGUAGES:
        texts = [pages.source(name, language) for name in pages.names(language)]
        text = " ".join([*texts, json.dumps(dict(pages.words(language)), ensure_ascii=False), figures]).lower()
        assert not [words for words in listed["free"][language] if words.lower() not in text]
        for kind in ("formula", "version", "date", "name", "rule"):
            used = [number for number in listed[kind] if f"{{lit {number} | {kind}}}".lower() in text]
            assert used == list(listed[kind])
    kinds = ("formula", "version", "date", "name", "rule")
    tables = [listed[kind] for kind in kinds] + [listed["free"][language] for language in pages.LANGUAGES]
    assert all(reason.strip() for table in tables for reason in table.values())


def test_the_listed_results_of_a_formula_are_what_it_gives():
    assert {"72", "368"} <= set(stray.literals()["formula"])
    assert stats.minimum_n(0.95) == 72 and stats.minimum_n(0.99) == 368
