"""A replay whose every input is what it was is taken over from the build folder instead of being executed again.

Inputs: notebook, parameters, profile with the files that it names, kvlab's own files, the installed versions, the
hardware, and all stored data. The figures that the replay left have to be there as they were too; the executed notebook
is kept for each machine, so that whoever goes from one machine to another and back waits once for each.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from kvlab import files, outcome, provenance, store, stored_figures

FILE = "replayed.json"  # in the build folder: machine/notebook -> {stamp, seconds} of its last replay
KEPT = "replayed"  # in the build folder: machine/notebook as that replay left it
PACKAGE = Path(__file__).parent


def inputs(profile: str) -> str:
    """A fingerprint of what every notebook of a command reads; `profile`: its whole text, JSON first."""
    named = [path for text in _texts(profile) if (path := Path(text)).is_absolute() and path.exists()]
    parts = [
        profile,
        *(list(_tree(path, whole=())) for path in named),
        list(_tree(PACKAGE, whole=("",))),
        _installed(),
        repr(provenance.hardware()),
        str(store.root()),
        list(_tree(store.root(), whole=("claims.csv",))),
    ]
    return _digest(parts)


def stamp(path: Path, given: Mapping[str, Any], out: Path, common: str) -> str:
    """A fingerprint of all that a replay of `path` read and left; `common`: of `inputs`."""
    machine, section = given["MACHINE"], path.stem[3:]
    figures = [
        file for told in stored_figures.of_section(machine, section) for file in told.parent.glob(f"{told.stem}.*")
    ]
    named = [file for value in given.values() if isinstance(value, str) and (file := path.parent / value).is_file()]
    left = [path, out, *named, *sorted(figures)]
    aside = list(_tree(outcome.what_if_dir(machine, section), whole=("",)))
    return _digest([common, dict(given), [(file.name, _content(file)) for file in left], aside])


def take(path: Path, given: Mapping[str, Any], build: Path, common: str) -> float | None:
    """Puts the executed notebook of the last replay of this machine into its place, and returns what that took.

    None, and nothing is touched, where it has to be executed.
    """
    out, kept = _places(path, given, build)
    known = _read(build).get(str(kept.relative_to(build / KEPT)))
    if known is None or not kept.is_file() or known["stamp"] != stamp(path, given, kept, common):
        return None
    if not out.is_file() or _content(out) != _content(kept):
        _copy(kept, out)
    return known["seconds"]


def remember(took_s: Mapping[Path, float], given: Mapping[str, Any], build: Path, common: str) -> None:
    """Keeps replays that have just ended, and their stamps; `took_s`: notebook -> seconds."""
    with files.locked(build):
        known = _read(build)
        for path, took in took_s.items():
            out, kept = _places(path, given, build)
            _copy(out, kept)
            entry = {"stamp": stamp(path, given, kept, common), "seconds": round(took, 3)}
            known[str(kept.relative_to(build / KEPT))] = entry
        files.write_text(build / FILE, json.dumps(known, indent=1, sort_keys=True) + "\n")


def _places(path: Path, given: Mapping[str, Any], build: Path) -> tuple[Path, Path]:
    """Where the executed notebook lies for everybody, and where it is kept for its machine."""
    return build / "notebooks" / path.name, build / KEPT / given["MACHINE"] / path.name


def _copy(source: Path, target: Path) -> None:
    with files.disk_errors(str(target)):
        files.write_bytes(target, source.read_bytes())


def _read(build: Path) -> dict[str, dict[str, Any]]:
    try:
        return json.loads((build / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}


def _tree(folder: Path, whole: tuple[str, ...]) -> Iterator[tuple]:
    """Every file below a folder: its content where the name ends as in `whole`, else size and time of change."""
    for place, folders, names in os.walk(folder) if folder.is_dir() else [(folder.parent, [], [folder.name])]:
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        for name in sorted(name for name in names if not name.startswith(".")):
            file = Path(place, name)
            if file.is_file():
                found = file.stat()
                told = _content(file) if name.endswith(whole) else (found.st_size, found.st_mtime_ns)
                yield os.path.relpath(file, folder), told


def _content(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _installed() -> list[str]:
    """Python and the distributions of its path, whose folders carry their versions."""
    places = [Path(place) for place in sys.path if os.path.isdir(place)]
    return [sys.version, *sorted({found.name for place in places for found in place.glob("*.dist-info")})]


def _texts(profile: str) -> Iterable[str]:
    """Every text in a profile; its paths are whole ones."""
    try:
        todo = [json.JSONDecoder().raw_decode(profile)[0]]
    except ValueError:
        return
    while todo:
        value = todo.pop()
        if isinstance(value, str):
            yield value
        elif isinstance(value, dict | list):
            todo += value.values() if isinstance(value, dict) else value


def _digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
