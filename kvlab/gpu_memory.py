"""GPU memory: what a server holds, and whether that of one that has ended is free again."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

SLACK_BYTES = 256 * 2**20
STEADY_S = 3.0


def used_bytes() -> int | None:
    """Memory in use on all GPUs of the machine, whoever uses it; null without an NVIDIA driver."""
    with _driver() as nvml:
        return None if nvml is None else sum(nvml.nvmlDeviceGetMemoryInfo(gpu).used for gpu in _gpus(nvml))
    return None


def of_processes(pids: set[int]) -> int | None:
    """Memory of these processes on all GPUs; null where the driver does not name them, as in many containers."""
    with _driver() as nvml:
        if nvml is not None:
            listed = [one for gpu in _gpus(nvml) for one in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)]
            return sum(one.usedGpuMemory or 0 for one in listed if one.pid in pids) or None
    return None


@contextlib.contextmanager
def _driver() -> Iterator:
    """NVIDIA's library while it is in use, or null; what the driver cannot answer ends the block."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # neither the library nor a driver is a must
        yield None
        return
    try:
        with contextlib.suppress(pynvml.NVMLError):
            yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _gpus(nvml) -> list:
    return [nvml.nvmlDeviceGetHandleByIndex(i) for i in range(nvml.nvmlDeviceGetCount())]


class GpuMemory:
    """What was in use before a server started."""

    def __init__(self):
        self.before = used_bytes()

    def more(self) -> int | None:
        """Bytes in use beyond that; null where it is not known."""
        now = used_bytes()
        return None if now is None or self.before is None else max(0, now - self.before)

    def wait_until_free(self, timeout_s: float = 60.0) -> None:
        """Return once use is back at what it was before, or steady: another program may have taken memory meanwhile.

        The driver frees the memory of a killed process some seconds after its end, and the next start would fail.
        """
        deadline = time.monotonic() + timeout_s
        last, since = used_bytes(), time.monotonic()
        while self.before is not None and last is not None and last > self.before + SLACK_BYTES:
            now = time.monotonic()
            if now > deadline or now - since > STEADY_S:
                return
            time.sleep(0.2)
            current = used_bytes()
            if current is not None and abs(current - last) > SLACK_BYTES // 8:
                since = time.monotonic()
            last = current
