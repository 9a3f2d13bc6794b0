"""The life of a server, with a small stand-in for vLLM under the real leash."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from processes_for_tests import alive
from waiting_for_tests import LIMIT_S, until

from kvlab import control, engine, ports, processes, server
from kvlab.config import ServerConfig
from kvlab.errors import PortBusy, ServerDied, ServerError
from kvlab.server import VllmServer, attach

sys.path.insert(0, str(Path(__file__).parent))
from child_server import serve  # noqa: E402

CHILD = Path(__file__).with_name("child_server.py")


@pytest.fixture
def stand_in(monkeypatch):
    """VllmServer starts the stand-in, and gives it half a second to end."""
    monkeypatch.setattr(engine, "check", lambda config: None)
    monkeypatch.setattr(engine, "metadata_stub", lambda: None)
    monkeypatch.setattr(engine, "to_argv", lambda config, model, port: [sys.executable, str(CHILD), str(port)])
    monkeypatch.setattr(server, "GRACE_S", 0.5)
    monkeypatch.setattr(server, "PROBE_S", 0.05)


def make(tmp_path, words="", **options):
    config = ServerConfig(model="tiny", engine="cpu", load_format="dummy", env={"CHILD": words})
    return VllmServer(config, log_dir=tmp_path, **options)


def left_in(folder):
    """Live processes that were started in a folder, as every server is in its log folder."""
    found = []
    for process in psutil.process_iter(["cwd"]):
        if process.info["cwd"] == str(folder) and process.pid != os.getpid():
            found.append(process)
    return alive(found)


@pytest.fixture
def foreign():
    """Starts servers of somebody else: foreign(words, port=, key=, models=) -> base_url."""
    running = []

    def start(words="", port=0, **options):
        running.append(serve(port, words.split(), **options))
        threading.Thread(target=running[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{running[-1].server_address[1]}"

    yield start
    for one in running:
        one.shutdown()
        one.server_close()


def test_start_read_and_stop(tmp_path, stand_in):
    seen = []
    with make(tmp_path, "worker", on_phase=lambda phase, s: seen.append(phase)) as running:
        assert running.version == "9.9.9"
        capacity = running.capacity
        assert (capacity.metric_blocks, capacity.metric_block_size, capacity.metric_tokens) == (100, 16, 1600)
        assert capacity.log_tokens == capacity.tokens == 1600 and "1,600 tokens" in capacity.log_line
        assert {"imports", "first answer", "ready"} <= running.startup.phases.keys()
        timeline = running.startup.timeline
        assert list(timeline)[0] == "imports" and len(timeline) > 2
        assert sum(timeline.values()) == pytest.approx(running.ready_s, abs=0.01)
        assert running.describe()["memory"]["pss_bytes"] > 2**20
        assert psutil.Process(running.pid).cmdline()[1] == str(CHILD)
        assert running.endpoint.model == "kvlab" and str(running.port) in running.endpoint.base_url
        running.check_alive()
        tree = processes.members(running.id)
        assert len(tree) == 4  # leash, guard, server, worker
    assert seen[0] == "imports" and seen[-1] == "ready"
    assert not alive(tree)
    running.stop()
    with pytest.raises(ServerDied):
        running.check_alive()


def test_its_sockets_have_a_short_folder_of_their_own_that_goes_with_it(tmp_path, stand_in, monkeypatch):  # pitfall 26
    (place := tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(place))
    with make(tmp_path) as running:
        (sockets,) = place.iterdir()
        assert psutil.Process(running.pid).environ()["VLLM_RPC_BASE_PATH"] == str(sockets)
        assert len(sockets.name) < 20  # the path of a socket has room for about 100 characters, its name for 36
        (sockets / "one").touch()
    assert not list(place.iterdir())


def test_a_run_tells_the_gpu_of_a_lone_server_and_that_multicast_is_off(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr("kvlab.gpu.on_host", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    config = ServerConfig(model="tiny", load_format="dummy", env={"CHILD": ""})
    with VllmServer(config, log_dir=tmp_path) as running:
        told, env = running.describe(), psutil.Process(running.pid).environ()
    assert (told["gpu"], told["multicast"]) == ("1", "off")
    assert engine.MULTI_GPU_ENV.items() <= env.items()


def test_a_server_can_be_started_again_after_stop(tmp_path, stand_in):
    one = make(tmp_path)
    first = one.start().pid
    one.stop()
    with one.start():
        assert one.pid != first


def test_ready_means_a_completion_came_back(tmp_path, stand_in):  # pitfall 28
    with make(tmp_path, "late-completion") as running:
        assert running.ready_s > 1.0


def test_death_at_start_is_told_with_its_cause_and_not_waited_out(tmp_path, stand_in):  # pitfall 28
    with pytest.raises(ServerDied, match="exit code 7") as error:
        make(tmp_path, "crash").start()
    assert "max_model_len to 96" in error.value.next_step
    assert not left_in(tmp_path)


def test_death_in_use_is_found(tmp_path, stand_in):  # pitfall 28
    with make(tmp_path) as running:
        os.kill(running.pid, signal.SIGKILL)
        until(lambda: running._leash.poll() is not None)
        with pytest.raises(ServerDied, match=r"killed by signal 9 \(SIGKILL\)"):
            running.check_alive()


def test_death_of_the_engine_alone_is_found_at_once(tmp_path, stand_in):  # pitfall 26
    with make(tmp_path, "worker") as running:
        engine_process = psutil.Process(running.startup.engine_pids[0])
        engine_process.kill()
        assert not alive([engine_process])
        with pytest.raises(ServerDied, match="its engine process is gone.*signal 9"):
            running.check_alive()


def test_a_foreign_server_on_the_port_is_not_taken_for_ours(tmp_path, stand_in, foreign, monkeypatch):  # pitfall 28
    port = int(foreign().rpartition(":")[2])
    monkeypatch.setattr(ports, "refuse_busy", lambda port: None)  # it came after the check
    with pytest.raises(ServerError, match="not ready after 2 s"):
        make(tmp_path, "silent", port=port, ready_timeout_s=2).start()


def test_a_busy_port_is_refused_and_its_holder_named(tmp_path, stand_in, foreign):
    port = int(foreign().rpartition(":")[2])
    with pytest.raises(PortBusy, match=f"pid {os.getpid()}"):
        make(tmp_path, port=port).start()


def test_a_port_held_by_a_server_of_kvlab_points_to_kvlab_stop(tmp_path, stand_in):
    with make(tmp_path) as running, pytest.raises(PortBusy, match=running.id) as error:
        make(tmp_path, port=running.port).start()
    assert "kvlab stop" in error.value.next_step


def test_the_start_limit_is_settable_and_names_the_phase(tmp_path, stand_in):  # pitfall 29
    with pytest.raises(ServerError, match="not ready after 4 s; last phase: model inspection") as error:
        make(tmp_path, "silent", ready_timeout_s=4).start()
    assert "ready_timeout_s" in error.value.next_step
    assert not left_in(tmp_path)


def test_a_server_deaf_to_sigterm_ends_with_its_worker(tmp_path, stand_in):  # pitfall 26, 27
    running = make(tmp_path, "deaf worker").start()
    tree = processes.members(running.id)
    began = time.monotonic()
    running.stop()
    assert time.monotonic() - began < processes.LEASH_S  # its leash ended it
    assert not alive(tree)


def test_an_interrupt_during_the_start_leaves_nothing(tmp_path, stand_in):
    def interrupt(phase, elapsed_s):
        if elapsed_s > 0.5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, "silent deaf", on_phase=interrupt).start()
    assert not left_in(tmp_path)


def test_two_servers_do_not_hold_each_others_rope(tmp_path, stand_in):
    with make(tmp_path) as first, make(tmp_path) as second:
        assert first.port != second.port
        began = time.monotonic()
        first.stop()
        # If the second leash held the first one's pipe, the first leash would be waited for in vain.
        assert time.monotonic() - began < processes.LEASH_S
        second.check_alive()


def test_works_inside_a_running_event_loop(tmp_path, stand_in):  # pitfall 36
    async def cell():
        with make(tmp_path) as running:
            running.reset_prefix_cache()

    asyncio.run(cell())


PARENT = """
import os, sys, time
sys.path[:0] = {path!r}
from pathlib import Path
from kvlab import engine, server
from kvlab.config import ServerConfig
engine.check = lambda config: None
engine.metadata_stub = lambda: None
engine.to_argv = lambda config, model, port: [sys.executable, {child!r}, str(port)]
server.GRACE_S = 0.5
config = ServerConfig(model="tiny", engine="cpu", load_format="dummy", env={{"CHILD": "deaf worker"}})
running = server.VllmServer(config, log_dir=Path({log!r})).start()
if os.fork() == 0:
    time.sleep(30)  # as a multiprocessing worker, which outlives its parent and must not keep the server
    os._exit(0)
print(running.id, flush=True)
time.sleep(60)
"""


def test_the_server_dies_with_its_parent_even_by_sigkill(tmp_path):  # pitfall 26
    root = str(Path(server.__file__).parent.parent)
    code = PARENT.format(path=[root], child=str(CHILD), log=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    server_id = parent.stdout.readline().strip()
    assert len(processes.members(server_id)) == 4
    forked = psutil.Process(parent.pid).children()
    parent.kill()
    parent.wait()
    try:
        assert processes.wait_until_gone(server_id, LIMIT_S)
    finally:
        for process in forked:
            if process.is_running() and process.ppid() == 1:
                process.kill()
        parent.stdout.close()


def test_an_orphan_that_only_the_mark_betrays_is_stopped_by_exit(tmp_path, stand_in):  # pitfall 26
    with make(tmp_path, "worker") as running:
        worker = psutil.Process(running.startup.engine_pids[0])
        assert os.getsid(worker.pid) == worker.pid
    assert not alive([worker])


def test_reset_is_verified(tmp_path, stand_in):  # pitfall 14
    with make(tmp_path) as running:
        running.reset_prefix_cache()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lying-reset", "still cached"),
        ("refusing-reset", "requests are still running"),
        ("no-reset", "VLLM_SERVER_DEV_MODE"),
        ("no-details", "--enable-prompt-tokens-details"),
        ("no-cache", "prefix caching is off"),
    ],
)
def test_a_reset_that_does_nothing_is_an_error(words, message, foreign, monkeypatch):  # pitfall 14
    monkeypatch.setattr(control, "RESET_TRIES", 2)
    with pytest.raises(ServerError, match=message):
        attach(foreign(words)).reset_prefix_cache()


def test_attach_reads_what_is_there(foreign):
    there = attach(foreign() + "/v1/")
    assert (there.endpoint.model, there.version, there.capacity.metric_tokens) == ("kvlab", "9.9.9", 1600)
    assert there.capacity.log_tokens is None and there.startup.capacity_tokens is None
    assert there.endpoint.vocab[1] <= 4096  # larger ids are out of its vocabulary
    there.check_alive()
    assert there.describe()["capacity"]["metric_blocks"] == 100


def test_attach_to_something_that_is_not_vllm(foreign):
    there = attach(foreign("no-metrics"))
    assert (there.version, there.capacity.tokens, there.capacity.metric_blocks) == (None, None, None)


def test_attach_chooses_only_where_there_is_no_choice(foreign):
    url = foreign(models=["a", "b"])
    with pytest.raises(ServerError, match="a, b"):
        attach(url)
    with pytest.raises(ServerError, match="does not serve 'c'"):
        attach(url, "c")
    assert attach(url, "b").endpoint.model == "b"


def test_attach_explains_refusals(foreign, monkeypatch):
    monkeypatch.delenv("KVLAB_API_KEY", raising=False)
    url = foreign(key="right")
    with pytest.raises(ServerError, match="KVLAB_API_KEY"):
        attach(url)
    with pytest.raises(ServerError, match="not accepted"):
        attach(url, api_key="wrong")
    monkeypatch.setenv("KVLAB_API_KEY", "right")
    assert attach(url).endpoint.api_key == "right"


def test_attach_to_nobody_and_to_a_web_page(foreign):
    with pytest.raises(ServerError, match="No server answers"):
        attach(f"http://127.0.0.1:{ports.free_port()}")
    with pytest.raises(ServerError, match="no OpenAI-compatible server"):
        attach(foreign("not-json"))


def test_a_lost_server_is_found_by_an_attached_one(foreign):
    there = attach(foreign())
    there.endpoint = type(there.endpoint)(f"http://127.0.0.1:{ports.free_port()}", "kvlab")
    with pytest.raises(ServerDied, match="no longer answers"):
        there.check_alive()
