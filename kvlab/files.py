"""Files that are there whole or not at all: synced writes, atomic replacement, one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import getpass
import json
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvlab.errors import StoreError

LOCK = ".lock"


def project_folder() -> Path:
    """The project around the current folder, else the current folder."""
    here = Path.cwd()
    return next((folder for folder in (here, *here.parents) if _is_project(folder)), here)


def _is_project(folder: Path) -> bool:
    if (folder / "notebooks").is_dir() and (folder / "data").is_dir():
        return True
    try:
        return re.search(r'^name = "kvlab"', (folder / "pyproject.toml").read_text(encoding="utf-8"), re.M) is not None
    except (OSError, UnicodeDecodeError):
        return False


def typed(text: str) -> Path:
    """The path that a person wrote. `~` is the home folder where there is one; of an unknown user it is a letter."""
    return Path(os.path.expanduser(text))  # Path.expanduser raises for an unknown user


def near(path: Path) -> str:
    """A path as one may type it: from the current folder, or whole where that would lead far out of it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("../..") else relative


def write_synced(path: Path, data: bytes) -> None:
    """Writes a file and waits until it is on the disk."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(handle)


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """One writer at a time in `folder`, across processes; the lock ends with its process. Creates the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: readers see the old text or the new one, a full disk leaves the old one."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """The same of bytes."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with disk_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(new, data)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A folder to be filled, which takes the place of `folder` once it is: until then the old one stays as it was.

    Builds of the same folder take turns; what one that was killed has left is removed by the next.
    """
    folder = folder.resolve()
    with disk_errors(str(folder)), locked(folder.parent):
        for left in folder.parent.glob(f".{folder.name}.*"):
            shutil.rmtree(left)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
        new, old = (folder.with_name(f".{folder.name}.{name}") for name in ("new", "old"))
        try:
            new.mkdir()
            yield new
            if folder.exists():
                folder.rename(old)
            new.rename(folder)
        finally:
            for left in (new, old):
                shutil.rmtree(left, ignore_errors=True)


def read_json(path: Path, next_step: str) -> dict[str, Any]:
    """The JSON object in a file that kvlab wrote. StoreError, with the next step, where it cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError, RecursionError) as error:
        raise StoreError(f"{path} cannot be read: {error}", "it was cut off, or edited", next_step) from None
    return found


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns an OSError into a StoreError that says what could not be stored, and why."""
    try:
        yield
    except OSError as error:
        raise explained(error, what) from error


def unusable(error: OSError) -> StoreError:
    """What an operation on a file says that nobody has explained: the file, read or written, and why it failed."""
    said = explained(error, str(error.filename or "A file"))
    reason = "the disk is full" if is_full(error) else error.strerror or str(error)
    missing = error.errno == errno.ENOENT
    return StoreError(
        f"{error.filename or 'A file'} could not be read or written: {reason}. What was measured is unharmed.",
        "it was removed, or never made" if missing else said.cause,
        "restore it (git status shows what is missing of the project), or make it anew" if missing else said.next_step,
    )


def is_full(error: OSError) -> bool:
    """Whether no space is left, or the user's share of it is used up."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def explained(error: OSError, what: str) -> StoreError:
    """What could not be stored, why, and what to do; what was stored before is always whole."""
    reason = "the disk is full" if is_full(error) else error.strerror or str(error)
    where = "" if error.filename is None or str(error.filename) == what else f" ({error.filename})"
    causes = {
        errno.EROFS: "the file system is read-only",
        errno.EACCES: f"the folder belongs to somebody else, or may not be written by {_user()}",
        errno.EPERM: f"the folder belongs to somebody else, or may not be written by {_user()}",
        errno.ENOENT: "the folder above it is gone, or takes no files, as /proc",
        errno.ENOTDIR: "a file stands where a folder is needed",
        errno.EEXIST: "a file stands where a folder is needed",
        errno.ENAMETOOLONG: "the name is too long",
    }
    return StoreError(
        f"{what} could not be stored: {reason}{where}. What was stored before is unharmed.",
        cause="no space is left there" if is_full(error) else causes.get(error.errno),
        next_step="free some space (df -h), or point KVLAB_DATA at another disk; what is measured is not measured again"
        if is_full(error)
        else "make it writable, or point KVLAB_DATA (data), KVLAB_CACHE (cache) at another folder",
    )


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"


def check_writable(folder: Path) -> None:
    """StoreError where no file can be made in `folder` (or in the nearest one above it that exists)."""
    there = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"x" * 4096)
            probe.flush()
    except OSError as error:
        told = explained(error, "x")
        reason = "the disk is full" if is_full(error) else error.strerror
        raise StoreError(f"The data folder {folder} cannot be written: {reason}.", told.cause, told.next_step) from None
