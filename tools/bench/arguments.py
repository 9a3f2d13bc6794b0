"""Numbers on the command line of a tool, as argparse's `type`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        if 0 < float(text) < math.inf:
            return float(text)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")


def whole_above_zero(text: str) -> int:
    """A whole number above 0."""
    if text.isascii() and text.isdigit() and int(text):
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")


def names_of(known: Sequence[str]) -> Callable[[str], list[str]]:
    """Reads names with commas between; one that is not known is an error, and so is none."""

    def names(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",") if name.strip()]
        if wrong := [name for name in given if name not in known] or ([text] if not given else []):
            raise argparse.ArgumentTypeError(f"{wrong[0]!r} is unknown; known: {', '.join(known)}")
        return given

    return names
