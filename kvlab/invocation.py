"""The command as its user typed it: `kvlab`, `.venv/bin/kvlab`, or a module of a Python."""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

COMMANDS = re.compile(r"(?<![\w/.-])kvlab (?=(?:measure|report|check|predict|compare|ps|stop|k8s|router)\b)")


def command() -> str:
    """What starts kvlab from the current folder, in this installation."""
    given = sys.argv[0] if sys.argv else ""
    if Path(given).name != "kvlab":  # a notebook's kernel, a test, `python -m`
        given = str(Path(sys.executable).parent / "kvlab")
        if not Path(given).exists():
            return "kvlab"
    found = shutil.which("kvlab")
    if found and os.path.realpath(found) == os.path.realpath(given):
        return "kvlab"
    near = os.path.relpath(given)
    return near if not near.startswith("..") else str(Path(given).absolute())


def as_typed(text: str) -> str:
    """The text with every `kvlab ...` command written so that it works where it is read."""
    word = command()
    return text if word == "kvlab" else COMMANDS.sub(lambda _: f"{word} ", text)
