"""Reads are stamped when they come, and decoded some at a time."""

import asyncio
import os

from kvlab.http1 import MAX_WAITING, MAX_WAITING_BYTES, Connection, Wire


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

    async def drive():
        connection = Connection()
        connection.connection_made(Silent())
        task = asyncio.create_task(connection.exchange(b"x", Wire(), lambda data, t: got.append((data, t))))
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
    big = framed(b"data: " + b"x" * MAX_WAITING_BYTES + b"\n\n")
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
