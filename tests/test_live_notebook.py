"""One notebook from its parameters to its claims with real vLLM on the CPU: one server start."""

import live_for_tests
import pytest
from typer.testing import CliRunner

from kvlab import claims, cli, processes, profile, store

pytestmark = live_for_tests.MARKS
EXACT = ("num_blocks", "capacity_tokens", "log_tokens")


def one_server(text):
    """The CPU profile with a single server and a small burst."""
    servers = text.index("[[kv_capacity.servers]]")
    end = text.index("[load]")
    return text[:servers] + '[[kv_capacity.servers]]\nname = "only"\n\n' + text[end:]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "own.toml").write_text(one_server((profile.FOLDER / "cpu-tiny.toml").read_text()))
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    return tmp_path


def measure(project, *words):
    options = ["--profile", str(project / "own.toml"), "--machine", "live", *words]
    result = CliRunner().invoke(cli.app, ["measure", "kv_capacity", "-p", "BURST=16", *options])
    assert result.exit_code == 0, result.stderr
    return (project / "data" / "live" / "claims.csv").read_bytes()


def test_a_section_is_measured_exactly_and_then_replayed_without_a_start(project):  # pitfall 19
    before = {server.id for server in processes.list_servers()}
    first = measure(project)
    assert {server.id for server in processes.list_servers()} <= before  # pitfall 26
    table = claims.read(store.machine_dir("live")).set_index("quantity")
    assert table.loc[list(EXACT), "state"].tolist() == ["measured"] * 3
    assert table.loc[list(EXACT), "residual"].tolist() == [0.0] * 3  # to the block
    fit = table.loc["running_while_waiting"]
    low, high = table.loc["requests_that_fit_low", "computed"], table.loc["requests_that_fit_high", "computed"]
    assert low - 1 <= fit["measured"] <= high + 1  # pitfall 30

    (run,) = store.list_runs("live", "kv_capacity")
    assert run.valid and run.manifest["fake"] is False
    assert run.manifest["predictions"]["stored_utc"][:19] <= run.manifest["server"]["started_utc"][:19]
    assert run.manifest["certificate"]["failures"] == [] and run.requests()["ok"].all()
    assert run.manifest["provenance"]["versions"]["vllm"] and "vllm" in run.log().lower()

    assert measure(project) == first
    assert measure(project, "--mode", "replay") == first
    assert [again.manifest["created_utc"] for again in store.list_runs("live")] == [run.manifest["created_utc"]]
