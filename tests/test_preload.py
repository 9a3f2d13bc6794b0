"""How a CPU server starts without importing twice, with a small stand-in for vLLM's package."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from processes_for_tests import alive
from waiting_for_tests import LIMIT_S, until

from kvlab import config, leashed, preload, processes
from kvlab.config import Cell, LoadConfig, ServerConfig

CPU = ServerConfig(model="tiny", engine="cpu", enforce_eager=True)

# What kvlab relies on in vLLM: a command line, and a module from whose namespace the engine's context is taken.
CLI = """
import os, sys, time
from vllm.v1.engine import utils

def own_engine(where):
    print("engine", "of main", flush=True)

if __name__ == "__main__":
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    if "change" in sys.argv:
        os.environ["SET_LATER"] = "yes"
    print("main", os.getpid(), os.getppid(), utils.IMPORTED_BY, os.environ.get("MARK"), os.getcwd(), flush=True)
    if "wait" in sys.argv:
        time.sleep(300)
    for where in range(sys.argv.count("engine")):
        target = own_engine if "own" in sys.argv else utils.engine
        process = utils.get_mp_context().Process(target=target, args=(where,), name="EngineCore")
        process.start()
        process.join()
        print("server", os.getpid(), process.pid, process.exitcode, flush=True)
    sys.exit(3)
"""
CORE = "import vllm.v1.engine.utils"
UTILS = """
import multiprocessing, os, sys
IMPORTED_BY = os.getpid()

def engine(where):
    print("engine", os.getpid(), IMPORTED_BY, where, os.environ.get("SET_LATER"), sys.argv[1:], flush=True)
    sys.exit(7)

def get_mp_context():
    return multiprocessing.get_context("spawn")
"""


@pytest.fixture
def package(tmp_path):
    """The folder of the stand-in's package; what waits in the end was started by the test."""
    texts = {"entrypoints/cli/main.py": CLI, "v1/engine/utils.py": UTILS, "v1/engine/core.py": CORE}
    for name, text in texts.items():
        (path := tmp_path / "vllm" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for folder in ("", "entrypoints", "entrypoints/cli", "v1", "v1/engine"):
        (tmp_path / "vllm" / folder / "__init__.py").touch()

    yield tmp_path / "vllm"
    preload.end_all()


@pytest.fixture
def run(package):
    """run(words...) -> the finished command line of the stand-in, started with a forked engine."""

    def start(*words):
        argv = preload.forked_engine([sys.executable, *preload.MODULE, *words])
        env = os.environ | {"PYTHONPATH": str(package.parent)}
        return subprocess.run(argv, env=env, cwd=package.parent, capture_output=True, text=True, timeout=LIMIT_S)

    return start


class Started:
    """A server of the stand-in, as kvlab starts it."""

    def __init__(self, package, *words, before=(), **env):
        self.name = f"test-{os.getpid()}-{time.monotonic_ns()}"
        self.log_path = package.parent / f"{self.name}.log"
        (sockets := package.parent / f"sockets-{self.name}").mkdir()
        self.sockets = sockets
        env = os.environ | {"PYTHONPATH": str(package.parent), "VLLM_RPC_BASE_PATH": str(sockets)} | env
        options = {"name": self.name, "port": 18000, "log_path": self.log_path, "env": env, "grace_s": 0.3}
        argv = [*before, sys.executable, *preload.MODULE, *words]
        self.leash, self.rope, self.kind = preload.launch(argv, spared=True, remove=str(sockets), **options)

    @property
    def told(self):
        return self.log_path.read_text()

    def main(self):
        """The words that its main program has printed, once it has."""
        return until(lambda: next((line.split() for line in self.told.splitlines() if line.startswith("main")), None))

    def tree(self):
        return processes.members(self.name)

    def stop(self):
        leashed.end(self.leash, self.rope, self.name)


def lines(done, first):
    return [line.split() for line in done.stdout.splitlines() if line.startswith(first)]


def test_the_engine_is_a_child_that_imports_nothing_again(run):
    done = run("serve", "engine", "engine")
    (_, pid, importer, where, _, *words), (_, second, imported_anew, *_) = lines(done, "engine")
    (_, server, child, code), _ = lines(done, "server")
    assert (pid, importer, code, where, words) == (child, server, "7", "0", ["['serve',", "'engine',", "'engine']"])
    assert second == imported_anew  # there is one fork, and a later process starts as vLLM would start it
    assert (done.returncode, "[start]" in done.stderr) == (3, False)


def test_where_vllm_changed_what_an_import_reads_the_engine_starts_anew(run):
    done = run("engine", "change")
    ((_, pid, importer, _, told, *_),) = lines(done, "engine")
    assert (pid, told, done.returncode) == (importer, "yes", 3)
    assert "[start] the engine process starts anew: vLLM changed SET_LATER" in done.stderr


def test_an_engine_that_is_part_of_the_main_program_starts_anew(run):
    done = run("engine", "own")
    assert ("engine of main" in done.stdout, done.returncode, done.stderr) == (True, 3, "")


def test_a_vllm_of_other_inner_names_starts_in_its_own_way(package, run):
    text = CLI.replace("from vllm.v1.engine import utils", "from vllm.v1.engine import other as utils")
    (package / "entrypoints/cli/main.py").write_text(text)
    (package / "v1/engine/core.py").unlink()
    (package / "v1/engine/utils.py").rename(package / "v1/engine/other.py")
    done = run("engine")
    ((_, pid, importer, *_),) = lines(done, "engine")
    assert (pid, done.returncode) == (importer, 3)
    assert "[start] the engine process starts anew: ModuleNotFoundError" in done.stderr


@pytest.mark.parametrize(
    "fields",
    [{"engine": "cuda"}, {"enforce_eager": False}, {"caches": "cold"}, {"preload": False}, {"tensor_parallel_size": 2}],
)
def test_only_a_server_that_is_the_same_afterwards_is_spared_imports(fields):
    assert preload.possible(CPU)
    assert not preload.possible(CPU.model_copy(update=fields))


def test_another_command_is_left_alone():
    assert preload.forked_engine([sys.executable, "router.py"]) is None
    argv = preload.forked_engine(["taskset", "-c", "0", sys.executable, *preload.MODULE, "serve"])
    assert argv == ["taskset", "-c", "0", sys.executable, "-P", str(preload.FORKED_ENGINE), "serve"]


def test_how_a_server_starts_does_not_make_it_another_one():
    load = LoadConfig(requests=1, input_tokens=1, output_tokens=1)
    keys = {config.key(Cell(name="a", server=CPU.model_copy(update={"preload": p}), load=load)) for p in (True, False)}
    assert len(keys) == 1


def test_servers_are_forked_from_one_process_that_has_imported(package):  # pitfall 26
    with open(package / "v1/engine/core.py", "a") as file:
        file.write("\nprint('said by an import')")
    first, second = Started(package, "wait", MARK="a"), Started(package, "wait")
    assert (first.kind, second.kind) == ("preloaded", "preloaded")
    (waiting,) = {psutil.Process(one.leash.pid).ppid() for one in (first,)}
    _, pid, parent, importer, mark, folder = first.main()
    assert (int(pid), int(parent)) == (leashed.main_pid(first.leash), first.leash.pid)
    assert (int(importer), mark, folder) == (waiting, "a", str(package.parent))
    assert first.told.startswith("said by an import\n") and "[leash] server process" in first.told
    assert second.main()[3] != importer and len(preload.pids()) == 2  # another environment, another process
    third = Started(package, "wait", MARK="a")
    assert third.main()[3] == importer

    found = {one.id: one for one in processes.list_servers()}
    for one in (first, second, third):
        assert (found[one.name].pid, found[one.name].port, found[one.name].orphan) == (
            leashed.main_pid(one.leash),
            18000,
            False,
        )
        assert processes.environment_of(one.tree()[0])["VLLM_RPC_BASE_PATH"] == str(one.sockets)
        assert "vllm" in found[one.name].cmd
        assert len(one.tree()) == 4  # leash, guard, server, what waits to become the engine
    assert not set(preload.pids()) & {process.pid for one in (first, second, third) for process in one.tree()}
    processes.end_tree(third.name)  # as kvlab stop
    until(lambda: third.leash.poll() is not None)
    for one in (first, second):
        tree = one.tree()
        one.stop()
        assert not alive(tree) and not one.sockets.exists()


def test_the_end_of_a_forked_server_is_told(package):  # pitfall 28
    ended = Started(package, "engine")
    assert ended.leash.wait(LIMIT_S) == 3
    ((_, pid, importer, *_),) = [line.split() for line in ended.told.splitlines() if line.startswith("engine")]
    assert pid != importer and int(importer) == preload.pids()[0]
    killed = Started(package, "wait")
    killed.main()
    os.kill(leashed.main_pid(killed.leash), signal.SIGKILL)
    assert killed.leash.wait(LIMIT_S) == 128 + signal.SIGKILL
    assert "ended by signal 9" in killed.told
    lost = Started(package, "wait")
    lost.main()
    tree = lost.tree()
    os.kill(lost.leash.pid, signal.SIGKILL)
    assert lost.leash.wait(LIMIT_S) == -signal.SIGKILL
    assert not alive(tree)


def test_a_server_outlives_the_process_that_it_was_forked_from_and_ends_as_ever(package):  # pitfall 26
    one = Started(package, "wait")
    one.main()
    (waiting,) = preload.pids()
    os.kill(waiting, signal.SIGKILL)
    assert not alive([psutil.Process(waiting)])
    assert one.leash.poll() is None and len(one.tree()) == 4
    again = Started(package, "wait")
    assert again.kind == "forked engine" and "[start] not from a preloaded process: " in again.told
    for each in (one, again):
        each.stop()
        assert each.leash.poll() is not None and not each.tree()


def test_where_the_imports_fail_a_server_starts_in_its_own_way_and_says_why(package):
    (package / "v1/engine/core.py").write_text("raise RuntimeError('broken here')")
    for _ in range(2):  # the second one does not try
        one = Started(package, "engine")
        assert (one.leash.wait(LIMIT_S), one.kind, preload.pids()) == (3, "forked engine", [])
        assert one.told.startswith("[start] not from a preloaded process: RuntimeError: broken here\n")
        assert "[start] the engine process starts anew: RuntimeError: broken here" in one.told


def test_a_share_of_the_cores_is_kept(package):
    core = min(os.sched_getaffinity(0))
    one = Started(package, "wait", before=("taskset", "-c", str(core)))
    one.main()
    assert (one.kind, os.sched_getaffinity(leashed.main_pid(one.leash))) == ("preloaded", {core})
    one.stop()
    assert Started(package, "engine", before=("nice",)).kind == "forked engine"


OWNER = """
import os, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
import test_preload
from kvlab import preload
one = test_preload.Started(Path({package!r}), "wait")
one.main()
if os.fork() == 0:
    time.sleep(30)  # as a multiprocessing worker, which outlives its parent and must not keep the server
    os._exit(0)
print(one.name, preload.pids()[0], one.kind, flush=True)
time.sleep(60)
"""


def test_with_the_owner_ends_the_preloaded_process_and_its_servers(package):  # pitfall 26
    path = [str(Path(preload.__file__).parent.parent), str(Path(__file__).parent)]
    code = OWNER.format(path=path, package=str(package))
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    name, waiting, kind = owner.stdout.readline().split(maxsplit=2)
    tree, waiting = processes.members(name), psutil.Process(int(waiting))
    assert (len(tree), kind.strip(), waiting.ppid()) == (4, "preloaded", owner.pid)
    forked = [child for child in psutil.Process(owner.pid).children() if child != waiting]
    owner.kill()
    owner.wait()
    try:
        assert not alive([*tree, waiting])
    finally:
        for process in forked:
            process.kill()
        owner.stdout.close()


SECOND = """
import sys
sys.path[:0] = {path!r}
from pathlib import Path
import test_preload
one = test_preload.Started(Path({package!r}), "wait", JPY_SESSION_NAME="another notebook")
print(one.kind, *one.main()[3:4], test_preload.preload.pids(), flush=True)
one.stop()
"""


def test_the_notebooks_of_one_command_share_a_preloaded_process_that_ends_with_it(package):
    code = SECOND.format(
        path=[str(Path(preload.__file__).parent.parent), str(Path(__file__).parent)], package=str(package)
    )
    with preload.shared():
        first = Started(package, "wait")
        importer = first.main()[3]
        (waiting,) = [psutil.Process(pid) for pid in preload.pids()]
        second = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
        assert second.stdout.split() == ["preloaded", importer, "[]"], second.stderr
        first.stop()
        preload.end_all()  # as at the end of a notebook: another one may follow
        assert waiting.is_running() and waiting.status() != psutil.STATUS_ZOMBIE
        third = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
        assert third.stdout.split() == ["preloaded", importer, "[]"], third.stderr
        waiting.kill()
        fourth = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LIMIT_S)
        assert fourth.stdout.startswith("preloaded") and importer not in fourth.stdout  # started anew at the same place
        anew = psutil.Process(int(fourth.stdout.split()[2].strip("[]")))
        assert anew.is_running()
    assert not alive([anew])
    assert preload.SHARED not in os.environ
