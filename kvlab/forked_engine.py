"""Run vLLM's command line with an engine process that has imported everything already. For eager servers on a CPU.

    python -P forked_engine.py serve MODEL ...

vLLM's CPU platform starts its engine process with the method "spawn", which imports torch and vLLM anew, as long as the
first time. Here one process imports what both need and forks, before any thread, socket or event loop is there; the
fork waits for what "spawn" would have sent to a new interpreter, and runs it. It does so only where it is what a new
interpreter would have become: an environment that vLLM changed meanwhile in a way that an import reads, a vLLM
whose inner names differ, an engine process that needs open files: each gives the plain start, and a line in the log.

Standard library only, so that it can run isolated from kvlab's own packages.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import glob
import importlib
import importlib.util
import io
import multiprocessing
import os
import runpy
import sys
import traceback
from multiprocessing import context, popen_spawn_posix, reduction, spawn, util

CLI = "vllm.entrypoints.cli.main"
PR_SET_NAME = 15
# What a server of vLLM 0.31 and its engine process import; what is missing here is imported when it is needed.
MODULES = (
    *(f"vllm.entrypoints.cli.{name}" for name in ("openai", "serve", "launch", "benchmark.main", "collect_env")),
    *(f"vllm.entrypoints.cli.{name}" for name in ("preload", "run_batch", "snapshot")),
    *("vllm.v1.engine.async_llm", "vllm.v1.engine.core", "vllm.v1.executor.uniproc_executor"),
    "vllm.v1.worker.cpu_worker",
)
# The CPU platform sets these for its engine process, and an import of torch reads them.
TORCH_ENV = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "TORCHINDUCTOR_CPP_DYNAMIC_THREADS": "1"}
# And it preloads these libraries there, from the folder of a package.
PRELOADED = {
    "vllm": ("libs/libtcmalloc_minimal*.so*", "libs/libtcmalloc.so*"),
    "torch": ("../torch.libs/libgomp*.so*", "lib/libgomp*.so*"),
}
# The CPU platform sets these too; they are read when they are needed.
READ_LATER = {
    *("VLLM_WORKER_MULTIPROC_METHOD", "NUMEXPR_MAX_THREADS", "VLLM_DISABLE_SHARED_EXPERTS_STREAM", "LOCAL_WORLD_SIZE"),
    *("VLLM_SSM_CONV_STATE_LAYOUT", "OMP_NUM_THREADS_SET_BY_VLLM", "VLLM_OMP_NUM_THREADS_SET"),
}


def say(text: str) -> None:
    """A line of the server's log."""
    print(f"[start] {text}", file=sys.stderr, flush=True)


def with_libraries(env: dict[str, str]) -> dict[str, str]:
    """`env` with the libraries and variables that the CPU platform gives its engine process before it imports torch."""
    found, there = [], env.get("LD_PRELOAD", "")
    for package, patterns in PRELOADED.items():
        spec = importlib.util.find_spec(package)
        folder = os.path.dirname(spec.origin) if spec and spec.origin else ""
        found += [file for pattern in patterns for file in glob.glob(os.path.join(folder, pattern))][:1]
    if any(name in there for name in ("libgomp", "libomp", "libiomp", "libtcmalloc")):
        found = []  # the user's own choice, which vLLM completes in its own way
    return TORCH_ENV | env | ({"LD_PRELOAD": ":".join(filter(None, [*found, there]))} if found else {})


def import_all() -> None:
    """Import what a server and its engine need; a module that this vLLM lacks is left out."""
    for name in MODULES:
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)


class Waiting:
    """A fork of this process that waits to become the engine. Needs a process without other threads."""

    def __init__(self):
        if len(os.listdir("/proc/self/task")) > 1:
            raise RuntimeError("the imports left threads running")
        self.env = dict(os.environ)
        self.sentinel, child_end = os.pipe()
        work, self.work = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(child_end)
            os.close(work)
            self.ends = (self.work, self.sentinel)
            return
        code = 1
        try:
            os.close(self.sentinel)
            os.close(self.work)
            code = _become_engine(work)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)  # never back into the server's own code

    def dismiss(self) -> None:
        """End the fork, which is not needed. Safe to call twice."""
        for end in self.ends:
            os.close(end)
        self.ends = ()


def _become_engine(work: int) -> int:
    """In the fork: wait for the work and do it, as multiprocessing.spawn does in a new interpreter."""
    watched = os.dup(work)  # its end tells that the server is gone
    with os.fdopen(work, "rb") as source:
        head = source.read(1)
        if not head:
            return 0  # the server ended, or started its engine in the plain way
        env = reduction.pickle.load(source)
        os.environ.clear()
        os.environ.update(env)
        new_seeds()
        multiprocessing.current_process()._inheriting = True
        try:
            spawn.prepare(reduction.pickle.load(source))
            process = reduction.pickle.load(source)
            ctypes.CDLL(None).prctl(PR_SET_NAME, process.name.encode())  # vLLM's own title needs an untouched argv
        finally:
            del multiprocessing.current_process()._inheriting
    code = process._bootstrap(parent_sentinel=watched)
    atexit._run_exitfuncs()
    util._flush_std_streams()
    return code


def new_seeds() -> None:
    """Random numbers that nobody seeds differ from process to process, as after an import; `random` sees to itself."""
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()


class _Popen(popen_spawn_posix.Popen):
    """Starts a process in the waiting fork; a second one, or one with open files, in a new interpreter."""

    waiting: Waiting | None = None

    def _launch(self, process_obj):
        waiting, _Popen.waiting = _Popen.waiting, None
        process_obj.__class__ = context.SpawnProcess  # what the fork can load by its name
        message = waiting and self._message(process_obj)
        if not message:
            return super()._launch(process_obj)
        self.pid, self.sentinel = waiting.pid, waiting.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, waiting.ends)
        with os.fdopen(waiting.work, "wb", closefd=False) as file:
            file.write(message)
        return None

    def _message(self, process_obj) -> bytes | None:
        about = spawn.get_preparation_data(process_obj._name)
        about = {name: value for name, value in about.items() if not name.startswith("init_main")}
        file = io.BytesIO(b"+")
        file.seek(0, os.SEEK_END)
        context.set_spawning_popen(self)
        try:
            for part in (dict(os.environ), about, process_obj):
                reduction.dump(part, file)
        finally:
            context.set_spawning_popen(None)
        message = file.getvalue()
        return None if self._fds or b"__main__" in message else message  # the fork runs another main module


class _Process(context.SpawnProcess):
    @staticmethod
    def _Popen(process_obj):
        return _Popen(process_obj)


class _Context(context.SpawnContext):
    Process = _Process


def fork_engine() -> None:
    """Fork the process that waits to become the engine, and make vLLM use it. Raises where this vLLM is another one."""
    import_all()
    utils = importlib.import_module("vllm.v1.engine.utils")
    plain = utils.get_mp_context
    waiting = _Popen.waiting = Waiting()

    def get_mp_context():
        chosen = plain()
        changed = {n for n in os.environ.keys() | waiting.env.keys() if os.environ.get(n) != waiting.env.get(n)}
        if chosen.get_start_method() == "spawn" and not changed - READ_LATER:
            return _Context()
        if changed - READ_LATER:
            _Popen.waiting = None
            waiting.dismiss()
            say(f"the engine process starts anew: vLLM changed {', '.join(sorted(changed - READ_LATER))}")
        return chosen

    utils.get_mp_context = get_mp_context


def run() -> None:
    """vLLM's command line with the arguments of this process, as `python -m` runs it."""
    try:
        fork_engine()
    except Exception as error:
        say(f"the engine process starts anew: {type(error).__name__}: {error}")
    runpy.run_module(CLI, run_name="__main__", alter_sys=True)


def begin_with_libraries() -> None:
    """Begin this program again where its libraries are not loaded: the loader reads them before Python begins."""
    wanted = with_libraries(dict(os.environ))
    if wanted != dict(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], wanted)


if __name__ == "__main__":
    begin_with_libraries()
    run()
