"""Starts the embedded model once after an install: that fills caches, and says at once if vLLM cannot start here.

python -m kvlab.first_start
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from kvlab import plot  # noqa: F401 - matplotlib lists the fonts of a machine at its first import
from kvlab.errors import KvlabError
from kvlab.profile import load_profile
from kvlab.server import VllmServer


def main() -> int:
    """0 after an answer of the server; 1 with the error, where it did not start."""
    config = load_profile("cpu-tiny").server
    try:
        with tempfile.TemporaryDirectory() as folder, VllmServer(config, log_dir=Path(folder)) as server:
            print(f"vLLM {server.version} starts here: ready in {server.ready_s:.0f} s")
    except KvlabError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
