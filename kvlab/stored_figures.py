"""Stored figures, figures/<machine>/<name>.{svg,png,json}; a damaged one is left out, with a warning."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

from kvlab import store
from kvlab.errors import StoreError
from kvlab.files import read_json


def of_section(machine: str, section: str) -> list[Path]:
    """The stored figures of a section, as paths of their JSON."""
    files = sorted(store.figures_dir(machine).glob("*.json"))
    return [path for path in files if (about := told(path)) and about["notebook"] == section]


def told(path: Path) -> dict[str, Any] | None:
    """What the JSON of a figure tells; None, with a warning, where it cannot be read."""
    try:
        about = read_json(path, _draw_again(path))
    except StoreError as error:
        warnings.warn(f"The figure {path.stem} of {path.parent.name} is left out: {error}", stacklevel=2)
        return None
    return {name: None for name in ("notebook", "machine", "alt")} | {"runs": []} | about


def picture(path: Path) -> bytes | None:
    """The SVG beside the JSON of a figure; None, with a warning, where it is not there or not whole."""
    file = path.with_suffix(".svg")
    try:
        svg = file.read_bytes()
        if not svg.rstrip().endswith(b"</svg>"):
            raise ValueError("it was cut off")
        if missing := [name for name, value in (told(path) or {}).items() if value is None]:
            raise ValueError(f"{path.name} names no {missing[0]}")
    except (OSError, ValueError) as error:
        said = StoreError(f"{file} cannot be read: {error}", next_step=_draw_again(path))
        warnings.warn(f"The figure {path.stem} of {path.parent.name} is left out: {said}", stacklevel=2)
        return None
    return svg


def _draw_again(path: Path) -> str:
    return f"kvlab report --mode replay --machine {path.parent.name} draws it anew"
