"""Stored files that were cut, edited or removed: named with the next command, and nobody else is in their way."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from replays_for_tests import ROOT
from test_report import built, small_machine
from typer.testing import CliRunner

from kvlab import claims, cli, compare, files, instrument, plot, predictions, report, store, stored_figures
from kvlab.errors import ConfigError, StoreError

BROKEN = [b"", b"{", b"\xff\xfe", b"null", b"[]", b"5", b'"x"']


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    return tmp_path / "data"


# -- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        *({name: wrong} for name in ("cell", "provenance", "server", "certificate", "summary") for wrong in (5, "x")),
        {"cell": None},
        {"cell": {}},
        {"created_utc": None},
        {"created_utc": "yesterday"},
        {"created_utc": 5},
        {"duration_s": "long"},
        {"problems": {}},
    ],
)
def test_a_manifest_that_no_reader_can_use_is_a_damaged_run(changes):
    small_machine()
    path = next(store.machine_dir("mine").glob("*/*/run.json"))
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.warns(UserWarning, match=f"Skipped a damaged run: .*{next(iter(changes))}"):
        left = store.list_runs("mine")
    assert path.parent not in [run.path for run in left]
    with pytest.warns(UserWarning, match="damaged run"):
        report.about("mine")


def test_a_manifest_that_is_a_folder_is_in_nobodys_way():
    small_machine()
    path = next(store.machine_dir("mine").glob("*/*/run.json"))
    path.unlink()
    path.mkdir()
    assert "mine" in store.machines()
    with pytest.warns(UserWarning, match="damaged run"):
        store.list_runs("mine")


@pytest.mark.parametrize("text", [*BROKEN, b'{"stored": 5}', b'{"stored": [{}]}', b'{"stored": [{"rows": []}]}'])
def test_computed_numbers_that_cannot_be_read_are_named_and_left_alone(tmp_path, text):
    (tmp_path / "computed.json").write_bytes(text)
    known = claims.claim("load", "knee_low", unit="requests", computed=1.0)
    for ask in (lambda: predictions.last(tmp_path), lambda: predictions.store(tmp_path, "p", [known])):
        with pytest.raises(StoreError, match=r"computed\.json(.|\n)*Next: restore it from git, or remove it"):
            ask()
    assert (tmp_path / "computed.json").read_bytes() == text


# -- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [*BROKEN, None])
@pytest.mark.parametrize("ending", ["json", "svg"])
def test_a_figure_that_is_not_whole_is_left_out_and_says_how_to_draw_it(tmp_path, ending, text):
    small_machine()
    path = store.figures_dir("mine") / f"load.{ending}"
    path.unlink() if text is None else path.write_bytes(text)
    if ending == "json" and text is None:  # nothing tells of such a figure any more
        assert stored_figures.of_section("mine", "load") == []
        return
    with pytest.warns(UserWarning, match=r"figure load of mine is left out(.|\n)*--machine mine draws it anew"):
        page = built(tmp_path)
    assert 'id="figure-load"' not in page and "668.1 ms" in page


def test_a_figure_that_cannot_be_stored_leaves_the_one_that_was(monkeypatch):
    lab = SimpleNamespace(machine="mine", section="load")
    figure, (axis,) = plot.panels(1)
    plot.save(figure, lab, "curve", alt="x")
    before = {path.name: path.read_bytes() for path in store.figures_dir("mine").iterdir()}
    changed, (axis,) = plot.panels(1)
    axis.plot([1, 2])

    def half(path, data):
        path.write_bytes(data[: len(data) // 2])
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("kvlab.files.write_synced", half)
    with pytest.raises(StoreError, match="the disk is full"):
        plot.save(changed, lab, "curve", alt="x")
    assert {path.name: path.read_bytes() for path in store.figures_dir("mine").iterdir()} == before


# -- the load generator's table -------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [b"", b"\xff\xfe", b"a,b\n1,2\n"])
def test_a_table_of_the_load_generator_that_cannot_be_read_is_named(data, text):
    (data / "client").mkdir(parents=True)
    (data / "client" / "peers.csv").write_bytes(text)
    with pytest.raises(StoreError, match=r"peers\.csv cannot be read(.|\n)*bench-client"):
        instrument.peers()


@pytest.mark.parametrize("text", BROKEN)
def test_a_record_of_the_load_generator_that_cannot_be_read_is_named(data, text):
    (data / "client").mkdir(parents=True)
    (data / "client" / "peers.json").write_bytes(text)
    with pytest.raises(StoreError, match=r"peers\.json cannot be read(.|\n)*bench-client"):
        instrument.record("peers")


# -- commands -------------------------------------------------------------------------------------------------------


def test_a_machine_without_claims_is_said_to_have_none():
    small_machine(), small_machine("h200")
    (store.machine_dir("mine") / claims.FILE).unlink()
    with pytest.raises(ConfigError, match=r"mine holds no measured number(.|\n)*replay --machine mine"):
        compare.compare("h200", "mine")


@pytest.mark.parametrize("name", ["a" * 5000, "~nobody-of-that-name"])
def test_what_can_be_no_path_is_bad_input_for_compare_and_never_a_difference(name):
    small_machine()
    result = CliRunner().invoke(cli.app, ["compare", "mine", name])
    assert result.exit_code == 2 and "Next:" in result.output and isinstance(result.exception, SystemExit)


def test_a_file_that_is_missing_was_not_stored_but_read():
    error = files.unusable(FileNotFoundError(2, os.strerror(2), "figures/x.svg"))
    assert "figures/x.svg could not be read or written: No such file" in str(error)
    assert "git status" in str(error) and "stored:" not in str(error)
    full = files.unusable(OSError(28, os.strerror(28), "x"))
    assert "the disk is full" in str(full) and "df -h" in str(full)


# -- other encodings ------------------------------------------------------------------------------------------------


def test_a_terminal_that_knows_ascii_only_reads_and_prints_everything(tmp_path):
    """Texts are UTF-8 whatever the locale is, and a sign that a terminal does not know costs no result."""
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    environment = os.environ | ascii_only | {"KVLAB_DATA": str(ROOT / "data"), "KVLAB_CACHE": str(tmp_path)}
    said = []
    for words in (["site", "--machine", "cpu-tiny"], ["compare", "h200", "cpu-tiny"]):
        command = [sys.executable, "-m", "kvlab.cli", *words]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True)
        said.append((done.returncode, done.stderr.decode("ascii", "replace")))
    assert said == [(0, ""), (1, "")]
    page = (tmp_path / "_build" / "site" / "zh" / "load.html").read_text(encoding="utf-8")
    assert "中文" in page or "并发" in page
