"""Papermill, made strict: an unknown or ill-typed parameter stops the run before anything starts."""

from __future__ import annotations

import contextlib
import difflib
import gc
import logging
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvlab import errors, processes, progress, store
from kvlab.errors import ConfigError, KvlabError, NotebookError
from kvlab.files import disk_errors, explained, near, typed
from kvlab.parameters import check_parameters

KERNEL, LINE = ".kernel-", "line.txt"  # folder of one kernel, and what it does now
FOLDER = Path(__file__).resolve().parent.parent / "notebooks"


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


def execute(path: Path, given: dict[str, Any], out: Path, *, timeout_s: float = 7200, shown: bool = False) -> float:
    """Executes a notebook into `out` and returns the seconds it took.

    Raises ConfigError before anything starts where a parameter is wrong, and NotebookError with the cell's own message
    where a cell fails or the kernel dies. `out` then holds everything up to that cell. `shown`: which cell runs is
    told on standard error.
    """
    import nbformat
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError
    from traitlets.config import Config

    check_parameters(path, given)
    with disk_errors(f"The executed notebook {near(out)}"):
        out.parent.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    try:
        with _kernel_folder(out) as folder, _kernel_environment(folder), _silent_loggers():
            position = progress.Position(path.stem[3:], nbformat.read(path, as_version=4).cells, folder / LINE)
            with progress.line(lambda: str(position)) if shown else contextlib.nullcontext():
                papermill.execute_notebook(
                    str(path),
                    str(out),
                    given,
                    cwd=str(path.parent),
                    progress_bar=False,
                    execution_timeout=int(timeout_s),
                    kernel_name="python3",
                    request_save_on_cell_execute=True,
                    extra_arguments=["--IPKernelApp.log_level=50"],
                    config=Config({"ConnectionFileMixin": {"connection_file": str(folder / "kernel.json")}}),
                    on_cell_start=position,
                )
    except PapermillExecutionError as error:
        if error.ename == "KeyboardInterrupt":
            raise KeyboardInterrupt from None
        said = f"{path.name} stopped in cell {error.exec_count} (see {near(out)}): {_last_words(error)}"
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
        raise explained(error, f"The executed notebook {near(out)}") from None
    return time.monotonic() - began


@contextlib.contextmanager
def _kernel_folder(out: Path) -> Iterator[Path]:
    """Beside the executed notebook: what kernel and command tell each other. The next run removes what a kill left."""
    for left in out.parent.glob(f"{KERNEL}*"):
        owner = left.name.removeprefix(KERNEL).partition("-")[0]
        if not (owner.isdigit() and os.path.exists(f"/proc/{owner}")):
            shutil.rmtree(left, ignore_errors=True)
    folder = (out.parent / f"{KERNEL}{os.getpid()}-{out.stem}").absolute()
    folder.mkdir(mode=0o700, exist_ok=True)  # the connection file holds the key to the kernel
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _kernel_environment(folder: Path):
    """The kernel works in the notebook's folder: relative paths of this process would mean another place there.

    No matplotlib backend is handed on: `agg`, as many a CI sets it, would drop the pictures.
    """
    absolute = {
        "KVLAB_DATA": str(store.root()),
        progress.FILE: str(folder / LINE),
        processes.PROJECT: processes.project(),
    }
    if os.environ.get("KVLAB_CACHE"):
        absolute["KVLAB_CACHE"] = str(typed(os.environ["KVLAB_CACHE"]).absolute())
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
    except BaseException:
        levels[-1] = logging.CRITICAL + 1  # the error's frames keep such tasks alive until this program ends
        raise
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
