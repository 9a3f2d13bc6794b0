"""How far one person, or a room, is in the exercises: the verdicts that their saved notebooks hold.

`python -m kvlab.workshop_progress [FOLDER ...]` prints a line a folder of exercises (without one: this checkout's).
JupyterLab saves with a notebook what its checks said; nothing is executed here, and nothing else is kept.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvlab import workshop, workshop_check
from kvlab.workshop import LEVELS, MARKS, PASSED

NOT_CHECKED, UNREADABLE = "·", "unreadable"
CHECKED = re.compile(rf"([{''.join(MARKS.values())}]) \*\*(\d+\.\w+)\*\*: ")


def saved(path: Path) -> dict[str, str]:
    """Question -> mark, from the outputs of a saved exercise; ValueError or OSError where it cannot be read."""
    try:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        outputs = [output for cell in cells for output in cell.get("outputs", ())]
        texts = ["".join(output.get("data", {}).get("text/markdown", "")) for output in outputs]
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is no notebook") from None
    found = [match for text in texts if (match := CHECKED.match(text))]
    return {match[2]: match[1] for match in found}


def line(paths: Iterable[Path]) -> list[str]:
    """For each exercise its marks in the order of the page, and last how many questions pass."""
    known: dict[str, str] = {}
    cells = []
    for path in paths:
        try:
            found = saved(path)
        except (ValueError, OSError):
            cells.append(UNREADABLE)
            continue
        number = str(int(path.name[:2]))
        cells.append("".join(found.get(f"{number}.{part}", NOT_CHECKED) for part in LEVELS))
        known |= found
    passed = sum(mark == MARKS[PASSED] for mark in known.values())
    return [*cells, f"{passed} of {len(workshop.parts())}"]


def overview(folders: Sequence[Path]) -> str:
    """A table: a row a folder, a column an exercise, a mark a question."""
    rows = [["", *(str(n) for n in workshop.NOTEBOOKS), "pass"]]
    rows += [[str(folder), *line(workshop_check.exercises(folder))] for folder in folders]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    meaning = [f"{mark} {state}" for state, mark in MARKS.items()]
    return "\n".join([*lines, "", f"Marks: {', '.join(LEVELS)}. {', '.join(meaning)}, {NOT_CHECKED} not checked."])


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the overview of the folders; 1 where one of them holds no complete set of exercises."""
    if {"-h", "--help"} & set(sys.argv[1:] if arguments is None else arguments):
        print(__doc__)
        return 0
    given = [Path(name) for name in (sys.argv[1:] if arguments is None else arguments)] or [workshop_check.folder()]
    whole = [folder for folder in given if len(workshop_check.exercises(folder)) == len(workshop.NOTEBOOKS)]
    if whole:
        print(overview(whole))
    for folder in given:
        if folder not in whole:
            print(f"{folder} does not hold the exercises. Next: give each notebooks/workshop.", file=sys.stderr)
    return 0 if whole == given else 1


if __name__ == "__main__":
    sys.exit(main())
