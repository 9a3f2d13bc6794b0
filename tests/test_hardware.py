"""The ceilings of the hardware, and what a step and a prefill must read and compute at least."""

import fakes
import pytest

from kvlab import geometry, hardware, store
from kvlab.errors import KvlabError


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch, tmp_path):
    fakes.install(monkeypatch, tmp_path)


def found(monkeypatch, calls, **more):
    def measured(server):
        calls.append(server)
        return {"device_type": "cpu", "copy_bytes_per_s": 2e9, "matmul_flop_per_s": 1e11} | more

    monkeypatch.setattr(hardware, "_in_a_process", measured)


def test_the_ceilings_are_measured_once_and_replayed(monkeypatch):
    found(monkeypatch, calls := [])
    lab = fakes.open_lab()
    first = hardware.measured(lab)
    assert first.value("copy_bytes_per_s") == 2e9 and len(calls) == 1
    assert hardware.measured(fakes.open_lab()).run.id == first.run.id
    assert hardware.measured(fakes.open_lab(mode="replay")).value("matmul_flop_per_s") == 1e11
    assert len(calls) == 1
    hardware.measured(fakes.open_lab(mode="measure"))
    assert len(calls) == 2
    assert store.list_runs("fake", "load")[0].manifest["provenance"]["cpu"]


def test_a_replay_without_a_run_says_how_to_measure_it(monkeypatch):
    found(monkeypatch, calls := [])
    nothing = hardware.measured(fakes.open_lab(mode="replay"))
    assert nothing.run is None and "kvlab measure load" in nothing.reason and not calls


def test_plain_pytorch_on_the_cpu(monkeypatch):
    pytest.importorskip("torch", reason="vLLM brings PyTorch along: make install")
    monkeypatch.setitem(hardware.SIZES, "cpu", (2**20, 64))
    one = hardware.ceilings("cpu", "float32")
    assert one["copy_bytes_per_s"] > 1e7 and one["matmul_flop_per_s"] > 1e6 and one["dtype"] == "float32"


def test_a_process_that_fails_says_why(monkeypatch, tmp_path):
    monkeypatch.setattr("kvlab.serverless.sys.executable", "/bin/false")
    with pytest.raises(KvlabError, match="exit code 1"):
        hardware.measured(fakes.open_lab())


def test_a_process_that_does_not_end_is_an_error_too(monkeypatch):
    monkeypatch.setattr("kvlab.serverless.LIMIT_S", 0.01)
    with pytest.raises(KvlabError, match="took longer than 0.01 s"):
        hardware.measured(fakes.open_lab())


def test_the_floor_of_a_step_is_its_bytes_over_the_bandwidth():
    qwen = geometry.load("Qwen3-1.7B")
    # 1.72 billion parameters of two bytes, and the KV cache of the article's pool
    assert hardware.step_bytes(qwen, 2, 2_528_641_024) == pytest.approx(2 * 1.72e9 + 2.53e9, rel=0.01)
    assert hardware.floor_s(qwen, 2, 0, 4.3e12) == pytest.approx(0.8e-3, rel=0.01)
    assert hardware.prefill_flop(qwen) == pytest.approx(2 * 1.41e9, rel=0.01)
    assert hardware.floor_s(qwen, 2, 0, None) is None
