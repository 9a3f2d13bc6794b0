"""The leash alone, under ordinary commands."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from waiting_for_tests import LIMIT_S, until

from kvlab import leash, processes

LEASH = leash.__file__
TREE = "import subprocess, sys, time; subprocess.Popen(['sleep', '300'], start_new_session=True); time.sleep(300)"


@pytest.fixture
def hold(request):
    """hold(command..., grace=, remove=) -> (leash process, write end of its pipe, mark)."""
    ropes = []

    def start(*command, grace=0.3, remove=None):
        mark = f"test-{os.getpid()}-{time.monotonic_ns()}"
        read_end, write_end = os.pipe()
        ropes.append(os.fdopen(write_end, "wb", buffering=0))
        argv = [sys.executable, "-I", "-S", LEASH, "--fd", str(read_end), "--grace", str(grace)]
        argv += [*(["--remove", str(remove)] if remove else []), "--", *command]
        env = os.environ | {leash.MARKER: mark}
        process = subprocess.Popen(
            argv, env=env, pass_fds=(read_end,), start_new_session=True, stderr=subprocess.DEVNULL
        )
        os.close(read_end)
        return process, ropes[-1], mark

    yield start
    for rope in ropes:
        rope.close()


def wait_for(mark, count):
    return until(lambda: len(tree := processes.members(mark)) >= count and tree)


@pytest.mark.parametrize(("code", "expected"), [("import sys; sys.exit(7)", 7), ("", 0)])
def test_the_exit_code_passes_through(hold, code, expected):
    assert hold(sys.executable, "-c", code)[0].wait(LIMIT_S) == expected


def test_a_signal_becomes_128_plus_its_number(hold):
    code = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert hold(sys.executable, "-c", code)[0].wait(LIMIT_S) == 128 + signal.SIGKILL


def test_a_missing_command_is_127(hold):
    assert hold("/no/such/program")[0].wait(LIMIT_S) == 127


@pytest.mark.parametrize("how", ["end of file", "SIGTERM"])
def test_the_whole_tree_ends(hold, how):  # pitfall 26
    process, rope, mark = hold(sys.executable, "-c", TREE)
    assert len(wait_for(mark, 4)) == 4  # leash, guard, command, its own child in another session
    rope.close() if how == "end of file" else process.terminate()
    assert process.wait(LIMIT_S) == 128 + signal.SIGTERM
    assert processes.wait_until_gone(mark, LIMIT_S)


def test_a_killed_command_leaves_no_shared_memory(hold, tmp_path):  # pitfall 26
    code = "import multiprocessing as m, signal, time; signal.signal(15, signal.SIG_IGN); "
    code += "s = m.get_context('spawn').Lock(); print(s._semlock.name, flush=True); time.sleep(300)"
    process, rope, _ = hold("sh", "-c", f'exec {sys.executable} -c "{code}" >{(out := tmp_path / "name")}')
    until(lambda: out.exists() and out.read_text().endswith("\n"))
    rope.close()
    process.wait(LIMIT_S)
    assert not (Path(leash.SHM) / f"sem.{out.read_text().strip().strip('/')}").exists()


def test_sigkill_of_the_leash_ends_the_tree(hold):  # pitfall 26
    process, _, mark = hold(sys.executable, "-c", TREE)
    wait_for(mark, 4)
    process.kill()
    process.wait()
    assert processes.wait_until_gone(mark, LIMIT_S)


@pytest.fixture
def sockets(tmp_path):
    """A folder like that of vLLM's sockets, with something in it."""
    (folder := tmp_path / "sockets").mkdir()
    (folder / "one").touch()
    return folder


@pytest.mark.parametrize("how", ["end of file", "SIGTERM", "SIGKILL of the leash", "SIGKILL of the command"])
def test_the_folder_to_remove_stays_while_the_command_runs_and_goes_with_it(hold, sockets, how):  # pitfall 26
    process, rope, mark = hold(sys.executable, "-c", TREE, remove=sockets)
    tree = wait_for(mark, 4)
    assert sockets.exists()
    if how == "end of file":
        rope.close()
    elif how == "SIGKILL of the command":
        next(p for p in tree if p.ppid() == process.pid and LEASH not in p.cmdline()).kill()
    else:
        process.send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    process.wait(LIMIT_S)
    until(lambda: not sockets.exists())


@pytest.mark.parametrize("command", [(sys.executable, "-c", ""), ("/no/such/program",)])
def test_the_folder_to_remove_goes_where_the_command_ends_by_itself_or_never_began(hold, sockets, command):
    hold(*command, remove=sockets)[0].wait(LIMIT_S)
    assert not sockets.exists()


def test_no_folder_is_removed_unasked(hold, sockets):
    assert hold("sh", "-c", f"cd {sockets}")[0].wait(LIMIT_S) == 0
    assert sockets.exists()


def test_sigkill_of_the_guard_changes_nothing(hold):  # pitfall 26
    process, rope, mark = hold(sys.executable, "-c", TREE)
    guard = next(p for p in wait_for(mark, 4) if p.ppid() == process.pid and LEASH in p.cmdline())
    guard.kill()
    rope.close()
    process.wait(LIMIT_S)
    assert processes.wait_until_gone(mark, LIMIT_S)


def test_what_a_crashed_command_leaves_is_swept_up(hold):  # pitfall 26
    code = TREE.replace("time.sleep(300)", "sys.exit(3)")
    process, _, mark = hold(sys.executable, "-c", code)
    assert process.wait(LIMIT_S) == 3
    assert processes.wait_until_gone(mark, LIMIT_S)


def test_the_command_does_not_inherit_the_rope(hold):
    code = "import os, time; print(len(os.listdir('/proc/self/fd')), flush=True)"
    plain = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout
    reader = f"import sys, subprocess; sys.exit(int(subprocess.check_output([sys.executable, '-c', {code!r}])))"
    assert hold(sys.executable, "-c", reader)[0].wait(LIMIT_S) <= int(plain)


def test_the_command_gets_sigint_by_default_even_from_a_background_shell(hold):  # pitfall 27
    code = "import signal, sys; sys.exit(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    old = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        process = hold(sys.executable, "-c", code)[0]
    finally:
        signal.signal(signal.SIGINT, old)
    assert process.wait(LIMIT_S) == 0


def test_the_leash_is_light():
    code = (
        f"import sys; sys.path.insert(0, {str(Path(LEASH).parent.parent)!r}); import kvlab.leash; print(*sys.modules)"
    )
    loaded = subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True).split()
    assert not {"psutil", "pydantic", "aiohttp", "numpy", "vllm"} & set(loaded)


def test_the_leash_leads_its_own_session(hold):
    process, _, mark = hold(sys.executable, "-c", TREE)
    wait_for(mark, 4)
    assert os.getsid(process.pid) == process.pid != os.getsid(0)
    command = next(p for p in psutil.Process(process.pid).children() if LEASH not in p.cmdline())
    assert os.getpgid(command.pid) == command.pid
