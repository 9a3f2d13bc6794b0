"""What runs is shown while one waits: one line that rewrites itself, or one now and then where nobody looks."""

import io
import itertools
import os
import re
import time

import pytest
from nbformat import v4
from notebooks_for_tests import notebook
from waiting_for_tests import until

from kvlab import progress, run


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_gets_one_line_that_rewrites_itself_and_goes(monkeypatch):
    stream, words = Terminal(), (f"cell {n}{'.' * max(0, 40 - n)}" for n in itertools.count())
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "REDRAW_S", 0.01)
    monkeypatch.setenv("COLUMNS", "30")
    with progress.line(lambda: next(words)):
        until(lambda: stream.getvalue().count("\r") > 4)
    pieces = stream.getvalue().split("\r")
    assert "cell 0" in pieces[1] and "cell 3" in pieces[4] and "\n" not in stream.getvalue()
    assert max(map(len, pieces)) < 30 and pieces[-1] == "" and pieces[-2].strip() == ""


def test_off_a_terminal_there_is_a_line_now_and_then(capsys, monkeypatch):
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(progress, "EVERY_S", 0.05)
    with progress.line(lambda: "load: cell 3 of 9"):
        until(stream.getvalue)
    with progress.line(lambda: "later", time.monotonic() - 125):
        until(lambda: "later" in stream.getvalue())
    first, *_, last = stream.getvalue().splitlines()
    assert re.fullmatch(r"  load: cell 3 of 9, 0:\d\d", first) and re.fullmatch(r"  later, 2:\d\d", last)
    monkeypatch.undo()
    assert progress.EVERY_S == 30.0


def test_a_position_names_the_cell_its_heading_and_what_the_kernel_tells(tmp_path):
    cells = [
        v4.new_markdown_cell("# Title\n\nwords"),
        v4.new_code_cell("1"),
        v4.new_markdown_cell("## Measured: the low points"),
        v4.new_code_cell("## no heading\n2"),
    ]
    position = progress.Position("load", cells, tmp_path / "line")
    position(cell=cells[1], cell_index=1)
    assert str(position) == "load: cell 2 of 4"
    (tmp_path / "line").write_text("3 of 9: c8\n")
    position(cell=cells[3], cell_index=3)
    assert str(position) == "load: cell 4 of 4 (Measured: the low points), 3 of 9: c8"


def test_nobody_waits_and_nothing_is_told(monkeypatch, tmp_path):
    monkeypatch.delenv(progress.FILE, raising=False)
    progress.tell("x")
    monkeypatch.setenv(progress.FILE, str(tmp_path / "gone" / "file"))
    progress.tell("x")  # never an error
    assert list(tmp_path.iterdir()) == []


def test_a_running_notebook_is_told_of(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "EVERY_S", 0.2)
    tells = "from kvlab import progress\nprogress.tell('2 of 5: c16')\nimport time\ntime.sleep(1.5)"
    path = notebook(tmp_path / "02_load.ipynb", tells)
    run.execute(path, {"X": 2}, tmp_path / "out.ipynb", shown=True)
    told = capsys.readouterr().err
    assert re.search(r"^  load: cell 2 of 2, 2 of 5: c16, \d:\d\d$", told, re.M)  # papermill's own cell is not counted


@pytest.mark.parametrize("name", ["MPLBACKEND", progress.FILE, "KVLAB_PROJECT"])
def test_the_kernel_variables_do_not_stay(tmp_path, monkeypatch, name):
    monkeypatch.delenv(name, raising=False)
    run.execute(notebook(tmp_path / "nb.ipynb", "1"), {}, tmp_path / "out.ipynb")
    assert name not in os.environ and not list(tmp_path.glob(".kernel-*"))
