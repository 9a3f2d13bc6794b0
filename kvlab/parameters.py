"""The parameters of a notebook: a cell of lines `NAME: type = value  # help`, checked before anything starts."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvlab.errors import ConfigError

COMMON = ("PROFILE", "MACHINE", "MODE", "BASE_URL")  # of every section
TYPES: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "float": (int, float),
    "bool": bool,
    "list": list,
    "list[int]": list,
    "list[str]": list,
    "list[list[int]]": list,
    "dict": dict,
}
PAPERMILL = " (papermill alone gives a list with -y 'NAME: [1, 8]'; its -p gives texts and numbers)"


def parameters(path: Path) -> dict[str, dict[str, Any]]:
    """The notebook's declared parameters: name -> {type, default, help}, each as it is written there."""
    source = _cell(path)
    try:
        statements = ast.parse(source).body
    except SyntaxError as error:
        raise ConfigError(
            f"The parameters of {path.name} cannot be read: line {error.lineno} is no Python.",
            next_step="write one NAME: type = value a line",
        ) from None
    lines, declared = source.splitlines(), {}
    for node in statements:
        target = getattr(node, "target", None) or next(iter(getattr(node, "targets", [])), None)
        if isinstance(target, ast.Name) and node.value is not None:
            kind = ast.unparse(node.annotation) if isinstance(node, ast.AnnAssign) else "None"
            rest = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
            told = {"type": kind, "default": ast.unparse(node.value), "help": rest.partition("#")[2].strip()}
            declared[target.id] = told
    return declared


def check_kernel(path: Path) -> None:
    """Raises ConfigError where a notebook does not say which kernel runs it, as one written by hand may."""
    about = _notebook(path).get("metadata") or {}
    if not ((about.get("language_info") or {}).get("name") or (about.get("kernelspec") or {}).get("language")):
        raise ConfigError(
            f"The notebook {path.name} names no kernel: its metadata has neither a kernelspec nor a language.",
            cause="it was written by a program, or by hand",
            next_step="open it in JupyterLab (make lab), choose the kernel Python 3, and save it; "
            "tools/new_section.py writes a new one whole",
        )


def _notebook(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"The notebook {path.name} cannot be read: {error}", next_step=f"git checkout -- notebooks/{path.name}"
    )


def _cell(path: Path) -> str:
    try:
        cells = _notebook(path)["cells"]
        found = [cell["source"] for cell in cells if "parameters" in cell["metadata"].get("tags", [])]
    except (KeyError, TypeError, AttributeError) as error:
        raise _unreadable(path, error) from None
    return "".join(found[0]) if found else ""


def check_parameters(path: Path, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for a parameter that the notebook does not declare, or one of another type."""
    declared = parameters(path)
    for name, value in given.items():
        if name not in declared:
            raise ConfigError(
                f"{path.name} has no parameter {name!r}.", next_step=f"use one of: {', '.join(sorted(declared))}"
            )
        check(value, declared[name]["type"], f"{path.name}: {name}", f"its help says: {declared[name]['help']}")


def check(value: Any, kind: str, name: str, hint: str) -> None:
    """Raises ConfigError where the value is not of that kind, or holds what no section can use."""
    wanted = TYPES.get(kind)
    is_bool = isinstance(value, bool) and kind != "bool"
    if wanted is not None and (is_bool or not isinstance(value, wanted)):
        whole = isinstance(value, int) and not is_bool and kind == "list[int]"
        text = kind.startswith("list") and isinstance(value, str)
        raise ConfigError(
            f"{name} is {value!r}, of type {type(value).__name__}; it must be of type {kind}.",
            next_step=f"write [{value}]" if whole else f"{hint}{PAPERMILL if text else ''}",
        )
    if kind in ("list[int]", "list[str]") and (nested := [item for item in value if isinstance(item, list)]):
        raise ConfigError(f"{name} is {value!r}, and {nested[0]!r} is a list in it.", next_step=hint)
    if kind == "list[list[int]]" and (flat := [item for item in value if not isinstance(item, list)]):
        raise ConfigError(f"{name} is {value!r}, and {flat[0]!r} is no list.", next_step=f"write [{value}], or {hint}")
    for item in _flat(value) if isinstance(value, list) else [value]:
        if why := _why_wrong(item, kind, inside=isinstance(value, list)):
            raise ConfigError(f"{name} is {value!r}, and {item!r} {why}.", next_step=hint)


def listed(name: str, value: Any, each: int | None = None) -> list:
    """A list parameter of whole numbers where a cell uses it, or with `each` of lists of so many of them, checked.

    A cell may hold anything; what is no such list is a ConfigError that says how to write it.
    """
    inner = ", ".join(["n"] * (each or 1))
    example = f"write {name} = [[{inner}], ...]" if each else f"write {name} = [1, 8], or [] for the profile's"
    check(value, "list[list[int]]" if each else "list[int]", name, example)
    if each and (wrong := [item for item in value if len(item) != each]):
        raise ConfigError(f"{name}: {wrong[0]} has {len(wrong[0])} numbers in place of {each}.", next_step=example)
    return value


def _flat(value: Any) -> list[Any]:
    return [inner for item in value for inner in _flat(item)] if isinstance(value, list) else [value]


def _why_wrong(item: Any, kind: str, *, inside: bool) -> str | None:
    """Counts, lengths and rates are never negative, and 0 means "the profile's" outside of a list only."""
    if "[int]" in kind and (isinstance(item, bool) or not isinstance(item, int)):
        return "is no whole number"
    if "[str]" in kind and not isinstance(item, str):
        return "is no text"
    if isinstance(item, (int, float)) and not math.isfinite(item):
        return "is not finite"
    if isinstance(item, (int, float)) and not isinstance(item, bool) and item < (1e-12 if inside else 0):
        return "must be above 0" if inside else "must be 0 or more"
    return "is too large" if isinstance(item, int) and item > 2**62 else None


def parse_parameter(text: str) -> tuple[str, Any]:
    """NAME=VALUE as typed on a command line: a Python literal, or else a string."""
    name, sign, value = text.partition("=")
    if not sign or not name.isidentifier():
        raise ConfigError(f"{text!r} is not a parameter.", next_step="write NAME=VALUE, such as CONCURRENCY=[1,8,32]")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value
