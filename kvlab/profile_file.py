"""The TOML file of a profile: where it is found, what may be wrong with it, and from where its relative paths count."""

from __future__ import annotations

import difflib
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

from kvlab.errors import ConfigError
from kvlab.files import typed

FOLDER = resources.files("kvlab") / "profiles"
PATHS = ("model", "geometry", "text")  # fields that may name a file or folder of the user's


def built_in() -> list[str]:
    """Names of the profiles that come with kvlab."""
    return sorted(Path(str(entry)).stem for entry in FOLDER.iterdir() if str(entry).endswith(".toml"))


def read(name_or_path: str) -> tuple[str, dict[str, Any]]:
    """(what to call it, its values) of a built-in profile or a file, relative paths made absolute; else ConfigError."""
    if name_or_path in built_in():
        where, folder = f"profile {name_or_path}", None
        data = (FOLDER / f"{name_or_path}.toml").read_bytes()
    else:
        path = typed(name_or_path)
        where, folder, data = str(path), path.absolute().parent, _bytes(path, name_or_path)
    try:
        values = tomllib.loads(data.decode("utf-8-sig"))  # some editors write the mark
    except UnicodeDecodeError:
        raise ConfigError(f"{where} is not valid TOML: it is not even text.", next_step=_known()) from None
    except ValueError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}", next_step="correct that line") from None
    return where, _from(folder, values) if folder else values


def _known() -> str:
    return f"use one of: auto, {', '.join(built_in())}; or the path of your own TOML file"


def _bytes(path: Path, given: str) -> bytes:
    """The bytes of a profile's file; ConfigError that says what stands there instead."""
    if path.is_dir():
        tomls = sorted(file.name for file in path.glob("*.toml"))
        raise ConfigError(
            f"{given!r} is a folder, and a profile is a file.",
            next_step=_known() + (f", such as {path / tomls[0]}" if tomls else ""),
        )
    try:
        return path.read_bytes()
    except FileNotFoundError:
        as_file = path.suffix == ".toml" or "/" in given
        what = f"There is no file {path.absolute()}." if as_file else f"There is no profile {given!r}."
        near = difflib.get_close_matches(path.stem, built_in(), 1)
        raise ConfigError(what, f"did you mean {near[0]}?" if near else None, _known()) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"The profile {given!r} cannot be read: {error}", next_step=_known()) from None


def _from(folder: Path, values: Any) -> Any:
    """The values with relative paths made absolute: those that begin with a dot, or that exist beside the file."""
    if isinstance(values, list):
        return [_from(folder, value) for value in values]
    if not isinstance(values, dict):
        return values
    return {name: _path_from(folder, v) if name in PATHS else _from(folder, v) for name, v in values.items()}


def _path_from(folder: Path, value: Any) -> Any:
    if not isinstance(value, str) or not value or value.startswith(("~", "/")):
        return value
    dotted = value.startswith(("./", "../")) or value in (".", "..")
    return str((folder / value).resolve()) if dotted or ("/" in value and (folder / value).exists()) else value
