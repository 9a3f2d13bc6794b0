"""Tiny notebooks, as texts of their cells, and their execution without a kernel."""

import contextlib
import io
import time
from unittest.mock import MagicMock

import IPython
import nbformat
import pytest
from nbformat import v4

from kvlab import claims, store
from kvlab.parameters import check_parameters

PARAMETERS = """\
X: int = 1  # a number
NAME: str = 'a'  # a word
CELLS: list = []  # a list
COUNTS: list[int] = []  # whole numbers
RATE: float = 1.0  # a rate"""
COMMON = """\
PROFILE: str = "auto"  # a profile
MACHINE: str = ""  # a machine
MODE: str = "auto"  # a mode
BASE_URL: str = ""  # an address"""


def notebook(path, *cells, parameters=PARAMETERS):
    """Writes a notebook with a parameters cell and these code cells; returns its path."""
    first = v4.new_code_cell(parameters, metadata={"tags": ["parameters"]})
    made = v4.new_notebook(cells=[first, *(v4.new_code_cell(text) for text in cells)])
    made.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": "python3"}
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, path)
    return path


def own_project(monkeypatch, folder, names, *cells, parameters):
    """Makes the folder a project with these notebooks, and the current folder; data and cache lie in it."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("KVLAB_DATA", "data")
    monkeypatch.setenv("KVLAB_CACHE", str(folder / "cache"))
    for name in names:
        notebook(folder / "notebooks" / f"{name}.ipynb", *cells, parameters=parameters)
    return folder


def execute_here(path, given, out, *, timeout_s=None, shown=False):
    """In place of `kvlab.run.execute`: the cells run in this process. A kernel that imports kvlab takes seconds.

    For tests of what is done before, in and after the cells; how a kernel is driven is what test_run.py is about.
    """
    began = time.monotonic()
    check_parameters(path, given)
    made, space = nbformat.read(path, as_version=4), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVLAB_DATA", str(store.root()))
        patch.chdir(path.parent)
        patch.setattr(IPython, "get_ipython", lambda: MagicMock(user_ns=space))
        patch.setattr(claims, "_stand_ins", {})  # they end with a kernel
        for cell in made.cells:
            with contextlib.redirect_stdout(io.StringIO()) as said:
                exec(compile(cell.source, path.name, "exec"), space)
            cell.outputs = [v4.new_output("stream", text=said.getvalue())]
            if "parameters" in cell.metadata.get("tags", ()):
                space |= given
    out.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(made, out)
    return time.monotonic() - began


def outputs(path):
    """Every output of an executed notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def printed(path):
    """What an executed notebook printed and returned as text."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs(path)]
    return "\n".join(texts)
