"""The programs that measure the load generator itself, for tests: tools/ is no package."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parent.parent / "tools"


def bench_tool(name, monkeypatch):
    """A module of tools/, its neighbours importable too; skips where the null server cannot be built."""
    if not sys.platform.startswith("linux") or not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("the null server needs Linux and a C compiler")
    monkeypatch.syspath_prepend(str(TOOLS))
    monkeypatch.syspath_prepend(str(TOOLS / "bench"))
    return importlib.import_module(name)
