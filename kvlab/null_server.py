"""A server that streams ready-made events at known times: `python -m kvlab.null_server TTFT_S ITL_S` prints its port.

It speaks just enough of the protocol for kvlab's own client, on the fastest event loop there is, in a process of its
own: what the client reads late is its own doing, and a little of this one's. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from typing import Any

from kvlab.client import FAKE_HEADER, Endpoint
from kvlab.http1 import clock
from kvlab.load_worker import loop_factory

MODEL = "null"
HEAD = f"HTTP/1.1 200 OK\r\n{FAKE_HEADER}: 1\r\n"
TIMER_S = 0.001
GOLDEN = 0.618034  # spreads phases evenly, however many there are


def _chunk(values: dict[str, Any]) -> bytes:
    event = b"data: " + json.dumps(values, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%s\r\n" % (len(event), event)


def _content(finish: str | None) -> bytes:
    choice = {"index": 0, "text": " word", "logprobs": None, "finish_reason": finish, "token_ids": [7]}
    return _chunk({"id": "cmpl-0", "object": "text_completion", "created": 1, "model": MODEL, "choices": [choice]})


EVENT, LAST = _content(None), _content("length")
END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


class _Stream(asyncio.Protocol):
    """One connection. The second event is later by a share of the gap, so that streams do not run in step."""

    count = 0

    def __init__(self, ttft_s: float, itl_s: float):
        self.ttft_s, self.itl_s, self.data, self.left = ttft_s, itl_s, b"", 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """asyncio: open."""
        self.transport, self.loop = transport, asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        """asyncio: bytes of a request; it is answered when it is whole."""
        now = clock()
        self.data += data
        head, found, body = self.data.partition(b"\r\n\r\n")
        length = head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0]
        if not found or len(body) < int(length or 0):
            return
        self.data = b""
        if not head.startswith(b"POST"):
            self.transport.write(f"{HEAD}content-length: 0\r\n\r\n".encode())
            return
        asked = json.loads(body)
        self.left = asked["max_tokens"]
        usage = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": self.left}
        self.usage = _chunk({"choices": [], "usage": usage})
        self.transport.write(f"{HEAD}content-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        _Stream.count += 1
        self.phase = self.itl_s * (_Stream.count * GOLDEN % 1)
        self._wait(now + self.ttft_s)

    def _wait(self, due: float) -> None:
        """Timers count whole milliseconds; the last one is spent in turns of the loop, so that nothing is early."""
        left = due - clock()
        if left > 2 * TIMER_S:
            self.loop.call_later(left - TIMER_S, self._wait, due)
        elif left > 0:
            self.loop.call_soon(self._wait, due)
        else:
            self._next(due)

    def _next(self, due: float) -> None:
        if self.transport.is_closing():
            return
        self.left -= 1
        if not self.left:
            self.transport.write(LAST + self.usage + END)
            return
        self.transport.write(EVENT)
        due, self.phase = due + self.itl_s + self.phase, 0.0
        self._wait(due)


class NullServer:
    """`with NullServer(ttft_s, itl_s) as server:` serves from another process at `server.endpoint`."""

    def __init__(self, ttft_s: float, itl_s: float):
        self._command = [sys.executable, "-m", "kvlab.null_server", str(ttft_s), str(itl_s)]

    def __enter__(self) -> NullServer:
        self._process = subprocess.Popen(
            self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self.endpoint = Endpoint(f"http://127.0.0.1:{self._process.stdout.readline().strip()}", MODEL)
        return self

    def __exit__(self, *_) -> None:
        self._process.stdin.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


async def _serve(ttft_s: float, itl_s: float) -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Stream(ttft_s, itl_s), "127.0.0.1", 0, backlog=4096)
    print(server.sockets[0].getsockname()[1], flush=True)
    ended = asyncio.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), loop.call_soon_threadsafe(ended.set)), daemon=True).start()
    await ended.wait()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(float(sys.argv[1]), float(sys.argv[2])))
