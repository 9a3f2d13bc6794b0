"""Numbers on the command line of a tool, as argparse's `type`."""

from __future__ import annotations

import argparse
import math


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
