"""Reads many connections together, each read stamped by the kernel: sockets without TLS on Linux.

A client that wakes up for every event spends more time on waking than on reading. Here the kernel notes when bytes came
(SO_TIMESTAMPNS, socket(7)). So the client may wait for a millisecond where events come densely, and read what is there
by then: fewer wake-ups, and stamps that hold no delay of the client. Only a next request leaves that much later.
`make bench-client` measures what it is worth. Without stamps of the kernel nothing waits, and the clock is read after
each read.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
import sys
import time
from collections.abc import Callable

clock, wall = time.perf_counter, time.time
SO_TIMESTAMPNS = 35  # asm-generic/socket.h; Python has no name for it
READ_BYTES, NOTE_BYTES = 64 * 1024, 64
unpack_time = struct.Struct("@ll").unpack  # struct timespec
LINGER_S = 0.001
DENSE_PER_S = 2 / LINGER_S  # reads of all connections, from which a wait saves wake-ups
QUICK_PER_S = 0.25 / LINGER_S  # of one connection: events that are closer would be read, and stamped, as one
SLOT_S = 0.02  # over which both are counted
STEP_S = 0.001  # a wall clock that moved so far between two wake-ups was set: its stamps cannot be placed

Take = Callable[[bytes, float], None]
Lost = Callable[[Exception | None], None]


def available() -> bool:
    """Whether this system has what `Reader` needs."""
    return sys.platform == "linux"


class Reader:
    """Reads what it watches, within the running event loop. `stamped`: whether the kernel stamped the last reads."""

    def __init__(self):
        self._loop = asyncio.get_running_loop()
        self._epoll = select.epoll()
        self._watched: dict[int, tuple[Callable, Take, Lost]] = {}
        self.stamped = self._dense = False
        self._count, self._since = 0, clock()
        self._offset = wall() - clock()
        self._loop.add_reader(self._epoll.fileno(), self._read)

    def watch(self, descriptor: int, take: Take, lost: Lost) -> None:
        """From now on `take` gets what comes and when it came (s, on `clock`); `lost` the end and its reason."""
        plain = socket.socket(fileno=descriptor)
        with contextlib.suppress(OSError):
            plain.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        self._watched[descriptor] = plain.recvmsg, take, lost
        self._epoll.register(descriptor, select.EPOLLIN)

    def forget(self, descriptor: int) -> None:
        """Reads no more from it, and leaves it open."""
        if descriptor in self._watched:
            receive, _, _ = self._watched.pop(descriptor)
            self._epoll.unregister(descriptor)
            receive.__self__.detach()

    def close(self) -> None:
        """Forgets everything."""
        for descriptor in list(self._watched):
            self.forget(descriptor)
        self._loop.remove_reader(self._epoll.fileno())
        self._epoll.close()

    def _read(self) -> None:
        if self._dense and self.stamped:
            time.sleep(LINGER_S)
        ready = self._epoll.poll(0)
        now = clock()
        offset = wall() - now
        steady, self._offset = abs(offset - self._offset) < STEP_S, offset
        watched, notes = self._watched, ()
        for descriptor, _ in ready:
            if descriptor not in watched:
                continue  # closed by one of those before
            receive, take, lost = watched[descriptor]
            try:
                data, notes, _, _ = receive(READ_BYTES, NOTE_BYTES)
            except BlockingIOError:
                continue
            except OSError as error:
                lost(error)
                continue
            if not data:
                lost(None)
            elif notes and steady:
                seconds, nanoseconds = unpack_time(notes[0][2])
                take(data, seconds - offset + nanoseconds * 1e-9)
            else:
                take(data, clock())
        self.stamped = bool(notes)
        self._measure_density(now, len(ready))

    def _measure_density(self, now: float, reads: int) -> None:
        self._count += reads
        if (passed := now - self._since) > SLOT_S:
            rate = self._count / passed
            self._dense = DENSE_PER_S < rate < QUICK_PER_S * len(self._watched)
            self._count, self._since = 0, now
