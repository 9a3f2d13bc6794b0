"""One more process of a load generator: `python -m kvlab.load_worker`, driven over its standard input and output.

Messages are pickles. In: (Job, zero), then the start time; out: "ready", then the Outcome. It ends with its parent: the
end of its input ends it at once, also in the middle of a phase.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import subprocess
import sys
import threading
import traceback
from typing import Any, BinaryIO

from kvlab.driver import Outcome, open_pool, run_phase, serialise
from kvlab.errors import LoadError
from kvlab.http1 import Pool


class Worker:
    """The parent's side of one worker process; its calls block."""

    def __init__(self):
        # A session of its own: Ctrl-C in a terminal reaches the parent only, which decides.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "kvlab.load_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )

    def tell(self, message: Any) -> None:
        """Sends one message."""
        pickle.dump(message, self._process.stdin, pickle.HIGHEST_PROTOCOL)
        self._process.stdin.flush()

    def hear(self) -> Any:
        """The next message; raises LoadError when the worker has died or failed."""
        try:
            message = pickle.load(self._process.stdout)
        except EOFError:
            raise LoadError(f"A load process ended with status {self._process.wait()}.") from None
        if isinstance(message, BaseException):
            raise LoadError(f"A load process failed: {message}", cause="a defect of the load generator") from message
        return message

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()


def loop_factory():
    """uvloop's loop where it is installed, else asyncio's."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    return uvloop.new_event_loop


def transport() -> str:
    """What carries the requests, for the certificate."""
    return f"kvlab.http1 on {loop_factory().__module__.partition('.')[0]}"


async def _serve(source: BinaryIO, sink: BinaryIO) -> None:
    inbox: asyncio.Queue = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_read, args=(source, loop, inbox), daemon=True).start()
    pool = None
    while True:
        job, zero = await inbox.get()
        pool = pool or Pool(reuse=not job.new_connection)
        prepared, outcome = serialise(job), Outcome()
        await open_pool(pool, job)
        _write(sink, "ready")
        await run_phase(pool, prepared, outcome, zero, await inbox.get())
        _write(sink, outcome)


def _read(source: BinaryIO, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue) -> None:
    while True:
        try:
            message = pickle.load(source)
        except EOFError:
            os._exit(0)
        loop.call_soon_threadsafe(inbox.put_nowait, message)


def _write(sink: BinaryIO, message: Any) -> None:
    pickle.dump(message, sink, pickle.HIGHEST_PROTOCOL)
    sink.flush()


def main() -> None:
    """Serves the parent until it closes the pipe."""
    source, sink = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what anything prints must not get between the messages
    try:
        with asyncio.Runner(loop_factory=loop_factory()) as runner:
            runner.run(_serve(source, sink))
    except BaseException as error:
        traceback.print_exc()
        _write(sink, RuntimeError(f"{type(error).__name__}: {error}"))
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
