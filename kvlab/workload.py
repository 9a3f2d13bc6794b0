"""Which prompts are sent, in which order and when: seeded token ids, every run different from the first block on.

Prompts are token ids, never text, so that their length is exact. The first tokens of each prompt (of each shared
prefix) spell the run's nonce and the prompt's number in the base of the vocabulary, so that two prompts of any two runs
differ within block 0 and nothing can be found in a prefix cache that the workload did not put there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from kvlab.config import LoadConfig
from kvlab.errors import ConfigError

MIN_VOCAB = 64
NONCE_BITS, ROLE_BITS, INDEX_BITS = 64, 2, 24
HEAD_BITS = NONCE_BITS + ROLE_BITS + INDEX_BITS
ROLES = {"warmup": 0, "measure": 1, "prefix": 2, "probe": 3}
WARM_TOKENS = 8
RUN_LENGTH = 10
CONTENT, ORDER, SCHEDULE = 1, 2, 3  # independent random streams of one seed


@dataclass(frozen=True)
class Request:
    """One request to send. `at_s` counts from the start of its phase; None means: as soon as a client is free."""

    index: int
    prompt: list[int]
    output_tokens: int
    kind: str = "unique"
    prefix: int | None = None
    at_s: float | None = None


def plan(load: LoadConfig, vocab: tuple[int, int], nonce: int) -> tuple[list[Request], list[Request]]:
    """(warm-up, measured) requests of a load, in the order of sending.

    `vocab` is the half-open range of token ids that may be sent; `nonce` (0 <= nonce < 2**64) must differ between runs.
    The same arguments give the same plan. Raises ConfigError for prompts too short to be told apart.

    unique: no two prompts share their first 8 tokens (more for a vocabulary under 2,300); the warm-up uses none of the
    measured prompts. shared_prefix: `prefixes` prefixes in independent random order, uniform or Zipf; kind is
    prefix_first where this plan has not sent the prefix before (warm-up included), else prefix_again. With at least as
    many warm-up requests as prefixes the warm-up sends each prefix once before it draws at random; with fewer
    it touches no prefix at all. insertion: request 0 decodes all the time (kind decode: decode_input_tokens,
    output_tokens); the others (kind insert: input_tokens, one output token) start at multiples of 1 / rate_per_s.
    """
    _check(load, vocab, nonce)
    if load.workload == "insertion":
        warmup, measured = _insertion(load, vocab, nonce)
    elif load.workload == "unique":
        warmup = _unique(load, vocab, nonce, "warmup", load.warmup_requests)
        measured = _unique(load, vocab, nonce, "measure", load.requests)
    else:
        warmup, measured = _shared(load, vocab, nonce)
    return warmup, with_times(measured, arrival_times(load))


def head(vocab: tuple[int, int], nonce: int, role: str, index: int) -> list[int]:
    """Tokens that spell (nonce, role, index): different arguments never give the same tokens."""
    number = (((nonce << ROLE_BITS) | ROLES[role]) << INDEX_BITS) | index
    return _digits(number, vocab, head_length(vocab))


def head_length(vocab: tuple[int, int]) -> int:
    """Tokens that a head takes: 8 from a span of 2,234 ids on, at most 15."""
    return _digits_for(2**HEAD_BITS, vocab)


def probe_prompt(vocab: tuple[int, int], nonce: int) -> list[int]:
    """A short prompt that shares its first token block with no prompt of the plan."""
    return head(vocab, nonce, "probe", 0)


def arrival_times(load: LoadConfig) -> list[float | None]:
    """When each measured request should start, in seconds: seeded Poisson, constant spacing, or None (closed loop)."""
    if load.arrival == "closed":
        return [None] * load.requests
    if load.arrival == "constant":
        return [i / load.rate_per_s for i in range(load.requests)]
    gaps = np.random.default_rng([load.seed, SCHEDULE]).exponential(1 / load.rate_per_s, load.requests)
    return np.cumsum(gaps).tolist()


def prefix_sequence(load: LoadConfig) -> tuple[list[int], list[int]]:
    """The prefixes of the warm-up and of the measured requests, in order; a short warm-up uses none."""
    rng = np.random.default_rng([load.seed, ORDER])
    order = prefix_order(load, load.requests, rng)
    extra = load.warmup_requests - load.prefixes
    return ([*range(load.prefixes), *prefix_order(load, extra, rng)] if extra >= 0 else []), order


def prefix_lengths(load: LoadConfig) -> list[int]:
    """Tokens of each prefix: prefix_tokens, by turns less and more by prefix_step_tokens."""
    return [load.prefix_tokens + load.prefix_step_tokens * (2 * (k % 2) - 1) for k in range(load.prefixes)]


def prefix_order(load: LoadConfig, count: int, rng: np.random.Generator) -> list[int]:
    """`count` prefixes: independent draws, P(k) proportional to (k + 1) ** -zipf; or all in a cycle; or runs of one."""
    if load.prefix_order == "cycle":
        return [i % load.prefixes for i in range(count)]
    if load.prefix_order == "runs":
        drawn = rng.integers(load.prefixes, size=-(-count // RUN_LENGTH))
        return np.repeat(drawn, RUN_LENGTH)[:count].tolist()
    weights = np.arange(1, load.prefixes + 1, dtype=float) ** -load.zipf
    return rng.choice(load.prefixes, size=count, p=weights / weights.sum()).tolist()


def with_times(requests: Sequence[Request], times: Sequence[float | None]) -> list[Request]:
    """The requests with their start times."""
    return [replace(r, at_s=t) if t is not None else r for r, t in zip(requests, times, strict=True)]


def _unique(load: LoadConfig, vocab: tuple[int, int], nonce: int, role: str, count: int) -> list[Request]:
    rng = np.random.default_rng([load.seed, CONTENT, ROLES[role]])
    tail = load.input_tokens - head_length(vocab)
    return [
        Request(i, head(vocab, nonce, role, i) + rng.integers(*vocab, tail).tolist(), load.output_tokens)
        for i in range(count)
    ]


def _insertion(load: LoadConfig, vocab: tuple[int, int], nonce: int) -> tuple[list[Request], list[Request]]:
    """The warm-up ends with some decode steps, so that both kinds of steps have run before."""
    warm = load.model_copy(update={"output_tokens": min(load.output_tokens, WARM_TOKENS)})
    long = _unique(load, vocab, nonce, "measure", load.requests)
    measured = [replace(request, output_tokens=1, kind="insert") for request in long]
    measured[0] = Request(0, long[0].prompt[: load.decode_input_tokens], load.output_tokens, "decode")
    return _unique(warm, vocab, nonce, "warmup", load.warmup_requests), measured


def _shared(load: LoadConfig, vocab: tuple[int, int], nonce: int) -> tuple[list[Request], list[Request]]:
    warmup_order, order = prefix_sequence(load)
    requests = _with_prefixes(load, vocab, nonce, warmup_order + order)
    warmup = requests[: len(warmup_order)]
    if not warmup_order:
        warmup = _unique(load, vocab, nonce, "warmup", load.warmup_requests)
    measured = [replace(r, index=i) for i, r in enumerate(requests[len(warmup_order) :])]
    return warmup, measured


def _with_prefixes(load: LoadConfig, vocab: tuple[int, int], nonce: int, order: list[int]) -> list[Request]:
    """Requests that use the prefixes in this order; the tail spells the serial number, lowest digit first."""
    rng = np.random.default_rng([load.seed, CONTENT, ROLES["prefix"]])
    taken = head_length(vocab)
    prefixes = [
        head(vocab, nonce, "prefix", k) + rng.integers(*vocab, length - taken).tolist()
        for k, length in enumerate(prefix_lengths(load))
    ]
    tail = load.input_tokens - load.prefix_tokens
    digits = min(tail, _digits_for(len(order), vocab))
    seen: set[int] = set()
    requests = []
    for serial, k in enumerate(order):
        unique_tail = _digits(serial, vocab, digits)[::-1] + rng.integers(*vocab, tail - digits).tolist()
        kind = "prefix_again" if k in seen else "prefix_first"
        seen.add(k)
        requests.append(Request(serial, prefixes[k] + unique_tail, load.output_tokens, kind, k))
    return requests


def _digits(number: int, vocab: tuple[int, int], count: int) -> list[int]:
    """`number` in base `hi - lo`, highest digit first, as token ids; exactly `count` of them."""
    lo, hi = vocab
    digits = []
    for _ in range(count):
        number, digit = divmod(number, hi - lo)
        digits.append(lo + digit)
    return digits[::-1]


def _digits_for(numbers: int, vocab: tuple[int, int]) -> int:
    """Digits that tell 0 .. numbers - 1 apart."""
    count, reach = 1, vocab[1] - vocab[0]
    while reach < numbers:
        count, reach = count + 1, reach * (vocab[1] - vocab[0])
    return count


def _check(load: LoadConfig, vocab: tuple[int, int], nonce: int) -> None:
    lo, hi = vocab
    if load.workload == "perplexity":
        raise ConfigError(
            "Perplexity windows are no load with random prompts.", next_step="use kvlab.perplexity.run_windows"
        )
    if hi - lo < MIN_VOCAB or lo < 0:
        raise ConfigError(
            f"The range of token ids {lo}..{hi} is too small to tell prompts apart.",
            next_step=f"give the endpoint a vocab of at least {MIN_VOCAB} ids",
        )
    if not 0 <= nonce < 2**NONCE_BITS:
        raise ConfigError(f"The nonce {nonce} is not in [0, 2**{NONCE_BITS}).", next_step="use secrets.randbits(48)")
    if max(load.requests, load.warmup_requests, load.prefixes) > 2**INDEX_BITS:
        raise ConfigError(f"A load holds at most {2**INDEX_BITS} requests.", next_step="split it into several runs")
    field = {"shared_prefix": "prefix_tokens", "insertion": "decode_input_tokens"}.get(load.workload, "input_tokens")
    tokens, needed = getattr(load, field) - load.prefix_step_tokens, head_length(vocab)
    if tokens < needed:
        raise ConfigError(
            f"{field} = {tokens} is too short: {needed} tokens tell the prompts of two runs apart.",
            next_step=f"set {field} to {needed} or more",
        )
    _check_tail(load, vocab)


def _check_tail(load: LoadConfig, vocab: tuple[int, int]) -> None:
    if load.workload != "shared_prefix":
        return
    needed = _digits_for(load.requests + load.warmup_requests, vocab)
    if load.input_tokens - load.prefix_tokens < needed:
        raise ConfigError(
            f"The tail after the shared prefix is too short to be unique: {needed} tokens are needed.",
            next_step="make input_tokens larger or prefix_tokens smaller",
        )
