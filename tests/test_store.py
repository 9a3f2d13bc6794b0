"""Runs are stored whole or not at all, and come back as they were."""

import errno
import gzip
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pandas as pd
import pytest
from tables_for_tests import failure, request, requests, samples

from kvlab import config, files, store, tables
from kvlab.errors import SchemaError, StoreError

CELL = config.Cell(
    name="c2",
    server=config.ServerConfig(model="tiny", engine="cpu"),
    load=config.LoadConfig(requests=2, input_tokens=8, output_tokens=3),
)
KEY = config.key(CELL)


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


def rows():
    return requests(request(0.0), failure(0.0, 1.0))


def manifest(**changes):
    return {"cell": CELL.model_dump(mode="json"), "key": KEY, "valid": True, "problems": []} | changes


def save(machine="cpu-tiny", section="load", requests=None, log_path=None, **changes):
    table = rows() if requests is None else requests
    return store.save_run(machine, section, manifest(**changes), table, samples({"t_s": 0.1, "running": 2}), log_path)


# -- there and back


def test_a_run_comes_back_as_it_was(tmp_path, data):
    log = tmp_path / "server.log"
    log.write_text("INFO started\nwörld\n")
    run = save(log_path=log)
    assert run.path == data / "cpu-tiny" / "load" / f"c2-r0-{KEY[:8]}"
    assert sorted(p.name for p in run.path.iterdir()) == [
        "requests.parquet",
        "run.json",
        "samples.parquet",
        "server.log.gz",
    ]
    found = store.find_run("cpu-tiny", "load", KEY)
    assert found.id == run.id and found.manifest == run.manifest
    pd.testing.assert_frame_equal(found.requests(), rows())
    pd.testing.assert_frame_equal(found.samples(), samples({"t_s": 0.1, "running": 2}))
    assert found.log() == "INFO started\nwörld\n"


def test_missing_stays_null_and_never_becomes_zero():  # pitfall 5
    row = save().requests().iloc[1]
    assert row["ttft_s"] is pd.NA and row["output_tokens"] is pd.NA and row["event_times_s"] is None


def test_times_are_kept_to_the_microsecond():
    run = save(requests=requests(request(0.0, [(0.1234567891, 1), (1000.0000004, 2)])))
    assert run.requests()["event_times_s"][0] == [0.123457, 1000.0]
    assert run.requests()["ttft_s"][0] == 0.123457


def test_a_run_of_many_tokens_stays_small():
    events = [[(k * 0.01 + i * 0.0101234567 + 0.5, 1) for i in range(128)] for k in range(64)]
    size = len(tables.to_bytes(requests(*[request(0.0, e) for e in events]), "requests"))
    assert size < 20_000  # 8192 events; as plain floats they take 80 kB


def test_empty_tables_can_be_stored():
    run = store.save_run("cpu-tiny", "load", manifest(), requests(), samples())
    assert len(run.requests()) == 0 and str(run.requests().dtypes["ttft_s"]) == "Float64"


def test_the_manifest_holds_null_for_what_is_not_a_number_and_for_what_is_not_known():
    run = save(summary={"a": float("nan"), "b": float("inf"), "c": pd.NA, "d": (1, 2)}, duration_s=1.5)
    on_disk = json.loads((run.path / "run.json").read_text())
    assert on_disk["summary"] == {"a": None, "b": None, "c": None, "d": [1, 2]}
    assert on_disk["provenance"] is None and on_disk["fake"] is False
    assert list(on_disk) == sorted(on_disk)


def test_a_manifest_that_cannot_be_written_is_refused_before_anything_is():
    with pytest.raises(StoreError, match="cannot hold object"):
        save(summary={"x": object()})
    assert store.list_runs("cpu-tiny") == []


def test_a_missing_log_does_not_cost_the_measurement(tmp_path):
    with pytest.warns(UserWarning, match="log is not stored"):
        run = save(log_path=tmp_path / "gone.log")
    assert run.log() is None and store.find_run("cpu-tiny", "load", KEY)


# -- checks


def test_wrong_columns_are_named():
    with pytest.raises(StoreError, match="unknown: ttft_ms; missing: ttft_s"):
        save(requests=rows().rename(columns={"ttft_s": "ttft_ms"}))


def test_a_wrong_type_is_named_with_its_meaning():
    with pytest.raises(StoreError, match="ttft_s.*Float64"):
        save(requests=rows().assign(ttft_s="fast"))


def test_as_many_stamps_as_token_counts():
    with pytest.raises(StoreError, match="Row 0.*3 event times but 2"):
        save(requests=requests(request() | {"event_tokens": [1, 2]}))


@pytest.mark.parametrize("name", ["../evil", "H200", "a b", "", ".hidden"])
def test_a_machine_is_a_plain_folder_name(name):
    with pytest.raises(StoreError, match="machine name"):
        save(machine=name)


def test_fake_rows_never_lie_beside_measurements():
    with pytest.raises(StoreError, match="fake server"):
        save(fake=True)
    assert save(machine="fake", fake=True).manifest["fake"] is True


def test_a_run_without_a_name_is_refused():
    with pytest.raises(StoreError, match="cell.name"):
        save(cell={"repeat": 0})


def test_nothing_private_is_stored(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/ada")
    log = tmp_path / "server.log"
    log.write_text("loading /home/ada/models/x from /home/ada\n{'api_key': ['abc123'], 'max_num_seqs': 4}\n")
    argv = ["vllm", "serve", "/home/ada/models/x", "--api-key", "abc123", "--port", "1", "--hf-token=abc123"]
    run = save(log_path=log, server={"argv": argv, "env": {"HF_TOKEN": "abc123", "VLLM_X": "1"}})
    stored = (run.path / "run.json").read_text() + run.log()
    assert "ada" not in stored and "abc123" not in stored
    hidden = ["--api-key", "<hidden>", "--port", "1", "--hf-token=<hidden>"]
    assert run.manifest["server"]["argv"][2:] == ["~/models/x", *hidden]
    assert "'max_num_seqs': 4" in run.log()


# -- whole or not at all


def test_a_newer_run_replaces_the_older_one_of_the_same_id():
    save(duration_s=1.0)
    save(duration_s=2.0)
    assert [run.manifest["duration_s"] for run in store.list_runs("cpu-tiny")] == [2.0]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_said_and_leaves_the_older_run(monkeypatch, data, code):
    save(duration_s=1.0)
    done = []

    def fsync(handle):
        done.append(handle)
        if len(done) > 1:
            raise OSError(code, os.strerror(code))

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(StoreError, match="disk is full") as found:
        save(duration_s=2.0)
    assert "KVLAB_DATA" in str(found.value)
    monkeypatch.undo()
    monkeypatch.setenv("KVLAB_DATA", str(data))
    assert len(done) > 1
    assert [p.name for p in (data / "cpu-tiny" / "load").iterdir()] == [f"c2-r0-{KEY[:8]}"]
    assert store.find_run("cpu-tiny", "load", KEY).manifest["duration_s"] == 1.0


def test_a_rename_that_fails_puts_the_older_run_back(monkeypatch, data):
    save(duration_s=1.0)
    rename = Path.rename

    def fail(path, target):
        if path.name.startswith(store.NEW):
            raise OSError(errno.EIO, "broken")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(StoreError, match="broken"):
        save(duration_s=2.0)
    assert [p.name for p in (data / "cpu-tiny" / "load").iterdir()] == [f"c2-r0-{KEY[:8]}"]
    assert store.find_run("cpu-tiny", "load", KEY).manifest["duration_s"] == 1.0


def test_what_a_dead_process_left_is_cleared(data):
    run = save()
    (run.path.parent / f"{store.NEW}dead").mkdir()
    (run.path.parent / f"{store.NEW}dead" / "run.json").write_text("{")
    assert len(store.list_runs("cpu-tiny", "load")) == 1  # half a run is never seen
    save(duration_s=3.0)
    assert [p.name for p in run.path.parent.iterdir()] == [run.id]


def test_a_run_that_died_between_the_renames_is_found_again():
    run = save()
    run.path.rename(run.path.with_name(store.OLD + run.id))
    assert store.find_run("cpu-tiny", "load", KEY).id == run.id


WRITER = """
    import sys
    sys.path.insert(0, {tests!r})
    import test_store as t
    for i in range(8):
        t.save(duration_s=float(sys.argv[1]))
        t.save(key=f"{{sys.argv[1]}}{{i}}aaaaaaaa")
"""


def test_processes_that_save_at_once_lose_nothing(data):
    code = textwrap.dedent(WRITER.format(tests=str(Path(__file__).parent)))
    writers = [subprocess.Popen([sys.executable, "-c", code, str(n)], env=os.environ) for n in (1, 2)]
    assert [w.wait(120) for w in writers] == [0, 0]
    assert len(store.list_runs("cpu-tiny", "load")) == 1 + 16
    assert store.find_run("cpu-tiny", "load", KEY).manifest["duration_s"] in (1.0, 2.0)
    assert not [p for p in (data / "cpu-tiny" / "load").iterdir() if p.name.startswith(".")]


def test_text_is_replaced_whole(tmp_path, monkeypatch):
    path = tmp_path / "new" / "a.json"
    store.write_text(path, "old")

    def fsync(handle):
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(files.os, "fsync", fsync)
    with pytest.raises(StoreError, match="disk is full"):
        store.write_text(path, "new")
    assert path.read_text() == "old" and len(list(path.parent.iterdir())) == 1


def test_text_changes_in_one_step(tmp_path, monkeypatch):
    path = tmp_path / "a.json"
    store.write_text(path, "old")

    def fail(new, target):
        assert new.read_text() == "new"  # complete before it takes the name
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(StoreError, match="broken"):
        store.write_text(path, "new")
    assert path.read_text() == "old" and len(list(tmp_path.iterdir())) == 1


# -- finding


def test_only_a_valid_run_of_the_same_configuration_is_found():
    save(valid=False, problems=["late client"])
    assert store.find_run("cpu-tiny", "load", KEY) is None
    assert [run.valid for run in store.list_runs("cpu-tiny")] == [False]
    save()
    assert store.find_run("cpu-tiny", "load", KEY).valid
    assert store.find_run("cpu-tiny", "load", KEY[:8] + "ffff") is None
    assert store.find_run("cpu-tiny", "other", KEY) is None
    assert store.find_run("nowhere", "load", KEY) is None


def test_the_newest_of_two_names_of_one_configuration_is_found():
    save(created_utc="2026-01-02T00:00:00+00:00")
    renamed = CELL.model_dump(mode="json") | {"name": "a-new-name"}
    save(cell=renamed, created_utc="2026-01-03T00:00:00+00:00")
    assert store.find_run("cpu-tiny", "load", KEY).manifest["cell"]["name"] == "a-new-name"


@pytest.mark.parametrize("name", ["run.json", "requests.parquet", "samples.parquet"])
def test_a_damaged_run_is_skipped_by_name(name):
    run = save()
    path = run.path / name
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.warns(UserWarning, match=name):
        assert store.find_run("cpu-tiny", "load", KEY) is None


def test_a_table_of_a_damaged_run_says_which_and_what_to_do():
    run = save()
    (run.path / "requests.parquet").unlink()
    with pytest.raises(StoreError, match="(?s)requests.parquet.*measure it again"):
        run.requests()


def test_data_of_a_newer_kvlab_asks_for_an_upgrade():
    run = save()
    newer = run.manifest | {"schema_version": 99}
    (run.path / "run.json").write_text(json.dumps(newer))
    with pytest.raises(SchemaError, match="(?s)newer kvlab.*upgrade"):
        store.list_runs("cpu-tiny")


def test_a_manifest_of_an_older_kvlab_reads_as_null_where_it_lacks_a_field():
    run = save()
    old = {name: value for name, value in run.manifest.items() if name != "window_s"}
    (run.path / "run.json").write_text(json.dumps(old))
    assert store.list_runs("cpu-tiny")[0].manifest["window_s"] is None


def test_runs_are_listed_oldest_first():
    save(key="b" * 12, created_utc="2026-01-02T00:00:00+00:00")
    save(key="a" * 12, created_utc="2026-01-03T00:00:00+00:00", section="other")
    assert [run.manifest["key"][0] for run in store.list_runs("cpu-tiny")] == ["b", "a"]


def test_the_log_reads_the_same_on_every_save(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("x")
    first, second = (save(log_path=log).path / "server.log.gz" for _ in range(2))
    assert gzip.decompress(second.read_bytes()) == b"x"
    assert first.read_bytes()[4:8] == bytes(4)  # no time stamp: equal logs are equal files


# -- where


def test_the_data_folder_is_the_projects_from_any_folder_inside(tmp_path, monkeypatch):
    monkeypatch.delenv("KVLAB_DATA")
    project = tmp_path / "project"
    (project / "notebooks" / "workshop").mkdir(parents=True)
    (project / "pyproject.toml").write_text('[project]\nname = "kvlab"\n')
    for folder in (project, project / "notebooks", project / "notebooks" / "workshop"):
        monkeypatch.chdir(folder)
        assert store.root() == project / "data"
    assert store.figures_dir("h200") == project / "figures" / "h200"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "pyproject.toml").write_text('[project]\nname = "another"\n')
    monkeypatch.chdir(elsewhere)
    assert store.root() == elsewhere / "data"


def test_the_variable_wins(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "big-disk"))
    assert store.root() == tmp_path / "big-disk"


def test_machines_are_those_of_which_something_was_measured(data):
    save(machine="cpu-tiny")
    texts = {
        "article/claims.csv": "id,state\na,computed\nb,measured\n",
        "broken/claims.csv": "\x00\n\x00",
        "replayed/claims.csv": "id,state\na,not measured\nb,failed\n",
        "tried/load/computed.json": "{}",
    }
    for name, text in texts.items():
        (data / name).parent.mkdir(parents=True)
        (data / name).write_text(text)
    save(machine="refused", valid=False)
    (data / "empty").mkdir()
    (data / "file").write_text("")
    assert store.machines() == ["article", "broken", "cpu-tiny"]
    assert store.default_replay_machine() == "cpu-tiny"


def test_a_machine_of_a_newer_layout_stands_in_the_way_of_no_other_one(data):
    save("old")
    path = save("new").path / "run.json"
    path.write_text(path.read_text().replace('"schema_version": 1', '"schema_version": 99'))
    with pytest.warns(UserWarning, match="machine new is left out: a newer kvlab"):
        assert store.machines() == ["old"]
    with pytest.raises(SchemaError):
        store.list_runs("new")


def test_what_a_failed_attempt_leaves_is_removed_and_nothing_else(data):
    save(machine="kept")
    for name in ("tried", "claimed"):
        (data / name / "load").mkdir(parents=True)
        (data / name / "load" / "computed.json").write_text("{}")
    (data / "claimed" / "claims.csv").write_text("")
    for name in ("kept", "tried", "claimed", "nowhere"):
        store.forget_attempt(name)
    assert {path.name for path in data.iterdir()} == {"kept", "claimed"}


def test_a_replay_without_any_run_says_what_to_do():
    with pytest.raises(StoreError, match="kvlab measure"):
        store.default_replay_machine()
