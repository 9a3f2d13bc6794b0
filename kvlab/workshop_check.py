"""Executes every exercise of the workshop twice: unanswered nothing may pass, with the solutions everything must.

`python -m kvlab.workshop_check` (make workshop-check) exits 1 where an exercise fails either way. The solutions are the
Python blocks of notebooks/workshop/solutions/NN_name.md; each one sets the answer that its question checks.
"""

from __future__ import annotations

import json
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode, v4

from kvlab import run, workshop
from kvlab.errors import KvlabError, NotebookError

SOLUTIONS = "solutions"
MARK = "workshop verdicts: "
TELL = (
    "import json\nfrom kvlab import workshop\n"
    f"print({MARK!r} + json.dumps({{v.part: [v.state, v.message] for v in workshop.verdicts().values()}}))"
)
AT_ONCE = 2
LIMIT_S = 600  # of one cell
Verdicts = dict[str, tuple[str, str]]  # part -> (state, message)


def folder() -> Path:
    """Where the exercises lie."""
    return run.folder() / "workshop"


def exercises(where: Path | None = None) -> list[Path]:
    """The exercises, in order."""
    return sorted((where or folder()).glob("[0-9][0-9]_*.ipynb"))


def solutions_of(path: Path) -> dict[str, str]:
    """Answer name -> the code that sets it, from the closed solutions of an exercise. NotebookError without them."""
    file = path.parent / SOLUTIONS / f"{path.stem}.md"
    if not file.is_file():
        raise NotebookError(
            f"The solutions of {path.stem} are not there.",
            cause="the folder is withheld; the exercises themselves do not need it",
            next_step=f"put {SOLUTIONS}/{file.name} beside the exercises",
        )
    found = re.findall(r"^```python\n(.*?)^```", file.read_text(encoding="utf-8"), re.M | re.S)
    return {name: code for code in found for name in re.findall(r"^(answer_\w+) =", code, re.M)}


def questions(notebook: NotebookNode) -> list[str]:
    """The answer names of an exercise, in order."""
    cells = [cell for cell in notebook.cells if "answer" in cell.metadata.get("tags", [])]
    return [cell.source.partition(" ")[0] for cell in cells]


def filled(notebook: NotebookNode, solutions: dict[str, str]) -> NotebookNode:
    """A copy with the answers in their cells. NotebookError names an answer without a solution."""
    missing = [name for name in questions(notebook) if name not in solutions]
    if missing:
        raise NotebookError(f"There is no solution for {', '.join(missing)}.")
    copy = nbformat.from_dict(json.loads(json.dumps(notebook)))
    for cell in copy.cells:
        if "answer" in cell.metadata.get("tags", []):
            cell.source = solutions[cell.source.partition(" ")[0]]
    return copy


def verdicts_of(notebook: NotebookNode, where: Path) -> Verdicts:
    """Executes a copy in a kernel of its own, in the folder `where`, and returns what its checks said."""
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError, CellTimeoutError, DeadKernelError

    copy = nbformat.from_dict(json.loads(json.dumps(notebook)))
    copy.cells.append(v4.new_code_cell(TELL))
    client = NotebookClient(
        copy,
        timeout=LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(where)}},
        extra_arguments=["--IPKernelApp.log_level=50"],
    )
    try:
        client.execute()
    except CellExecutionError as error:
        raise NotebookError(f"a cell failed: {error.ename}: {error.evalue}") from None
    except (CellTimeoutError, DeadKernelError) as error:
        died = isinstance(error, DeadKernelError)
        raise NotebookError("its kernel died" if died else f"a cell took longer than {LIMIT_S} s") from None
    said = "".join(output.get("text", "") for output in copy.cells[-1].outputs)
    return {part: tuple(verdict) for part, verdict in json.loads(said.partition(MARK)[2]).items()}


def problems_of(path: Path) -> list[str]:
    """What is wrong with an exercise: nothing where it passes with its solutions and does not pass unanswered."""
    try:
        notebook = nbformat.read(path, as_version=4)
        if not isinstance(notebook, NotebookNode):
            raise ValueError("it is no notebook")
    except (OSError, ValueError, AttributeError, KeyError, TypeError, nbformat.ValidationError) as error:
        return [f"{path.name} cannot be read: {str(error).splitlines()[0]:.200}; git checkout restores it"]
    try:
        asked = [name.removeprefix("answer_").replace("_", ".") for name in questions(notebook)]
        empty = verdicts_of(notebook, path.parent)
        solved = verdicts_of(filled(notebook, solutions_of(path)), path.parent)
    except KvlabError as error:
        return [error.what]
    return [
        *_unlike(asked, empty, workshop.UNANSWERED, "unanswered"),
        *_unlike(asked, solved, workshop.PASSED, "solved"),
    ]


def _unlike(asked: list[str], found: Verdicts, wanted: str, how: str) -> list[str]:
    problems = [f"{part} is not checked" for part in asked if part not in found]
    wrong = [(part, state, said) for part, (state, said) in found.items() if state != wanted]
    return problems + [f"{part}, {how}: {state} instead of {wanted} ({said})" for part, state, said in wrong]


def main(arguments: list[Any] | None = None) -> int:
    """Checks every exercise of the folder in `arguments` (default: the project's); the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    paths = exercises(Path(given[0]) if given else None)
    if not paths:
        print("There are no exercises here. Next: run this inside the repository.", file=sys.stderr)
        return 1
    began = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(paths, pool.map(problems_of, paths), strict=True))
    for path, problems in found.items():
        print(f"{'failed' if problems else 'passed'}  {path.stem}")
        for problem in problems:
            print(f"        {problem}")
    bad = sum(bool(problems) for problems in found.values())
    print(f"{len(found) - bad} of {len(found)} exercises pass with their solutions and not without them, in ", end="")
    print(f"{time.monotonic() - began:.0f} s.")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
