"""A process that has imported vLLM and waits; each server is a fork of it, and so spared the imports.

    python -P preloaded.py --control FD --owner PID [--listen PATH]

It ends with its owner. On the control socket, and on those that connect to PATH, it is sent one server at a time: a
file with what is wanted as JSON, the read end of the leash's rope, the log, and a socket on which it tells {"pid"} at
once (or {"refused"}), and {"exit"} in the end. The fork is a leash (kvlab.leash), and the server a fork of that one,
parent and child as ever.

A fork keeps the environment and the command line that others see of the process it came from. Room is reserved in the
first for what tells servers apart, and both are overwritten in place: kvlab finds its servers by them.

Standard library only, beside vLLM itself.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import ctypes
import importlib.util
import json
import os
import select
import signal
import socket
import sys
import threading
import traceback
from pathlib import Path

LOG_START = 1 << 16  # bytes of what the imports said that each server's log begins with


def _sibling(name: str):
    """A module of this folder, which is not in the path: its files have names of the standard library's modules."""
    spec = importlib.util.spec_from_file_location(f"kvlab_{name}", Path(__file__).with_name(f"{name}.py"))
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


leash, forked_engine = _sibling("leash"), _sibling("forked_engine")
ROOM = leash.ROOM


def _area(first: int) -> tuple[int, int]:
    """Address and length of the command line (45) or of the environment (47) of this process, as others see them."""
    with open("/proc/self/stat", encoding="utf-8") as file:
        fields = file.read().rpartition(")")[2].split()
    return int(fields[first]), int(fields[first + 1]) - int(fields[first])


def _new_words(env: dict[str, str], old: dict[str, str]) -> bytes:
    """What `env` has beside `old`, to be written over the room; ValueError where there is not enough."""
    words = "".join(f"{name}={value}\0" for name, value in env.items() if old.get(name) != value)
    left = len(old.get(ROOM, "")) - len(words.encode())
    if left < 0:
        raise ValueError("no room for the marks in the environment")
    return f"{words}{ROOM}={'x' * left}".encode()


def _show_environment(words: bytes) -> None:
    start, length = _area(47)
    at = (b"\0" + ctypes.string_at(start, length)).find(f"\0{ROOM}=".encode())
    if at >= 0:
        ctypes.memmove(start + at, words, len(words))


def _show_command(words: list[str]) -> None:
    start, length = _area(45)
    ctypes.memmove(start, "\0".join(words).encode()[: length - 1].ljust(length, b"\0"), length)


class Child:
    """A forked process, for its parent: what the leash uses of subprocess.Popen."""

    def __init__(self, pid: int):
        self.pid, self.returncode = pid, None

    def poll(self) -> int | None:
        """Its exit code, -n for a signal; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Its exit code; subprocess.TimeoutExpired where it runs on."""
        return leash.wait_for(self, timeout)

    def terminate(self) -> None:
        """SIGTERM."""
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _end(run) -> None:
    """Run it, then end this process as an interpreter does; never returns into what was forked."""
    code = 1
    try:
        code = run() or 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    with contextlib.suppress(BaseException):
        threading._shutdown()
        atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
    os._exit(code & 0xFF)


class Preloaded:
    """The process itself. `kept`: descriptors that the imports have left open, for everybody."""

    def __init__(self, control: int, owner: int, listener: socket.socket | None = None):
        self.controls = [socket.socket(fileno=control)]
        self.listeners = [listener] if listener else []
        self.owner = os.pidfd_open(owner)
        self.said = b""
        with contextlib.suppress(OSError):  # a file, if its owner started it
            self.said = os.pread(1, LOG_START, 0)
        self.env = dict(os.environ)
        self.told: dict[int, socket.socket] = {}  # leash -> where its end is told
        self.kept = {int(name) for name in os.listdir("/proc/self/fd")} - {
            control,
            self.owner,
            *(s.fileno() for s in self.listeners),
        }
        self.wake, write_end = os.pipe()
        os.set_blocking(write_end, False)
        signal.set_wakeup_fd(write_end)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Fork servers until the owner ends, or nobody is left who could ask and the servers have ended."""
        while self.told or self.controls or self.listeners:
            ready, _, _ = select.select([self.wake, self.owner, *self.controls, *self.listeners], [], [])
            if self.owner in ready:
                return
            if self.wake in ready:
                os.read(self.wake, 512)
                self._tell_ends()
            for listener in [s for s in self.listeners if s in ready]:
                self.controls.append(listener.accept()[0])
            for control in [s for s in self.controls if s in ready]:
                self._hear(control)

    def _hear(self, control: socket.socket) -> None:
        message, fds = b"", []
        with contextlib.suppress(ConnectionError):
            message, fds, _, _ = socket.recv_fds(control, 1, 4)
        if message == b"+":
            self._start(*fds)
        elif message == b"-":  # nobody else will connect
            while self.listeners:
                self.listeners.pop().close()
        else:
            self.controls.remove(control)
            control.close()

    def _tell_ends(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                with contextlib.suppress(OSError), self.told.pop(found[0]) as there:
                    there.send(json.dumps({"exit": os.waitstatus_to_exitcode(found[1])}).encode())

    def _start(self, wanted: int, rope: int, log: int, told: int) -> None:
        there = socket.socket(fileno=told)
        with os.fdopen(wanted, "rb") as file:
            request = json.load(file)
        try:
            if len(os.listdir("/proc/self/task")) > 1:
                raise RuntimeError("the imports left threads running")
            words = _new_words(request["env"], self.env)
            pid = os.fork()
        except (OSError, ValueError, RuntimeError) as error:
            there.send(json.dumps({"refused": str(error)}).encode())
            there.close()
        else:
            if pid == 0:
                _end(lambda: self._hold(request, words, rope, log))
            self.told[pid] = there
            with contextlib.suppress(OSError):
                there.send(json.dumps({"pid": pid}).encode())
        os.close(rope)
        os.close(log)

    def _hold(self, request: dict, words: bytes, rope: int, log: int) -> int:
        """In the fork: the leash of one server."""
        os.setsid()
        with open(os.devnull, encoding="utf-8") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.write(2, self.said)
        signal.set_wakeup_fd(-1)
        self._close_but(rope)
        os.environ.clear()
        os.environ.update(forked_engine.with_libraries(request["env"]))
        _show_environment(words)
        _show_command([sys.executable, leash.__file__])
        os.chdir(request["folder"])
        arguments = ["--fd", str(rope), "--grace", str(request["grace_s"]), "--remove", request["remove"]]
        return leash.main([*arguments, "--", *request["argv"]], spawn=lambda argv: self._spawn(argv, request["cores"]))

    def _close_but(self, *kept: int) -> None:
        for name in os.listdir("/proc/self/fd"):
            if int(name) not in self.kept | {0, 1, 2, *kept}:
                with contextlib.suppress(OSError):
                    os.close(int(name))

    def _spawn(self, argv: list[str], cores: list[int]) -> Child:
        """The server as a child of the leash that calls this. `argv`: the words after vLLM's command."""
        holder, pid = os.getpid(), os.fork()
        if pid == 0:
            _end(lambda: self._become_server(argv, cores, holder))
        with contextlib.suppress(OSError):  # whichever of the two is first
            os.setpgid(pid, pid)
        return Child(pid)

    def _become_server(self, argv: list[str], cores: list[int], holder: int) -> None:
        os.setpgid(0, 0)
        leash.die_with(holder)
        signal.set_wakeup_fd(-1)
        for number in (*leash.ENDING, signal.SIGCHLD):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._close_but()
        if cores:
            os.sched_setaffinity(0, cores)
        _show_command([sys.executable, "-m", forked_engine.CLI, *argv])
        forked_engine.new_seeds()
        sys.argv = [sys.argv[0], *argv]
        forked_engine.run()


def main() -> None:
    """Import everything, then fork servers for the owner."""
    parser = argparse.ArgumentParser(prog="preloaded")
    parser.add_argument("--control", type=int, required=True)
    parser.add_argument("--owner", type=int, required=True)
    parser.add_argument("--listen")
    options = parser.parse_args()
    listener = None
    if options.listen:  # before the imports, so that a second one waits for them instead of importing too
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        Path(options.listen).unlink(missing_ok=True)  # of one that was killed
        listener.bind(options.listen)
        listener.listen()
    # No gc.freeze(): without the imported objects in its count, the collector of a server runs far more often.
    forked_engine.import_all()
    Preloaded(options.control, options.owner, listener).serve()


if __name__ == "__main__":
    forked_engine.begin_with_libraries()
    main()
