"""The routers' packages: each in a folder of its own, made on demand, so that no two of them share a dependency.

$KVLAB_ROUTERS/<product> where that is set (somebody installed it there), else the cache: routers/<product>-<version>.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvlab import engine
from kvlab.errors import ConfigError, ServerError

FOLDER = "KVLAB_ROUTERS"


@dataclass(frozen=True)
class Product:
    """What pip is asked for. `complete`: the list is whole, and pip adds no dependencies of its own."""

    version: str
    requirements: tuple[str, ...]
    download_mb: int
    complete: bool = False


# Dynamo's own list asks for a stub package that does not exist for Python 3.11; its workers bring vLLM's packages.
PRODUCTS = {
    "vllm-router": Product("0.1.17", ("vllm-router==0.1.17",), 30),
    "smg": Product("1.13.0", ("smg==1.13.0",), 50),
    "dynamo": Product(
        "1.6.1",
        ("ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1", "redis==6.4.0", "kubernetes==32.0.1"),
        82,
        complete=True,
    ),
}
DISTRIBUTIONS = {"dynamo": "ai-dynamo"}


def place(product: str) -> Path:
    """Where its packages lie, or would lie. ConfigError for an unknown product."""
    if product not in PRODUCTS:
        raise ConfigError(f"There is no router package {product!r}.", next_step=f"use one of: {', '.join(PRODUCTS)}")
    if given := os.environ.get(FOLDER):
        return Path(given).expanduser().resolve() / product
    return engine.cache_dir() / "routers" / f"{product}-{PRODUCTS[product].version}"


def version(product: str) -> str | None:
    """The installed version; None where it is missing."""
    name = DISTRIBUTIONS.get(product, product)
    found = importlib.metadata.distributions(name=name, path=[str(place(product))])
    return next((one.version for one in found), None)


def require(product: str) -> tuple[Path, str]:
    """(folder, version) of an installed product; ServerError with the command that installs it."""
    installed = version(product)
    if installed is None:
        raise ServerError(
            f"The router {product} is not installed in {place(product)}",
            f"it is optional: about {PRODUCTS[product].download_mb} MB, in an environment of its own",
            f"kvlab router install {product}",
        )
    return place(product), installed


def environment(product: str, base: dict[str, str] | None = None) -> dict[str, str]:
    """The environment its programs start with: its packages first, and no proxy between it and the workers."""
    folder, _ = require(product)
    base = dict(os.environ) if base is None else base
    paths = [str(folder), *filter(None, [base.get("PYTHONPATH")])]
    local = "127.0.0.1,localhost"
    quiet = engine.COMMON_ENV | {"HF_HUB_OFFLINE": "1"}  # above all the readable environment, by which they are found
    return base | {"PYTHONPATH": os.pathsep.join(paths), "NO_PROXY": local, "no_proxy": local} | quiet


def install(product: str) -> Path:
    """Installs the pinned version with pip and returns its folder; one that is there is kept.

    pip's own settings hold, such as PIP_NO_INDEX with PIP_FIND_LINKS for a machine without a network.
    """
    folder = place(product)
    if version(product):
        return folder
    what = PRODUCTS[product]
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{product}-", dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(draft)]
    try:
        done = subprocess.run(
            [*command, *(["--no-deps"] if what.complete else []), *what.requirements],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            raise ServerError(
                f"{product} could not be installed: {lines[-1] if lines else 'pip says nothing'}",
                "no network, or no wheel for this platform",
                f"{' '.join(command[:4])} {' '.join(what.requirements)} shows the whole of it",
            )
        shutil.rmtree(folder, ignore_errors=True)
        draft.chmod(0o755)
        draft.rename(folder)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
