"""One streamed request becomes one row. The clock is read when bytes arrive, before anything is parsed."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from yarl import URL

from kvlab.answer import Answer, MalformedEvent, error_text
from kvlab.errors import LoadError
from kvlab.http1 import CONNECT_TIMEOUT_S, Pool, Wire, clock
from kvlab.http_message import BadResponse
from kvlab.workload import Request, probe_prompt

FAKE_HEADER = "x-kvlab-fake"
# Optional fields, best first: what a server refuses in the probe is left out of the load.
FIELD_SETS: tuple[dict[str, Any], ...] = (
    {"return_token_ids": True},
    {"return_token_ids": False},
)
FULL = FIELD_SETS[0]


@dataclass(frozen=True)
class Endpoint:
    """Where requests go. `vocab`: half-open range of token ids that are safe to send; `worker`: the server's name.

    Routers ask for more. `words`: prompts are sent as text, words[i] for token id i. `session_header` carries the
    number of the request's shared prefix. `answered_by`: the response header with the address of the worker that
    answered, and pairs (address, name).
    """

    base_url: str
    model: str
    api_key: str | None = None
    vocab: tuple[int, int] = (100, 4000)
    worker: str | None = None
    words: tuple[str, ...] | None = None
    session_header: str | None = None
    answered_by: tuple[str, tuple[tuple[str, str | None], ...]] | None = None

    def url(self, path: str) -> URL:
        """The URL of a path such as /v1/completions, whether base_url ends in /v1 or not."""
        base = self.base_url.rstrip("/").removesuffix("/v1")
        return URL(base + path)

    @property
    def headers(self) -> dict[str, str]:
        """Headers that each request carries."""
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def headers_of(self, request: Request) -> dict[str, str]:
        """Headers of one request; those without a shared prefix are sessions of their own."""
        if self.session_header is None:
            return self.headers
        session = f"own-{request.index}" if request.prefix is None else f"prefix-{request.prefix}"
        return self.headers | {self.session_header: session}

    def worker_of(self, headers: dict[str, str]) -> str | None:
        """The worker that answered, by the headers of the response where they name it."""
        if self.answered_by is None:
            return self.worker
        return dict(self.answered_by[1]).get(headers.get(self.answered_by[0], ""))


def body(endpoint: Endpoint, request: Request, fields: dict[str, bool] = FULL) -> bytes:
    """The serialised request. Made before the load: a long prompt takes milliseconds."""
    values: dict[str, Any] = {
        "model": endpoint.model,
        "prompt": request.prompt if endpoint.words is None else "".join(endpoint.words[i] for i in request.prompt),
        "max_tokens": request.output_tokens,
        "temperature": 0,
        "ignore_eos": True,  # min_tokens beside it would add a pass over the logits to every step of the server
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if fields["return_token_ids"]:
        values["return_token_ids"] = True
    return json.dumps(values, separators=(",", ":")).encode()


async def send(
    pool: Pool,
    endpoint: Endpoint,
    request: Request,
    *,
    zero: float,
    timeout_s: float,
    phase: str = "measure",
    payload: bytes | None = None,
    scheduled: float | None = None,
    record: Callable[[dict], None] | None = None,
) -> dict[str, Any]:
    """One row (REQUEST_COLUMNS) for one request, successful or not; times count from `zero` on `clock`.

    `timeout_s` limits the whole request; `payload` is the body made before (see `body`); `scheduled` is when it should
    have started, on `clock`. `record` gets the row also when the task is cancelled. What a server or a network can do
    wrong is a row with `error`; anything else raises: a defect of the client must not look like a failure of the
    server. The extra key `exact` says that the tokens of each event were counted, not spread.
    """
    payload = body(endpoint, request) if payload is None else payload
    answer, wire = Answer(), Wire()

    def finish(error: str | None) -> dict[str, Any]:
        row = {"request": request.index, "phase": phase, "kind": request.kind, "prefix": request.prefix}
        row |= {"worker": endpoint.worker_of(wire.headers), "ok": error is None, "error": error}
        row |= _counts(request, answer) | _times(answer, wire, zero, scheduled, ok=error is None)
        if record is not None:
            record(row)
        return row

    try:
        async with asyncio.timeout(timeout_s):
            error = await _stream(pool, endpoint, endpoint.headers_of(request), payload, answer, wire)
    except asyncio.CancelledError:
        finish("interrupted")
        raise
    except TimeoutError:
        error = f"timeout after {timeout_s:g} s"
    except (MalformedEvent, BadResponse) as problem:
        error = str(problem)
    except OSError as problem:
        _check_open_files(problem)
        error = _network_error(problem, wire)
    return finish(answer.error or error or answer.why_not(len(request.prompt), request.output_tokens))


async def warm_pool(pool: Pool, endpoint: Endpoint, connections: int) -> bool:
    """Opens idle connections by as many simultaneous small requests; True when the server says that it is a fake.

    Failures are left to the requests that come, where they are rows.
    """

    async def touch() -> bool:
        wire = Wire()
        with contextlib.suppress(OSError, BadResponse):
            await pool.request("GET", endpoint.url("/health"), endpoint.headers, b"", wire, lambda *_: None)
        return FAKE_HEADER in wire.headers

    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            return any(await asyncio.gather(*(touch() for _ in range(connections))))
    except TimeoutError:
        return False


async def probe(pool: Pool, endpoint: Endpoint, nonce: int, timeout_s: float) -> dict[str, bool]:
    """One request of one token before the load: the optional fields (FIELD_SETS) that this server accepts.

    Raises LoadError when nothing answers, or when the request is refused as wrong in every form.
    """
    request = Request(0, probe_prompt(endpoint.vocab, nonce), 1, "probe")
    for fields in FIELD_SETS:
        payload = body(endpoint, request, fields)
        row = await send(pool, endpoint, request, zero=clock(), timeout_s=timeout_s, payload=payload)
        if row["start_s"] is None:
            raise LoadError(
                f"Nothing answers at {endpoint.base_url}: {row['error']}",
                cause="the server is not running, still starting, or listens elsewhere",
                next_step=f"curl {endpoint.url('/v1/models')}",
            )
        if row["http_status"] not in (400, 422):
            break
    if row["http_status"] in (400, 401, 403, 404, 405, 422):
        raise LoadError(
            f"The server at {endpoint.base_url} refuses the request for model {endpoint.model!r}: {row['error']}",
            cause="a wrong model name or API key, or a server without token-id prompts or ignore_eos",
            next_step=f"compare the name with: curl {endpoint.url('/v1/models')}",
        )
    return fields


async def _stream(
    pool: Pool, endpoint: Endpoint, headers: dict, payload: bytes, answer: Answer, wire: Wire
) -> str | None:
    """Sends and reads until the end of the response; returns the reason of an HTTP error."""
    await pool.request("POST", endpoint.url("/v1/completions"), headers, payload, wire, answer.feed_all)
    if wire.status != 200:
        return f"HTTP {wire.status}: {_message(wire.refusal)}"
    answer.end(clock())
    return None


def _counts(request: Request, answer: Answer) -> dict[str, Any]:
    return {
        "input_tokens_asked": len(request.prompt),
        "output_tokens_asked": request.output_tokens,
        "prompt_tokens": answer.count("prompt_tokens"),
        "output_tokens": answer.count("completion_tokens"),
        "cached_tokens": answer.cached_tokens,
        "finish_reason": answer.finish_reason,
        "event_tokens": answer.event_tokens(),
        "exact": answer.exact,
    }


def _times(answer: Answer, wire: Wire, zero: float, scheduled: float | None, ok: bool) -> dict[str, Any]:
    """Stamps on the run's clock. ttft, latency and tpot only of successes: a failed request has none."""
    due = wire.asked if scheduled is None else scheduled
    first = answer.times[0] if answer.times else None
    last = answer.times[-1] if answer.times else None
    produced = answer.count("completion_tokens")
    return {
        "scheduled_s": None if scheduled is None else scheduled - zero,
        "start_s": None if wire.ready is None else wire.ready - zero,
        "wait_s": None if wire.ready is None else wire.ready - due - wire.connect_s,
        "connect_s": wire.connect_s,
        "first_content_s": None if first is None else first - zero,
        "last_content_s": None if last is None else last - zero,
        "end_s": clock() - zero,
        "ttft_s": first - wire.ready if ok else None,
        "latency_s": last - wire.ready if ok else None,
        "tpot_s": (last - first) / (produced - 1) if ok and produced > 1 else None,
        "http_status": wire.status,
        "event_times_s": [t - zero for t in answer.times],
    }


def _check_open_files(problem: OSError) -> None:
    """LoadError where this process may open no more connections: that is no failure of the server."""
    if problem.errno in (errno.EMFILE, errno.ENFILE):
        raise LoadError(
            "The client may open no more connections.",
            cause="the limit on open files of a process (ulimit -Hn)",
            next_step="use more processes, offer fewer requests a second, or raise the limit",
        ) from problem


def _network_error(problem: OSError, wire: Wire) -> str:
    """What the network did, in words."""
    text = str(problem) or type(problem).__name__
    if wire.ready is None:
        return f"no connection: {text}"
    if wire.status is None:
        return f"the connection broke before an answer: {text}"
    return f"truncated stream: {text}"


def _message(answer: bytes) -> str:
    try:
        return error_text(json.loads(answer))
    except ValueError:
        return error_text(answer.decode(errors="replace"))
