"""The tools that are compared: an environment of its own for each, its command, and what its result file says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gaps import later_gaps_s
from null import compiled

from kvlab import __version__, foreign, tiny
from kvlab.engine import cache_dir

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TOKENIZER = str(Path(tiny.__file__).parent)
INPUT_TOKENS = 64


@dataclass(frozen=True)
class Ask:
    """One measurement: where, how many streams and requests, tokens of each, and a folder for the result."""

    port: int
    streams: int
    requests: int
    tokens: int
    folder: Path

    @property
    def url(self) -> str:
        """Of the null server."""
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Tool:
    """`command(ask)` starts it, `read(ask)` gives requests, failures, ttft and itl quantiles of its result.

    `packages`: pinned, installed into an environment of its own; empty where this Python runs it. `extra_env` is added
    to its environment.
    """

    name: str
    version: str
    command: Callable[[Ask], list[str]]
    read: Callable[[Ask], dict[str, Any]]
    packages: tuple[str, ...] = ()
    engine: bool = False  # needs vLLM itself
    extra_env: tuple[tuple[str, str], ...] = ()


def environment(name: str, version: str) -> Path:
    """Where a tool is installed."""
    return cache_dir() / "bench" / f"{name.split()[0]}-{version}"


def install(tool: Tool) -> str | None:
    """Makes the tool's environment; returns why it could not be made, None where it stands."""
    if not tool.packages:
        return None
    folder = environment(tool.name, tool.version)
    if (folder / "installed").exists():
        return None
    python = folder / "bin" / "python"
    print(f"installing {tool.name} {tool.version} into {folder}", flush=True)
    if not (folder / "bin" / "pip").exists():
        try:
            venv.create(folder, with_pip=True)
        except (OSError, subprocess.CalledProcessError) as error:
            return f"its environment {folder} could not be made: {error}"
    if tool.engine and subprocess.run([python, ROOT / "tools" / "install_engine.py", "--engine", "cpu"]).returncode:
        return "its engine could not be installed"
    done = subprocess.run([python, "-m", "pip", "install", "-q", *tool.packages], capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
        return f"could not be installed: {last[:200]}"
    (folder / "installed").touch()
    return None


def environ(tool: Tool) -> dict[str, str]:
    """The environment of its process: no network, no telemetry."""
    quiet = {"HF_HUB_DISABLE_TELEMETRY": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "NO_COLOR": "1"}
    return os.environ | quiet | dict(tool.extra_env)


def _python(name: str, version: str) -> str:
    return str(environment(name, version) / "bin" / "python")


# -- commands -----------------------------------------------------------------------------------------------------


def _kvlab(ask: Ask) -> list[str]:
    script = str(HERE / "run_kvlab.py")
    numbers = [str(n) for n in (ask.streams, ask.requests, ask.tokens)]
    return [sys.executable, script, ask.url, *numbers, str(ask.folder / "kvlab.json")]


def _reader(ask: Ask) -> list[str]:
    numbers = [str(n) for n in (ask.port, ask.streams, ask.requests, ask.tokens)]
    return [str(compiled("null_reader")), *numbers]


def _vllm_bench(ask: Ask) -> list[str]:
    where = ["--backend", "openai", "--base-url", ask.url, "--model", "kvlab-null", "--tokenizer", TOKENIZER]
    what = ["--dataset-name", "random", "--random-input-len", str(INPUT_TOKENS), "--random-output-len", str(ask.tokens)]
    load = ["--num-prompts", str(ask.requests), "--max-concurrency", str(ask.streams), "--ignore-eos"]
    out = ["--save-result", "--save-detailed", "--result-dir", str(ask.folder), "--result-filename", "vllm.json"]
    script = str(HERE / "run_vllm_bench.py")
    return [_python("vllm", VLLM), script, *where, *what, *load, *out, "--disable-tqdm"]


def _guidellm(ask: Ask) -> list[str]:
    program = str(environment("guidellm", GUIDELLM) / "bin" / "guidellm")
    target = f"kind=openai_http,target={ask.url},model=kvlab-null,request_format=/v1/completions"
    data = f"kind=synthetic_text,prompt_tokens={INPUT_TOKENS},output_tokens={ask.tokens}"
    return [
        *(program, "run", "--backend", target, "--data", data),
        *("--profile", f"kind=concurrent,streams={ask.streams}"),
        *("--constraint", f"kind=max_requests,count={ask.requests}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}"),
        *("--output", f"kind=json,path={ask.folder / 'guidellm.json'}", "--disable-console"),
    ]


def _aiperf(ask: Ask) -> list[str]:
    program = str(environment("aiperf", AIPERF) / "bin" / "aiperf")
    return [
        *(program, "profile", "-m", "kvlab-null", "--url", ask.url, "--endpoint-type", "completions", "--streaming"),
        *("--concurrency", str(ask.streams), "--request-count", str(ask.requests), "--num-dataset-entries", "256"),
        *("--synthetic-input-tokens-mean", str(INPUT_TOKENS), "--output-tokens-mean", str(ask.tokens)),
        *("--extra-inputs", "ignore_eos:true", "--tokenizer", TOKENIZER, "--ui", "none"),
        *("--use-server-token-count", "--workers-max", "1", "--record-processors", "1"),
        *("--artifact-dir", str(ask.folder / "aiperf")),
    ]


# -- results ------------------------------------------------------------------------------------------------------


def quantiles(values: Any) -> tuple[float | None, float | None]:
    """(p50, p99); None where there are no values."""
    values = np.asarray(values, dtype=float)
    return (float(np.quantile(values, 0.5)), float(np.quantile(values, 0.99))) if len(values) else (None, None)


def _foreign(path: Path) -> dict[str, Any]:
    rows = foreign.read(path)[0].requests()
    ok = rows[rows["ok"]]
    ttft, itl = quantiles(ok["ttft_s"].dropna()), quantiles(later_gaps_s(ok))
    found = {"requests": len(rows), "failures": int((~rows["ok"]).sum())}
    return found | {"ttft_p50_s": ttft[0], "ttft_p99_s": ttft[1], "itl_p50_s": itl[0], "itl_p99_s": itl[1]}


def _json(ask: Ask, name: str) -> dict[str, Any]:
    return json.loads((ask.folder / name).read_text(encoding="utf-8"))


VLLM, GUIDELLM, AIPERF = "0.31.0", "0.8.1", "0.13.0"
OFFLINE = (("HF_HUB_OFFLINE", "1"), ("TRANSFORMERS_OFFLINE", "1"))
TOOLS = (
    Tool("kvlab", __version__, _kvlab, lambda ask: _json(ask, "kvlab.json")),
    Tool(
        "vllm bench",
        VLLM,
        _vllm_bench,
        lambda ask: _foreign(ask.folder / "vllm.json"),
        ("pandas", "datasets"),
        engine=True,
        extra_env=OFFLINE,
    ),
    Tool(
        "guidellm",
        GUIDELLM,
        _guidellm,
        lambda ask: _foreign(ask.folder / "guidellm.json"),
        (f"guidellm=={GUIDELLM}",),
        extra_env=(*OFFLINE, ("GUIDELLM__MAX_WORKER_PROCESSES", "1")),
    ),
    Tool(
        "aiperf",
        AIPERF,
        _aiperf,
        lambda ask: _foreign(ask.folder / "aiperf" / "profile_export.jsonl"),
        (f"aiperf=={AIPERF}",),
    ),
    Tool("null reader", "C", _reader, lambda ask: _json(ask, "out.txt")),
)
