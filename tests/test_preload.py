"""How a CPU server starts without importing twice, with a small stand-in for vLLM's package."""

import os
import subprocess
import sys

import pytest
from waiting_for_tests import LIMIT_S

from kvlab import config, preload
from kvlab.config import Cell, LoadConfig, ServerConfig

CPU = ServerConfig(model="tiny", engine="cpu", enforce_eager=True)

# What kvlab relies on in vLLM: a command line, and a module from whose namespace the engine's context is taken.
CLI = """
import os, sys
from vllm.v1.engine import utils

def own_engine(where):
    print("engine", "of main", flush=True)

if __name__ == "__main__":
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    if "change" in sys.argv:
        os.environ["SET_LATER"] = "yes"
    for where in range(sys.argv.count("engine")):
        target = own_engine if "own" in sys.argv else utils.engine
        process = utils.get_mp_context().Process(target=target, args=(where,), name="EngineCore")
        process.start()
        process.join()
        print("server", os.getpid(), process.pid, process.exitcode, flush=True)
    sys.exit(3)
"""
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
def run(tmp_path):
    """run(words...) -> the finished command line of a stand-in for vLLM, started with a forked engine."""
    for name, text in {"entrypoints/cli/main.py": CLI, "v1/engine/utils.py": UTILS}.items():
        (path := tmp_path / "vllm" / name).parent.mkdir(parents=True)
        path.write_text(text)
    for folder in ("", "entrypoints", "entrypoints/cli", "v1", "v1/engine"):
        (tmp_path / "vllm" / folder / "__init__.py").touch()

    def start(*words):
        argv = preload.forked_engine([sys.executable, *preload.MODULE, *words])
        env = os.environ | {"PYTHONPATH": str(tmp_path)}
        return subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=LIMIT_S)

    start.package = tmp_path / "vllm"
    return start


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


def test_a_vllm_of_other_inner_names_starts_in_its_own_way(run):
    text = CLI.replace("from vllm.v1.engine import utils", "from vllm.v1.engine import other as utils")
    (run.package / "entrypoints/cli/main.py").write_text(text)
    (run.package / "v1/engine/utils.py").rename(run.package / "v1/engine/other.py")
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
