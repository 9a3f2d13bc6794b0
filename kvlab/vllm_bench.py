"""The same load sent by `vllm bench serve`, for cross-checks: token-id prompts of the same lengths.

`python -m kvlab.vllm_bench ARGUMENTS` is `vllm bench serve ARGUMENTS` for such prompts: it needs no tokenizer, and runs
also where the build of vLLM is named otherwise than its command expects. `--wait` keeps it for one load after another:
importing it takes longer than a short load, and in turns with another tool the machine would be measured warm and cold.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import select
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kvlab import foreign, workload
from kvlab.certificate import plateau
from kvlab.client import Endpoint
from kvlab.config import LoadConfig
from kvlab.errors import ConfigError
from kvlab.load import LoadResult
from kvlab.results import NO_ROWS, NO_SAMPLES

LIMIT_S = 900.0
IDLE_S = 300.0  # then it ends by itself; it ends with whoever started it in any case
PROGRAM = (sys.executable, "-m", "kvlab.vllm_bench", "--wait")
NAME = "vllm bench serve"
NOISE = re.compile("nanobind|leaked|skipped remainder")  # what a library says when any such process ends


def run(endpoint: Endpoint, load: LoadConfig, nonce: int) -> LoadResult:
    """The measured requests of a closed loop as that tool saw them; it counts no tokens per event and no counters.

    Where it does not run here, such as beside a vLLM whose benchmark lacks a package, there are no rows, and the
    certificate's `failures` say why.
    """
    _, requests = workload.plan(load, endpoint.vocab, nonce)
    with tempfile.TemporaryDirectory() as folder:
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text(
            "".join(json.dumps({"prompt": request.prompt}) + "\n" for request in requests), encoding="utf-8"
        )
        said = _ask(arguments(endpoint, load, prompts), endpoint, folder)
        try:
            (found,) = foreign.read(Path(folder) / "result.json")
        except ConfigError:
            return LoadResult(NO_ROWS, NO_SAMPLES, None, _certificate([f"{NAME} measured nothing: {said}"]))
    for row in found.rows:
        row |= {"input_tokens_asked": load.input_tokens, "output_tokens_asked": load.output_tokens}
    return LoadResult(found.requests(), NO_SAMPLES, plateau(found.rows, load.concurrency), _certificate([]))


def _certificate(failures: list[str]) -> dict[str, Any]:
    return {"tool": NAME, "failures": failures, "problems": failures, "tokens_per_event": "spread", "fake": False}


def arguments(endpoint: Endpoint, load: LoadConfig, prompts: Path) -> list[str]:
    """Of its command line: prompts of token ids, sent as they are."""
    body = {"max_tokens": load.output_tokens, "temperature": 0}
    return [
        *("--backend", "openai", "--model", endpoint.model),
        *("--base-url", endpoint.base_url.rstrip("/").removesuffix("/v1"), "--skip-chat-template"),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle", "--ignore-eos"),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--custom-output-len", str(load.output_tokens)),
        *("--extra-body", json.dumps(body), "--disable-tqdm", "--ready-check-timeout-sec", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(prompts.parent), "--result-filename", "result.json"),
    ]


_running: list[subprocess.Popen] = []  # none, or the one that waits for the next load


def _ask(arguments: Sequence[str], endpoint: Endpoint, folder: str, program: Sequence[str] = PROGRAM) -> str:
    """Lets the program send one load to its end, in the folder; the last line that it said."""
    asked = json.dumps({"arguments": list(arguments), "folder": folder, "key": endpoint.api_key}) + "\n"
    said = None
    for _ in range(2):  # one that waited may have ended a moment ago
        waited = bool(_running) and _running[0].poll() is None
        if not waited:
            _end()
            environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            _running.append(subprocess.Popen(program, env=environment, text=True, **pipes))
        said = _answer(_running[0], asked)
        if said is not None or not waited:
            break
    return said or f"it ended, or was not done after {LIMIT_S:g} s"


def _answer(program: subprocess.Popen, asked: str) -> str | None:
    """What it says at the end; None where it ended instead. An answer that nobody waits for must not meet the next."""
    limit = threading.Timer(LIMIT_S, program.kill)
    limit.start()
    try:
        program.stdin.write(asked)
        program.stdin.flush()
        answer = program.stdout.readline()
    except OSError:
        answer = ""
    except BaseException:
        _end()
        raise
    finally:
        limit.cancel()
    if not answer:
        _end()
        return None
    return json.loads(answer)["said"]


def _end() -> None:
    while _running:
        program = _running.pop()
        program.kill()
        program.wait()
        for pipe in (program.stdin, program.stdout):
            with contextlib.suppress(OSError):
                pipe.close()


class TokenIds:
    """In place of a tokenizer, where prompts are token ids already: vLLM 0.26 refuses to go without one."""

    def __call__(self, prompt: list[int], **_: Any) -> SimpleNamespace:
        if isinstance(prompt, str):  # an answer without usage, whose tokens it would count
            raise ValueError("the server states no usage, and no tokenizer is here to count with")
        return SimpleNamespace(input_ids=prompt)


def wait() -> None:
    """One load a line of standard input, and a line of standard output when it is done, until nobody asks any more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # the tool prints its own results
    while select.select([sys.stdin], [], [], IDLE_S)[0]:
        line = sys.stdin.readline()
        if not line:
            break
        answers.write(json.dumps({"said": _load(json.loads(line))}) + "\n")
        answers.flush()


def _load(asked: dict[str, Any]) -> str:
    """Sends one load; the last line that the tool said of it, an error's where it failed."""
    os.chdir(asked["folder"])
    if asked["key"]:
        os.environ["OPENAI_API_KEY"] = asked["key"]
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            main(asked["arguments"])
        except SystemExit as end:
            print(end.code, file=said)
        except BaseException:
            traceback.print_exc()
    os.chdir("/")  # the folder is about to go
    return last_line(said.getvalue())


def last_line(text: str) -> str:
    """What a program said last, without what a library says whenever any process ends."""
    lines = [line for line in text.splitlines() if line.strip() and not NOISE.search(line)]
    return (lines or ["no output"])[-1].strip()[:300]


def main(arguments: Sequence[str] | None = None) -> None:
    """vLLM's own command."""
    import argparse

    from vllm.benchmarks import serve

    serve.get_tokenizer = lambda *_, **__: TokenIds()
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args(arguments))


if __name__ == "__main__":
    wait() if sys.argv[1:] == ["--wait"] else main()
