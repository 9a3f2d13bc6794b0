"""A small HTTP/1.1 client for streamed answers: bytes are stamped by the kernel, or in the call that receives them.

Reads are stamped and put aside; they are decoded some at a time, so that a stamp waits for nobody's parser and the
parser runs in warm caches. `make bench-client` measures what that is worth. The client follows RFC 9112 for what
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

from kvlab import kernel_reads
from kvlab.http_message import BadResponse, Counted, body_of, head_of, parse_head
from kvlab.kernel_reads import Reader

clock = time.perf_counter  # CLOCK_MONOTONIC on Linux: the same in all processes of the machine
CONNECT_TIMEOUT_S = 30.0
# uvicorn closes a connection that is idle for 5 s; one that is older than this is opened anew, not risked.
IDLE_REUSE_S = 2.0
MAX_HEAD = 64 * 1024
# A read that ends so ends a chunk with whole events, and never the body: it may wait for others to be decoded with.
WHOLE_EVENT = b"\n\n\r\n"
MAX_WAITING, LARGE_BYTES = 16, 4096  # reads put aside in one connection, and the size from which none is

_first_limits = itertools.cycle(range(1, MAX_WAITING + 1))  # streams that run in step shall not decode in step

Sink = Callable[[list[bytes], list[float]], None]  # pieces of a body, and when each of them came


class Wire:
    """What happened to one request, on `clock`. None where it did not happen."""

    __slots__ = ("asked", "ready", "connect_s", "status", "headers", "refusal")

    def __init__(self):
        self.asked = clock()
        self.ready: float | None = None  # just before the request is written
        self.connect_s: float | None = None
        self.status: int | None = None
        self.headers: dict[str, str] = {}
        self.refusal = b""  # the body, where the status is not 200


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self):
        self.idle_since = clock()
        self.reusable = True
        self._transport: asyncio.Transport | None = None
        self._answered: asyncio.Future | None = None
        self._reader: Reader | None = None

    async def exchange(self, request: bytes, wire: Wire, sink: Sink) -> None:
        """Writes the request; `sink` gets body bytes and the times of their receipt until the response has ended.

        Raises OSError when the connection breaks, BadResponse, or what the sink raises.
        """
        self._wire, self._sink, self._head, self._body = wire, sink, b"", None
        self._reads, self._stamps = [], []
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
        self._leave_reader()
        if self._transport is not None:
            self._transport.abort()

    def read_by(self, reader: Reader) -> None:
        """Leaves the reading to `reader`, where the bytes are not encrypted."""
        if self._socket is not None and self.reusable:
            self._transport.pause_reading()
            self._reader = reader
            reader.watch(self._socket, self.take, self.connection_lost)

    def _leave_reader(self) -> None:
        if self._reader is not None:
            self._reader.forget(self._socket)
            self._reader = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: open."""
        self._transport = transport
        secure = transport.get_extra_info("sslcontext") is not None
        self._socket = None if secure else transport.get_extra_info("socket").fileno()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes are here. The stamp comes first."""
        self.take(data, clock())

    def take(self, data: bytes, t: float) -> None:
        """Bytes that came at `t`."""
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
            if (
                data.endswith(WHOLE_EVENT)
                and len(self._reads) < self._limit
                and len(data) < LARGE_BYTES
                and self._body.waits
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
        reads, stamps, self._reads, self._stamps = self._reads, self._stamps, [], []
        payloads: list[bytes] = []
        try:
            for data in reads:
                payloads.append(self._body.feed(data))
        finally:
            if not all(payloads):  # parts of chunks, or what is around them
                stamps = [t for t, payload in zip(stamps, payloads, strict=False) if payload]
                payloads = [payload for payload in payloads if payload]
            if payloads:
                self._hand_out(payloads, stamps[: len(payloads)])

    def _hand_out(self, payloads: list[bytes], stamps: list[float]) -> None:
        if self._wire.status == 200:
            self._sink(payloads, stamps)
        else:
            self._wire.refusal += b"".join(payloads)

    def connection_lost(self, exc: Exception | None) -> None:
        """asyncio: closed by the other side, by an error, or by `close`."""
        self.reusable = False
        self._leave_reader()
        if self._answered is None or self._answered.done():
            return
        if exc is None and isinstance(self._body, Counted) and self._body.left is None:
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
            self._body = body_of(status, headers)
            closes = headers.get("connection", "").lower() == "close" or version != b"HTTP/1.1"
            self.reusable = self.reusable and not closes and getattr(self._body, "left", 0) is not None
            return rest
        if len(self._head) > MAX_HEAD:
            raise BadResponse("the head of the response does not end")
        return b""


class Pool:
    """Connections without a limit, reused for a short while unless `reuse` is False."""

    def __init__(self, *, reuse: bool = True):
        self.reuse = reuse
        self._idle: dict[tuple[str, int, bool], list[Connection]] = {}
        self._reader: Reader | None = None

    async def __aenter__(self) -> Pool:
        return self

    async def __aexit__(self, *_: Any) -> None:
        for connections in self._idle.values():
            for connection in connections:
                connection.close()
        if self._reader is not None:
            self._reader.close()

    @property
    def stamped(self) -> bool:
        """Whether the kernel stamped what came last."""
        return self._reader is not None and self._reader.stamped

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
        if self._reader is None and kernel_reads.available():
            self._reader = Reader()
        if self._reader is not None:
            connection.read_by(self._reader)
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
