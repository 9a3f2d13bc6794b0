"""Hold a server so that it cannot outlive the program that started it, however that program ends.

    python leash.py --fd N [--grace SECONDS] [--remove FOLDER] -- command ...

The leash starts the command and watches file descriptor N, the read end of a pipe whose only write end is in the
parent. End of file there (the parent closed it, or died in any way, SIGKILL included) or SIGTERM ends the command with
everything it started: SIGTERM, a short wait, SIGKILL. Then FOLDER, where the command kept its sockets, is removed.
The command's own exit code passes through; a signal n gives 128+n.

Standard library only, so that it can run isolated from the environment of the server.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable

MARKER = "KVLAB_SERVER_ID"  # in the environment of the leash and of everything under it
ROOM = "KVLAB_ROOM"  # in the environment of a process that forks servers: a variable that is there to be overwritten
GRACE_S = 5.0  # a healthy vLLM ends in 0.4 s; one that hangs in flight or swallowed SIGTERM at start-up never does
LINGER_S = 1.0  # for helpers that end by themselves once the main process is gone, and clean up as they do
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SHM = "/dev/shm/"
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


def main(arguments: list[str], spawn: Callable[[list[str]], subprocess.Popen] | None = None) -> int:
    """Run the command of the command line under the leash; returns its exit code. `spawn`: another way to start it."""
    parser = argparse.ArgumentParser(prog="leash")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--grace", type=float, default=GRACE_S)
    parser.add_argument("--remove", default="")
    parser.add_argument("command", nargs="+")
    options = parser.parse_args(arguments)
    if os.getsid(0) != os.getpid():
        os.setsid()
    wake = _wake_on_signals()
    guard = _fork_guard(options.fd, options.remove)
    try:
        command = (spawn or _spawn)(options.command)
    except OSError as error:
        _say(f"cannot start {options.command[0]}: {error}")
        _remove(options.remove)
        return 127
    _say(f"server process {command.pid}")
    leftovers: set[str] = set()
    while command.poll() is None:
        ready, _, _ = select.select([options.fd, wake], [], [])
        asked = wake in ready and _asked_to_end(wake)
        if asked or options.fd in ready:
            why = "a signal asked for it" if asked else "the program that started it closed it or is gone"
            _say(f"ending the server: {why}")
            leftovers = shared_files(members())
            _terminate(command, options.grace)
    if command.returncode < 0:
        _say(f"the server process was ended by signal {-command.returncode}")
    _sweep(command.pid, spare={os.getpid(), guard})
    remove_shared_files(leftovers)
    _remove(options.remove)
    return command.returncode if command.returncode >= 0 else 128 - command.returncode


def _say(text: str) -> None:
    print(f"[leash] {text}", file=sys.stderr, flush=True)


def _wake_on_signals() -> int:
    """A descriptor that becomes readable at each signal, the number of the signal being the byte."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (*ENDING, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return read_end


def _asked_to_end(wake: int) -> bool:
    return any(number in ENDING for number in os.read(wake, 512))


def _fork_guard(parent_fd: int, folder: str) -> int:
    """A second process that sweeps up when the leash itself is killed; returns its process id."""
    read_end, write_end = os.pipe()  # the write end stays open in the leash only
    guard = os.fork()
    if guard:
        os.close(read_end)
        return guard
    os.close(write_end)
    os.close(parent_fd)
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
    while os.read(read_end, 1):
        pass
    _sweep(None, spare={os.getpid()}, linger_s=0.0)
    _remove(folder)
    os._exit(0)


def _remove(folder: str) -> None:
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _spawn(command: list[str]) -> subprocess.Popen:
    leash = os.getpid()
    # A group of its own: the whole of it can be killed without the leash, which has to look afterwards.
    return subprocess.Popen(command, process_group=0, preexec_fn=lambda: die_with(leash))


def die_with(leash: int) -> None:
    """In a child of the leash: have the kernel kill it with the leash."""
    # The signal follows the spawning thread; the leash has one, so here that is the leash itself.
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != leash:
            os._exit(1)


def wait_for(command, timeout_s: float | None) -> int:
    """The exit code of what has `poll`, asked again and again; subprocess.TimeoutExpired where it runs on."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    while (code := command.poll()) is None:
        if deadline is not None and time.monotonic() > deadline:
            raise subprocess.TimeoutExpired(str(command.pid), timeout_s)
        time.sleep(0.01)
    return code


def _terminate(command: subprocess.Popen, grace_s: float) -> None:
    """End the main process: SIGTERM to it alone, then SIGKILL to its whole group."""
    # The API server ends its own workers; a SIGTERM to all at once makes it hang waiting for them.
    command.terminate()
    try:
        command.wait(grace_s)
    except subprocess.TimeoutExpired:
        _say(f"still there after {grace_s:g} s: killing it")
        _signal_group(command.pid, signal.SIGKILL)
        command.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _sweep(group: int | None, spare: set[int], linger_s: float = LINGER_S) -> None:
    """Kill what is left of the server: its group, and all that carries its mark or is in this session."""
    deadline = time.monotonic() + linger_s
    while (left := members() - spare) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left and group:
        _signal_group(group, signal.SIGKILL)
    for _ in range(100):
        if not (left := members() - spare):
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    _say(f"could not end {sorted(left)}")


def members() -> set[int]:
    """Live processes of this session, or with this leash's mark in their environment (Linux; elsewhere none)."""
    mark = f"{MARKER}={os.environ[MARKER]}".encode() if MARKER in os.environ else None
    try:
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
    except OSError:
        return set()
    return {pid for pid in pids if _belongs(pid, mark)}


def _belongs(pid: int, mark: bytes | None) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0]
        if state in (b"Z", b"X"):
            return False
        if os.getsid(pid) == os.getsid(0):
            return True
        with open(f"/proc/{pid}/environ", "rb") as file:
            return mark is not None and mark in file.read().split(b"\0")
    except OSError:
        return False


def shared_files(pids: Iterable[int]) -> set[str]:
    """Files in shared memory that these processes hold: theirs for sure, and left behind by SIGKILL.

    Told by their numbers: a named semaphore is mapped under the name of a temporary file that was linked and removed.
    """
    held = {number for pid in pids for number in _held_files(pid)}
    try:
        with os.scandir(SHM) as entries:
            return {entry.path for entry in entries if entry.inode() in held}
    except OSError:
        return set()


def _held_files(pid: int) -> set[int]:
    """Inode numbers of the files in shared memory that a process maps or has open, removed names included."""
    held = set()
    with contextlib.suppress(OSError):
        with open(f"/proc/{pid}/maps", encoding="utf-8") as maps:
            held = {int(number) for number in re.findall(rf"\s(\d+)\s+{SHM}", maps.read())}
        for name in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.readlink(path := f"/proc/{pid}/fd/{name}").startswith(SHM):
                    held.add(os.stat(path).st_ino)
    return held


def remove_shared_files(files: Iterable[str]) -> None:
    """Remove those that are still there, that are this user's and that no living process holds."""
    left = {file for file in files if os.path.exists(file) and os.stat(file).st_uid == os.getuid()}
    if left:
        left -= shared_files(int(name) for name in os.listdir("/proc") if name.isdigit())
    for file in left:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
