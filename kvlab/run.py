"""Papermill, made strict: an unknown or ill-typed parameter stops the run before anything starts."""

from __future__ import annotations

import ast
import contextlib
import difflib
import gc
import io
import logging
import math
import os
import re
import time
from pathlib import Path
from typing import Any

from kvlab import errors, store
from kvlab.errors import ConfigError, KvlabError, NotebookError
from kvlab.files import disk_errors, explained

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
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


def notebooks() -> dict[str, Path]:
    """Section -> notebook, in the order of their numbers. A section is the file's name without its number."""
    found = sorted(folder().glob("[0-9][0-9]_*.ipynb"))
    return {path.stem[3:]: path for path in found}


def folder() -> Path:
    """The notebooks folder: of the project around the current folder, else beside the package (an editable install)."""
    places = [*(place / "notebooks" for place in (Path.cwd(), *Path.cwd().parents)), FOLDER]
    return next((place for place in places if (place / "00_start_here.ipynb").is_file()), FOLDER)


def notebook_of(section: str) -> Path:
    """The notebook of a section, also by its file name; raises ConfigError naming the known ones."""
    known = notebooks()
    name = re.sub(r"^\d\d_", "", Path(section).stem)
    require_notebooks()
    if name not in known:
        near = difflib.get_close_matches(name, known, 1)
        raise ConfigError(
            f"There is no section {section!r}.",
            cause=f"did you mean {near[0]}?" if near else None,
            next_step=f"use one of: {', '.join(known)}",
        )
    return known[name]


def require_notebooks() -> None:
    """ConfigError where there is no notebook, with the folder in which they were looked for."""
    if not notebooks():
        raise ConfigError(
            f"No notebooks were found from here: {folder()} {'holds none' if folder().is_dir() else 'does not exist'}.",
            "they were removed, or kvlab is called outside of its repository",
            "call it in the repository of kvlab, or restore them there: git checkout -- notebooks",
        )


def parameters(path: Path) -> dict[str, dict[str, Any]]:
    """The notebook's declared parameters: name -> {type, default, help}."""
    import papermill

    with contextlib.redirect_stderr(io.StringIO()):
        declared = papermill.inspect_notebook(str(path))
    return {
        name: {"type": entry["inferred_type_name"], "default": entry["default"], "help": entry["help"]}
        for name, entry in declared.items()
    }


def check_parameters(path: Path, given: dict[str, Any]) -> None:
    """Raises ConfigError for a parameter that the notebook does not declare, or one of another type."""
    declared = parameters(path)
    for name, value in given.items():
        if name not in declared:
            raise ConfigError(
                f"{path.name} has no parameter {name!r}.", next_step=f"use one of: {', '.join(sorted(declared))}"
            )
        wanted = TYPES.get(declared[name]["type"])
        is_bool = isinstance(value, bool) and declared[name]["type"] != "bool"
        if wanted is not None and (is_bool or not isinstance(value, wanted)):
            raise ConfigError(
                f"{path.name}: {name} is {value!r}, a {type(value).__name__}; it must be a {declared[name]['type']}.",
                next_step=f"its default is {declared[name]['default']}",
            )
        for item in [value] if not isinstance(value, list) else _flat(value):
            if why := _why_wrong(item, declared[name]["type"], inside=isinstance(value, list)):
                raise ConfigError(
                    f"{path.name}: {name} is {value!r}, and {item!r} {why}.",
                    next_step=f"its help says: {declared[name]['help']}",
                )


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


def execute(path: Path, given: dict[str, Any], out: Path, *, timeout_s: float = 7200, progress: bool = False) -> float:
    """Executes a notebook into `out` and returns the seconds it took.

    Raises ConfigError before anything starts where a parameter is wrong, and NotebookError with the cell's own message
    where a cell fails or the kernel dies. `out` then holds everything up to that cell.
    """
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    check_parameters(path, given)
    with disk_errors(f"The executed notebook {_short(out)}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        with _kernel_environment(), _silent_loggers():
            papermill.execute_notebook(
                str(path),
                str(out),
                given,
                cwd=str(path.parent),
                progress_bar=progress,
                execution_timeout=int(timeout_s),
                kernel_name="python3",
                request_save_on_cell_execute=True,
                extra_arguments=["--IPKernelApp.log_level=50"],
            )
    except PapermillExecutionError as error:
        if error.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        said = f"{path.name} stopped in cell {error.exec_count} (see {_short(out)}): {_last_words(error)}"
        if _is_ours(error.ename, ConfigError):
            raise ConfigError(said) from None
        raise NotebookError(f"{said}\nWhat was measured before is kept; running again resumes.") from None
    except (DeadKernelError, CellTimeoutError) as error:
        kind = "its kernel died" if isinstance(error, DeadKernelError) else f"a cell took longer than {timeout_s:.0f} s"
        raise NotebookError(
            f"{path.name} did not finish: {kind}.",
            cause="out of memory, or the kernel was killed" if isinstance(error, DeadKernelError) else None,
            next_step="`kvlab ps` shows what still runs; what was measured is kept, and running again resumes",
        ) from None
    except OSError as error:
        raise explained(error, f"The executed notebook {_short(out)}") from None
    return time.monotonic() - began


@contextlib.contextmanager
def _kernel_environment():
    """The kernel works in the notebook's folder: relative paths of this process would mean another place there.

    No matplotlib backend is handed on: `agg`, as many a CI sets it, would drop the pictures.
    """
    absolute = {"KVLAB_DATA": str(store.root())}
    if os.environ.get("KVLAB_CACHE"):
        absolute["KVLAB_CACHE"] = str(Path(os.environ["KVLAB_CACHE"]).absolute())
    before = {name: os.environ.get(name) for name in ("MPLBACKEND", *absolute)}
    os.environ.pop("MPLBACKEND", None)
    os.environ.update(absolute)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@contextlib.contextmanager
def _silent_loggers():
    """What nbclient and asyncio log about a kernel that died is in the error already."""
    loggers = [logging.getLogger(name) for name in ("traitlets", "papermill", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
        gc.collect()  # tasks that asyncio would complain about later
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _last_words(error) -> str:
    """The message of the cell's exception, without traceback and colours; with its kind where it is not ours."""
    value = re.sub(r"\x1b\[[0-9;]*m", "", str(error.evalue)).strip()
    return value if _is_ours(error.ename, KvlabError) else f"{error.ename}: {value}"


def _is_ours(name: str, kind: type[KvlabError]) -> bool:
    found = getattr(errors, name, None)
    return isinstance(found, type) and issubclass(found, kind)


def _short(path: Path) -> str:
    return os.path.relpath(path)
