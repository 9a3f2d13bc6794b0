"""The log-probabilities of a text by transformers, in float32 and in bfloat16: what a server should compute too.

The float32 ones are the reference; how far bfloat16 moves them in transformers itself is the error to expect of any
server that computes in 16 bits.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvlab import model_files, perplexity, provenance, serverless
from kvlab.claims import Claim, parse_conditions
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import KvlabError
from kvlab.results import Result

NAME = "reference"
EXACT, ROUNDED = "float32", "bfloat16"
WITHIN = 1.25  # two ways of rounding to 16 bits do not err alike: a quarter more is still the same error


def measured(lab, server: ServerConfig, load: LoadConfig, windows: int) -> Result:
    """The first `windows` windows of a perplexity load through transformers: see `serverless.measured`.

    Where they cannot be computed the result says why, and nothing is stored.
    """
    plain = ServerConfig(model=server.model, engine=server.engine, load_format=server.load_format, served_name=NAME)
    # No field of a cell counts them; in its environment they are a part of its key.
    few = plain.model_copy(update={"env": {"KVLAB_REFERENCE_WINDOWS": str(windows)}})
    cell = Cell(name=NAME, server=few, load=load)
    if not windows:
        return Result(cell, None, "the profile asks for no window of the reference")
    elsewhere = "the weights of an existing server are elsewhere"
    try:
        return serverless.measured(lab, cell, lambda: _summary(cell, windows), elsewhere)
    except KvlabError as error:
        return Result(cell, None, error.what, failed=True)


def _summary(cell: Cell, windows: int) -> dict[str, Any]:
    found = _in_a_process(cell, windows)
    return found | {"n": windows, "weights": model_files.fingerprint(cell.server)}


def _in_a_process(cell: Cell, windows: int) -> dict[str, Any]:
    folder, extra = model_files.resolve_model(cell.server)
    if cell.server.load_format == "dummy" or extra == model_files.DUMMY:
        raise KvlabError("Random weights have no reference.")
    load = cell.load
    numbers = [str(n) for n in (load.requests, load.input_tokens, windows)]
    return serverless.in_a_process(
        "kvlab.reference", cell.server.engine, folder, load.text or perplexity.HELDOUT, *numbers
    )


def logprobs(engine: str, folder: str, text: str, count: int, length: int, windows: int) -> dict[str, Any]:
    """A summary as `perplexity.run_windows` writes it, for each dtype under its name."""
    import torch
    import transformers

    device = "cuda" if engine == "cuda" and torch.cuda.is_available() else "cpu"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = tokenizer(perplexity.read_text(text), add_special_tokens=False)["input_ids"]
    parts = perplexity.windows(tokens, count, length)
    found: dict[str, Any] = {"windows_sha256": hashlib.sha256(np.asarray(parts, dtype=np.int64).tobytes()).hexdigest()}
    for dtype in (EXACT, ROUNDED):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        model = model.eval().to(device)
        each = [_nll(torch, model, part, device) for part in parts[:windows]]
        del model
        found[dtype] = {
            "window_tokens": [length - 1] * windows,
            "window_nll_sum": [math.fsum(nll) for nll in each],
            "token_nll_packed": [perplexity.pack(nll) for nll in each],
        }
    name = torch.cuda.get_device_name(0) if device == "cuda" else provenance.cpu_model()
    return found | {"device": name, "torch": torch.__version__, "transformers": transformers.__version__}


def _nll(torch, model, window: Sequence[int], device: str) -> list[float]:
    """Negative log-likelihood (nats) of every token of a window but the first."""
    ids = torch.tensor([window], device=device)
    with torch.no_grad():
        logits = model(ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none").tolist()


# -- what it says -------------------------------------------------------------------------------------------------


def first(summary: dict[str, Any] | None, windows: int) -> dict[str, Any]:
    """The first windows of a summary; empty where they are not all there."""
    names = ("window_tokens", "window_nll_sum", "token_nll_packed")
    taken = {name: ((summary or {}).get(name) or [])[:windows] for name in names}
    return taken if all(len(values) == windows and None not in values for values in taken.values()) else {}


def unlike(reference: dict[str, Any], summary: dict[str, Any]) -> str | None:
    """Why the two cannot be compared: other tokens or other weights; null where they can."""
    for name, what in (("windows_sha256", "tokens"), ("weights", "weights")):
        if reference.get(name) != summary.get(name):
            return f"the server had other {what} than transformers"
    return None


def stated(lab, result: Result, where: dict[str, Any], windows: int, runs: dict[str, Result]) -> list[Claim]:
    """What bfloat16 changes in transformers, and how far each server is from transformers in float32.

    `runs`: by the name of a KV format that leaves the cache as wide as the model. A server in float32 should be off by
    nothing, one in 16 bits by as much as transformers in bfloat16 is.
    """
    summary = result.run.manifest["summary"] if result.run is not None else {}
    exact, rounded = (first(summary.get(dtype), windows) for dtype in (EXACT, ROUNDED))
    error = perplexity.token_change(exact, rounded)
    at = where | {"dtype": ROUNDED, "over": "transformers"}
    made = [lab.claim("reference_logprob_error", at, measured=error, unit="nats", results=[result])]
    for name, one in runs.items():
        own = one.run.manifest["summary"] if one.run is not None else {}
        seen, why = first(own, windows), unlike(summary, own) if own and summary else None
        both = bool(seen and exact and not why)
        off = perplexity.token_change(exact, seen) if both else None
        wanted = 0.0 if one.cell.server.dtype == EXACT else error.value if error else None
        more = {"unit": "nats", "results": [one, result]} | ({"reason": why} if why else {})
        at = where | {"kv_dtype": name, "over": "transformers"}
        made.append(lab.claim("vllm_logprob_error", at, computed=wanted, measured=off, **more))
        of_text = perplexity.perplexity(exact) if exact else None
        found = perplexity.perplexity(seen) if both else None
        computed = of_text.value if of_text else None
        made.append(lab.claim("reference_perplexity", at, computed=computed, measured=found, **more | {"unit": "ppl"}))
    return made


def told(made: Sequence[Claim]) -> str | None:
    """Whether the servers give the text the log-probabilities that transformers gives it."""
    error = next((c.measured for c in made if c.quantity == "reference_logprob_error"), None)
    found = [c for c in made if c.quantity == "vllm_logprob_error" and c.measured is not None]
    if error is None or not found:
        return None
    parts = []
    for c in found:
        name = parse_conditions(c.conditions)["kv_dtype"]
        parts.append(f"{name} {c.measured:.2g} ({'within' if c.measured <= WITHIN * error else 'beyond'} that)")
    return (
        f"Rounding to bfloat16 changes a token's log-probability in transformers by {error:.2g} nats on average. Off "
        f"from transformers in float32 are, through vLLM: {'; '.join(parts)}."
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Log-probabilities by transformers; prints one line of JSON.")
    parser.add_argument("engine", choices=["cpu", "cuda"])
    parser.add_argument("folder")
    parser.add_argument("text")
    for number in ("count", "length", "windows"):
        parser.add_argument(number, type=int)
    print(json.dumps(logprobs(**vars(parser.parse_args()))))
