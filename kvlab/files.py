"""Files that are there whole or not at all: synced writes, atomic replacement, one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlab.errors import StoreError

LOCK = ".lock"


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
    with (folder / LOCK).open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def write_text(path: Path, text: str) -> None:
    """Writes a file atomically: readers see the old text or the new one, a full disk leaves the old one."""
    new = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    with disk_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(new, text.encode())
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)


@contextmanager
def disk_errors(what: str) -> Iterator[None]:
    """Turns an OSError into a StoreError that says what could not be stored, and whether the disk is full."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StoreError(
            f"{what} could not be stored: {'the disk is full' if full else error}. What was stored before is unharmed.",
            cause="no space is left under the data folder" if full else None,
            next_step="free some space, or point KVLAB_DATA at another disk; measured cells are not measured again"
            if full
            else "check that the data folder can be written, or point KVLAB_DATA at another one",
        ) from error
