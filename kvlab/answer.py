"""What one streamed answer said, event by event, and whether it is a success by the strict definition."""

from __future__ import annotations

import json
import re
from typing import Any

from kvlab.sse import EventSplitter, data_of, is_error

BROKEN_ENDINGS = ("abort", "error")
TOKEN_IDS = re.compile(rb'"token_ids":\[(\d+(?:,\d+)*)\][^\n]*\n')  # to the end of the line: one in an event


class MalformedEvent(Exception):
    """An event of the stream is not what the protocol allows."""


class Answer:
    """Collects one stream. `feed` gets each read with the time of its receipt, stamped before anything is parsed.

    Content is non-empty text, reasoning text or token ids; a role-only or empty event is not content.
    `tokens` holds the tokens of each content event, None where the event does not say how many it holds.
    """

    __slots__ = ("times", "tokens", "finish_reason", "usage", "done", "error", "_splitter", "_counted")

    def __init__(self):
        self.times: list[float] = []
        self.tokens: list[int | None] = []
        self.finish_reason: str | None = None
        self.usage: dict[str, Any] | None = None
        self.done = False
        self.error: str | None = None
        self._splitter = EventSplitter()
        self._counted = 0  # completion tokens reported so far by servers that repeat the usage in every event

    def feed_all(self, reads: list[bytes], stamps: list[float]) -> None:
        """Takes reads, each received at its stamp; raises MalformedEvent for JSON that is none."""
        counts = None if self._splitter.holds else plain_events(reads)
        if counts is None:
            for data, t in zip(reads, stamps, strict=True):
                self.feed(data, t)
        else:
            self.times += stamps
            self.tokens += counts

    def feed(self, data: bytes, t: float) -> None:
        """Takes one read that was received at `t`; raises MalformedEvent for JSON that is none."""
        for event in self._splitter.feed(data):
            self._take(event, t)

    def end(self, t: float) -> None:
        """The stream is over: takes a last event that has no blank line after it."""
        for event in self._splitter.flush():
            self._take(event, t)

    def _take(self, event: bytes, t: float) -> None:
        payload = data_of(event)
        if payload is None:
            return
        count = plain_tokens(payload)
        if count:
            self.times.append(t)
            self.tokens.append(count)
        elif payload == b"[DONE]":
            self.done = True
        else:
            self._take_parsed(event, payload, t)

    def _take_parsed(self, event: bytes, payload: bytes, t: float) -> None:
        try:
            parsed = json.loads(payload)
        except ValueError:
            raise MalformedEvent(f"an event is no JSON: {_short(payload)}") from None
        if not isinstance(parsed, dict):
            raise MalformedEvent(f"an event is no JSON object: {_short(payload)}")
        if parsed.get("error") or is_error(event):
            self.error = self.error or f"error event after HTTP 200: {error_text(parsed)}"
            return
        usage = parsed.get("usage")
        choice = next(iter(parsed.get("choices") or ()), None)
        if usage:
            self.usage = usage
        if choice is None:
            return
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        count = self._tokens_in(choice, usage)
        if count or _has_text(choice):
            self.times.append(t)
            self.tokens.append(count)

    def _tokens_in(self, choice: dict, usage: dict | None) -> int | None:
        """Tokens in one event: its token ids, else the rise of a running usage; None where it has neither."""
        ids = choice.get("token_ids")
        if ids is not None:
            return len(ids)
        total = (usage or {}).get("completion_tokens")
        if total is None:
            return None
        rise, self._counted = total - self._counted, total
        return rise

    @property
    def exact(self) -> bool:
        """True when every content event said how many tokens it holds."""
        return None not in self.tokens

    def event_tokens(self) -> list[int] | None:
        """Tokens of each content event; usage spread evenly where the events do not say; None without either."""
        if self.exact:
            return list(self.tokens)
        total = self.count("completion_tokens")
        return None if total is None else spread(total, len(self.tokens))

    def count(self, name: str) -> int | None:
        """A number of the usage, such as `prompt_tokens`; None where it was not reported."""
        return None if self.usage is None else self.usage.get(name)

    @property
    def cached_tokens(self) -> int | None:
        """Prompt tokens served from the prefix cache; None where the server does not report them."""
        details = self.count("prompt_tokens_details")
        return None if details is None else details.get("cached_tokens")

    def why_not(self, input_tokens: int, output_tokens: int) -> str | None:
        """Why this answer is no success; None when it is one: ended properly, with exactly the tokens asked for."""
        if self.error:
            return self.error
        if not self.done:
            return "truncated stream: it ended without [DONE]"
        if self.finish_reason is None:
            return "the stream ended without a finish_reason"
        if self.finish_reason in BROKEN_ENDINGS:
            return f"the server ended the request with finish_reason {self.finish_reason!r}"
        if not self.times:
            return "no event held content"
        if self.usage is None:
            return "no usage was reported, so the token counts cannot be verified"
        return self._wrong_count(input_tokens, output_tokens)

    def _wrong_count(self, input_tokens: int, output_tokens: int) -> str | None:
        produced, read = self.count("completion_tokens"), self.count("prompt_tokens")
        if produced != output_tokens:
            return f"{produced} output tokens instead of {output_tokens}"
        if read != input_tokens:
            return f"the server counted {read} prompt tokens, {input_tokens} were sent"
        if self.exact and sum(self.tokens) != produced:
            return f"the events hold {sum(self.tokens)} tokens, the usage says {produced}"
        return None


def plain_events(reads: list[bytes]) -> list[int] | None:
    """Tokens of reads that are one plain content event each, told all at once; None where any of them is not.

    Plain: one `data` line that holds token ids and ends nothing. As safe as `plain_tokens`, in less time.
    """
    n, block = len(reads), b"\r".join(reads)  # a CR, which is excluded within them, shows where a read begins
    if (
        not block.startswith(b"data: ")
        or not block.endswith(b"\n\n")
        or block.count(b"\r") != n - 1
        or block.count(b"\n\n\rdata: ") != n - 1
        or block.count(b"\n") != 2 * n
        or block.count(b'"finish_reason":null') != n
        or block.count(b'"finish_reason":') != n
        or block.find(b'"error":') >= 0
    ):
        return None
    found = TOKEN_IDS.findall(block)
    return [ids.count(b",") + 1 for ids in found] if len(found) == n else None


def plain_tokens(payload: bytes) -> int:
    """Tokens of a plain content event, found without parsing JSON; 0 where only a parser can tell.

    Safe on any JSON: inside a string a quote is escaped, so these keys with their quotes cannot be text.
    """
    # `find`, as `in` would first try to read its argument as a number, which takes longer than the search.
    start = payload.rfind(b'"token_ids":[')
    if start < 0 or payload.find(b'"finish_reason":null') < 0 or payload.find(b'"error":') >= 0:
        return 0
    end = payload.find(b"]", start)
    return payload.count(b",", start, end) + 1 if end > start + 13 else 0


def spread(total: int, events: int) -> list[int]:
    """`total` tokens over `events` as evenly as whole numbers allow; the sum is exact."""
    return [total * (i + 1) // events - total * i // events for i in range(events)]


def error_text(parsed: Any) -> str:
    """The message of an OpenAI-style error body, whatever its nesting."""
    error = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    if isinstance(error, dict):
        error = error.get("message") or error.get("detail") or error
    return _short(str(error))


def _has_text(choice: dict) -> bool:
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(k) for k in ("content", "reasoning_content", "reasoning")))


def _short(text: str | bytes) -> str:
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return text if len(text) <= 300 else text[:300] + " …"
