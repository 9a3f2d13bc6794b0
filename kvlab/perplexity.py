"""Perplexity of fixed windows of real text through a server, and what a change of the KV cache does to it.

One request a window, one after another: batches would change the order of additions, and with it the last digits.
Every window is a whole request without a cached prefix, and both sides of a comparison get the same tokens.
"""

from __future__ import annotations

import base64
import hashlib
import math
import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from tqdm.auto import tqdm

from kvlab import control, tiny
from kvlab.client import Endpoint
from kvlab.config import LoadConfig
from kvlab.errors import ConfigError, LoadError
from kvlab.files import typed
from kvlab.load import LoadResult, request_frame
from kvlab.scrape import sample_frame
from kvlab.stats import Estimate, mean_interval, paired_difference

if TYPE_CHECKING:
    from collections.abc import Sequence

HELDOUT = "heldout"  # the held-out text of the embedded model
PROGRESS_AFTER_S = 2.0
BROKEN_NLL = 0.1  # nats a token: a KV format that costs a tenth of the perplexity is not a format but a defect
STEP_NLL = 0.01  # nats: resolution of the stored log-probabilities of single tokens
REPEAT_NLL = 1e-3  # nats a token: the same window, the same server, twice


@dataclass(frozen=True)
class WindowsResult(LoadResult):
    """A load's result whose `summary` holds the windows: tokens that have a probability, their summed NLL, and each
    token's own in steps of STEP_NLL (see `pack`).
    """

    summary: dict[str, Any] = field(default_factory=dict)


class Verdict(NamedTuple):
    """`state`: "ok", "ignored" (the numbers of the base), "wrong" or "not measured"; `why` in words, None for ok."""

    state: str
    why: str | None


# -- the text -----------------------------------------------------------------------------------------------------


def read_text(name: str) -> str:
    """The embedded held-out text for "heldout", else the UTF-8 file at that path. Raises ConfigError."""
    if name == HELDOUT:
        return tiny.heldout_text()
    try:
        return typed(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"The text {name!r} cannot be read: {error}", next_step=f"give a UTF-8 text file, or {HELDOUT!r}"
        ) from None


def tokenize(endpoint: Endpoint, text: str, timeout_s: float = 120.0) -> list[int]:
    """Token ids of a text by the server's own tokenizer, no special tokens added. Raises LoadError."""
    body = {"model": endpoint.model, "prompt": text, "add_special_tokens": False}
    status, answer = control.call(endpoint, "/tokenize", body, timeout_s=timeout_s)
    tokens = control.parse_object(answer).get("tokens")
    if status != 200 or not isinstance(tokens, list):
        raise LoadError(
            f"The server does not tokenize the text: HTTP {status}, {answer[:200]!r}",
            cause="it has no /tokenize, or no tokenizer",
            next_step="measure perplexity on a vLLM server with the model's tokenizer",
        )
    return tokens


def windows(tokens: Sequence[int], count: int, length: int) -> list[list[int]]:
    """`count` windows of `length` tokens that do not overlap, spread evenly over the text. Raises ConfigError."""
    step = len(tokens) // count
    if step < length or length < 2:
        raise ConfigError(
            f"A text of {len(tokens):,} tokens does not hold {count} windows of {length} tokens.",
            next_step="ask for fewer or shorter windows (of 2 tokens at least), or give a longer text",
        )
    return [list(tokens[k * step : k * step + length]) for k in range(count)]


# -- through the server -------------------------------------------------------------------------------------------


def run_windows(
    endpoint: Endpoint, load: LoadConfig, *, weights: str | None = None, progress: bool = True
) -> WindowsResult:
    """Sends the windows of a load of kind "perplexity" one by one; `requests` of `input_tokens` tokens each.

    `weights` names the model's weights, where that is known: runs with others are no pair.

    A window that fails is a row with its reason and has no number; Ctrl-C keeps what was measured. Raises LoadError
    where the server cannot tokenize, ConfigError where the text is too short.
    """
    tokens = tokenize(endpoint, read_text(load.text or HELDOUT))
    parts = windows(tokens, load.requests, load.input_tokens)
    zero, rows, found, interrupted = time.monotonic(), [], [], False
    bar = tqdm(parts, unit="window", desc="perplexity", delay=PROGRESS_AFTER_S, leave=False, disable=not progress)
    try:
        for index, window in enumerate(bar):
            row, nll = _measure(endpoint, index, window, zero, load.timeout_s)
            rows.append(row)
            found.append(nll)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        bar.close()
    summary = {
        "window_tokens": [load.input_tokens - 1] * len(found),
        "window_nll_sum": [None if nll is None else math.fsum(nll) for nll in found],
        "token_nll_packed": [None if nll is None else pack(nll) for nll in found],
        "text_tokens": len(tokens),
        "weights": weights,
        "windows_sha256": hashlib.sha256(np.asarray(parts, dtype=np.int64).tobytes()).hexdigest(),
    }
    return WindowsResult(
        request_frame(rows), sample_frame([]), None, _certificate(rows, interrupted), interrupted, summary
    )


def _measure(endpoint: Endpoint, index: int, window: list[int], zero: float, timeout_s: float):
    body = {"model": endpoint.model, "prompt": window, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
    start, status, answer, error = time.monotonic(), None, {}, None
    try:
        status, text = control.call(endpoint, "/v1/completions", body, timeout_s=timeout_s)
        answer = control.parse_object(text)
        nll = token_nll(answer, window) if status == 200 else None
        error = None if nll is not None else f"HTTP {status}: no log-probability for each token: {text[:200]}"
    except OSError as problem:
        nll, error = None, f"no answer: {problem}"
    return _row(index, window, answer, status, error, start - zero, time.monotonic() - zero), nll


def token_nll(answer: dict[str, Any], window: Sequence[int]) -> list[float] | None:
    """Negative log-likelihood (nats) of every token of a window but the first; null where one is missing."""
    try:
        listed = answer["choices"][0]["prompt_logprobs"]
        pairs = zip(listed[1:], window[1:], strict=True)
        nll = [-float(entry[str(token)]["logprob"]) for entry, token in pairs]
    except (KeyError, IndexError, TypeError, ValueError):
        return None
    return nll if np.isfinite(nll).all() else None


def pack(nll: Sequence[float]) -> str:
    """Log-likelihoods in steps of STEP_NLL as text, a byte or so each: 16-bit numbers, compressed, base64."""
    steps = np.clip(np.round(np.asarray(nll) / STEP_NLL), 0, 65535).astype("<u2")
    return base64.b64encode(zlib.compress(steps.tobytes(), 9)).decode()


def unpack(text: str) -> np.ndarray:
    """What `pack` wrote, in nats."""
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u2") * STEP_NLL


def _row(index, window, answer, status, error, start_s, end_s) -> dict[str, Any]:
    usage = answer.get("usage") or {}
    return {
        "request": index,
        "phase": "measure",
        "kind": "perplexity",
        "start_s": start_s,
        "end_s": end_s,
        "input_tokens_asked": len(window),
        "output_tokens_asked": 1,
        "prompt_tokens": usage.get("prompt_tokens"),
        "output_tokens": usage.get("completion_tokens"),
        "cached_tokens": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        "http_status": status,
        "ok": error is None,
        "error": error,
    }


def _certificate(rows: list[dict[str, Any]], interrupted: bool) -> dict[str, Any]:
    cached = sum(row["cached_tokens"] or 0 for row in rows)
    failed = [row["error"] for row in rows if not row["ok"]]
    problems = [f"{len(failed)} of {len(rows)} windows failed, such as: {failed[0]}"] if failed else []
    if cached:
        # Tokens out of the cache would have no log-probability of this run.
        problems.append(f"{cached} tokens came out of the prefix cache; switch it off (enable_prefix_caching = false).")
    return {"failures": problems, "problems": problems, "fake": False, "interrupted": interrupted}


# -- what it says -------------------------------------------------------------------------------------------------


def mean_nll(summary: dict[str, Any] | None) -> list[float]:
    """Mean NLL a token of each window; empty where there is no such run."""
    if not summary or not summary.get("window_nll_sum"):
        return []
    pairs = zip(summary["window_nll_sum"], summary["window_tokens"], strict=True)
    return [nll / tokens for nll, tokens in pairs if nll is not None]


def perplexity(summary: dict[str, Any] | None) -> Estimate | None:
    """exp of the mean NLL a token, with the interval over windows; it tells how much texts differ, not the noise."""
    found = mean_nll(summary)
    return _exp(mean_interval(found)) if found else None


def change(base: dict[str, Any] | None, other: dict[str, Any] | None) -> Estimate | None:
    """Relative change of the perplexity, exp(mean NLL difference) - 1, from the same windows in both arms.

    The interval is the t interval of the paired differences. Raises LoadError where windows or weights differ.
    """
    a, b = mean_nll(base), mean_nll(other)
    if not a or not b:
        return None
    unlike = [name for name in ("windows_sha256", "weights") if base.get(name) != other.get(name)]
    if unlike or len(a) != len(b):
        raise LoadError(
            "The two arms did not get the same windows and weights, so that their difference says nothing.",
            cause="another text, tokenizer, number or length of windows, or a model that was replaced in between",
            next_step="measure both arms again: MODE = 'measure'",
        )
    estimate = _exp(paired_difference(a, b))
    ends = [None if end is None else end - 1 for end in (estimate.low, estimate.high)]
    return Estimate(estimate.value - 1, *ends, estimate.n, estimate.note)


def token_change(base: dict[str, Any] | None, other: dict[str, Any] | None) -> Estimate | None:
    """Mean absolute change of a token's log-probability in nats, with the interval over windows.

    A perplexity that stays the same does not mean that nothing changed: gains and losses cancel in it, and not here.
    """
    a, b = ((summary or {}).get("token_nll_packed") or [] for summary in (base, other))
    if not a or len(a) != len(b) or None in [*a, *b]:
        return None
    return mean_interval([float(np.abs(unpack(x) - unpack(y)).mean()) for x, y in zip(a, b, strict=True)])


def _exp(e: Estimate) -> Estimate:
    value, low, high = (None if v is None else math.exp(v) for v in (e.value, e.low, e.high))
    return Estimate(value, low, high, e.n, e.note)


def largest_difference(a: dict[str, Any] | None, b: dict[str, Any] | None) -> float | None:
    """Largest difference of a window's mean NLL between two runs, nats a token; null where one is missing."""
    first, second = mean_nll(a), mean_nll(b)
    if not first or len(first) != len(second):
        return None
    return max(abs(x - y) for x, y in zip(first, second, strict=True))


def judge(base: dict[str, Any] | None, runs: Sequence[dict[str, Any] | None]) -> Verdict:
    """Whether a KV format does what its name says, from the base's windows and repeats of its own on one server.

    ignored: every window has the base's number to the last digit. wrong: the same window gives different numbers on
    the same server, or the text has become BROKEN_NLL harder to predict. A server that accepts a flag says nothing.
    """
    found = [largest_difference(base, run) for run in runs]
    if not found or None in found:
        return Verdict("not measured", "not every repeat has all windows")
    if max(found) == 0:
        return Verdict("ignored", "ignored by the engine: every window has the number of the base KV cache")
    again = max((largest_difference(runs[0], run) for run in runs[1:]), default=0.0)
    if again > REPEAT_NLL:
        return Verdict("wrong", f"wrong: one window on one server differs by {again:.3g} nats a token when repeated")
    worse = np.mean(mean_nll(runs[0])) - np.mean(mean_nll(base))
    if worse > BROKEN_NLL:
        return Verdict("wrong", f"wrong: the text costs {worse:.3g} nats a token more than with the base KV cache")
    return Verdict("ok", None)
