"""The estimate of a pool from a GPU's memory, against what starts on the H200 found."""

from pathlib import Path

import pytest

from kvlab import geometry, gpu_pool, startup, store
from kvlab.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


def test_it_meets_a_start_that_sized_its_own_pool(monkeypatch):
    """The memory of the GPU and the share are given; the weights are computed; the overhead is the largest stored."""
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    monkeypatch.setattr("kvlab.provenance.machine_name", lambda: "mine")
    shape, met = geometry.load("Qwen3-1.7B"), []
    for run in store.list_runs("h200", "startup"):
        parts, share = startup.memory_bytes(run.manifest["server"]), run.manifest["cell"]["server"]
        if parts:
            share = share["gpu_memory_utilization"]
            found = gpu_pool.estimate(shape, gpu_pool.Gpu(parts["requested"] / share / 2**30, share))
            assert found.bytes <= parts["kv"] * 1.005  # never more than a start found
            assert found.rows[-1][1].endswith("the most that a start on h200 took")
            met.append(found.bytes / parts["kv"])
    assert max(met) == pytest.approx(1, rel=0.005) and min(met) > 0.93


def test_weights_that_nobody_can_compute_are_asked_for(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    shape = geometry.load("Qwen3-1.7B").__class__(**(vars(geometry.load("Qwen3-1.7B")) | {"params": None}))
    with pytest.raises(ConfigError, match="--weights-gib"):
        gpu_pool.estimate(shape, gpu_pool.Gpu(24))
    assert gpu_pool.estimate(shape, gpu_pool.Gpu(24, 0.9, 4, 1)).bytes == pytest.approx((24 * 0.9 - 4 - 1) * 2**30)
