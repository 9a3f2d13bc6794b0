"""Reads that the kernel stamps, many connections in one turn."""

import asyncio
import contextlib
import os
import random
import socket
import time

import pytest

from kvlab import kernel_reads
from kvlab.answer import Answer, plain_events
from kvlab.config import LoadConfig
from kvlab.http1 import clock
from kvlab.kernel_reads import LINGER_S, Reader
from kvlab.load import run_load
from kvlab.null_server import NullServer

pytestmark = pytest.mark.skipif(not kernel_reads.available(), reason="the kernel stamps on Linux")


class Pair:
    """A connection over loopback: `far` writes, `near` is read."""

    def __enter__(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            self.far = socket.create_connection(server.getsockname())
            self.near, _ = server.accept()
        self.far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.near.setblocking(False)
        self.got, self.ends = [], []
        return self

    def __exit__(self, *_):
        self.far.close()
        self.near.close()

    def watch(self, reader):
        reader.watch(self.near.fileno(), lambda data, t: self.got.append((data, t)), self.ends.append)


@contextlib.contextmanager
def reading(*pairs):
    reader = Reader()
    for pair in pairs:
        pair.watch(reader)
    try:
        yield reader
    finally:
        reader.close()


async def stamping():
    """Returns when the kernel has begun to stamp: it takes a moment after the first who asks."""
    with Pair() as pair, reading(pair) as reader:
        for _ in range(1000):
            pair.far.send(b"x")
            await asyncio.sleep(0.005)
            if reader.stamped:
                return
    pytest.skip("this kernel stamps nothing")


def test_a_busy_client_does_not_delay_its_stamps():
    async def go():
        await stamping()
        with Pair() as pair, reading(pair):
            sent = clock()
            pair.far.send(b"x")
            time.sleep(0.2)  # the event loop stands still
            free_again = clock()
            while not pair.got:
                await asyncio.sleep(0.001)
            return sent, pair.got[0][1], free_again

    sent, stamp, free_again = asyncio.run(go())
    assert sent - 1e-4 < stamp < free_again - 0.1


def test_without_stamps_of_the_kernel_the_clock_is_read_and_nothing_waits(monkeypatch):
    async def go():
        monkeypatch.setattr(kernel_reads, "SO_TIMESTAMPNS", 30000)
        monkeypatch.setattr(kernel_reads.time, "sleep", lambda s: 1 / 0)
        with Pair() as pair, reading(pair) as reader:
            reader._dense = True
            began = clock()
            pair.far.send(b"a")
            while not pair.got:
                await asyncio.sleep(0.001)
            return began, pair.got, clock(), reader.stamped

    began, ((data, t),), ended, stamped = asyncio.run(go())
    assert data == b"a" and began < t < ended and not stamped


def test_a_wall_clock_that_is_set_spoils_no_stamp(monkeypatch):
    async def go():
        await stamping()
        with Pair() as pair, reading(pair):
            began = clock()
            pair.far.send(b"a")
            monkeypatch.setattr(kernel_reads, "wall", lambda: time.time() + 3600)
            while not pair.got:
                await asyncio.sleep(0.001)
            return began, pair.got[0][1], clock()

    began, t, ended = asyncio.run(go())
    assert began < t < ended


def test_it_waits_only_where_many_connections_are_dense_and_none_is_quick():
    async def go():
        with contextlib.ExitStack() as stack:
            pairs = [stack.enter_context(Pair()) for _ in range(20)]
            with reading(*pairs) as reader:
                verdicts = []
                for rate in (100, 3000, 100_000):  # of all; 3,000 is 150 of each
                    reader._count, reader._since = 0, 0.0
                    reader._measure_density(1.0, rate)
                    verdicts.append(reader._dense)
                return verdicts

    assert asyncio.run(go()) == [False, True, False]


def test_while_it_waits_it_reads_what_comes_by_then(monkeypatch):
    async def go():
        await stamping()
        with Pair() as one, Pair() as two, reading(one, two) as reader:
            reader._dense = reader.stamped = True
            waited = []
            monkeypatch.setattr(kernel_reads.time, "sleep", lambda s: (waited.append(s), two.far.send(b"2")))
            one.far.send(b"1")
            while not (one.got and two.got):
                await asyncio.sleep(0.001)
            return waited[0], one.got, two.got

    waited, one, two = asyncio.run(go())
    assert waited == LINGER_S and one[0][0] == b"1" and two[0][0].startswith(b"2")


def test_ends_are_told_with_their_reason():
    async def go():
        with Pair() as ended, Pair() as broken, reading(ended, broken) as reader:
            ended.far.shutdown(socket.SHUT_WR)
            broken.far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            broken.far.close()
            while not (ended.ends and broken.ends):
                await asyncio.sleep(0.001)
            for pair in (ended, broken):
                reader.forget(pair.near.fileno())
            return ended.ends[0], broken.ends[0]

    end, reset = asyncio.run(go())
    assert end is None and isinstance(reset, ConnectionResetError)


def test_what_is_forgotten_stays_open_and_is_not_read():
    async def go():
        with Pair() as pair, reading(pair) as reader:
            reader.forget(pair.near.fileno())
            reader.forget(pair.near.fileno())
            pair.far.send(b"x")
            await asyncio.sleep(0.02)
            os.fstat(pair.near.fileno())
            return pair.got, pair.near.recv(10)

    assert asyncio.run(go()) == ([], b"x")


def test_one_that_closes_another_in_the_same_turn():
    async def go():
        with Pair() as one, Pair() as two, contextlib.closing(Reader()) as reader:
            got = []

            def take_and_forget(other):
                return lambda data, t: (got.append(data), reader.forget(other.near.fileno()))

            for pair, other in ((one, two), (two, one)):
                pair.far.send(b"x")
                reader.watch(pair.near.fileno(), take_and_forget(other), pair.ends.append)
            while not got:
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.02)
            return got

    assert asyncio.run(go()) == [b"x"]


def test_a_load_says_who_stamped(monkeypatch):
    load = LoadConfig(concurrency=4, requests=8, input_tokens=32, output_tokens=4)
    with NullServer(0.02, 0.005) as server:
        by_kernel = run_load(server.endpoint, load, nonce=1, progress=False)
        monkeypatch.setattr(kernel_reads, "available", lambda: False)
        by_process = run_load(server.endpoint, load, nonce=2, progress=False)
    assert by_process.certificate["stamps"] == "process"
    assert by_kernel.certificate["stamps"] in ("kernel", "process")
    for result in (by_kernel, by_process):
        assert result.requests["ok"].all() and (result.requests["ttft_s"] > 0.0199).all()


# -- many reads at once ------------------------------------------------------------------------------------------


def line(text=" a", ids="[7]", finish="null", more=""):
    return (
        f'data: {{"choices":[{{"index":0,"text":"{text}","finish_reason":{finish},"token_ids":{ids}}}]{more}}}\n\n'
    ).encode()


SHAPES = [
    *[line(ids=ids) for ids in ("[7]", "[1,2,3]", "[]", "null")],
    line(r"\"finish_reason\":\"stop\" \"token_ids\":[1,2] \"error\":"),
    line(r"data: \n\n é😀"),
    line(finish='"length"'),
    line(finish='"stop"', ids="[1,2]"),
    line(more=',"usage":null'),
    line(more=',"usage":{"prompt_tokens":3,"completion_tokens":9}'),
    line(more=',"prompt_token_ids":[1,2,3,4]'),
    line().replace(b"data: ", b"data:"),
    line().replace(b"\n", b"\r\n"),
    line().replace(b"\n\n", b"\r\r"),
    line() + line(ids="[8,9]"),
    line() + b": comment\n\n",
    b": comment\n\n" + line(),
    b"id: 1\n" + line(),
    b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":9}}\n\n',
    b'data: {"choices":[{"text":"a","token_ids":[1]}]}\n\n',
    b'data: {"choices":[{"finish_reason":null,"text":"a"}]}\n\n',
    b'data: {"error":{"message":"gone"},"finish_reason":null,"token_ids":[1]}\n\n',
    b'event: error\ndata: {"message":"gone"}\n\n',
    b"data: [DONE]\n\n",
    line()[:-1],
    b"\n",
    line()[:30],
    line()[30:],
]


def state(answer):
    return answer.times, answer.tokens, answer.finish_reason, answer.usage, answer.done, answer.error


def fed(reads, *, at_once):
    answer = Answer()
    stamps = [float(k) for k in range(len(reads))]
    try:
        if at_once:
            answer.feed_all(reads, stamps)
        else:
            for data, t in zip(reads, stamps, strict=True):
                answer.feed(data, t)
        answer.end(len(reads))
    except Exception as error:
        return repr(error)
    return state(answer)


def test_reads_told_at_once_hold_what_they_hold_one_by_one():
    rng = random.Random(3)
    plain = [line(ids=ids) for ids in ("[7]", "[1,2,3]", "[7]", "[12,345]")]
    for _ in range(3000):
        reads = rng.choices(plain, k=rng.randint(1, 8))
        for _ in range(rng.randint(0, 2)):
            reads.insert(rng.randint(0, len(reads)), rng.choice(SHAPES))
        assert fed(reads, at_once=True) == fed(reads, at_once=False), reads


def test_only_plain_events_are_told_at_once():
    assert plain_events([line(), line(ids="[1,2,3]"), line(r"\"token_ids\":[1,2]")]) == [1, 3, 1]
    plain = line(more=',"prompt_token_ids":[1,2,3,4]')
    assert plain_events([plain, plain]) == [1, 1]
    told = [shape for shape in SHAPES if plain_events([line(), shape, line()]) is not None]
    assert len(told) == 7, told


def test_what_is_held_back_belongs_to_the_next_reads():
    whole = line(ids="[1,2]")
    assert fed([whole[:40], whole[40:], whole], at_once=True)[1] == [2, 2]
    answer = Answer()
    answer.feed_all([whole[:40]], [1.0])
    answer.feed_all([whole[40:]], [2.0])
    answer.feed_all([whole], [3.0])
    assert (answer.times, answer.tokens) == ([2.0, 3.0], [2, 2])
