"""The embedded model through real vLLM on the CPU, against transformers."""

import importlib.util
import json
import math

import live_for_tests
import numpy as np
import pytest
from live_for_tests import tiny_server

from kvlab import control, perplexity, tiny
from kvlab.config import LoadConfig

pytestmark = [
    *live_for_tests.MARKS,
    pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers comes with vLLM"),
]
# Prefix caching off: a cached prompt has no log-probabilities of its own.
CONFIG = tiny_server(
    max_model_len=2048,
    kv_cache_memory_bytes=32 * 2**20,
    enable_prefix_caching=False,
)


SERVERS = [CONFIG]


@pytest.fixture
def server(live_servers):
    return live_servers(CONFIG)


def ask(server, path: str = "/v1/completions", **fields) -> dict:
    status, text = control.call(server.endpoint, path, {"model": server.endpoint.model, **fields}, timeout_s=120)
    assert status == 200, text
    return json.loads(text)


def vllm_logprobs(server, ids: list[int]) -> np.ndarray:
    """Log-probability of each id but the first."""
    answer = ask(server, prompt=ids, max_tokens=1, temperature=0, prompt_logprobs=0)
    listed = answer["choices"][0]["prompt_logprobs"]
    assert listed[0] is None and len(listed) == len(ids)
    return np.array([entry[str(token)]["logprob"] for entry, token in zip(listed[1:], ids[1:], strict=True)])


def transformers_logprobs(ids: list[int], dtype: str = "float32") -> np.ndarray:
    """Log-probabilities of the whole vocabulary after each id."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny.path(), dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0].float(), -1).numpy()


def scored(logprobs: np.ndarray, ids: list[int]) -> np.ndarray:
    return logprobs[np.arange(len(ids) - 1), ids[1:]]


def test_logprobs_equal_those_of_transformers_within_bf16_error(server):  # pitfall 25
    ids = tiny.heldout_tokens(1024)
    exact, rounded = (scored(transformers_logprobs(ids, dtype), ids) for dtype in ("float32", "bfloat16"))
    measured = vllm_logprobs(server, ids)
    assert math.exp(-exact.mean()) == pytest.approx(float(tiny.facts()["window_perplexity"]), abs=1e-3)
    bf16_error = np.abs(rounded - exact).mean()
    assert np.abs(measured - exact).mean() < 2 * bf16_error
    assert abs(measured.mean() - exact.mean()) < bf16_error


def test_a_text_prompt_is_continued_greedily(server):
    prompt = tiny.encode("The children of")
    answer = ask(server, prompt="The children of", max_tokens=30, temperature=0, return_token_ids=True)
    chosen = answer["choices"][0]["token_ids"]
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    assert answer["choices"][0]["text"] == tiny.decode(chosen)
    after = transformers_logprobs(prompt + chosen)[len(prompt) - 1 : -1]
    # Near ties may fall another way in bf16; a token that is far from the best may not be chosen.
    assert (after.max(-1) - after[np.arange(len(chosen)), chosen]).max() < 0.1


def test_the_server_tokenizes_as_the_package_does(server):
    text = "Naïve 🙂 text\n\n with  spaces"
    assert ask(server, "/tokenize", prompt=text)["tokens"] == tiny.encode(text)


def test_windows_through_vllm_have_the_cards_perplexity_and_repeat(server):  # pitfall 25
    load = LoadConfig(workload="perplexity", requests=1, input_tokens=1024, output_tokens=1)
    runs = [perplexity.run_windows(server.endpoint, load, progress=False) for _ in range(2)]
    assert [run.certificate["failures"] for run in runs] == [[], []]
    stated = float(tiny.facts()["window_perplexity"])
    assert perplexity.perplexity(runs[0].summary).value == pytest.approx(stated, rel=0.01)
    assert perplexity.largest_difference(*(run.summary for run in runs)) < perplexity.REPEAT_NLL
