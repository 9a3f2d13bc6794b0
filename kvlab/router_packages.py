"""The routers' packages: each in a folder of its own, made on demand, so that no two of them share a dependency.

$KVLAB_ROUTERS/<product> where that is set (somebody installed it there), else the cache: routers/<product>-<version>.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from kvlab import engine
from kvlab.errors import ConfigError, EngineMissing, ServerError
from kvlab.files import typed

FOLDER = "KVLAB_ROUTERS"


@dataclass(frozen=True)
class Product:
    """What pip is asked for. `complete`: the list is whole, and pip adds no dependencies of its own."""

    version: str
    requirements: tuple[str, ...]
    download_mb: int
    complete: bool = False


def _dynamo(version: str, download_mb: int, *others: str) -> Product:
    own = f"ai-dynamo=={version}", f"ai-dynamo-runtime=={version}"
    return Product(version, (*own, *others), download_mb, complete=True)


# From which vLLM on: its workers import vLLM's modules, which move, and each release is made for one vLLM.
# Its own list asks for a stub package that does not exist for Python 3.11; its workers bring vLLM's packages.
DYNAMO = {
    (0, 31): _dynamo("1.6.1", 82, "redis==6.4.0", "kubernetes==32.0.1"),
    (0, 26): _dynamo("1.4.2", 60),
}
PRODUCTS = {
    "vllm-router": Product("0.1.17", ("vllm-router==0.1.17",), 30),
    "smg": Product("1.13.0", ("smg==1.13.0",), 50),
    "dynamo": DYNAMO[0, 31],
}
DISTRIBUTIONS = {"dynamo": "ai-dynamo"}


def pinned(product: str) -> Product:
    """What this Python needs of a product; Dynamo's release follows the installed vLLM. ConfigError if unknown."""
    if product not in PRODUCTS:
        raise ConfigError(f"There is no router package {product!r}.", next_step=f"use one of: {', '.join(PRODUCTS)}")
    return dynamo_for(_vllm_version()) if product == "dynamo" else PRODUCTS[product]


def dynamo_for(vllm: str | None) -> Product:
    """The release of Dynamo for a version of vLLM, the newest one where that is None; ConfigError for one too old."""
    if vllm is None:
        return PRODUCTS["dynamo"]
    installed = tuple(int(part) for part in re.findall(r"\d+", vllm)[:2])
    for first, release in DYNAMO.items():
        if installed >= first:
            return release
    raise ConfigError(
        f"Dynamo does not run here with vLLM {vllm}",
        f"its workers import vLLM's modules; releases for vLLM {'.'.join(map(str, min(DYNAMO)))} and later are known",
        "use a newer vLLM, or another router: kvlab router list",
    )


def _vllm_version() -> str | None:
    try:
        return engine.installed_build()[1]
    except EngineMissing:
        return None


def place(product: str) -> Path:
    """Where its packages lie, or would lie. ConfigError for an unknown product."""
    what = pinned(product)
    if given := os.environ.get(FOLDER):
        return typed(given).resolve() / product
    return engine.cache_dir() / "routers" / f"{product}-{what.version}"


def version(product: str) -> str | None:
    """The installed version; None where it is missing."""
    name = DISTRIBUTIONS.get(product, product)
    found = importlib.metadata.distributions(name=name, path=[str(place(product))])
    return next((one.version for one in found), None)


def told(product: str) -> str:
    """Whether a product is installed, and where or how large it is; or why it cannot be."""
    try:
        there, what = version(product), pinned(product)
    except ConfigError as error:
        return error.what
    return f"{there} in {place(product)}" if there else f"not installed, about {what.download_mb} MB"


def require(product: str) -> tuple[Path, str]:
    """(folder, version) of an installed product; ServerError with the command that installs it."""
    installed, what = version(product), pinned(product)
    if installed is None:
        raise ServerError(
            f"The router {product} is not installed in {place(product)}",
            f"it is optional: about {what.download_mb} MB, in an environment of its own",
            f"kvlab router install {product}",
        )
    if _for_another_vllm(product, installed):
        raise ServerError(
            f"{product} {installed} lies in {place(product)}, and vLLM {_vllm_version()} needs {what.version}",
            "its workers import vLLM's modules, which move from one version to the next",
            f"kvlab router install {product}",
        )
    return place(product), installed


def _for_another_vllm(product: str, installed: str) -> bool:
    others = {release.version for release in DYNAMO.values()} - {pinned("dynamo").version}
    return product == "dynamo" and installed in others


def environment(product: str, base: dict[str, str] | None = None) -> dict[str, str]:
    """The environment its programs start with: its packages first, and no proxy between it and the workers."""
    folder, _ = require(product)
    base = dict(os.environ) if base is None else base
    paths = [str(folder), *filter(None, [base.get("PYTHONPATH")])]
    local = "127.0.0.1,localhost"
    quiet = engine.COMMON_ENV | {"HF_HUB_OFFLINE": "1"}  # above all the readable environment, by which they are found
    return base | {"PYTHONPATH": os.pathsep.join(paths), "NO_PROXY": local, "no_proxy": local} | quiet


def install(product: str) -> Path:
    """Installs the pinned version with pip and returns its folder; one that is there and fits is kept.

    pip's own settings hold, such as PIP_NO_INDEX with PIP_FIND_LINKS for a machine without a network.
    """
    folder, what, installed = place(product), pinned(product), version(product)
    if installed and not _for_another_vllm(product, installed):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{product}-", dir=folder.parent))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(draft)]
    try:
        done = subprocess.run(
            [*command, *(["--no-deps"] if what.complete else []), *what.requirements],
            capture_output=True,
            errors="replace",
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
