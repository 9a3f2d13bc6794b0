"""The same load sent by `vllm bench serve`, for cross-checks: token-id prompts of the same lengths.

`python -m kvlab.vllm_bench ARGUMENTS` is `vllm bench serve ARGUMENTS` for such prompts: it needs no tokenizer, and runs
also where the build of vLLM is named otherwise than its command expects.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
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
        prompts.write_text("".join(json.dumps({"prompt": request.prompt}) + "\n" for request in requests))
        said = _start(command(endpoint, load, prompts), endpoint, folder)
        try:
            (found,) = foreign.read(Path(folder) / "result.json")
        except ConfigError:
            return LoadResult(NO_ROWS, NO_SAMPLES, None, _certificate([f"{NAME} measured nothing: {said}"]))
    for row in found.rows:
        row |= {"input_tokens_asked": load.input_tokens, "output_tokens_asked": load.output_tokens}
    return LoadResult(found.requests(), NO_SAMPLES, plateau(found.rows, load.concurrency), _certificate([]))


def _certificate(failures: list[str]) -> dict[str, Any]:
    return {"tool": NAME, "failures": failures, "problems": failures, "tokens_per_event": "spread", "fake": False}


def command(endpoint: Endpoint, load: LoadConfig, prompts: Path) -> list[str]:
    """Its command line: prompts of token ids, sent as they are."""
    body = {"max_tokens": load.output_tokens, "temperature": 0}
    return [
        *(sys.executable, "-m", "kvlab.vllm_bench", "--backend", "openai", "--model", endpoint.model),
        *("--base-url", endpoint.base_url.rstrip("/").removesuffix("/v1"), "--skip-chat-template"),
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--disable-shuffle", "--ignore-eos"),
        *("--num-prompts", str(load.requests), "--max-concurrency", str(load.concurrency)),
        *("--custom-output-len", str(load.output_tokens)),
        *("--extra-body", json.dumps(body), "--disable-tqdm", "--ready-check-timeout-sec", "0"),
        *("--save-result", "--save-detailed", "--result-dir", str(prompts.parent), "--result-filename", "result.json"),
    ]


def _start(command: list[str], endpoint: Endpoint, folder: str) -> str:
    """Runs it to its end; the last line that it said."""
    key = {"OPENAI_API_KEY": endpoint.api_key} if endpoint.api_key else {}
    environment = os.environ | {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | key
    try:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return f"it was not done after {LIMIT_S:g} s"
    lines = [line for line in done.stderr.splitlines() if line.strip() and not NOISE.search(line)]
    return (lines or ["no output"])[-1].strip()[:300]


class TokenIds:
    """In place of a tokenizer, where prompts are token ids already: vLLM 0.26 refuses to go without one."""

    def __call__(self, prompt: list[int], **_: Any) -> SimpleNamespace:
        if isinstance(prompt, str):  # an answer without usage, whose tokens it would count
            raise ValueError("the server states no usage, and no tokenizer is here to count with")
        return SimpleNamespace(input_ids=prompt)


def main() -> None:
    """vLLM's own command."""
    import argparse

    from vllm.benchmarks import serve

    serve.get_tokenizer = lambda *_, **__: TokenIds()
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    serve.main(parser.parse_args())


if __name__ == "__main__":
    main()
