"""Rows of requests that have ended, kept out of the process: what a load holds does not grow while it runs.

Small loads stay in memory. A row takes 12 bytes an event on disk, and less than 1 kB beside.
"""

from __future__ import annotations

import pickle
import tempfile
from collections.abc import Iterator
from typing import Any

import numpy as np

IN_MEMORY_BYTES = 8 * 2**20
PACKED = {"event_times_s": np.float64, "event_tokens": np.int32}


class RowFile:
    """A list of rows that can only grow: `append`, `len`, iteration. `ok` counts the successes."""

    def __init__(self):
        self._file = tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES)  # noqa: SIM115  it lives as long as the rows
        self._count = self.ok = 0

    def append(self, row: dict[str, Any]) -> None:
        """Keeps a row; its lists of events become arrays."""
        packed = {name: np.asarray(row[name], kind) for name, kind in PACKED.items() if row.get(name) is not None}
        pickle.dump(row | packed, self._file, pickle.HIGHEST_PROTOCOL)
        self._count += 1
        self.ok += bool(row.get("ok"))

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._file.seek(0)
        try:
            for _ in range(self._count):
                yield pickle.load(self._file)
        finally:
            self._file.seek(0, 2)

    def __getstate__(self) -> tuple[bytes, int, int]:
        self._file.seek(0)
        return self._file.read(), self._count, self.ok

    def __setstate__(self, state: tuple[bytes, int, int]) -> None:
        self.__init__()
        data, self._count, self.ok = state
        self._file.write(data)
