import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from notebooks_for_tests import COMMON, notebook, outputs, printed
from waiting_for_tests import LIMIT_S, until

from kvlab import parameters, run
from kvlab.errors import ConfigError, NotebookError, StoreError
from kvlab.fake_server import FakeServer

ROOT = Path(run.__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
OTHERS = sorted((ROOT / "notebooks").glob("*/*.ipynb"))  # to play with, and exercises: no sections


# -- parameters ---------------------------------------------------------------------------------------------------


def leaves_a_mark(tmp_path):
    return notebook(tmp_path / "nb.ipynb", f"open({str(tmp_path / 'started')!r}, 'w').close()")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"XX": 1}, "no parameter 'XX'"),
        ({"x": 1}, "no parameter 'x'"),
        ({"X": "1"}, "X is '1', of type str; it must be of type int"),
        ({"X": 1.5}, "must be of type int"),
        ({"X": True}, "must be of type int"),
        ({"NAME": 5}, "must be of type str"),
        ({"CELLS": "[1]"}, "must be of type list"),
        ({"CELLS": [0, -1]}, "CELLS is [0, -1], and 0 must be above 0"),
        ({"CELLS": [[8, float("nan")]]}, "nan is not finite"),
        ({"CELLS": [10**30]}, "is too large"),
        ({"COUNTS": ["a"]}, "'a' is no whole number"),
        ({"COUNTS": [1, True]}, "True is no whole number"),
        ({"COUNTS": [1.5]}, "1.5 is no whole number"),
        ({"X": -1}, "-1 must be 0 or more"),
        ({"RATE": float("inf")}, "inf is not finite"),
        ({"RATE": "fast"}, "must be of type float"),
        ({"RATE": False}, "must be of type float"),
    ],
)
def test_a_wrong_parameter_stops_before_anything_starts(tmp_path, given, message):  # pitfall 37
    path = leaves_a_mark(tmp_path)
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")) as caught:
        run.execute(path, given, tmp_path / "out.ipynb")
    assert "Next:" in str(caught.value)
    assert not (tmp_path / "started").exists() and not (tmp_path / "out.ipynb").exists()


def test_good_parameters_arrive(tmp_path):
    path = notebook(tmp_path / "nb.ipynb", "print(X, NAME, CELLS, RATE)")
    run.execute(path, {"X": 7, "NAME": "b", "CELLS": [1, 2], "RATE": 3}, tmp_path / "out.ipynb")
    assert "7 b [1, 2] 3" in printed(tmp_path / "out.ipynb")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("X=1", ("X", 1)),
        ("CELLS=[1, 8]", ("CELLS", [1, 8])),
        ("NAME=h200", ("NAME", "h200")),
        ("NAME=a=b", ("NAME", "a=b")),
        ("NAME=", ("NAME", "")),
        ("ON=True", ("ON", True)),
    ],
)
def test_parameters_typed_on_a_command_line(text, expected):
    assert parameters.parse_parameter(text) == expected


@pytest.mark.parametrize("text", ["X", "=1", "1X=2", "X Y=2"])
def test_what_is_no_parameter(text):
    with pytest.raises(ConfigError, match="NAME=VALUE"):
        parameters.parse_parameter(text)


# -- what a run does with failures --------------------------------------------------------------------------------


def test_a_killed_kernel_is_an_error_and_not_waited_out(tmp_path, capfd, caplog):  # pitfall 39
    path = notebook(tmp_path / "nb.ipynb", "print('before')", "import os; os.kill(os.getpid(), 9)", "print('after')")
    with pytest.raises(NotebookError, match="its kernel died"):
        run.execute(path, {}, tmp_path / "out.ipynb")
    assert capfd.readouterr() == ("", "") and not caplog.records  # nothing stands before our error
    assert "before" in printed(tmp_path / "out.ipynb") and "after" not in printed(tmp_path / "out.ipynb")


def test_a_cell_that_never_ends_is_an_error(tmp_path):  # pitfall 39
    path = notebook(tmp_path / "nb.ipynb", "import time; time.sleep(60)")
    with pytest.raises(NotebookError, match="longer than 1 s"):
        run.execute(path, {}, tmp_path / "out.ipynb", timeout_s=1)


def test_an_explained_error_reaches_the_reader_as_it_was_written(tmp_path):
    raises = "from kvlab.errors import ServerDied\nraise ServerDied('It died.', 'no memory', 'free some')"
    path = notebook(tmp_path / "nb.ipynb", "1", raises, "print('after')")
    with pytest.raises(NotebookError) as caught:
        run.execute(path, {}, tmp_path / "out.ipynb")
    text = str(caught.value)
    assert text.startswith("nb.ipynb stopped in cell ") and "It died.\nLikely cause: no memory\nNext: free some" in text
    assert "Traceback" not in text and "ServerDied" not in text and "\x1b" not in text
    assert text.count("Next:") == 1 and "out.ipynb" in text
    assert "after" not in printed(tmp_path / "out.ipynb")


def test_bad_input_found_in_a_cell_is_bad_input(tmp_path):
    wrong = "from kvlab.config import LoadConfig\nLoadConfig(requests=0, input_tokens=8, output_tokens=1)"
    with pytest.raises(ConfigError, match="requests: must be greater than 0, not 0") as caught:
        run.execute(notebook(tmp_path / "nb.ipynb", wrong), {}, tmp_path / "out.ipynb")
    assert "kept" not in str(caught.value) and "nb.ipynb stopped in cell" in str(caught.value)


def test_an_explained_error_is_shown_without_its_traceback(tmp_path):
    raises = "from kvlab.errors import ServerDied\nraise ServerDied('It died.', 'no memory', 'free some')"
    with pytest.raises(NotebookError):
        run.execute(notebook(tmp_path / "nb.ipynb", raises), {}, tmp_path / "out.ipynb")
    (shown,) = [o for o in outputs(tmp_path / "out.ipynb") if o.output_type == "error"]
    assert shown.traceback == ["It died.", "Likely cause: no memory", "Next: free some"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_notebook_that_cannot_be_stored_is_one_error(tmp_path, monkeypatch, number):
    def full(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("papermill.execute_notebook", full)
    with pytest.raises(StoreError, match=r"executed notebook .*out.ipynb could not be stored") as caught:
        run.execute(notebook(tmp_path / "nb.ipynb", "1"), {}, tmp_path / "out.ipynb")
    assert "Likely cause" in str(caught.value) and "Next:" in str(caught.value)


def test_any_other_error_is_named_by_its_kind(tmp_path):
    path = notebook(tmp_path / "nb.ipynb", "{}['missing']")
    with pytest.raises(NotebookError, match="KeyError: 'missing'"):
        run.execute(path, {}, tmp_path / "out.ipynb")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_kernel_and_says_so(tmp_path, some_engine, number):  # pitfall 26
    pid_file = tmp_path / "pid"
    write = f"import os; open({str(pid_file)!r}, 'w').write(str(os.getpid()))\nimport time; time.sleep(60)"
    notebook(tmp_path / "notebooks" / "00_start_here.ipynb", write, parameters=COMMON)
    command = [sys.executable, "-c", "from kvlab.cli import app; app()", "measure", "start_here", "--machine", "mine"]
    # A group of its own, and SIGINT as it is by default: a runner in the background may have it ignored.
    child = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=os.environ | {"KVLAB_CACHE": str(tmp_path / "cache"), "KVLAB_DATA": str(tmp_path / "data")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    until(lambda: child.poll() is not None or (pid_file.is_file() and pid_file.read_text()))
    child.send_signal(number)
    _, told = child.communicate(timeout=LIMIT_S)
    assert told.strip() == "Interrupted. What was measured is kept; the same command resumes."
    assert child.returncode == 130
    kernel = int(pid_file.read_text())
    until(lambda: not Path(f"/proc/{kernel}").exists())


def test_a_killed_command_leaves_no_connection_file_in_the_temporary_folder(tmp_path):
    """It holds the key to the kernel. The next run removes what a killed one left beside the executed notebook."""
    wait = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    path, out = notebook(tmp_path / "nb.ipynb", wait), tmp_path / "build" / "out.ipynb"
    (tmp_path / "tmp").mkdir()
    code = (
        f"from pathlib import Path; from kvlab import run; run.execute(Path({str(path)!r}), {{}}, Path({str(out)!r}))"
    )
    child = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"TMPDIR": str(tmp_path / "tmp")})
    until(lambda: child.poll() is not None or ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()))
    (folder,) = out.parent.glob(".kernel-*")
    assert (folder / "kernel.json").stat().st_mode & 0o77 == 0 == folder.stat().st_mode & 0o77
    child.kill()
    child.wait()
    assert folder.exists() and not list((tmp_path / "tmp").rglob("*.json"))
    run.execute(notebook(tmp_path / "nb.ipynb", "1"), {}, out)
    assert not list(out.parent.glob(".kernel-*"))


# -- what a notebook can rely on ----------------------------------------------------------------------------------


def test_a_load_runs_in_a_cell_whose_event_loop_is_running(tmp_path):  # pitfall 36
    cells = [
        "import asyncio\nassert asyncio.get_event_loop().is_running()",
        "from kvlab.client import Endpoint\nfrom kvlab.config import LoadConfig\nfrom kvlab import load\n"
        "at = Endpoint(NAME, 'fake')\nsmall = LoadConfig(requests=3, input_tokens=16, output_tokens=2)",
        "print('sync', load.run_load(at, small, nonce=1).requests['ok'].sum())",
        "result = await load.run_load_async(at, small, nonce=2)\nprint('async', result.requests['ok'].sum())",
    ]
    with FakeServer() as fake:
        path = notebook(tmp_path / "nb.ipynb", *cells)
        run.execute(path, {"NAME": fake.endpoint.base_url}, tmp_path / "out.ipynb")
    assert "sync 3" in printed(tmp_path / "out.ipynb") and "async 3" in printed(tmp_path / "out.ipynb")


def test_a_figure_stays_in_the_executed_notebook(tmp_path, monkeypatch):  # pitfall 38
    monkeypatch.setenv("MPLBACKEND", "agg")  # as continuous integration sets it
    draw = "from kvlab import plot\nfigure, axes = plot.panels(1)\nfigure"
    run.execute(notebook(tmp_path / "nb.ipynb", draw), {}, tmp_path / "out.ipynb")
    pictures = [o for o in outputs(tmp_path / "out.ipynb") if "image/png" in o.get("data", {})]
    assert len(pictures) == 1
    assert os.environ["MPLBACKEND"] == "agg"


def test_a_figure_drawn_over_two_cells_is_shown_once(tmp_path):  # pitfall 38
    cells = ["from kvlab import plot\nfigure, axes = plot.panels(1)", "axes[0].plot([1, 2])\nfigure"]
    run.execute(notebook(tmp_path / "nb.ipynb", *cells), {}, tmp_path / "out.ipynb")
    assert len([o for o in outputs(tmp_path / "out.ipynb") if "image/png" in o.get("data", {})]) == 1


def test_relative_folders_mean_the_same_in_the_notebook(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KVLAB_DATA", "mine")
    path = notebook(tmp_path / "elsewhere" / "nb.ipynb", "from kvlab import store\nprint(store.root())")
    run.execute(path, {}, tmp_path / "out.ipynb")
    assert str(tmp_path / "mine") in printed(tmp_path / "out.ipynb")
    assert os.environ["KVLAB_DATA"] == "mine"


# -- the notebooks themselves -------------------------------------------------------------------------------------


def test_sections_are_named_by_their_notebooks():
    assert list(run.notebooks())[:3] == ["start_here", "kv_capacity", "load"]
    for name in ("load", "02_load", "notebooks/02_load.ipynb"):
        assert run.notebook_of(name).name == "02_load.ipynb"
    with pytest.raises(ConfigError, match="kv_capacity, load"):
        run.notebook_of("laod")


@pytest.mark.parametrize("path", [*NOTEBOOKS, *OTHERS], ids=lambda path: path.stem)
def test_every_notebook_has_the_common_shape(path):
    cells = nbformat.read(path, as_version=4)
    code = [cell for cell in cells.cells if cell.cell_type == "code"]
    assert cells.metadata.kernelspec.name == "python3"
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert len([cell for cell in code if "parameters" in cell.metadata.get("tags", [])]) == 1
    assert max(len(cell.source.splitlines()) for cell in code) <= 25
    title, sentence = cells.cells[0].source.splitlines()[0], cells.cells[0].source
    assert title.startswith("# ") and "**Time**" in sentence and "**Hardware**" in sentence


@pytest.mark.parametrize("path", [*NOTEBOOKS, *OTHERS], ids=lambda path: path.stem)
def test_every_parameter_is_typed_and_explained(path):  # pitfall 37
    declared = parameters.parameters(path)
    assert {"PROFILE", "MACHINE", "MODE", "BASE_URL"} <= set(declared) or path in OTHERS
    lines = next(
        cell.source.splitlines()
        for cell in nbformat.read(path, as_version=4).cells
        if "parameters" in cell.metadata.get("tags", [])
    )
    assert len(declared) == len(lines)  # papermill understood each line
    assert {entry["type"] for entry in declared.values()} <= set(parameters.TYPES)
    assert all(entry["help"] for entry in declared.values())
    assert all(line.partition("#")[0].count("=") == 1 for line in lines)
