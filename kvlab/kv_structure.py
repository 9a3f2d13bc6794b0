"""What the layers of a config.json keep for each token: reasons against the plain KV formula, and parameter counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

# One layer in N attends to everything, by the defaults of transformers' config classes, where no list says so.
DEFAULT_PATTERN = {"gemma2": 2, "gemma3_text": 6, "gemma3n_text": 5, "gpt_oss": 2, "cohere2": 4}
WINDOWED = {"sliding_attention", "chunked_attention"}
ATTENTION = {"full_attention", "attention", "global_attention", *WINDOWED}
RECURRENT_KEYS = ("mamba_", "ssm_", "linear_num_", "linear_attn", "hybrid_override_pattern")
RECURRENT_TYPES = ("mamba", "rwkv", "recurrent_gemma", "jamba", "bamba", "zamba", "falcon_h1", "nemotron_h")
# What decides what a layer keeps; one that cannot be read would give a wrong number, and not a refusal.
NUMBERS = (
    "kv_lora_rank",
    "qk_rope_head_dim",
    "full_attention_interval",
    "attn_layer_period",
    "num_kv_shared_layers",
    "cla_share_factor",
    "attention_chunk_size",
    "sliding_window",
    "max_window_layers",
)
KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types")
LARGEST = 2**40  # of any number in a config.json: beyond it stands a slip, and sizes would leave the range of a float
COUNTED = (  # what parameters are counted from
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "moe_intermediate_size",
    "num_experts",
    "num_local_experts",
    "ffn_dim",
    "vocab_size",
    "max_position_embeddings",
)
GATED = {"llama", "mistral", "qwen2", "qwen3", "phi3", "mixtral", "qwen3_moe"}


def is_whole(value: Any) -> bool:
    """Whether it is a whole number that may stand in a config.json; true and false are none."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= LARGEST


def shown(value: Any) -> str:
    """A value in a message: its beginning, and whether it is beyond the largest number."""
    said = repr(value)
    short = said if len(said) <= 60 else f"{said[:57]}..."
    return f"{short}, which is beyond 2^40" if isinstance(value, int) and abs(value) > LARGEST else short


def unreadable(text: dict[str, Any]) -> str | None:
    """What is wrong with a field that decides what layers keep; null where all can be read.

    Each number is a whole one of 0 or more; null, false and no field at all mean that the model has no such thing.
    """
    for key in NUMBERS:
        value = text.get(key)
        if value not in (None, False) and not (is_whole(value) and value >= 0):
            return f"{key} must be null or a whole number, not {shown(value)}"
    for key in KINDS_OF_LAYERS:
        if text.get(key) is not None and not isinstance(text[key], list):
            return f"{key} must be a list with an entry a layer, not {shown(text[key])}"
    return None


def why_not(text: dict[str, Any]) -> list[str]:
    """Every reason why 2 x layers x KV heads x head_dim x bytes is not the KV size of a token; empty where it is."""
    checks = (_encoder_decoder, _latent, _recurrent, _shared, _uneven, _windowed)
    return [reason for check in checks if (reason := check(text))]


def _encoder_decoder(text: dict[str, Any]) -> str | None:
    if text.get("is_encoder_decoder"):
        return "encoder-decoder: a cross-attention cache of the encoder's length comes on top of the decoder's own"
    if text.get("cross_attention_layers"):
        return "cross-attention layers keep the KV of the image, not of the text"
    return None


def _latent(text: dict[str, Any]) -> str | None:
    if values := mla_values_per_token_and_layer(text):
        return f"multi-head latent attention (MLA): a layer keeps one latent vector of {values} values, no heads"
    return None


def mla_values_per_token_and_layer(text: dict[str, Any]) -> int | None:
    """kv_lora_rank + qk_rope_head_dim of an MLA model (DeepSeek-V2, arXiv:2405.04434, section 2.1), else null."""
    rank, rope = text.get("kv_lora_rank"), text.get("qk_rope_head_dim")
    return rank + rope if is_whole(rank) and is_whole(rope) else None


def _recurrent(text: dict[str, Any]) -> str | None:
    kinds = Counter(k for k in _layer_kinds(text) if k not in ATTENTION)
    interval = text.get("full_attention_interval") or text.get("attn_layer_period")
    model_type = str(text.get("model_type", ""))
    if kinds:
        what = ", ".join(f"{n} {kind.replace('_', ' ')}" for kind, n in sorted(kinds.items()))
        return f"hybrid: {what} layers keep a state of fixed size, not KV for each token"
    if isinstance(interval, int) and interval > 1:
        return f"hybrid: one layer in {interval} is attention, the others keep a state of fixed size"
    found = [key for key in text if key.startswith(RECURRENT_KEYS) and text[key] not in (None, False)]
    if found or model_type.startswith(RECURRENT_TYPES):
        return f"Mamba or linear-attention layers keep a state of fixed size ({', '.join(found[:2]) or model_type})"
    return None


def _layer_kinds(text: dict[str, Any]) -> list[str]:
    for key in KINDS_OF_LAYERS:
        if isinstance(text.get(key), list):
            return [str(kind) for kind in text[key]]
    return []


def _shared(text: dict[str, Any]) -> str | None:
    shared = text.get("num_kv_shared_layers")
    if isinstance(shared, int) and shared > 0:
        return f"cross-layer sharing: the last {shared} layers read the KV of earlier layers and keep none"
    if text.get("use_cla") or (text.get("cla_share_factor") or 1) > 1:
        return "cross-layer attention: neighbouring layers share one KV"
    return None


def _uneven(text: dict[str, Any]) -> str | None:
    for key in ("num_key_value_heads", "num_kv_heads", "num_key_value_heads_per_layer", "block_configs"):
        if isinstance(text.get(key), list):
            return f"the layers differ in KV heads ({key} is a list)"
    return None


def _windowed(text: dict[str, Any]) -> str | None:
    kinds = _layer_kinds(text)
    if chunk := text.get("attention_chunk_size"):
        return f"chunked attention: most layers keep at most {chunk} tokens"
    window, max_len = text.get("sliding_window"), _number(text, "max_position_embeddings")
    if kinds:
        n = sum(kind in WINDOWED for kind in kinds)
        where = f"{n} of {len(kinds)} layers" if n else None
    else:
        where = _windowed_layers(text) if window else None
    # A window that no sequence can outgrow takes nothing away.
    if where is None or (window and max_len and window >= max_len):
        return None
    return f"sliding window: {where} keep only the last {window} tokens" if window else f"sliding window in {where}"


def _windowed_layers(text: dict[str, Any]) -> str | None:
    """Which layers have the window where no list of layer types says so; null where it is switched off."""
    model_type = str(text.get("model_type", ""))
    # Qwen files carry a window that is off unless use_sliding_window says otherwise.
    if not text.get("use_sliding_window", not model_type.startswith("qwen")):
        return None
    first = text.get("max_window_layers")
    if first is not None and model_type.startswith("qwen"):
        after = (_number(text, "num_hidden_layers") or 0) - first
        return f"the last {after} layers" if after > 0 else None
    pattern = text.get("sliding_window_pattern") or DEFAULT_PATTERN.get(model_type)
    return f"all but one in {pattern} layers" if isinstance(pattern, int) and pattern > 1 else "all layers"


def _number(text: dict[str, Any], key: str) -> int | None:
    """A number above 0; null where there is none, or something else."""
    value = text.get(key)
    return value if is_whole(value) and value > 0 else None


def parameters(text: dict[str, Any]) -> int | None:
    """Parameters of the architectures whose parts are known, tied embeddings once; null for others.

    Gated decoder layer: H(Hq + 2 Hkv)D + Hq D H for attention, 3 H I for the MLP (of each expert, with a router of
    H E), 2 H for the norms; then V H for each embedding that is not tied, and H for the last norm.
    """
    model_type = text.get("model_type")
    if any(text.get(key) and _number(text, key) is None for key in COUNTED):
        return None
    given = {key: value for key, value in text.items() if value or key not in COUNTED}
    try:
        if model_type == "opt":
            return _opt_parameters(given)
        return _gated_parameters(given) if model_type in GATED else None
    except (KeyError, TypeError):
        return None  # a field that the KV formula does not need is missing


def _gated_parameters(text: dict[str, Any]) -> int:
    model_type, h, heads = text["model_type"], text["hidden_size"], text["num_attention_heads"]
    kv_heads, d = text.get("num_key_value_heads") or heads, text.get("head_dim") or h // heads
    attention = h * (heads + 2 * kv_heads) * d + heads * d * h
    if model_type == "qwen2" or text.get("attention_bias"):
        attention += (heads + 2 * kv_heads) * d
    if model_type.startswith("qwen3"):
        attention += 2 * d  # norms of queries and keys
    experts = text.get("num_local_experts") or text.get("num_experts")
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    mlp = experts * 3 * h * width + h * experts if experts else 3 * h * width
    embeddings = text["vocab_size"] * h * (1 if text.get("tie_word_embeddings", False) else 2)
    return text["num_hidden_layers"] * (attention + mlp + 2 * h) + embeddings + h


def _opt_parameters(text: dict[str, Any]) -> int:
    """Biased layers, learned positions (two more than the maximum), tied embeddings."""
    h, f = text["hidden_size"], text["ffn_dim"]
    layer = 4 * (h * h + h) + 2 * h * f + f + h + 4 * h
    return text["num_hidden_layers"] * layer + (text["vocab_size"] + text["max_position_embeddings"] + 2) * h + 2 * h
