"""Whether the GPU memory of a server that has ended is free again."""

from __future__ import annotations

import time

SLACK_BYTES = 256 * 2**20
STEADY_S = 3.0


def used_bytes() -> int | None:
    """Memory in use on all GPUs of the machine, whoever uses it; null without an NVIDIA driver."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # neither the library nor a driver is a must
        return None
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return sum(pynvml.nvmlDeviceGetMemoryInfo(handle).used for handle in handles)
    except pynvml.NVMLError:
        return None
    finally:
        pynvml.nvmlShutdown()


class GpuMemory:
    """What was in use before a server started."""

    def __init__(self):
        self.before = used_bytes()

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
