"""The embedded model's files, against each other and against the card."""

import ast
import csv
import hashlib
import importlib.util
import json
import math
import random
import re
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from kvlab import tiny
from kvlab.errors import KvlabError

tokenizers_missing = importlib.util.find_spec("tokenizers") is None
needs_tokenizers = pytest.mark.skipif(tokenizers_missing, reason="tokenizers is not installed; it comes with vLLM")
CONFIG = json.loads((tiny.path() / "config.json").read_text())


def load_weights() -> dict[str, np.ndarray]:
    """The bf16 safetensors file as float32: an 8-byte length, a JSON header, then the raw numbers."""
    raw = (tiny.path() / "model.safetensors").read_bytes()
    start = 8 + struct.unpack("<Q", raw[:8])[0]
    weights = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        assert entry["dtype"] == "BF16"
        a, b = entry["data_offsets"]
        halves = np.frombuffer(raw[start + a : start + b], dtype="<u2").astype("<u4")
        weights[name.removeprefix("model.")] = (halves << 16).view("<f4").reshape(entry["shape"])
    return weights


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG["rms_norm_eps"]) * weight


def rotate(x):
    """Rotary embedding of (heads, tokens, head_dim), halves as pairs."""
    size = x.shape[-1]
    angle = np.arange(x.shape[1])[:, None] * CONFIG["rope_theta"] ** -(np.arange(0, size, 2) / size)
    angle = np.concatenate([angle, angle], axis=-1)
    a, b = np.split(x, 2, axis=-1)
    return x * np.cos(angle) + np.concatenate([-b, a], axis=-1) * np.sin(angle)


def attend(x, w, p):
    tokens, size = len(x), CONFIG["head_dim"]
    q, k, v = ((x @ w[f"{p}.{n}_proj.weight"].T).reshape(tokens, -1, size).swapaxes(0, 1) for n in "qkv")
    q, k = rotate(norm(q, w[f"{p}.q_norm.weight"])), rotate(norm(k, w[f"{p}.k_norm.weight"]))
    k, v = (np.repeat(t, len(q) // len(t), axis=0) for t in (k, v))
    scores = q @ k.swapaxes(1, 2) / math.sqrt(size) + np.triu(np.full((tokens, tokens), -np.inf), 1)
    share = np.exp(scores - scores.max(-1, keepdims=True))
    out = (share / share.sum(-1, keepdims=True)) @ v
    return out.swapaxes(0, 1).reshape(tokens, -1) @ w[f"{p}.o_proj.weight"].T


def token_nll(ids: list[int]) -> np.ndarray:
    """Negative log-likelihood in nats of each id but the first, by a forward pass in numpy."""
    w = load_weights()
    x = w["embed_tokens.weight"][ids]
    for i in range(CONFIG["num_hidden_layers"]):
        p = f"layers.{i}"
        x = x + attend(norm(x, w[f"{p}.input_layernorm.weight"]), w, f"{p}.self_attn")
        h = norm(x, w[f"{p}.post_attention_layernorm.weight"])
        gate = h @ w[f"{p}.mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{p}.mlp.up_proj.weight"].T)) @ w[f"{p}.mlp.down_proj.weight"].T
    logits = (norm(x, w["norm.weight"]) @ w["embed_tokens.weight"].T)[:-1]
    top = logits.max(-1)
    return top + np.log(np.exp(logits - top[:, None]).sum(-1)) - logits[np.arange(len(ids) - 1), ids[1:]]


def test_the_geometry_is_the_documented_one():
    wanted = {
        "num_hidden_layers": 6,
        "hidden_size": 320,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 768,
        "vocab_size": 4096,
        "max_position_embeddings": 8192,
    }
    assert {name: CONFIG[name] for name in wanted} == wanted
    assert CONFIG["architectures"] == ["Qwen3ForCausalLM"]
    assert CONFIG["tie_word_embeddings"] is True


def test_the_weights_are_the_cards_and_fit_the_package():
    raw = (tiny.path() / "model.safetensors").read_bytes()
    facts = tiny.facts()
    assert hashlib.sha256(raw).hexdigest() == facts["weights_sha256"]
    assert len(raw) == int(facts["weights_bytes"]) <= 15e6
    weights = load_weights()
    assert sum(w.size for w in weights.values()) == int(facts["parameters"])
    assert all(np.isfinite(w).all() for w in weights.values())


def test_the_card_states_the_last_row_of_the_curve():
    facts = tiny.facts()
    rows = list(csv.DictReader((tiny.path() / "training.csv").read_text().splitlines()))
    assert (rows[-1]["step"], rows[-1]["tokens"]) == (facts["training_steps"], facts["training_tokens_seen"])
    # The curve is computed in bf16 on windows one token longer than the card's.
    assert math.log(float(facts["heldout_perplexity"])) == pytest.approx(float(rows[-1]["heldout_nll"]), abs=0.01)
    assert float(facts["heldout_perplexity"]) < float(facts["unigram_perplexity"]) / 20


def test_the_card_lists_the_sources_as_they_are():
    rows = json.loads((tiny.path() / "sources.json").read_text())
    table = (tiny.path() / "MODEL_CARD.md").read_text().split("<!-- sources -->\n")[1].split("\n<!-- end -->")[0]
    stated = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    assert stated == [
        [r["package"], r["version"], r["licence"], r["what"], f"{r['training_tokens']:,}", f"{r['heldout_tokens']:,}"]
        for r in rows
    ]
    assert sum(r["training_tokens"] for r in rows) == int(tiny.facts()["training_tokens"])
    assert not [r for r in rows if re.search(r"GPL|GFDL|CC-BY", r["licence"])]


def test_heldout_text_is_the_cards():
    text = tiny.heldout_text()
    assert hashlib.sha256(text.encode()).hexdigest() == tiny.facts()["heldout_sha256"]
    listed = sum(len(r["heldout_documents"]) for r in json.loads((tiny.path() / "sources.json").read_text()))
    assert text.count("<|endoftext|>") == listed - 1


@needs_tokenizers
def test_heldout_tokens_are_as_many_as_stated_and_decode_to_the_text():
    ids = tiny.heldout_tokens()
    assert len(ids) == int(tiny.facts()["heldout_tokens"]) >= 300_000
    assert tiny.decode(ids) == tiny.heldout_text()
    assert tiny.heldout_tokens(100) == ids[:100]


@needs_tokenizers
def test_any_unicode_round_trips():
    draw = random.Random(5)
    scalars = [i for i in range(0x110000) if not 0xD800 <= i < 0xE000]
    texts = ["", " leading", "a\r\n\tb\u00a0", "e\u0301 \u00e9", "👩‍👩‍👧‍👦🏳️‍🌈", "\x00\x7f\ufeff", "ไทย العربية 中文"]
    for text in texts:
        assert tiny.decode(tiny.encode(text)) == text
    for _ in range(200):
        text = "".join(map(chr, draw.choices(scalars, k=50)))
        assert tiny.decode(tiny.encode(text)) == text


@needs_tokenizers
def test_special_tokens_have_the_ids_of_the_configuration():
    settings = json.loads((tiny.path() / "tokenizer_config.json").read_text())
    assert tiny.encode(settings["eos_token"]) == [CONFIG["eos_token_id"]] == [0]
    assert tiny.encode(settings["bos_token"]) == [CONFIG["bos_token_id"]]
    assert tiny.encode(settings["pad_token"]) == [CONFIG["pad_token_id"]] == [1]
    vocabulary = json.loads((tiny.path() / "tokenizer.json").read_text())["model"]["vocab"]
    assert sorted(vocabulary.values()) == list(range(CONFIG["vocab_size"]))


@needs_tokenizers
def test_perplexity_of_the_fixed_window():
    nll = token_nll(tiny.heldout_tokens(1024))
    assert math.exp(nll.mean()) == pytest.approx(float(tiny.facts()["window_perplexity"]), abs=1e-3)


def test_the_greedy_samples_read_as_words():
    known = set(re.findall(r"[a-z]+", tiny.heldout_text().lower()))
    for number in (1, 2, 3):
        words = re.findall(r"[a-z]+", ast.literal_eval(tiny.facts()[f"sample_{number}"]).lower())[:-1]
        assert len(words) > 30
        assert sum(word in known for word in words) / len(words) > 0.97


def test_missing_tokenizers_are_explained(monkeypatch):
    tiny._tokenizer.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(KvlabError, match="pip install tokenizers"):
        tiny.heldout_tokens()


def test_data_list_of_the_script_is_the_shipped_one():
    script = (Path(__file__).parent.parent / "tools" / "train_tiny.py").read_text()
    for row in json.loads((tiny.path() / "sources.json").read_text()):
        assert f'"{row["package"]}", "{row["version"]}", "{row["licence"]}"' in script
