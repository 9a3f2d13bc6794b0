import asyncio
import contextlib
import random

import pytest
from waiting_for_tests import until
from yarl import URL

from kvlab import http1, kernel_reads
from kvlab.http1 import Pool, Wire
from kvlab.http_message import BadResponse, Chunks, head_of, parse_head

BODY = b"5\r\nhello\r\n1;name=value\r\n \r\nA\r\n0123456789\r\n0\r\n\r\n"
TEXT = b"hello 0123456789"


def decoded(pieces):
    chunks = Chunks()
    text = b"".join(chunks.feed(piece) for piece in pieces)
    return text, chunks.done


def test_chunks_cut_anywhere_are_put_together():
    for cut in range(1, len(BODY)):
        assert decoded([BODY[:cut], BODY[cut:]]) == (TEXT, True), cut
    assert decoded([BODY[i : i + 1] for i in range(len(BODY))]) == (TEXT, True)
    rng = random.Random(2)
    for _ in range(100):
        cuts = sorted(rng.sample(range(1, len(BODY)), 5))
        assert decoded([BODY[a:b] for a, b in zip([0, *cuts], [*cuts, len(BODY)], strict=True)]) == (TEXT, True)


def test_a_body_is_not_over_before_its_last_chunk_and_trailers():
    assert decoded([BODY[:-2]]) == (TEXT, False)
    assert decoded([BODY[:-7]])[1] is False
    assert decoded([b"0\r\nx-a: b\r\n"]) == (b"", False)
    assert decoded([b"0\r\nx-a: b\r\n\r\n"]) == (b"", True)


@pytest.mark.parametrize("size", [1, 9, 15, 16, 17, 255, 256, 4095, 4096])
def test_a_whole_chunk_is_told_by_its_length_alone_and_no_other_read_is(size):
    whole = b"%x\r\n%s\r\n" % (size, b"x" * size)
    assert Chunks().feed(whole) == b"x" * size
    assert Chunks().feed(whole[:-1]) == b""  # not yet
    chunks = Chunks()
    assert (chunks.feed(whole + whole[:3]), chunks.feed(whole[3:])) == (b"x" * size, b"x" * size)
    with pytest.raises(BadResponse):
        Chunks().feed(b"%x\r\n%s\r\n" % (size, b"x" * (size + 2)))


@pytest.mark.parametrize("body", [b"zz\r\n", b"-5\r\n", b"1_0\r\n", b"\r\n", b"1\r\nabc\r\n"])
def test_broken_chunks_are_refused(body):
    with pytest.raises(BadResponse):
        Chunks().feed(body)


def test_heads():
    assert parse_head(b"HTTP/1.1 200 OK\r\nA-b:  c \r\nd:e:f") == (200, b"HTTP/1.1", {"a-b": "c", "d": "e:f"})
    assert parse_head(b"HTTP/1.0 429")[0] == 429
    for bad in (b"SSH-2.0-x", b"HTTP/2 200", b"HTTP/1.1 OK", b""):
        with pytest.raises(BadResponse):
            parse_head(bad)


def test_requests():
    head = head_of("POST", URL("http://h:1/a?b=c"), {"Authorization": "Bearer k"}, 3)
    assert head.startswith(b"POST /a?b=c HTTP/1.1\r\nHost: h:1\r\n") and head.endswith(b"\r\n\r\n")
    assert b"\r\nContent-Length: 3\r\n" in head and b"\r\nAuthorization: Bearer k\r\n" in head
    assert b"Host: [::1]:1\r\n" in head_of("GET", URL("http://[::1]:1/"), {}, 0)


@pytest.fixture(autouse=True, params=["kernel", "process"])
def stamps(request, monkeypatch):
    """Both ways of reading."""
    if request.param == "process":
        monkeypatch.setattr(kernel_reads, "available", lambda: False)


class Server:
    """Answers each request with the next of the given byte strings, in the given pieces."""

    def __init__(self, *answers, hang_up=False):
        self.answers, self.hang_up, self.connections, self.requests = list(answers), hang_up, 0, []

    async def __aenter__(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = URL(f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}/x")
        return self

    async def __aexit__(self, *_):
        self.server.close()

    async def _serve(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError):
            while self.answers:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                answer = self.answers.pop(0)
                for piece in answer if isinstance(answer, list) else [answer]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.02)
                if self.hang_up:
                    break
            writer.close()


async def get(pool, server):
    wire, got = Wire(), []
    await pool.request("GET", server.url, {}, b"", wire, lambda *given: got.extend(zip(*given, strict=True)))
    return wire, b"".join(data for data, _ in got), got


def exchange(*answers, times=1, hang_up=False, reuse=True):
    async def go():
        async with Server(*answers, hang_up=hang_up) as server, Pool(reuse=reuse) as pool:
            results = [await get(pool, server) for _ in range(times)]
            return results, server

    return asyncio.run(go())


OK = b"HTTP/1.1 200 OK\r\n"
COUNTED = OK + b"Content-Length: 2\r\n\r\nhi"


@pytest.mark.parametrize(
    "answer",
    [
        COUNTED,
        [COUNTED[:9], COUNTED[9:30], COUNTED[30:]],
        OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n0\r\n\r\n",
        [OK + b"transfer-encoding: Chunked\r\n\r\n1\r", b"\nh\r\n1\r\ni\r\n", b"0\r\n\r\n"],
        [b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n" + COUNTED[:20], COUNTED[20:]],
    ],
)
def test_bodies_are_read_to_their_end_and_the_connection_is_used_again(answer):
    results, server = exchange(answer, COUNTED, times=2)
    assert [body for _, body, _ in results] == [b"hi", b"hi"]
    assert server.connections == 1 and results[0][0].connect_s > 0 and results[1][0].connect_s == 0.0
    assert results[0][0].status == 200


def test_a_body_may_end_with_the_connection():
    results, server = exchange(OK + b"\r\nhi", COUNTED, times=2, hang_up=True)
    assert [body for _, body, _ in results] == [b"hi", b"hi"] and server.connections == 2


@pytest.mark.parametrize("head", [OK + b"Connection: close\r\n", b"HTTP/1.0 200 OK\r\n"])
def test_a_server_that_closes_is_not_written_to_again(head):
    _, server = exchange(head + b"Content-Length: 2\r\n\r\nhi", COUNTED, times=2)
    assert server.connections == 2


def test_every_read_has_its_own_stamp():
    (wire, _, got), *_ = exchange([OK + b"Content-Length: 2\r\n\r\n", b"h", b"i"])[0]
    assert [data for data, _ in got] == [b"h", b"i"]
    assert wire.ready < got[0][1] < got[1][1]


@pytest.mark.parametrize(
    "answer",
    [b"", OK, OK + b"Content-Length: 3\r\n\r\nhi", OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n"],
)
def test_a_connection_that_ends_too_early_is_an_error(answer):
    with pytest.raises(OSError):
        exchange(answer, hang_up=True)


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n\r\n", OK + b"Content-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx"]
)
def test_what_is_not_understood_is_refused(answer):
    with pytest.raises(BadResponse):
        exchange(answer)


def test_an_endless_head_is_refused():
    with pytest.raises(BadResponse):
        exchange(OK + b"x" * 100_000)


def test_connections_of_their_own_say_so():
    _, server = exchange(COUNTED, COUNTED, times=2, reuse=False)
    assert server.connections == 2 and all(b"Connection: close" in request for request in server.requests)


def test_an_idle_connection_is_not_risked(monkeypatch):
    """A server may close it in the moment in which the next request is written."""
    monkeypatch.setattr(http1, "IDLE_REUSE_S", 0.05)

    async def go():
        async with Server(COUNTED, COUNTED) as server, Pool() as pool:
            await get(pool, server)
            await asyncio.sleep(0.1)
            await get(pool, server)
            return server.connections

    assert asyncio.run(go()) == 2


def test_a_connection_that_was_closed_while_idle_is_replaced():
    async def go():
        async with Server(COUNTED, COUNTED, hang_up=True) as server, Pool() as pool:
            await get(pool, server)
            await asyncio.to_thread(until, lambda: not any(c.reusable for kept in pool._idle.values() for c in kept))
            return (await get(pool, server))[1], server.connections

    assert asyncio.run(go()) == (b"hi", 2)


def test_what_a_sink_raises_reaches_the_caller():
    async def go():
        async with Server(COUNTED) as server, Pool() as pool:
            await pool.request("GET", server.url, {}, b"", Wire(), lambda data, t: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(go())
