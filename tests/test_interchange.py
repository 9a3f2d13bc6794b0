"""Files that the real tools wrote against the null server: 4 streams, 12 requests of 20 tokens, 50 ms and 10 ms."""

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from kvlab import beside, claims, cli, foreign, interchange, store
from kvlab.errors import ConfigError
from kvlab.rows import itl_s

RESULTS = Path(__file__).parent / "fixtures" / "results"
VLLM = RESULTS / "vllm-bench-0.31.0.json.gz"
GUIDELLM = RESULTS / "guidellm-0.8.1.json.gz"
AIPERF = RESULTS / "aiperf-0.13.0" / "profile_export.jsonl.gz"


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    return tmp_path


def content(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def only(path):
    (found,) = foreign.read(path)
    return found, found.requests()


# -- in -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "tool", "version"),
    [(VLLM, "vllm bench serve", None), (GUIDELLM, "guidellm", "0.8.1"), (AIPERF, "aiperf", "0.13.0")],
)
def test_what_each_file_says_of_the_load(path, tool, version):
    found, rows = only(path)
    assert (found.tool, found.version, found.concurrency, found.arrival) == (tool, version, 4, "closed")
    assert len(rows) == 12 and rows["ok"].all() and (rows["output_tokens"] == 20).all()
    assert rows["start_s"].min() == 0 and rows["start_s"].is_monotonic_increasing
    assert rows["ttft_s"].between(0.049, 1).all() and (rows["latency_s"] > rows["ttft_s"]).all()
    assert found.load().output_tokens == 20 and found.load().requests == 12


def test_the_numbers_are_those_that_vllm_bench_prints():
    stated, (_, rows) = content(VLLM), only(VLLM)
    assert 1e3 * rows["ttft_s"].median() == pytest.approx(stated["median_ttft_ms"])
    assert 1e3 * rows["tpot_s"].mean() == pytest.approx(stated["mean_tpot_ms"])
    assert 1e3 * np.quantile(itl_s(rows), 0.99) == pytest.approx(stated["p99_itl_ms"])
    assert rows["prompt_tokens"].sum() == stated["total_input_tokens"]
    assert rows["latency_s"].tolist() == pytest.approx(sorted_by_start(stated, "latencies"))


def sorted_by_start(stated, name):
    return [value for _, value in sorted(zip(stated["start_times"], stated[name], strict=True))]


def test_the_numbers_are_those_that_guidellm_prints():
    stated, (_, rows) = content(GUIDELLM)["benchmarks"][0]["metrics"], only(GUIDELLM)
    for column, name in (("ttft_s", "time_to_first_token_ms"), ("tpot_s", "inter_token_latency_ms")):
        assert 1e3 * rows[column].mean() == pytest.approx(stated[name]["successful"]["mean"], rel=1e-3)
    assert rows["event_times_s"].isna().all() and rows["connect_s"].isna().all()  # not held: null, not 0


def test_the_numbers_are_those_that_aiperf_prints():
    stated, (_, rows) = content(AIPERF.with_name("profile_export_aiperf.json.gz")), only(AIPERF)
    assert 1e3 * rows["ttft_s"].mean() == pytest.approx(stated["time_to_first_token"]["avg"], rel=1e-3)
    assert 1e3 * itl_s(rows).mean() == pytest.approx(stated["inter_chunk_latency"]["avg"], rel=1e-3)
    assert rows["prompt_tokens"].sum() == stated["total_usage_prompt_tokens"]["avg"]
    assert (rows["connect_s"] > 0).any()


def test_failures_are_rows_with_their_reason_and_no_latency(tmp_path):  # pitfall 5, pitfall 6
    stated = content(VLLM)
    stated["errors"][3] = "Traceback ...\nConnectionResetError: gone"
    stated["ttfts"][3], stated["itls"][3], stated["output_lens"][3] = 0.0, [], 0
    path = tmp_path / "failed.json"
    path.write_text(json.dumps(stated))
    _, rows = only(path)
    failed = rows[~rows["ok"]]
    assert failed["error"].tolist() == ["ConnectionResetError: gone"]
    assert failed[["ttft_s", "latency_s", "tpot_s", "output_tokens"]].isna().all(axis=None)

    report = content(GUIDELLM)
    requests = report["benchmarks"][0]["requests"]
    requests["incomplete"], requests["errored"] = [requests["successful"].pop()], [requests["successful"].pop()]
    requests["errored"][0]["info"]["error"] = "timeout"
    path.write_text(json.dumps(report))
    _, rows = only(path)
    assert set(rows.loc[~rows["ok"], "error"]) == {foreign.CUT_OFF, "timeout"} and len(rows) == 12

    lines = [json.loads(line) for line in gzip.decompress(AIPERF.read_bytes()).decode().splitlines()]
    lines[0]["error"] = {"code": 500, "type": "Internal", "message": "as told"}
    lines[0]["metrics"] = {}
    path.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, lines)))
    found, rows = only(path.with_suffix(".jsonl"))
    assert rows.loc[~rows["ok"], "error"].tolist() == ["as told"]
    assert found.version is None and found.concurrency is None and "the most that were" in found.notes[-1]


def test_several_tokens_in_an_event_are_spread_over_the_events(tmp_path):  # pitfall 2
    stated = content(VLLM)
    stated["itls"] = [itls[:9] for itls in stated["itls"]]
    path = tmp_path / "two.json"
    path.write_text(json.dumps(stated))
    _, rows = only(path)
    assert rows["event_tokens"].map(list).tolist() == [[2] * 10] * 12


def test_files_without_start_times_give_no_rates(tmp_path):
    stated = content(VLLM)
    del stated["start_times"], stated["queue_times"]
    path = tmp_path / "old.json"
    path.write_text(json.dumps(stated))
    (run,) = interchange.import_file(path, "mine")
    summary = run.manifest["summary"]
    assert summary["throughput_tok_s"] is None and summary["wall_s"] is None and summary["itl_p50_s"] is None
    assert summary["ttft_p50_s"] == pytest.approx(0.0565, abs=1e-3)


def test_an_open_loop_is_known_by_its_rate(tmp_path):
    stated = content(VLLM) | {"max_concurrency": None, "request_rate": 8.0}
    path = tmp_path / "open.json"
    path.write_text(json.dumps(stated))
    found, _ = only(path)
    assert (found.load().arrival, found.load().rate_per_s) == ("poisson", 8.0)


SUMS = {key: value for key, value in content(VLLM).items() if key not in ("ttfts", "itls")}
BAD = {
    "no JSON": (b"hello", "is no JSON"),
    "no text": (b"\xff\xfe\x00", "cannot be read"),
    "nothing": (b"", "not a known result file"),
    "something else": (b'{"a": 1}', "not a known result file"),
    "a list": (b"[1, 2]", "not a known result file"),
    "cut off": (gzip.decompress(VLLM.read_bytes())[:2000], "is no JSON"),
    "sums only": (json.dumps(SUMS).encode(), "holds no single requests"),
    "sums of aiperf": (b'{"aiperf_version": "0.13.0"}', "sums only"),
    "a missing field": (json.dumps(content(VLLM) | {"errors": None}).encode(), "damaged or of a release"),
    "lists of unequal lengths": (json.dumps(content(VLLM) | {"errors": [""]}).encode(), "damaged or of a release"),
    "no requests": (b'{"ttfts": [], "itls": [], "input_lens": [], "output_lens": [], "errors": []}', "no request"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_file_is_one_clear_error(tmp_path, kind):
    data, message = BAD[kind]
    path = tmp_path / "bad.json"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        interchange.import_file(path, "mine")
    assert not store.machines()
    result = CliRunner().invoke(cli.app, ["import", str(path), "--machine", "mine"])
    assert result.exit_code == 2 and "Traceback" not in result.output


def test_a_missing_file_a_damaged_gzip_and_the_published_machine(tmp_path):
    (tmp_path / "x.gz").write_bytes(b"nothing of gzip")
    for path in (tmp_path / "gone.json", tmp_path / "x.gz", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            foreign.read(path)
    with pytest.raises(ConfigError, match="published"):
        interchange.import_file(VLLM, "article")


def test_imported_runs_have_claims_and_the_same_file_replaces_itself():
    for path in (VLLM, VLLM, GUIDELLM, AIPERF):
        interchange.import_file(path, "mine")
    assert len(store.list_runs("mine", "load")) == 3
    found = claims.read(store.machine_dir("mine")).set_index("id")
    measured = found["measured"].dropna()
    assert measured["load/throughput_tok_s/c=4;in=17;out=20;tool=vllm-bench-serve"] == pytest.approx(312, abs=3)
    assert measured["load/failures/c=4;in=18;out=20;tool=guidellm"] == 0
    gone = found.loc["load/itl_p50_s/c=4;in=18;out=20;tool=guidellm"]
    assert pd.isna(gone["measured"]) and "does not hold it" in gone["reason"]


def test_imported_points_are_drawn_as_a_machine_of_their_own(tmp_path):
    other = tmp_path / "eight.json"
    other.write_text(json.dumps(content(VLLM) | {"max_concurrency": 8}))
    for path in (VLLM, other):
        interchange.import_file(path, "mine")
    points = beside.points("mine", "load", "ttft_p50_s", "c", **{"in": 17, "out": 20})
    assert points["x"].tolist() == [4, 8] and points["measured"].notna().all()
    assert beside.others(SimpleNamespace(machine="theirs", section="load")) == ["mine"]


def test_another_file_of_the_same_load_is_another_repeat(tmp_path):
    again = tmp_path / "again.json"
    again.write_text(json.dumps(content(VLLM) | {"label": "second"}))
    interchange.import_file(VLLM, "mine")
    (run,) = interchange.import_file(again, "mine")
    assert run.manifest["cell"]["repeat"] == 1 and len(store.list_runs("mine")) == 2


# -- out ----------------------------------------------------------------------------------------------------------


def test_what_was_imported_is_exported_as_it_was(tmp_path):
    (run,) = interchange.import_file(VLLM, "mine")
    out = tmp_path / "out.json"
    result = CliRunner().invoke(cli.app, ["export", f"mine/load/{run.id}", "--out", str(out)])
    assert result.exit_code == 0, result.output
    stated, written = content(VLLM), json.loads(out.read_text())
    assert set(written) == set(stated)
    for name in ("ttfts", "latencies", "input_lens", "output_lens", "errors", "queue_times"):
        assert written[name] == pytest.approx(sorted_by_start(stated, name), abs=3e-6), name
    same = [name for name in stated if name.endswith("_ms")]
    same += ["completed", "failed", "total_output_tokens", "max_concurrency", "num_prompts", "request_throughput"]
    for name in same:
        assert written[name] == pytest.approx(stated[name], rel=2e-3), name
    assert written["max_output_tokens_per_s"] == 240
    (again,) = foreign.read(out)
    assert again.requests()["ttft_s"].tolist() == pytest.approx(run.requests()["ttft_s"].tolist())


def test_exports_that_cannot_be():
    result = CliRunner().invoke(cli.app, ["export", "nothing"])
    assert result.exit_code == 2 and "is no run" in result.output
    (run,) = interchange.import_file(VLLM, "mine")
    result = CliRunner().invoke(cli.app, ["export", run.id, "--to", "excel"])
    assert result.exit_code == 2 and "vllm-bench" in result.output
