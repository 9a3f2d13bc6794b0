"""GPU memory of one server: by its processes where the driver names them, else by difference, and only when alone."""

import sys
from types import SimpleNamespace

import pytest

from kvlab import gpu_memory, processes
from kvlab.config import ServerConfig
from kvlab.server import VllmServer


class Driver(SimpleNamespace):
    """Two GPUs as NVIDIA's library shows them."""

    class NVMLError(Exception):
        pass

    def __init__(self, used, processes):
        super().__init__(used=used, processes=processes, fails=False)

    def nvmlInit(self):  # noqa: N802  the library's names
        pass

    nvmlShutdown = nvmlInit  # noqa: N815

    def nvmlDeviceGetCount(self):  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, i):  # noqa: N802
        return i

    def nvmlDeviceGetMemoryInfo(self, i):  # noqa: N802
        if self.fails:
            raise self.NVMLError
        return SimpleNamespace(used=self.used[i])

    def nvmlDeviceGetComputeRunningProcesses(self, i):  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.processes[i]]


@pytest.fixture
def driver(monkeypatch):
    found = Driver([100, 50], [[(7, 40), (8, 30)], [(7, 5)]])
    monkeypatch.setitem(sys.modules, "pynvml", found)
    return found


@pytest.fixture
def server(monkeypatch, driver, tmp_path):
    one = VllmServer(ServerConfig(model="tiny", engine="cuda", kv_cache_memory_bytes=2**30), log_dir=tmp_path)
    one._gpu_memory, one.id = gpu_memory.GpuMemory(), "this"
    monkeypatch.setattr(processes, "pids", lambda server_id: {7})
    monkeypatch.setattr(processes, "list_servers", lambda: [SimpleNamespace(id=one.id)])
    return one


def test_memory_is_summed_over_gpus_and_processes(driver):
    assert gpu_memory.used_bytes() == 150
    assert gpu_memory.of_processes({7, 9}) == 45 and gpu_memory.of_processes({9}) is None


def test_without_a_driver_or_its_answer_there_is_none(monkeypatch, driver):
    driver.fails = True
    assert gpu_memory.used_bytes() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_memory.used_bytes() is None and gpu_memory.of_processes({7}) is None


def test_a_server_is_counted_by_its_processes(server, driver):
    driver.used = [100, 900]  # somebody else's
    assert server._gpu_bytes() == 45


def test_where_no_process_is_named_the_difference_counts_only_when_alone(monkeypatch, server, driver):
    driver.processes, driver.used = [[], []], [160, 50]
    assert server._gpu_bytes() == 60
    server._others = {"came-before"}
    assert server._gpu_bytes() is None
    server._others = set()
    both = [SimpleNamespace(id=server.id), SimpleNamespace(id="came-later")]
    monkeypatch.setattr(processes, "list_servers", lambda: both)
    assert server._gpu_bytes() is None
