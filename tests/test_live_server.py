"""Real vLLM on the CPU: three starts, two of them at once."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import live_for_tests
import psutil
import pytest
from processes_for_tests import alive
from waiting_for_tests import LIMIT_S, until

from kvlab import control, leash, processes
from kvlab.config import ServerConfig
from kvlab.scrape import fetch
from kvlab.server import VllmServer, attach

pytestmark = live_for_tests.MARKS
# A maximum length that is no multiple of the block: the log's number then differs from blocks x block size.
FIELDS = {
    "model": "tiny",
    "engine": "cpu",
    "max_model_len": 1000,
    "block_size": 64,
    "kv_cache_memory_bytes": 64 * 64 * 3072,
    "enforce_eager": True,
}
CONFIG = ServerConfig(**FIELDS)


HOLDER = """
import sys, time
from pathlib import Path
from kvlab.config import ServerConfig
from kvlab.server import VllmServer
server = VllmServer(ServerConfig(**{fields!r}), log_dir=Path({log!r})).start()
print(server.id, flush=True)
time.sleep(600)
"""


@pytest.fixture(scope="module", autouse=True)
def owner(tmp_path_factory):
    """Another process that has a server: it starts beside the first test's own."""
    code = HOLDER.format(fields=FIELDS, log=str(tmp_path_factory.mktemp("owner")))
    path = os.pathsep.join([str(Path(processes.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True) as owner:
        yield owner
        owner.kill()


def shared_memory():
    return {str(path) for path in Path(leash.SHM).iterdir()}


def held_by_others():
    return leash.shared_files(psutil.pids())


def keep_streaming(endpoint, answers):
    """A request that is in flight when the server is stopped, from a client that keeps its socket open."""
    body = {"model": endpoint.model, "prompt": [300], "max_tokens": 990, "ignore_eos": True, "temperature": 0}
    try:
        answers.append(control.call(endpoint, "/v1/completions", body, timeout_s=60))
    except OSError as error:
        answers.append(error)


def test_start_read_reset_and_stop_in_flight(tmp_path):  # pitfall 14, 19, 26, 28
    before = shared_memory()
    phases = []
    with VllmServer(CONFIG, log_dir=tmp_path, on_phase=lambda phase, s: phases.append(phase)) as server:
        assert {"imports", "engine imports", "ready"} <= set(phases)
        assert server.version and server.startup.version == server.version
        assert server.startup.phases["ready"] > server.startup.phases["imports"] > 0

        # Capacity three ways: metric, log, and the formula int(blocks / blocks per request * max_model_len).
        capacity = server.capacity
        assert (capacity.metric_blocks, capacity.metric_block_size) == (64, 64)
        assert capacity.metric_tokens == capacity.log_tokens == int(64 / -(-1000 // 64) * 1000) == 4000

        low, high = server.endpoint.vocab
        for token in (low, high - 1):
            status, answer = control.complete(server.endpoint, [token, low, high - 1])
            assert control.answers(status, answer) and answer["usage"]["prompt_tokens"] == 3
        server.reset_prefix_cache()
        listed = next(found for found in processes.list_servers() if found.id == server.id)
        assert (listed.pid, listed.port, listed.orphan) == (server.pid, server.port, False)
        assert attach(server.base_url).endpoint.vocab == server.endpoint.vocab

        tree = processes.members(server.id)
        assert len(tree) >= 4  # leash, guard, API server, engine
        assert set(server.startup.engine_pids) <= {process.pid for process in tree}
        held = leash.shared_files(process.pid for process in tree)
        answers = []
        client = threading.Thread(target=keep_streaming, args=(server.endpoint, answers))
        client.start()
        until(lambda: fetch(server.endpoint)["running"])
        assert not answers
        server.stop()
    assert not alive(tree)
    assert held and not held & shared_memory()
    # What came meanwhile is another program's, which holds it or tidies up.
    until(lambda: not shared_memory() - before - held_by_others())
    client.join(60)
    assert answers  # the client was not left waiting


def test_stop_during_the_start_leaves_nothing(tmp_path):  # pitfall 26
    def interrupt(phase, elapsed_s):
        began.setdefault(phase, elapsed_s)
        # From here on vLLM swallows SIGTERM: its handler is set, and the loop that would act on it does not run yet.
        if phase == "engine imports" and elapsed_s - began[phase] > 1:
            raise KeyboardInterrupt

    began = {}

    plain = CONFIG.model_copy(update={"preload": False})  # its engine process imports for seconds
    server = VllmServer(plain, log_dir=tmp_path, on_phase=interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.start()
    assert not processes.members(server.id)


def test_sigkill_of_the_owner_ends_the_server(owner):  # pitfall 26
    server_id = owner.stdout.readline().strip()
    tree = processes.members(server_id)
    assert len(tree) >= 4
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    assert processes.wait_until_gone(server_id, LIMIT_S)
    assert not alive(tree)
