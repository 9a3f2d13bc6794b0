"""What vLLM says while it starts, as data: capacity, backend, how long each phase took, and why it failed.

Lines are matched by their message alone (files and line numbers change with each release); tried with logs of
vLLM 0.26 on an H200 and 0.31 on the CPU, and with the format strings of 0.20 to 0.33.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from datetime import datetime, timedelta

PREFIX = re.compile(
    r"^(?:\((?P<process>[\w-]+) pid=(?P<pid>\d+)\) ?)?"
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) (?:\d{4}-)?(?P<date>\d\d-\d\d) (?P<time>\d\d:\d\d:\d\d)\S* "
    r"\[[^\]]*\] ?)?"
)

# (phase that begins with this line, line). The order is that of a start; a phase may be absent.
PHASES = [
    ("model inspection", r"non-default args:"),
    ("engine imports", r"Using max model len"),
    ("engine start", r"Initializing a V1 LLM engine"),
    ("weights", r"Starting to load model|Loading model from scratch"),
    ("profile run", r"Model loading took"),
    ("compile", r"Warming up model for the compilation|Using cache directory: .* for vLLM's torch.compile"),
    ("kv profiling", r"torch\.compile took|Initial profiling/warmup run took"),
    ("kv cache", r"KV cache size: [\d,]+ tokens"),
    ("graph capture", r"Capturing CUDA graphs"),
    ("warm-up", r"Graph capturing finished"),
    ("API start", r"init engine \(profile"),
    ("first answer", r"Starting vLLM server on|Application startup complete"),
]
PHASE_PATTERNS = [(name, re.compile(pattern)) for name, pattern in PHASES]

# Durations that vLLM states itself, more exact than its whole-second time stamps.
TOOK = {
    "weights": r"Model loading took .* and ([\d.]+) seconds|Loading weights took ([\d.]+) seconds",
    "compile": r"torch\.compile took ([\d.]+) s",
    "graph capture": r"Graph capturing finished in ([\d.]+) secs",
    "engine init": r"init engine \(.*?\) took ([\d.]+) s",
}

CAPACITY = r"KV cache size: ([\d,]+) tokens"
CONCURRENCY = r"Maximum concurrency for ([\d,]+) tokens per request: ([\d.]+)x"
BACKENDS = (
    r"Using (?:AttentionBackendEnum\.)?(\w+) attention backend",
    r"Using AttentionBackendEnum\.(\w+) backend",
    r"Using (.+?) backend on V1 engine",
)
KV_GIB = (
    r"Available KV cache memory: ([\d.]+) GiB",
    r"reserved ([\d.]+) GiB memory for KV Cache",
    r"(?:Explicitly|Auto) set \(([\d.]+)/[\d.]+\) GiB for KV cache",
)
# What a start without a pinned pool found in use, by part. Releases from 0.27 on give weights and non-torch as one.
MEMORY_GIB = {
    "weights": r"([\d.]+) GiB for weights?,|Model loading took ([\d.]+) GiB",
    "weights_and_non_torch": r"([\d.]+) GiB for consumed memory",
    "peak_activation": r"([\d.]+) GiB for peak activation",
    "non_torch": r"([\d.]+) GiB for non-torch memory",
    "graphs": r"([\d.]+) GiB for CUDAGraph memory|Graph capturing finished in [\d.]+ secs, took ([\d.]+) GiB",
    "requested": r"Desired GPU memory utilization is \([\d.]+, ([\d.]+) GiB\)",
    "free_at_start": r"Free memory on device \(([\d.]+)/|Initial free memory ([\d.]+) GiB",
}
SCALES = r"scaling factor|q_scale|k_scale|v_scale|per-token-head scales"

ERROR_LINE = re.compile(r"^(?:[A-Za-z_][\w.]*)?(?:Error|Exception)(?::\s.*)?$|^\s*Value error, |^\S+: error: ")
GENERIC = re.compile(
    r"Engine core initialization failed|Engine process failed to start|EngineDeadError|EngineCore encountered an issue"
    r"|WorkerProc (?:initialization )?failed|Executor failed|CancelledError|ValidationError: \d+ validation error"
)

COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
NOISE = re.compile(r"nanobind| - leaked | - \.\.\. skipped remainder|resource_tracker|^\s*warnings\.warn\(")


@dataclass(frozen=True)
class StartupReport:
    """One start. Null where the log does not say it; `phases` in seconds.

    "engine init" spans the phases from "compile" to "warm-up": it is not one more of them. `timeline`: the phases as
    the starting program saw them begin, to 0.1 s; one after another they add up to the whole start.
    `memory_gib`: parts of the GPU's memory by MEMORY_GIB; empty on a CPU, and mostly where the pool is pinned.
    `capacity_tokens` is the log's own number: whole requests of the maximum length, the reserved null block included.
    `kv_gib` is rounded to 0.01 GiB by vLLM.
    """

    version: str | None = None
    capacity_tokens: int | None = None
    capacity_line: str | None = None
    max_concurrency: float | None = None
    max_concurrency_tokens: int | None = None
    num_blocks: int | None = None
    available_kv_gib: float | None = None
    attention_backend: str | None = None
    kv_cache_dtype: str | None = None
    kv_dtype_note: str | None = None
    scale_warnings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    engine_pids: tuple[int, ...] = ()
    phases: dict[str, float] = field(default_factory=dict)
    timeline: dict[str, float] = field(default_factory=dict)
    memory_gib: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Line:
    """One log line without its prefix; `at` has the year 2000, as the log names none."""

    message: str
    level: str | None
    at: datetime | None
    process: str | None
    pid: int | None


def read_lines(text: str) -> list[Line]:
    """The lines of a log without colours; progress bars, which rewrite their line, count as several."""
    return [_line(raw) for raw in re.split(r"[\r\n]+", plain(text))]


def plain(text: str) -> str:
    """The text without terminal colours: a notebook's kernel asks every child for them, terminal or not."""
    return COLOUR.sub("", text)


def _line(raw: str) -> Line:
    match = PREFIX.match(raw)
    groups = match.groupdict()
    at = None
    if groups["date"]:
        at = datetime.strptime(f"2000-{groups['date']} {groups['time']}", "%Y-%m-%d %H:%M:%S")
    pid = int(groups["pid"]) if groups["pid"] else None
    return Line(raw[match.end() :].rstrip(), groups["level"], at, groups["process"], pid)


def parse_startup(text: str) -> StartupReport:
    """The report of one start; an empty or foreign text gives a report of nulls."""
    lines = read_lines(text)
    body = "\n".join(line.message for line in lines)
    capacity = _last(CAPACITY, body)
    concurrency = _last(CONCURRENCY, body)
    return StartupReport(
        version=_group(r"version (\d+\.\d+\S*)", body) or _group(r"V1 LLM engine \(v([^)]+)\)", body),
        capacity_tokens=_number(capacity.group(1)) if capacity else None,
        capacity_line=_whole_line(body, capacity) if capacity else None,
        max_concurrency=float(concurrency.group(2)) if concurrency else None,
        max_concurrency_tokens=_number(concurrency.group(1)) if concurrency else None,
        num_blocks=_blocks(body),
        available_kv_gib=_first_float(KV_GIB, body),
        attention_backend=next(filter(None, (_group(pattern, body) for pattern in BACKENDS)), None),
        kv_cache_dtype=_group(r"kv_cache_dtype=(\w+)", body),
        kv_dtype_note=_group(r"(Using \S+ data type to store kv cache\..*)", body),
        scale_warnings=_messages(lines, lambda line: line.level == "WARNING" and re.search(SCALES, line.message)),
        warnings=_messages(lines, lambda line: line.level == "WARNING"),
        engine_pids=tuple(dict.fromkeys(line.pid for line in lines if _is_engine(line))),
        phases=_phases(lines),
        memory_gib={name: gib for name, p in MEMORY_GIB.items() if (gib := _first_float((p,), body)) is not None},
    )


def phase_of(line: str) -> str | None:
    """The phase that begins with this log line, or None."""
    return next((name for name, pattern in PHASE_PATTERNS if pattern.search(line)), None)


def seconds_between(earlier: datetime, later: datetime) -> float:
    """Seconds between two time stamps without a year: a start over New Year's Eve is not minus one year."""
    if earlier - later > timedelta(days=180):
        later += timedelta(days=366)  # the year 2000 has a 29 February
    return max(0.0, (later - earlier).total_seconds())


def _phases(lines: list[Line]) -> dict[str, float]:
    began: list[tuple[str, datetime]] = []
    now = None
    for line in lines:
        now = line.at or now
        name = phase_of(line.message)
        if name and now and name not in dict(began):
            began.append((name, now))
    ends = [at for _, at in began[1:]]
    phases = {name: seconds_between(at, end) for (name, at), end in zip(began, ends, strict=False)}
    body = "\n".join(line.message for line in lines)
    stated = {name: _first_float((pattern,), body) for name, pattern in TOOK.items()}
    return phases | {name: seconds for name, seconds in stated.items() if seconds is not None}


def root_cause(text: str) -> str | None:
    """The line that says why vLLM ended; None where the log holds no error.

    It is seldom the last one: "Engine core initialization failed" and other consequences follow it.
    """
    lines = [line for line in read_lines(text) if line.level not in ("DEBUG", "INFO", "WARNING")]
    messages = [line.message for line in lines]
    errors = [i for i, message in enumerate(messages) if ERROR_LINE.match(message)]
    decisive = [i for i in errors if not GENERIC.search(messages[i])] or errors
    if decisive:
        last = decisive[-1]
        if not messages[last].endswith(("Error", "Exception")):
            return messages[last].strip()
        # A bare "AssertionError": the statement above it says which; Python 3.12 underlines it with carets.
        above = [text.strip() for text in messages[:last] if text.strip(" ^~")]
        return f"{messages[last]} at `{above[-1]}`" if above else messages[last]
    stated = [line.message for line in lines if line.level in ("ERROR", "CRITICAL") and line.message]
    return stated[-1] if stated else None


def is_consequence(line: str) -> bool:
    """Whether a line says only that something before it went wrong, such as "See stack trace (above)"."""
    return GENERIC.search(line) is not None


def last_lines(text: str, count: int = 8) -> list[str]:
    """The last lines that say something."""
    return [line for line in re.split(r"[\r\n]+", plain(text)) if line.strip() and not NOISE.search(line)][-count:]


def _is_engine(line: Line) -> bool:
    return line.pid is not None and (line.process or "").startswith(("EngineCore", "Worker", "VllmWorker"))


def _blocks(body: str) -> int | None:
    number = _group(r"with num_gpu_blocks_override=(\d+)", body) or _group(r"# \w+ blocks: (\d+)", body)
    return int(number) if number else None


def full_graph_sizes(text: str) -> tuple[int, ...]:
    """Numbers of running requests for which a whole decode step is one CUDA graph, ascending; empty without a word.

    vLLM captures the smallest of its capture sizes as full graphs, as many as its progress bar counts; larger batches
    run as pieces between which the CPU launches attention.
    """
    sizes = re.search(r"cudagraph_capture_sizes': \[([\d, ]+)\]", text)
    bars = re.findall(r"Capturing CUDA graphs \([^)]*FULL\):\s+100%[^|]*\|[^|]*\|\s*(\d+)/\d+", text)
    if not sizes or not bars:
        return ()
    return tuple(sorted(int(size) for size in sizes[1].split(","))[: int(bars[-1])])


def _last(pattern: str, body: str) -> re.Match | None:
    return next(reversed(list(re.finditer(pattern, body))), None)


def _group(pattern: str, body: str) -> str | None:
    match = re.search(pattern, body)
    return match.group(1) if match else None


def _first_float(patterns: tuple[str, ...], body: str) -> float | None:
    for pattern in patterns:
        if match := re.search(pattern, body):
            return float(next(filter(None, match.groups())))
    return None


def _number(text: str) -> int:
    return int(text.replace(",", ""))


def _whole_line(body: str, match: re.Match) -> str:
    start = body.rfind("\n", 0, match.start()) + 1
    return body[start:].partition("\n")[0]


def _messages(lines: list[Line], wanted) -> tuple[str, ...]:
    return tuple(dict.fromkeys(line.message for line in lines if wanted(line)))
