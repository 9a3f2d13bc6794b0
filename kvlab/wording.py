"""Prompts as text of a known length: words that are one token each, for routers that take no token ids."""

from __future__ import annotations

import json
import re

from kvlab import control
from kvlab.client import Endpoint
from kvlab.errors import ServerError

MARK = re.compile(r"[Ġ▁ ]?(\w+)", re.ASCII)  # how tokenizers write the space before a word
ENOUGH = 64
AT_ONCE = 400  # token ids, or words, in one call: some servers limit it to their longest request
MOST = 400


def words(endpoint: Endpoint) -> tuple[str, ...]:
    """Words, each with a space before it, that the server's tokenizer turns into one token wherever they stand.

    From the server's own /detokenize and /tokenize; in the order of their token ids. ServerError where it offers none,
    or knows fewer than `ENOUGH` such words.
    """
    low, high = endpoint.vocab
    texts = [
        _call(endpoint, "/detokenize", tokens=list(range(start, min(start + AT_ONCE, high))))["prompt"]
        for start in range(low, min(high, low + 10 * AT_ONCE), AT_ONCE)
    ]
    candidates = sorted({word for text in texts for word in re.findall(r"(?<= )[A-Za-z][A-Za-z0-9]*(?= |$)", text)})
    found = _whole(endpoint, [f" {word}" for word in candidates])
    if len(found) < ENOUGH:
        raise ServerError(
            f"Only {len(found)} words of this model are one token each",
            "its tokenizer does not keep whole words",
            "use a router that takes token ids",
        )
    return tuple(found)


def _whole(endpoint: Endpoint, candidates: list[str]) -> list[str]:
    """Those that come back as one token, between others as they will be sent; checked once more together."""
    single: set[str] = set()
    for start in range(0, len(candidates), AT_ONCE):
        single |= _single(endpoint, candidates[start : start + AT_ONCE])
    kept = [word for word in candidates if word[1:] in single][:MOST]
    if len(_call(endpoint, "/tokenize", prompt="".join(kept[::-1]))["tokens"]) != len(kept):
        raise ServerError("Words that are one token each are several side by side", next_step="report this tokenizer")
    return kept


def _single(endpoint: Endpoint, candidates: list[str]) -> set[str]:
    strings = _call(endpoint, "/tokenize", prompt="".join(candidates), return_token_strs=True)["token_strs"]
    starts = [text[:1] in ("Ġ", "▁", " ") for text in strings]
    spaced = any(starts)  # a tokenizer of words has no mark, and every token is one
    ends = [*starts[1:], True]
    found = [
        match[1]
        for text, start, end in zip(strings, starts, ends, strict=True)
        if (start and end or not spaced) and (match := MARK.fullmatch(text))
    ]
    return set(found)


def _call(endpoint: Endpoint, path: str, **values) -> dict:
    body = {"model": endpoint.model} | values
    if path == "/tokenize":
        body["add_special_tokens"] = False
    try:
        status, text = control.call(endpoint, path, body, timeout_s=30.0)
    except OSError as error:
        status, text = 0, str(error)
    if status != 200:
        raise ServerError(
            f"{endpoint.url(path)} answers {status or 'nothing'}: {text[:200]}",
            "the worker is no vLLM server, and which words are one token cannot be asked",
            "use a router that takes token ids, such as vllm-router",
        )
    return json.loads(text)
