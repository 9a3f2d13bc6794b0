"""The published repeats are repeats over servers, not over requests to one of them."""

from collections import defaultdict
from pathlib import Path

import pytest

from kvlab import store

ROOT = Path(__file__).parent.parent
REPEATS, SERVERS = 5, 3
ONE_SERVER = ("start0-", "check-")  # the repeats of one start, and two clients in turns on one server


def servers_of(runs):
    """Starts by condition, of the conditions that are repeated: {(name, clients): {start, ...}}."""
    starts, repeats = defaultdict(set), defaultdict(set)
    for run in runs:
        cell, server = run.manifest["cell"], run.manifest["server"] or {}
        condition = cell["name"], cell["load"]["concurrency"]
        starts[condition].add((server.get("started_utc"), server.get("ready_s")))
        repeats[condition].add(cell["repeat"])
    return {c: starts[c] for c, found in repeats.items() if len(found) >= REPEATS and not c[0].startswith(ONE_SERVER)}


@pytest.fixture
def runs(monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    if not (ROOT / "data" / "h200").is_dir():
        pytest.skip("the published dataset is not here")
    return [run for run in store.list_runs("h200") if run.valid]


def test_a_condition_with_five_repeats_was_measured_on_three_servers(runs):
    found = servers_of(runs)
    assert {name for name, _ in found} >= {"cap34", "cost-on", "chunk2048-in32768", "w6-k2-c8", "c64-in1500-out256"}
    assert not {c: len(starts) for c, starts in found.items() if len(starts) < SERVERS}


def test_repeats_of_one_server_are_seen(runs):
    on_one = [run for run in runs if run.manifest["cell"]["name"] == "cap34"]
    for run in on_one:
        run.manifest["server"] = on_one[0].manifest["server"]
    assert [len(starts) for starts in servers_of(on_one).values()] == [1]
