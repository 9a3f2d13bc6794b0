"""Tiny notebooks, as texts of their cells."""

import nbformat
from nbformat import v4

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


def outputs(path):
    """Every output of an executed notebook."""
    cells = nbformat.read(path, as_version=4).cells
    return [output for cell in cells if cell.cell_type == "code" for output in cell.outputs]


def printed(path):
    """What an executed notebook printed and returned as text."""
    texts = [o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs(path)]
    return "\n".join(texts)
