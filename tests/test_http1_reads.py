"""Reads are stamped when they come, and decoded some at a time."""

import asyncio
import json
import os
import random

import pytest

from kvlab.answer import Answer
from kvlab.client import body, send
from kvlab.config import LoadConfig
from kvlab.fake_server import FakeServer
from kvlab.http1 import LARGE_BYTES, MAX_WAITING, Connection, Wire, clock
from kvlab.load import run_load
from kvlab.workload import Request


class Silent:
    """A transport that takes everything and does nothing."""

    def write(self, data):
        pass

    def abort(self):
        pass

    def get_write_buffer_size(self):
        return 0

    def get_extra_info(self, name):
        return None if name == "sslcontext" else self

    def fileno(self):
        return os.open(os.devnull, os.O_WRONLY)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def framed(body):
    return b"%x\r\n%s\r\n" % (len(body), body)


def fed(reads, *, end):
    """What the sink got from reads that arrive one by one; `end` completes the body, or cancels the request."""
    got = []

    def keep(payloads, stamps):
        got.extend(zip(payloads, stamps, strict=True))

    async def drive():
        connection = Connection()
        connection.connection_made(Silent())
        task = asyncio.create_task(connection.exchange(b"x", Wire(), keep))
        await asyncio.sleep(0)
        for read in [HEAD, *reads]:
            connection.data_received(read)
        before = len(got)
        if end is None:
            task.cancel()
        else:
            connection.data_received(end)
        await asyncio.gather(task, return_exceptions=True)
        return before

    return asyncio.run(drive()), got


def test_reads_are_stamped_at_once_and_decoded_together():
    events = [framed(b"data: %d\n\n" % k) for k in range(4 * MAX_WAITING)]
    before, got = fed(events, end=b"0\r\n\r\n")
    assert 2 * MAX_WAITING < before <= len(events)  # constant memory: not more than one batch is put aside
    assert [data for data, _ in got] == [b"data: %d\n\n" % k for k in range(len(events))]
    stamps = [t for _, t in got]
    assert stamps == sorted(stamps) and len(set(stamps)) == len(events)


def test_streams_in_step_do_not_decode_in_step():
    counts = {fed([framed(b"data: x\n\n")] * k, end=None)[0] for k in [MAX_WAITING - 1] * MAX_WAITING}
    assert len(counts) > MAX_WAITING // 2


def test_what_was_put_aside_is_not_lost_with_the_request():
    _, got = fed([framed(b"data: a\n\n"), framed(b"data: b\n\n")], end=None)
    assert [data for data, _ in got] == [b"data: a\n\n", b"data: b\n\n"]


def test_large_reads_do_not_pile_up():
    big = framed(b"data: " + b"x" * LARGE_BYTES + b"\n\n")
    before, got = fed([big] * 3, end=None)
    assert before == 3


def test_anything_unusual_is_decoded_at_once():
    for odd in (framed(b"data: a\n\n")[:-1], framed(b"data: a\r\n\r\n"), framed(b"da"), b"4\r\ndata"):
        before, got = fed([framed(b"data: 0\n\n"), odd], end=None)
        assert before >= 1


def test_a_request_leaves_at_once_not_at_the_end_of_a_round():
    """uvloop keeps what is written until its current round is over; a start stamp would be too early by that."""

    async def measured():
        late = []

        async def serve(reader, writer):
            pass

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
        connection._transport.write = late.append  # only what the kernel does not take at once may go this way
        task = asyncio.create_task(connection.exchange(b"x" * 100, Wire(), lambda data, t: None))
        await asyncio.sleep(0)
        task.cancel()
        server.close()
        await asyncio.gather(task, return_exceptions=True)
        return late

    assert asyncio.run(measured()) == []


# -- from bytes to tokens -----------------------------------------------------------------------------------------


def event(text, ids, finish=None):
    choice = {"index": 0, "text": text, "finish_reason": finish, "token_ids": ids}
    return b"data: " + json.dumps({"choices": [choice]}, ensure_ascii=False).encode() + b"\n\n"


USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\n'
STREAM = [
    event("", []),
    event("a", [1]),
    event("ü€😀", [2, 3]),
    b": a comment\n\n" + event("b", [4]),
    event("c", [5]).replace(b"\n", b"\r\n"),
    event("d", [6]) + event("e", [7, 8]),
    event("f", [9], "length"),
    USAGE + b"data: [DONE]\n\n",
]
TOKENS = [1, 2, 1, 1, 1, 2, 1]


def answer_of(pieces):
    """What is understood of a response that arrives in these pieces."""
    answer = Answer()

    async def drive():
        connection = Connection()
        connection.connection_made(Silent())
        task = asyncio.create_task(connection.exchange(b"x", Wire(), answer.feed_all))
        await asyncio.sleep(0)
        for piece in pieces:
            connection.data_received(piece)
        await asyncio.wait_for(task, 5)

    asyncio.run(drive())
    return answer


def response(events):
    return HEAD + b"".join(map(framed, events)) + b"0\r\n\r\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 500, 10**6])
def test_a_response_cut_into_pieces_of_any_size_holds_the_same_tokens(size):
    data = response(STREAM)
    answer = answer_of([data[k : k + size] for k in range(0, len(data), size)])
    assert answer.event_tokens() == TOKENS and answer.why_not(3, 9) is None
    assert answer.times == sorted(answer.times)


def test_a_response_cut_at_random_holds_the_same_tokens():
    data, rng = response(STREAM * 1), random.Random(5)
    for _ in range(300):
        cuts = sorted(rng.sample(range(1, len(data)), rng.randint(1, 12)))
        pieces = [data[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert answer_of(pieces).event_tokens() == TOKENS


def test_one_event_in_several_chunks_and_several_events_in_one_chunk():
    whole = b"".join(STREAM)
    for size in (5, 40, 10**6):
        assert answer_of([response([whole[k : k + size] for k in range(0, len(whole), size)])]).event_tokens() == TOKENS


def test_an_event_of_a_megabyte_between_small_ones():
    big = event("x" * 2**20, [2, 3])
    data = response([event("a", [1]), big, event("b", [4]), event("c", [5, 6, 7, 8, 9], "length"), STREAM[-1]])
    answer = answer_of([data[k : k + 65536] for k in range(0, len(data), 65536)])
    assert answer.event_tokens() == [1, 2, 1, 5] and answer.why_not(3, 9) is None


def test_a_prompt_larger_than_the_sockets_buffer_arrives_whole_and_holds_nobody_up():
    """50,000 token ids are a third of a megabyte; here are 20, and a server that reads nothing for a while."""
    body = bytes(range(256)) * 80_000

    async def drive():
        got, may_read = bytearray(), asyncio.Event()

        async def serve(reader, writer):
            await may_read.wait()
            while len(got) < len(body):
                got.extend(await reader.read(2**20))
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")

        server = await asyncio.start_server(serve, "127.0.0.1", 0, limit=2**16)
        port = server.sockets[0].getsockname()[1]
        _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
        task = asyncio.create_task(connection.exchange(body, Wire(), lambda data, t: None))
        await asyncio.sleep(0)  # a blocking write would never return from here
        may_read.set()
        await task
        server.close()
        return bytes(got)

    assert asyncio.run(drive()) == body


def test_long_prompts_are_serialised_before_anything_is_timed(monkeypatch):
    """Serialising 50,000 ids takes milliseconds, in which no other stream would be stamped."""
    made = []
    monkeypatch.setattr("kvlab.driver.body", lambda *given: made.append(clock()) or body(*given))
    prompts = [Request(k, list(range(100, 100 + n)), 3) for k, n in enumerate((32, 2000, 32, 2000))]
    load = LoadConfig(concurrency=2, requests=4, input_tokens=32, output_tokens=3)
    sent = []
    monkeypatch.setattr("kvlab.driver.send", lambda *given, **more: sent.append(clock()) or send(*given, **more))
    with FakeServer() as fake:
        result = run_load(fake.endpoint, load, nonce=1, requests=prompts, progress=False)
    assert result.requests["ok"].all() and len(made) == len(sent) == 4
    assert max(made) < min(sent)
