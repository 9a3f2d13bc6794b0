"""Builds _build/wheels: kvlab and everything of its light install as wheels, for computers without network.

The wheels fit computers with the same system, processor and Python version as this one. On such a computer:
    PIP_NO_INDEX=1 PIP_FIND_LINKS=/path/to/wheels make install-light
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def build(out: Path) -> list[Path]:
    """The wheels, in `out`; wheels of an earlier kvlab there are removed. CalledProcessError where pip fails."""
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("kvlab-*.whl"):
        old.unlink()
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)  # this Python may have no pip of its own
        pip = [str(Path(place) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        wheel = [*pip, "wheel", "-q", "--wheel-dir", str(out)]
        subprocess.run([*wheel, f"{ROOT}[dev]"], check=True)
        # An install without network also builds kvlab itself, and asks for the tools of that.
        subprocess.run([*wheel, *build_requirements(), "pip", "wheel"], check=True)
    return sorted(out.glob("*.whl"))


def check(wheels: Path) -> None:
    """Installs from the folder alone into a fresh environment and computes something; CalledProcessError if not."""
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        programs = Path(place) / "bin"
        offline = ["--no-index", "--find-links", str(wheels)]
        pip = [str(programs / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-q", *offline]
        subprocess.run([*pip, "kvlab[dev]", *build_requirements()], check=True)
        told = [str(programs / "kvlab"), "predict", "Qwen3-1.7B"]
        subprocess.run(told, check=True, stdout=subprocess.DEVNULL, cwd=place)


def build_requirements() -> list[str]:
    """What pyproject.toml needs to be built."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["build-system"]["requires"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "_build" / "wheels")
    out = parser.parse_args().out.resolve()
    try:
        wheels = build(out)
        check(out)
    except subprocess.CalledProcessError as error:
        print(f"The wheels could not be built or installed (exit {error.returncode}).", file=sys.stderr)
        print("Likely cause: no network. Next: run this once where a package index is reachable.", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in wheels) / 2**20
    where = f"Python {sys.version_info.major}.{sys.version_info.minor} on {sysconfig.get_platform()}"
    print(f"{len(wheels)} wheels, {size:.0f} MiB, installed once without network, for {where}: {out}")
    print("There: PIP_NO_INDEX=1 PIP_FIND_LINKS=<that folder> make install-light")
    return 0


if __name__ == "__main__":
    sys.exit(main())
