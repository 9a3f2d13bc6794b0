"""The workshop's questions on fp8 KV, prefix caching and hit ratios. See `workshop`."""

from __future__ import annotations

import math

from kvlab import geometry, hits, predict
from kvlab.workshop import Choice, Facts, Number
from kvlab.workshop_pool import block_of, directions

ARTICLE = "article"


# -- 6: fp8 KV ----------------------------------------------------------------------------------------------------


def _base(f: Facts) -> str:
    return f.require(f.profile().fp8_kv, "section on fp8 KV").base_name


def _capacity_ratio(f: Facts) -> float:
    return f.value("fp8_kv", "capacity_ratio", "computed", kv_dtype="fp8", over=_base(f))


def _short_change(f: Facts, column: str) -> float:
    return f.value("fp8_kv", "fp8_changes_throughput_tok_s", column, input="short")


def _long_fit(f: Facts, kv_dtype: str) -> float:
    return f.value("fp8_kv", "requests_that_fit_low", "computed", kv_dtype=kv_dtype, input="long")


def _article_capacity(f: Facts, server: str) -> float:
    return f.value("kv_capacity", "capacity_tokens", on=ARTICLE, server=server)


def _article_fp8_ratio(f: Facts) -> float:
    return _article_capacity(f, "fp8-first-start") / _article_capacity(f, "bf16-first-start")


FP8 = {
    "6.predict": Number(
        "How many times more tokens does the same pool hold with fp8 KV, on your machine?",
        "times",
        _capacity_ratio,
        (
            (
                lambda f: 2,
                "the ratio of 16 to 8 bits; look at what the KV of this machine's server is without the flag",
            ),
            (
                lambda f: 4,
                "the ratio of 32 to 8 bits; look at what the KV of this machine's server is without the flag",
            ),
            (lambda f: _article_fp8_ratio(f), "the article's ratio: its two servers did not get the same pool"),
            (lambda f: 1, "no gain: fewer bytes an element are more tokens in the same pool"),
        ),
        accept=0.01,
        because="The ratio of the bytes, but for the rounding to whole blocks.",
    ),
    "6.explain": Choice(
        "At short inputs and few clients, what does fp8 KV do to throughput on your machine?",
        directions(
            _short_change,
            "fp8_changes_throughput_tok_s",
            rises="it rises: half the bytes are read, or fewer",
            stays="no change can be told",
            falls="it falls: values are converted",
        ),
        because="fp8 KV is capacity, not speed: the gain is a shorter queue where the pool was the limit.",
    ),
    "6.most": Number(
        "The article's fp8 server held 1.9 and not 2 times the tokens. How large was its pool, as a share of "
        "the other "
        "server's pool?",
        "ratio",
        lambda f: _article_fp8_ratio(f) / 2,
        (
            (lambda f: _article_fp8_ratio(f), "the ratio of the *tokens*; each of them takes half the bytes"),
            (lambda f: 1, "equal pools, as with a pinned one: then the ratio would have been 2"),
            (
                lambda f: 2 / _article_fp8_ratio(f),
                "the other way round: the fp8 server's share of the other one is asked",
            ),
        ),
        because="What the profiler takes changes from start to start: compare bytes per token, or pin the pool.",
    ),
    "6.stretch": Number(
        "In the long load of the section: from how many clients on does the fp8 server make one wait? (Lower "
        "end of what "
        "fits.)",
        "clients",
        lambda f: math.floor(_long_fit(f, "fp8")) + 1,
        (
            (lambda f: math.floor(_long_fit(f, "fp8")), "the last number that fits: the next one waits"),
            (lambda f: math.floor(_long_fit(f, _base(f))) + 1, "the answer for the server without fp8"),
        ),
        accept=0,
        because="Between the two servers' numbers lies all of fp8's gain.",
    ),
}


# -- 7: prefix cache ----------------------------------------------------------------------------------------------


def _prefix(f: Facts) -> tuple[int, int]:
    grid = f.profile().prefix_cache
    return grid.prefix_tokens, grid.tail_tokens


def _cached(f: Facts, block: int | None = None) -> int:
    prefix, tail = _prefix(f)
    return predict.cached_tokens(prefix, prefix + tail, block or block_of(f))


def _prefill(f: Facts) -> float:
    return f.value("prefix_cache", "prefill_tok_s")


def _ttft(f: Facts, kind: str, column: str = "measured") -> float:
    return f.value("prefix_cache", f"ttft_{kind}_s", column)


def _saved_s(f: Facts) -> float:
    return predict.ttft_saved_s(_cached(f), _prefill(f))


PREFIX = {
    "7.predict": Number(
        "The section sends prompts of a shared prefix and an own tail. How many tokens of a prompt come from "
        "the cache?",
        "tokens",
        _cached,
        (
            (lambda f: _prefix(f)[0], "the whole prefix: only whole blocks of it are cached"),
            (lambda f: sum(_prefix(f)), "the whole prompt: the tail is new in every request"),
            (
                lambda f: math.ceil(_prefix(f)[0] / block_of(f)) * block_of(f),
                "rounded up: the last, mixed block differs",
            ),
            (lambda f: _cached(f, 16), "what blocks of 16 give; look at the profile's block_size"),
        ),
        accept=1e-6,
        because="⌊prefix ÷ block⌋ × block, and never the last token of the prompt.",
    ),
    "7.explain": Choice(
        "The prompt is dozens of times longer than what is left to compute, but a hit is not that many times "
        "faster. Why?",
        (
            (
                "some hits found fewer tokens than computed",
                lambda f: f.value("prefix_cache", "hits_with_other_tokens") > 0,
                "Look at the claim hits_with_other_tokens.",
            ),
            (
                "a hit still has a fixed part: a step, the way through the server, reading the cached KV",
                lambda f: _ttft(f, "hit") > 1.5 * (sum(_prefix(f)) - _cached(f)) / _prefill(f),
                "Compute new tokens ÷ prefill speed and compare it with the measured time of a hit.",
            ),
            (
                "a miss is faster than computed",
                lambda f: _ttft(f, "miss") < 0.8 * _ttft(f, "miss", "computed"),
                "Compare computed and measured of ttft_miss_s.",
            ),
        ),
        because="The faster the machine, the more of a hit is fixed, and the smaller the ratio.",
    ),
    "7.most": Number(
        "A prompt of exactly 31 blocks was sent before, word for word. How many of its tokens come from the cache now?",
        "tokens",
        lambda f: predict.cached_tokens(31 * block_of(f), 31 * block_of(f), block_of(f)),
        (
            (lambda f: 31 * block_of(f), "all of them: one token must be computed, for its output is the next token"),
            (lambda f: 31 * block_of(f) - 1, "all but the last token: only whole blocks are taken"),
        ),
        accept=1e-6,
        because="The last token is always computed, and with it its whole block.",
    ),
    "7.stretch": Number(
        "How much time to first token does a hit save, by the measured prefill speed?",
        "ms",
        lambda f: _saved_s(f) * 1e3,
        (
            (
                lambda f: (sum(_prefix(f)) - _cached(f)) / _prefill(f) * 1e3,
                "what is left to compute, not what is saved",
            ),
            (lambda f: _prefill(f) / _cached(f), "speed ÷ tokens: seconds are tokens ÷ speed"),
        ),
        accept=0.05,
        because="Compare it with the measured miss − hit.",
    ),
}


# -- 8: hit ratio behind a Service --------------------------------------------------------------------------------

KINDS, WORKERS, BLOCK = 12, 6, 16  # the article's middle case


def _usable() -> int:
    per_token = predict.kv_bytes_per_token(geometry.load("Qwen3-0.6B"))
    return predict.usable_blocks(predict.num_blocks(2**30, per_token, BLOCK))


def _request_blocks() -> int:
    return predict.blocks_per_request(2000 + 300, 64, BLOCK)


def _held() -> float:
    return hits.prefixes_that_fit(_usable(), _request_blocks())


def _article_hits(f: Facts, workers: int) -> float:
    return f.value("service_hit_rate", "hit_ratio", on=ARTICLE, prefixes=KINDS, c=8, workers=workers)


HITS = {
    "8.predict": Number(
        f"{KINDS} prefixes, {WORKERS} workers behind a Service that splits evenly at random: which share of "
        "the requests "
        "finds its prefix?",
        "ratio",
        lambda f: hits.hit_ratio(_held(), KINDS),
        (
            (
                lambda f: 1 / WORKERS,
                "1/N: true only of the first touch; once warm, every worker knows the popular prefixes",
            ),
            (lambda f: 1, "all of them, as if each request went to the worker that has its prefix: nobody routes here"),
            (lambda f: 1 / KINDS, "1/K, as if a worker held one prefix"),
            (lambda f: _held(), "what one worker holds; the question asks for a share of the requests"),
            (lambda f: KINDS / _held(), "the other way round: the share that finds its prefix is at most 1"),
            (
                lambda f: min(1, _usable() / 125 / KINDS),
                "what room for the prefixes alone gives: tails take blocks too",
            ),
        ),
        accept=lambda f: (hits.hit_ratio(_held(), KINDS) - 0.03, hits.hit_ratio(_held(), KINDS) + 0.03),
        because="min(1, C ÷ K): what one worker holds ÷ the prefixes in use. The number of workers is not in it.",
    ),
    "8.explain": Choice(
        f"The article halves the workers, from {WORKERS} to {WORKERS // 2}. The measured hit ratio of {KINDS} prefixes",
        (
            (
                "doubles: each prefix meets fewer workers",
                lambda f: _article_hits(f, 3) > 1.5 * _article_hits(f, 6),
                "Compare the two measured values.",
            ),
            (
                "stays within a few points",
                lambda f: abs(_article_hits(f, 3) - _article_hits(f, 6)) < 0.05,
                "Compare the two measured values with 2 sd = 2 √(h (1 − h) ÷ n).",
            ),
            (
                "halves: there is half the cache",
                lambda f: _article_hits(f, 3) < 0.67 * _article_hits(f, 6),
                "Compare the two measured values: the total cache is not what a request finds.",
            ),
        ),
        because="More workers behind an even split keep more copies of the same prefixes.",
    ),
    "8.most": Number(
        "How many requests' worth of blocks does one worker hold (1 GiB, Qwen3-0.6B, 2,000 + 300 tokens, 64 "
        "out, blocks of 16)? Give the fraction, to two decimals.",
        "requests' worth",
        lambda f: _held(),
        (
            (lambda f: math.floor(_held()), "rounded to whole requests: the question asks for the fraction"),
            (lambda f: math.ceil(_held()), "rounded to whole requests: the question asks for the fraction"),
            (lambda f: _usable() / (2000 // BLOCK), "prefixes alone: each request's tail and output take blocks too"),
            (lambda f: _held() * WORKERS, "what all workers hold together: a request sees one of them"),
            (lambda f: _usable() * BLOCK / 2300, "tokens ÷ input: count the blocks at the end, output included"),
        ),
        accept=0.003,
        because="Usable blocks ÷ ⌈(in + out − 1) ÷ block⌉.",
    ),
    "8.stretch": Number(
        f"2 prefixes, {WORKERS} workers; each prefix was sent once before. How many requests at most miss, "
        "though a worker could "
        "hold both?",
        "requests",
        lambda f: hits.first_touch_misses(2, WORKERS),
        (
            (lambda f: 2 * WORKERS, "every pair of prefix and worker: the requests sent before have filled some"),
            (lambda f: WORKERS - 1, "the pairs of one prefix"),
            (lambda f: 2, "one miss a prefix: each worker has a cache of its own"),
        ),
        accept=0,
        because="K (N − 1): the article counted exactly these among its requests.",
    ),
}

PARTS: dict[str, Number | Choice] = FP8 | PREFIX | HITS
