"""Writes the start of a new section, notebooks/NN_NAME.ipynb, in the shape that all of them share.

    .venv/bin/python tools/new_section.py NAME 'A title with a verb'

CONTRIBUTING.md says what goes into its cells. An existing section stays as it is.
"""

import argparse
import re
import sys
from pathlib import Path

import nbformat
from nbformat import v4

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
TITLE = """\
# {title}

One sentence: what decides it.

**Time**: a few minutes on two CPU cores. **Hardware**: none beyond what the profile names."""
PARAMETERS = """\
PROFILE: str = "auto"  # auto, a built-in profile, or the path of your own TOML file
MACHINE: str = ""  # data folder; empty: named after this machine's hardware
MODE: str = "auto"  # auto: measure what is missing; measure: all again; replay: start nothing
BASE_URL: str = ""  # an existing server to measure instead of starting one"""
PARTS = (("Computed", 1), ("Measured", 2), ("The picture", 1), ("What did not match, and why", 1))  # with code cells
KERNEL = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def skeleton(title: str) -> nbformat.NotebookNode:
    """The notebook: title, parameters, and under each heading its empty code cells."""
    cells = [v4.new_markdown_cell(TITLE.format(title=title))]
    cells.append(v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]}))
    for heading, code in PARTS:
        cells += [v4.new_markdown_cell(f"## {heading}"), *(v4.new_code_cell() for _ in range(code))]
    for at, cell in enumerate(cells):
        cell["id"] = f"cell-{at:02}"  # the same each time
    return v4.new_notebook(cells=cells, metadata=KERNEL)


def write(name: str, title: str, folder: Path = FOLDER) -> Path:
    """Writes it with the next number and returns its path. SystemExit for a name that is wrong or taken."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        sys.exit(f"{name!r} is no section name.\nNext: use lower-case letters, digits and _, such as block_size")
    known = {path.stem[3:]: path for path in sorted(folder.glob("[0-9][0-9]_*.ipynb"))}
    if name in known:
        sys.exit(f"The section {name} is there already: {known[name]}")
    number = max((int(path.name[:2]) for path in known.values()), default=-1) + 1
    path = folder / f"{number:02}_{name}.ipynb"
    nbformat.write(skeleton(title), path)
    return path


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("name", help="of the section, such as block_size")
    parser.add_argument("title", help="its first line: a title with a verb")
    given = parser.parse_args()
    print(write(given.name, given.title))
