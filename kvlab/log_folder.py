"""Where servers write their logs: each run keeps its own, and the folder goes, unless an error has named it."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

from kvlab import engine
from kvlab.files import disk_errors

KEPT = 10  # folders of programs that have ended, the newest ones; an error names a log for a while, not for ever


def make() -> Path:
    """A new folder in the cache, which also goes when many later programs have left theirs. Raises StoreError."""
    place = engine.cache_dir() / "logs"
    with disk_errors("The server's log"):
        place.mkdir(parents=True, exist_ok=True)
        _tidy(place)
        return Path(tempfile.mkdtemp(prefix=f"{os.getpid()}-", dir=place))


def _tidy(place: Path) -> None:
    left = [path for path in place.iterdir() if not _in_use(path)]
    for path in sorted(left, key=lambda path: path.lstat().st_mtime_ns)[:-KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def _in_use(folder: Path) -> bool:
    owner = folder.name.partition("-")[0]
    return owner.isdigit() and os.path.exists(f"/proc/{owner}")
