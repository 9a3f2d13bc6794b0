"""The workshop's questions on chunked prefill and on noise. See `workshop`."""

from __future__ import annotations

import math

from kvlab import compare, noise, predict
from kvlab.profile import Insertion
from kvlab.workshop import Choice, Facts, Number, Undecided

ARTICLE = "article"


# -- 9: chunked prefill -------------------------------------------------------------------------------------------


def _insertion(f: Facts) -> Insertion:
    return f.require(f.profile().chunked_prefill, "section on chunked prefill").inputs[0]


def _smallest(f: Facts) -> int:
    measured = [int(chunk) for chunk, _, _ in f.claims("chunked_prefill", "itl_max_s", "chunk")]
    return min(f.require(measured or None, "measured pauses"))


def _chunk_speed(f: Facts) -> float:
    return f.value("chunked_prefill", "prefill_tok_s")


def _pause_ms(f: Facts, chunk: float) -> float:
    return chunk / _chunk_speed(f) * 1e3


def _pause_ends(f: Facts) -> tuple[float, float]:
    chunk = _smallest(f)
    plain = predict.chunk_stall_s(chunk, _insertion(f).input_tokens, _chunk_speed(f))
    measured = f.value("chunked_prefill", "itl_max_s", chunk=chunk)
    return min(plain, measured) * 0.9e3, max(plain, measured) * 1.1e3


def _article_pause(f: Facts, chunk: int) -> float:
    return f.value("chunked_prefill", "itl_max_s", on=ARTICLE, chunk=chunk)


def _article_speed(f: Facts) -> float:
    return f.value("chunked_prefill", "prefill_tok_s", on=ARTICLE)


CHUNKS = {
    "9.predict": Number(
        "With the smallest chunk of the section: how long is the longest pause that a long input causes for "
        "the others?",
        "ms",
        lambda f: _pause_ms(f, min(_smallest(f), _insertion(f).input_tokens)),
        (
            (
                lambda f: _pause_ms(f, _insertion(f).input_tokens),
                "the whole input ÷ prefill speed: the others get a token after every *chunk*",
            ),
            (
                lambda f: _pause_ms(f, _smallest(f)) * _insertion(f).inserts,
                "the pause of all inserted inputs together: they come one after another",
            ),
            (lambda f: _chunk_speed(f) / _smallest(f), "speed ÷ chunk: seconds are tokens ÷ speed"),
        ),
        accept=_pause_ends,
        because="min(chunk, input) ÷ prefill speed; the decode step comes on top.",
    ),
    "9.explain": Choice(
        "On the article's GPU, chunks of 4,096 and of 8,192 cause the same pause. Why?",
        (
            (
                "its input of 3,500 tokens is shorter than both: the chunk that counts is the input",
                lambda f: _article_pause(f, 4096) == _article_pause(f, 8192) >= 0.9 * 3500 / _article_speed(f),
                "Compute min(chunk, input) ÷ prefill speed for both.",
            ),
            (
                "the GPU is saturated at 4,096 tokens and computes larger chunks no slower",
                lambda f: _article_pause(f, 8192) < 0.8 * 3500 / _article_speed(f),
                "At 8,200 tok/s, how long do 3,500 tokens take? Compare with the measured pause.",
            ),
            (
                "values above the default of 2,048 are ignored",
                lambda f: _article_pause(f, 4096) <= 1.1 * _article_pause(f, 2048),
                "Compare the pauses of 2,048 and 4,096.",
            ),
        ),
        because="A chunk larger than the longest input changes nothing more.",
    ),
    "9.most": Number(
        "And how long is that pause by the formula: chunk 8,192, input 3,500, the article's prefill speed?",
        "ms",
        lambda f: predict.chunk_stall_s(8192, 3500, _article_speed(f)) * 1e3,
        (
            (lambda f: 8192 / _article_speed(f) * 1e3, "the chunk ÷ speed: no chunk is longer than the input"),
            (lambda f: _article_speed(f) / 3500, "speed ÷ tokens: seconds are tokens ÷ speed"),
        ),
        because="The article measured a little more: the decode step is in it.",
    ),
    "9.stretch": Number(
        "A voice service wants no pause above 100 ms on the article's GPU. What is the largest chunk, the "
        "decode step left out?",
        "tokens",
        lambda f: 0.1 * _article_speed(f),
        (
            (lambda f: 0.1 * 3500, "a tenth of the input: the pause is the chunk ÷ prefill speed, whatever the input"),
            (lambda f: _article_speed(f), "a whole second's worth"),
        ),
        accept=lambda f: (0.1 * _article_speed(f) * 0.97, 0.1 * _article_speed(f) * 1.001),
        because="Chunk = pause × prefill speed; round down to whole blocks.",
    ),
}


# -- 10: noise ----------------------------------------------------------------------------------------------------


def _floor(f: Facts) -> float:
    return f.require(noise.floor_of(f.machine, "throughput_tok_s"), "noise floor of throughput")


def _repeats(f: Facts) -> tuple[float, int]:
    """Spread of the throughput over repeats on one server at the most clients, and the number of repeats."""
    found = f.claims("repeatability", "spread", "c", of="throughput_tok_s", between="repeats")
    grid = f.require(f.profile().repeatability, "section on repeatability")
    if not found:
        raise Undecided(f"{f.machine} has no measured spread.")
    return found[-1][2]["measured"], grid.repeats


def _normal_floor(f: Facts) -> float:
    return 1.96 * math.sqrt(2) * _repeats(f)[0]


def _moved(section: str, verdict: str = compare.MOVED) -> int:
    return compare.counts(compare.compare("cpu-tiny", "h200", section))[verdict]


NOISE = {
    "10.predict": Number(
        "Repeats scatter by 2% (standard deviation ÷ mean). How many give a mean that is known to ± 1%, "
        "with 95% confidence?",
        "repeats",
        lambda f: noise.repeats_needed(0.02, 0.01),
        (
            (lambda f: 4, "(spread ÷ wanted)²: one standard error; 95% takes about two of them"),
            (
                lambda f: math.ceil((1.96 * 2) ** 2),
                "the normal distribution's number: with few repeats the spread is not known either, hence Student's t",
            ),
            (lambda f: 2, "spread ÷ wanted: the error falls with the square root of the repeats"),
        ),
        accept=0,
        because="The smallest n with t(n − 1) × spread ÷ √n ≤ 1%.",
    ),
    "10.explain": Choice(
        "Two servers of one configuration on your machine differ by 5% in throughput. What does that say?",
        (
            (
                "the second one is really different: 5% is much",
                lambda f: _floor(f) < 0.05,
                "Compare 5% with the machine's noise floor between starts.",
            ),
            (
                "nothing: two starts of one configuration differ by so much",
                lambda f: _floor(f) >= 0.05,
                "Compare 5% with the machine's noise floor between starts.",
            ),
            (
                "that something is wrong: equal configurations give equal numbers",
                lambda f: _floor(f) == 0,
                "Look at the measured spread between starts: is it 0?",
            ),
        ),
        because="Below the floor a difference is no finding, however often somebody repeats the sentence.",
    ),
    "10.most": Number(
        "What is the noise floor of throughput at the most clients of the section, from the spread over the "
        "repeats on one "
        "server: the difference that two single measurements exceed in 5% of all cases?",
        "ratio",
        lambda f: noise.floor(*_repeats(f)),
        (
            (
                lambda f: _repeats(f)[0],
                "the spread itself: *two* measurements differ, and 95% lie within more than one sd",
            ),
            (
                lambda f: _normal_floor(f),
                "1.96 √2 spread: with so few repeats the spread is not known well, hence Student's t",
            ),
            (lambda f: _normal_floor(f) / math.sqrt(2), "1.96 spread: both measurements scatter, hence √2"),
            (
                lambda f: noise.floor(*_repeats(f)) / math.sqrt(2),
                "t × spread: both measurements scatter, hence √2",
            ),
        ),
        accept=0.02,
        because="t(n − 1) × √2 × spread.",
    ),
    "10.stretch": Number(
        "Compare the sections on load of cpu-tiny and h200: `compare.compare(a, b, section)` gives a table with a "
        "verdict for each number. How many numbers moved beyond the noise?",
        "numbers",
        lambda f: _moved("load"),
        (
            (
                lambda f: sum(compare.counts(compare.compare("cpu-tiny", "h200", "load")).values()),
                "all that both measured",
            ),
            (lambda f: _moved("load", compare.WITHIN), "those that did not"),
        ),
        accept=0,
        because="The rest either did not move, or nothing is known about its noise: then nothing can be told.",
    ),
}

PARTS: dict[str, Number | Choice] = CHUNKS | NOISE
