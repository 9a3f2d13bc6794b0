"""Parameters as notebooks declare them, and what a list parameter may hold where a cell uses it."""

import re
from pathlib import Path

import nbformat
import pytest
from notebooks_for_tests import notebook

from kvlab import parameters, run
from kvlab.errors import ConfigError

ROOT = Path(run.__file__).resolve().parent.parent
LISTS = [
    (path, name)
    for path in sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))
    for name, told in parameters.parameters(path).items()
    if told["type"].startswith("list")
]


def test_a_declaration_is_read_as_it_is_written(tmp_path):
    lines = 'N: list[int] = [1, 2]  # müssen # 3\nTEXT: str = "a # b"  # a word\nOLD = 3\n'
    assert parameters.parameters(notebook(tmp_path / "a.ipynb", parameters=lines)) == {
        "N": {"type": "list[int]", "default": "[1, 2]", "help": "müssen # 3"},
        "TEXT": {"type": "str", "default": "'a # b'", "help": "a word"},
        "OLD": {"type": "None", "default": "3", "help": ""},
    }
    with pytest.raises(ConfigError, match=r"parameters of a.ipynb cannot be read: line 1"):
        parameters.parameters(notebook(tmp_path / "a.ipynb", parameters="N: int ="))


@pytest.mark.parametrize("text", ["", "{}", '{"cells": [{}]}', "[]", "\xff"])
def test_a_broken_notebook_is_one_error(tmp_path, text):
    (tmp_path / "a.ipynb").write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError, match=r"a.ipynb cannot be read"):
        parameters.parameters(tmp_path / "a.ipynb")


@pytest.mark.parametrize("about", [{}, {"kernelspec": {"name": "python3"}}, {"kernelspec": None}])
def test_a_notebook_that_names_no_kernel_is_one_error(tmp_path, about):
    path = notebook(tmp_path / "a.ipynb")
    parameters.check_kernel(path)
    made = nbformat.read(path, as_version=4)
    made.metadata = about
    nbformat.write(made, path)
    with pytest.raises(ConfigError, match="a.ipynb names no kernel") as caught:
        run.execute(path, {}, tmp_path / "out.ipynb")
    assert "Next: open it in JupyterLab" in str(caught.value) and not (tmp_path / "out.ipynb").exists()


@pytest.mark.parametrize("value", [[], [1, 8]])
def test_a_list_passes(value):
    assert parameters.listed("N", value) is value


@pytest.mark.parametrize("value", [8, 8.0, "8", None, True, (1,), [0], [-1], [1.5], [[1]], [True], {"a": 1}])
def test_what_is_no_list_of_counts_is_one_error(value):
    with pytest.raises(ConfigError, match="N is ") as caught:
        parameters.listed("N", value)
    assert "Next: write " in str(caught.value)


@pytest.mark.parametrize("value", [8, [8, 512, 128, 64], [[8, 512, 128]], [[8, 512, 128, 0]], ["a"], [[]]])
def test_what_is_no_list_of_loads_is_one_error(value):
    with pytest.raises(ConfigError, match="LOADS") as caught:
        parameters.listed("LOADS", value, each=4)
    assert "[[n, n, n, n], ...]" in str(caught.value)
    assert parameters.listed("LOADS", [[8, 512, 128, 64]], each=4) == [[8, 512, 128, 64]]


@pytest.mark.parametrize(("path", "name"), LISTS, ids=[f"{path.stem}-{name}" for path, name in LISTS])
def test_every_notebook_checks_its_list_before_it_uses_it(path, name, monkeypatch, tmp_path):
    """Whatever became of the parameters cell: a line without its type, and a number in place of a list."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    edited = re.sub(rf"^{name}: .*$", f"{name} = 8", cells[0], flags=re.M)
    space = {}
    exec(edited, space)
    space |= {"MODE": "replay", "MACHINE": "empty", "PROFILE": "cpu-tiny"}
    with pytest.raises(ConfigError, match=f"{name} is 8, of type int; it must be of type list"):
        for cell in cells[1:]:
            exec(compile(cell, path.name, "exec"), space)
