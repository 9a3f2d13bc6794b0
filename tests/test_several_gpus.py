"""The notebook on several GPUs, run on fake servers: every arm is measured, and the service gets its workers."""

from pathlib import Path

import fakes
import matplotlib
import nbformat
import pandas as pd
import pytest

from kvlab import gpu, hardware, profile

NOTEBOOK = Path(__file__).parents[1] / "notebooks" / "14_several_gpus.ipynb"
GPU = {"name": "a GPU", "memory_bytes": 150_000_000_000}


def run(changes):
    """Executes the notebook's code in this process with some parameters changed; returns its names."""
    names: dict = {}
    for cell in nbformat.read(NOTEBOOK, as_version=4).cells:
        if cell.cell_type == "code":
            exec(cell.source, names)
            names.update(changes if "parameters" in cell.metadata.get("tags", []) else {})
    return names


@pytest.fixture
def machine(monkeypatch, tmp_path):
    matplotlib.use("agg")
    fakes.install(monkeypatch, tmp_path, ttft_s=0.0, itl_s=0.0, cache_blocks=600, block_size=16)
    ceilings = {"device_type": "cuda", "copy_bytes_per_s": 4e12, "matmul_flop_per_s": 7e14, "dtype": "bfloat16"}
    monkeypatch.setattr(hardware, "_in_a_process", lambda server: ceilings)
    monkeypatch.setattr(profile, "check_fits", lambda *given: None)
    given = {"PROFILE": "h200", "MACHINE": "fake", "MODE": "auto", "CONCURRENCY": [1, 8], "REPEATS": 1}

    def claims(gpus):
        monkeypatch.setattr(gpu, "gpus", lambda: [GPU] * gpus)
        run(given)
        return pd.read_csv(tmp_path / "data" / "fake" / "claims.csv")

    return claims


def test_every_arm_and_the_fleet_are_measured_with_servers_that_start_together(machine):
    claims = machine(gpus=2)
    # one over both, one alone, one on each, and the fleet of six: spread, packed and on one GPU
    assert fakes.EVENTS[:22] == ["start"] * 22 and fakes.EVENTS[22:] == ["stop"] * 22
    throughput = claims[(claims["quantity"] == "throughput_tok_s") & claims["conditions"].str.startswith("arm")]
    throughput = throughput[~throughput["conditions"].str.contains("gpus=[34]")]  # computed, for larger hosts
    assert set(throughput["state"]) == {"measured"} and len(throughput) == 7
    spread = throughput[throughput["conditions"].str.startswith("arm=spread")]
    assert spread["computed"].notna().all()  # from the single server at half the clients
    hits = claims[claims["quantity"] == "hit_ratio"].set_index("conditions")
    routed = hits[hits.index.str.contains("router")]
    assert routed["reason"].str.contains("is not installed: kvlab router install").all() and len(routed) == 3
    placed = hits.drop(routed.index)
    assert set(placed["state"]) == {"measured"} and len(placed) == 4
    assert placed["computed"].notna().all()  # stored before: the same order and the same picks, wherever workers stand
    assert placed.loc[placed.index.str.contains("random"), "computed"].nunique() == 1
    where = {text.split("workers=6;")[1].split(";prefixes")[0] for text in placed.index}
    assert where == {"gpus=2", "placement=packed-on-2", "placement=all-on-1"}
    changes = claims[claims["quantity"] == "placement_changes_ttft_p50_s"]
    assert set(changes["state"]) == {"measured"} and len(changes) == 2
    per_rank = claims[claims["quantity"] == "kv_bytes_per_token_and_rank"]
    assert per_rank["computed"].tolist() == [114688, 57344, 28672, 14336, 14336]  # beyond 8 ranks heads are replicated
    by_quantity = claims.set_index("quantity")
    most = by_quantity.loc["most_in_one_server"]
    assert most["computed"].tolist() == [1, 4] and set(most["state"]) == {"measured"}
    preempted = by_quantity.loc["preemptions"]
    assert preempted["computed"].tolist() == [0, 0]  # all fit
    wave = by_quantity.loc["ttft_first_wave_s"]
    assert set(wave["state"]) == {"measured"} and len(wave) == 6  # three layouts with one client and with eight
    split = by_quantity.loc["itl_p50_s"].set_index("conditions").loc["arm=split;gpus=2;c=1;in=512;out=128"]
    exchange = by_quantity.loc["exchange_s"].iloc[0]
    assert exchange["measured"] == pytest.approx(split["measured"] - split["computed"])
    border = by_quantity.loc["split_wins_above_bytes"]
    assert border["state"] == "computed"
    assert border["computed"] == pytest.approx(max(0, exchange["measured"] * 4e12 * 2 - 576 * 114688))
    ready = by_quantity.loc["ready_s"]
    assert ready["conditions"].str.endswith("starts=all-servers-at-once").all() and (ready["measured"] == 0.1).all()
    where = by_quantity.loc["workers_on_one_gpu"]
    assert set(where.loc[where["conditions"].str.contains("all-on-1"), "computed"]) == {6}
    more = claims[claims["conditions"].str.contains("gpus=[34]", na=False)]
    assert len(more) == 6 and set(more["state"]) == {"not measured"}
    assert more["reason"].str.endswith("GPUs").all() and more.iloc[0]["computed"] == 3 * 22032


def test_a_machine_with_one_gpu_says_so_and_starts_nothing(machine):
    claims = machine(gpus=1)
    assert fakes.EVENTS == []
    reasons = claims.loc[claims["quantity"] == "throughput_tok_s", "reason"]
    assert reasons.str.contains("this machine has 1 GPU\\(s\\), the profile asks for 2").all()
