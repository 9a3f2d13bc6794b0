"""Log-probabilities by transformers beside those of a server: what is compared, and what is not."""

import hashlib
import importlib.util
import json
import math

import fakes
import numpy as np
import pytest

from kvlab import perplexity, reference, tiny
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import KvlabError
from kvlab.results import Result

LOAD = LoadConfig(workload="perplexity", requests=3, input_tokens=5, output_tokens=1)
WHERE = {"text": "heldout", "windows": 2}


class Run:
    def __init__(self, summary):
        self.id, self.manifest = "run", {"summary": summary}

    @property
    def valid(self):
        return True


def windows(*nll):
    """Windows of four tokens, every token with this negative log-likelihood."""
    packed = [perplexity.pack([value] * 4) for value in nll]
    return {"window_tokens": [4] * len(nll), "window_nll_sum": [4 * value for value in nll], "token_nll_packed": packed}


def result(summary, dtype=None):
    cell = Cell(name="ppl", server=ServerConfig(model="tiny", dtype=dtype), load=LOAD)
    return Result(cell, Run(summary) if summary else None, None if summary else "no run of this point is stored")


NAMES = {"windows_sha256": "a", "weights": "b"}
BY_TRANSFORMERS = result({"float32": windows(1.0, 2.0), "bfloat16": windows(1.1, 1.9)} | NAMES)


@pytest.fixture
def lab(monkeypatch, tmp_path):
    fakes.install(monkeypatch, tmp_path)
    return fakes.open_lab(section="fp8_kv")


def stated(lab, **runs):
    made = reference.stated(lab, BY_TRANSFORMERS, WHERE, 2, runs)
    return made, {(c.quantity, c.conditions.split(";")[2]): c for c in made}


def test_a_server_in_16_bits_is_measured_against_the_error_of_16_bits(lab):
    made, by = stated(lab, bf16=result(windows(1.05, 2.05, 9.0) | NAMES))
    assert by["reference_logprob_error", "dtype=bfloat16"].measured == pytest.approx(0.1)
    off = by["vllm_logprob_error", "kv_dtype=bf16"]
    assert (off.computed, off.measured) == (pytest.approx(0.1), pytest.approx(0.05))
    of_text = by["reference_perplexity", "kv_dtype=bf16"]  # the same two windows on both sides
    assert (of_text.computed, of_text.measured) == (pytest.approx(math.exp(1.5)), pytest.approx(math.exp(1.55)))
    assert "bf16 0.05 (within that)" in reference.told(made)


def test_a_server_in_float32_should_be_off_by_nothing_and_one_that_is_far_off_is_told(lab):
    made, by = stated(lab, float32=result(windows(1.5, 2.5, 9.0) | NAMES, "float32"))
    off = by["vllm_logprob_error", "kv_dtype=float32"]
    assert (off.computed, off.measured) == (0.0, pytest.approx(0.5)) and "beyond" in reference.told(made)


@pytest.mark.parametrize("name", NAMES)
def test_other_tokens_or_weights_are_no_comparison(lab, name):
    made, by = stated(lab, bf16=result(windows(1.0, 2.0) | NAMES | {name: "other"}))
    claim = by["vllm_logprob_error", "kv_dtype=bf16"]
    assert claim.measured is None and "the server had other" in claim.reason and reference.told(made) is None


def test_what_was_not_measured_says_why(lab):
    made, by = stated(lab, bf16=result(None))
    assert by["vllm_logprob_error", "kv_dtype=bf16"].reason == "no run of this point is stored"
    missing = reference.stated(lab, result(None), WHERE, 2, {"bf16": result(windows(1.0, 2.0) | NAMES)})
    assert {c.state for c in missing} == {"not measured"} and reference.told(missing) is None
    assert reference.first(windows(1.0), 2) == {}  # a window is missing


def test_it_is_computed_once_and_a_failure_stores_nothing(lab, monkeypatch):
    called = []

    def fails(cell, n):
        called.append(n)
        raise KvlabError("no memory was left")

    monkeypatch.setattr(reference, "_in_a_process", fails)
    server = lab.server()
    failed = reference.measured(lab, server, LOAD, 2)
    assert failed.run is None and failed.failed and failed.reason == "no memory was left"
    monkeypatch.setattr(reference, "_in_a_process", lambda cell, n: called.append(n) or {"float32": windows(1.0, 2.0)})
    found = [reference.measured(fakes.open_lab(mode, section="fp8_kv"), server, LOAD, 2) for mode in ("auto", "replay")]
    assert called == [2, 2] and found[0].run.id == found[1].run.id
    assert found[0].run.manifest["summary"]["weights"]  # other weights are no pair


def test_random_weights_have_no_reference(lab):
    server = ServerConfig(model="geometry:Qwen3-0.6B", load_format="dummy")
    assert "Random weights" in reference.measured(lab, server, LOAD, 2).reason


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers comes with vLLM")
def test_transformers_gives_the_perplexity_of_the_card():  # pitfall 25
    found = reference.logprobs("cpu", str(tiny.path()), "heldout", 1, 1024, 1)
    ids = tiny.heldout_tokens(1024)
    assert found["windows_sha256"] == hashlib.sha256(np.asarray([ids], dtype=np.int64).tobytes()).hexdigest()
    stated = float(tiny.facts()["window_perplexity"])
    assert perplexity.perplexity(found["float32"]).value == pytest.approx(stated, abs=1e-3)
    error = perplexity.token_change(found["float32"], found["bfloat16"]).value
    assert 0 < error < 0.1
    json.dumps(found)
