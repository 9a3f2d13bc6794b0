"""What runs right now, in one line: a notebook's kernel writes it into a file, and the command that waits shows it."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

FILE = "KVLAB_PROGRESS"  # in a kernel's environment: the file of its line
EVERY_S = 30.0  # between lines where nobody looks at a terminal
REDRAW_S = 0.5


def tell(text: str) -> None:
    """In a kernel: what it does now. Does nothing where no command waits, and never fails."""
    if os.environ.get(FILE):
        with contextlib.suppress(OSError):
            Path(os.environ[FILE]).write_text(text, encoding="utf-8")


def show(bar: Any, text: str) -> None:
    """Tells it beside a progress bar over cells, and with the bar's count."""
    bar.set_postfix_str(text)
    tell(f"{min(bar.n + 1, bar.total)} of {bar.total}: {text}")


def told(file: Path) -> str:
    """What the kernel of that file has told last; "" before it tells anything."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return " ".join(file.read_text(encoding="utf-8").split())
    return ""


@contextlib.contextmanager
def line(describe: Callable[[], str], since_s: float | None = None) -> Iterator[None]:
    """Meanwhile shows `describe()` with the time: a line that rewrites itself, or one every 30 s off a terminal.

    `since_s`: the monotonic clock's time from which it counts; null: from now.
    """
    ended, stream = threading.Event(), sys.stderr
    arguments = (describe, stream, ended, time.monotonic() if since_s is None else since_s)
    thread = threading.Thread(target=_show, args=arguments, daemon=True, name="kvlab-progress")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _show(describe: Callable[[], str], stream, ended: threading.Event, began: float) -> None:
    on_terminal, width = stream.isatty(), 0
    while not ended.wait(REDRAW_S if on_terminal else EVERY_S):
        text = f"  {describe()}, {_minutes(time.monotonic() - began)}"
        if on_terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r{text.ljust(width)}", end="", file=stream, flush=True)
            width = len(text)
        else:
            print(text, file=stream, flush=True)
    if width:
        print(f"\r{' ' * width}\r", end="", file=stream, flush=True)


def _minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


class Position:
    """Which cell of a notebook runs: nbclient calls it as each one starts; in words it says what the cell is about."""

    def __init__(self, section: str, cells: list[Any], file: Path):
        self.section, self._file, self._index, self._added = section, file, 0, 0
        self._headings = _headings(cells)

    def __call__(self, cell: Any, cell_index: int) -> None:
        self._added = self._added or int("injected-parameters" in cell.metadata.get("tags", []))  # papermill's own cell
        self._index = cell_index - self._added

    def __str__(self) -> str:
        at = min(self._index, len(self._headings) - 1)
        heading = f" ({self._headings[at]})" if self._headings[at] else ""
        said = told(self._file)
        return f"{self.section}: cell {at + 1} of {len(self._headings)}{heading}{f', {said}' if said else ''}"


def _headings(cells: list[Any]) -> list[str]:
    """For each cell the last heading of the second level above it; "" before the first."""
    found, last = [], ""
    for cell in cells:
        heads = [text[3:] for text in cell.source.splitlines() if text.startswith("## ")]
        last = heads[-1] if cell.cell_type == "markdown" and heads else last
        found.append(last)
    return found or [""]
