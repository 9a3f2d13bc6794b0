"""A small HTTP/1.1 client for streamed answers: bytes are stamped in the call that receives them, with no task between.

Reads are stamped and put aside; they are decoded some dozens at a time, so that a stamp waits for nobody's parser and
the parser runs in warm caches. `make bench-client` measures what that is worth. The client follows RFC 9112 for what
servers of this kind send: chunked, counted and close-delimited bodies. No redirects, no compression, no proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
import ssl
import time
from collections.abc import Callable
from typing import Any

from yarl import URL

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: the same in all processes of the machine
CONNECT_TIMEOUT_S = 30.0
# uvicorn closes a connection that is idle for 5 s; one that is older than this is opened anew, not risked.
IDLE_REUSE_S = 2.0
MAX_HEAD = 64 * 1024
# A read that ends so ends a chunk with whole events, and never the body: it may wait for others to be decoded with.
WHOLE_EVENT = b"\n\n\r\n"
MAX_WAITING, MAX_WAITING_BYTES = 16, 64 * 1024  # reads put aside in one connection

_first_limits = itertools.cycle(range(1, MAX_WAITING + 1))  # streams that run in step shall not decode in step

Sink = Callable[[bytes, float], None]


class BadResponse(Exception):
    """What came back is no HTTP/1.1 response that this client understands."""


class Wire:
    """What happened to one request, on `clock`. None where it did not happen."""

    __slots__ = ("asked", "ready", "connect_s", "status", "headers")

    def __init__(self):
        self.asked = clock()
        self.ready: float | None = None  # just before the request is written
        self.connect_s: float | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}


class Chunks:
    """Decodes a chunked body incrementally; `done` after the last chunk and its trailers."""

    __slots__ = ("done", "_rest")
    waits = True  # its end can be told from a read

    def __init__(self):
        self.done = False
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        """The payload that `data` completes. The network may cut anywhere; a chunk is handed out when it is whole."""
        if not self._rest:
            line = data.find(b"\r\n")
            if line > 0 and 0 < _chunk_length(data[:line]) == len(data) - line - 4 and data.endswith(b"\r\n"):
                return data[line + 2 : -2]  # the usual read: one whole chunk
        else:
            data, self._rest = self._rest + data, b""
        payload, at, size = [], 0, len(data)
        while at < size:
            line = data.find(b"\r\n", at)
            if line < 0:
                break
            length = _chunk_length(data[at:line])
            if length == 0:
                self._end(data, line)
                break
            end = line + 2 + length
            if end + 2 > size:
                break
            if data[end : end + 2] != b"\r\n":
                raise BadResponse("a chunk is longer than it says")
            payload.append(data[line + 2 : end])
            at = end + 2
        if at < size:
            self._rest = data[at:]
        return payload[0] if len(payload) == 1 else b"".join(payload)

    def _end(self, data: bytes, line: int) -> None:
        """The last chunk starts at `line`; trailers, if any, end with a blank line."""
        self.done = data.startswith(b"\r\n", line + 2) or data.find(b"\r\n\r\n", line) >= 0


class Counted:
    """A body of known length; None means until the connection closes."""

    __slots__ = ("done", "_left")
    waits = False

    def __init__(self, length: int | None):
        self._left = length
        self.done = length == 0

    def feed(self, data: bytes) -> bytes:
        """The payload in `data`."""
        if self._left is not None:
            self._left -= len(data)
            self.done = self._left <= 0
        return data


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self):
        self.idle_since = clock()
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future | None = None

    async def exchange(self, request: bytes, wire: Wire, sink: Sink) -> None:
        """Writes the request; `sink` gets body bytes and the time of their receipt until the response has ended.

        Raises OSError when the connection breaks, BadResponse, or what the sink raises.
        """
        self._wire, self._sink, self._head, self._body = wire, sink, b"", None
        self._reads, self._stamps, self._waiting = [], [], 0
        self._limit = next(_first_limits)
        self._answered = asyncio.get_running_loop().create_future()
        try:
            wire.ready = clock()
            self._write(request)
            await self._answered
            if self._transport.get_write_buffer_size():  # answered before it had read the request
                self.close()
        except BaseException:
            self.close()
            raise
        finally:
            self._answered = None
            self.idle_since = clock()
            with contextlib.suppress(Exception):  # what led here is the better explanation
                self._decode()

    def _write(self, request: bytes) -> None:
        """Hands the request to the kernel now: uvloop would keep it until the end of its current round."""
        if self._socket is not None:
            with contextlib.suppress(BlockingIOError):
                request = request[os.write(self._socket, request) :]
        if request:
            self._transport.write(request)

    def close(self) -> None:
        """Closes at once."""
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: open."""
        self._transport = transport
        secure = transport.get_extra_info("sslcontext") is not None
        self._socket = None if secure else transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes are here. The stamp comes first."""
        t = clock()
        try:
            if self._answered is None or self._answered.done():
                self.close()  # nobody asked
                return
            if self._body is None:
                data = self._take_head(data)
                if self._body is None or not (data or self._body.done):
                    return
            self._reads.append(data)
            self._stamps.append(t)
            self._waiting += len(data)
            if (
                data.endswith(WHOLE_EVENT)
                and self._body.waits
                and len(self._reads) < self._limit
                and self._waiting < MAX_WAITING_BYTES
            ):
                return
            self._limit = MAX_WAITING
            self._decode()
            if self._body.done:
                self._answered.set_result(None)
        except Exception as error:
            self._fail(error)

    def _decode(self) -> None:
        """Hands out what has been put aside, each read with its stamp."""
        reads, stamps, self._reads, self._stamps, self._waiting = self._reads, self._stamps, [], [], 0
        feed, sink = self._body and self._body.feed, self._sink
        for data, t in zip(reads, stamps, strict=True):
            if data and (payload := feed(data)):
                sink(payload, t)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: closed by the other side, by an error, or by `close`."""
        self.reusable = False
        if self._answered is None or self._answered.done():
            return
        if exc is None and isinstance(self._body, Counted) and self._body._left is None:
            self._answered.set_result(None)
        else:
            self._fail(exc if isinstance(exc, OSError) else ConnectionResetError("the server closed the connection"))

    def _fail(self, error: Exception) -> None:
        if self._answered is not None and not self._answered.done():
            self._answered.set_exception(error)

    def _take_head(self, data: bytes) -> bytes:
        """Reads the head when it is complete; returns what belongs to the body."""
        self._head += data
        while (end := self._head.find(b"\r\n\r\n")) >= 0:
            head, rest = self._head[:end], self._head[end + 4 :]
            status, version, headers = parse_head(head)
            if status < 200:  # interim: the real one follows
                self._head = rest
                continue
            self._wire.status, self._wire.headers = status, headers
            self._body = _body_of(status, headers)
            closes = headers.get("connection", "").lower() == "close" or version != b"HTTP/1.1"
            self.reusable = self.reusable and not closes and getattr(self._body, "_left", 0) is not None
            return rest
        if len(self._head) > MAX_HEAD:
            raise BadResponse("the head of the response does not end")
        return b""


class Pool:
    """Connections without a limit, reused for a short while unless `reuse` is False."""

    def __init__(self, *, reuse: bool = True):
        self.reuse = reuse
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *_: Any) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()

    async def request(
        self, method: str, url: URL, headers: dict[str, str], body: bytes, wire: Wire, sink: Sink
    ) -> None:
        """One request, see Connection.exchange. `wire` tells connecting from answering."""
        key = (url.raw_host, url.port, url.scheme == "https")
        if not self.reuse:
            headers = headers | {"Connection": "close"}
        connection = await self._connection(key, wire)
        await connection.exchange(head_of(method, url, headers, len(body)) + body, wire, sink)
        if connection.reusable and self.reuse:
            self._idle.setdefault(key, []).append(connection)
        else:
            connection.close()

    async def _connection(self, key: tuple[str, int, bool], wire: Wire) -> Connection:
        idle, oldest = self._idle.get(key, []), clock() - IDLE_REUSE_S
        while idle:
            connection = idle.pop()
            if connection.reusable and connection.idle_since >= oldest:
                wire.connect_s = 0.0
                return connection
            connection.close()
        began = clock()
        connection = await _connect(*key)
        wire.connect_s = clock() - began
        return connection


@functools.cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _connect(host: str, port: int, secure: bool) -> Connection:
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, host, port, ssl=_tls() if secure else None)
    except TimeoutError:
        raise ConnectionError(f"none within {CONNECT_TIMEOUT_S:g} s") from None
    return connection


def head_of(method: str, url: URL, headers: dict[str, str], length: int) -> bytes:
    """The head of a request."""
    host = url.raw_authority.rpartition("@")[2]
    lines = [f"{method} {url.raw_path_qs} HTTP/1.1", f"Host: {host}", "Accept-Encoding: identity"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if length:
        lines += ["Content-Type: application/json", f"Content-Length: {length}"]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


def parse_head(head: bytes) -> tuple[int, bytes, dict[str, str]]:
    """(status, version, headers with lower-case names) of a response head; raises BadResponse."""
    first, *lines = head.split(b"\r\n")
    version, _, rest = first.partition(b" ")
    if not version.startswith(b"HTTP/1.") or not rest[:3].isdigit():
        raise BadResponse(f"no HTTP/1.1 response: {first[:80]!r}")
    pairs = (line.decode("latin-1").partition(":") for line in lines)
    return int(rest[:3]), version, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _body_of(status: int, headers: dict[str, str]) -> Chunks | Counted:
    if headers.get("content-encoding", "identity") != "identity":
        raise BadResponse(f"the body is encoded as {headers['content-encoding']}, which was not asked for")
    if "chunked" in headers.get("transfer-encoding", "").lower():
        return Chunks()
    if status in (204, 304):
        return Counted(0)
    length = headers.get("content-length")
    return Counted(int(length) if length is not None and length.isdigit() else None)


@functools.lru_cache(4096)
def _chunk_length(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not digits.isalnum():  # int() would also take a sign or underscores
        raise BadResponse(f"no chunk length: {line[:40]!r}")
    try:
        return int(digits, 16)
    except ValueError:
        raise BadResponse(f"no chunk length: {line[:40]!r}") from None
