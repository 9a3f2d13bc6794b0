"""Model geometry from a Hugging Face config.json, and whether the plain KV formula is true for it."""

from __future__ import annotations

import difflib
import json
import os
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvlab import kv_structure, predict
from kvlab.errors import ConfigError
from kvlab.files import typed

HERE = Path(__file__).parent
TINY = HERE / "tiny" / "config.json"

# The same fact under the names that different architectures use for it.
ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "head_dim": ("head_dim", "kv_channels"),
    "vocab_size": ("vocab_size", "padded_vocab_size"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
}
# Published files leave these out where they equal the defaults of transformers' config classes.
DEFAULTS: dict[str, dict[str, int]] = {
    "gemma3_text": {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    "qwen3": {"head_dim": 128},
}
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "half": 2, "auto": 2, "float32": 2, "float": 2}
LARGEST_FILE = 16 * 2**20
TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


@dataclass(frozen=True)
class Geometry:
    """What decides the size of a model's KV cache. A fact is null only where `applies` is false and it is not known.

    `dtype_bytes` is one KV element under vLLM's defaults (`--dtype auto --kv-cache-dtype auto`): vLLM runs float32
    checkpoints in 16 bits. `params` counts tied embeddings once; null where the architecture is not modelled.
    `structure` says in words what each layer keeps; `mla_bytes_per_token` is the latent cache of MLA models.
    """

    name: str
    layers: int | None
    kv_heads: int | None
    head_dim: int | None
    query_heads: int | None
    hidden: int | None
    vocab: int | None
    max_len: int | None
    dtype_bytes: int
    params: int | None
    applies: bool
    why_not: str | None = None
    structure: str = ""
    mla_bytes_per_token: int | None = None
    source: str | None = None


def from_config(config: dict[str, Any], name: str, source: str | None = None) -> Geometry:
    """The geometry in a config.json; a nested text_config is followed. ConfigError names the field that is wrong."""
    if not isinstance(config, dict):
        what = f"{name}: config.json must hold one JSON object, not {type(config).__name__}"
        raise ConfigError(what, next_step="give the model's own config.json, or its folder")
    part = text_part(config)
    given = {key: value for key, value in part.items() if value is not None}
    text = {**DEFAULTS.get(str(part.get("model_type")), {}), **given}
    if wrong := kv_structure.unreadable(text):
        raise _damaged(name, wrong)
    reasons = kv_structure.why_not(text)
    reader = _Reader(text, name, strict=not reasons)
    layers, heads, hidden = (reader(f) for f in ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    mla = kv_structure.mla_values_per_token_and_layer(text)
    dtype_bytes = _dtype_bytes(config, text, name)
    return Geometry(
        name=name,
        layers=layers,
        kv_heads=_kv_heads(reader, heads),
        head_dim=None if mla else _head_dim(reader, hidden, heads),
        query_heads=heads,
        hidden=hidden,
        vocab=reader("vocab_size", required=False),
        max_len=reader("max_position_embeddings", required=False),
        dtype_bytes=dtype_bytes,
        params=kv_structure.parameters(text) if part is config else None,
        applies=not reasons,
        why_not="; ".join(reasons) or None,
        structure="; ".join(reasons) or _grouping(heads, _kv_heads(reader, heads)),
        mla_bytes_per_token=layers * mla * dtype_bytes if mla and layers else None,
        source=source,
    )


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config.json that describes the language model."""
    for part in TEXT_PARTS:
        if isinstance(config.get(part), dict):
            return text_part(config[part])
    return config


def load(path_or_name: str | Path) -> Geometry:
    """The geometry of a folder or file with a config.json, of a published model, or of "tiny"; else ConfigError."""
    name = str(path_or_name).removeprefix("geometry:")
    if name == "tiny":
        return from_config(_read(TINY), "tiny")
    path = typed(name)
    if os.path.exists(path):  # Path.exists raises where the name is too long
        file = path / "config.json" if path.is_dir() else path
        return from_config(_read(file), path.name if path.is_dir() else path.parent.name or path.name)
    return _published_one(_find(name))


def published() -> list[Geometry]:
    """Every geometry of the built-in table, in its order."""
    return [_published_one(name) for name in _table()["models"]]


def names() -> list[str]:
    """What `load` knows without a path."""
    return ["tiny", *_table()["models"]]


def model_config(name: str) -> dict[str, Any]:
    """A config.json with which vLLM starts the model on dummy weights ("tiny" and the dense Qwen3 models)."""
    name = name.removeprefix("geometry:")
    if name == "tiny":
        return _read(TINY)
    found = _find(name)
    if "family" not in _table()["models"][found]:
        startable = [n for n, entry in _table()["models"].items() if "family" in entry]
        raise ConfigError(
            f"{found} is known by its geometry only; its full config.json is not built in",
            next_step=f"use one of {', '.join(['tiny', *startable])}, or a folder with the model's own config.json",
        )
    return _config(found)


def table(context_tokens: int = 32768) -> list[dict[str, Any]]:
    """One row a published model for a notebook: KV bytes per token and at `context_tokens`, null where refused."""
    rows = []
    for g in published():
        per_token = predict.kv_bytes_per_token(g) if g.applies else None
        rows.append(
            {
                "name": g.name,
                "layers": g.layers,
                "kv_heads": g.kv_heads,
                "head_dim": g.head_dim,
                "kv_bytes_per_token": per_token,
                "kv_bytes_at_context": per_token * context_tokens if per_token is not None else None,
                "context_tokens": context_tokens,
                "applies": g.applies,
                "why_not": g.why_not,
                "mla_bytes_per_token": g.mla_bytes_per_token,
                "source": g.source,
            }
        )
    return rows


class _Reader:
    """Reads positive whole numbers by any of their names; lenient where the formula is refused anyway."""

    def __init__(self, text: dict[str, Any], name: str, strict: bool):
        self.text, self.name, self.strict = text, name, strict

    def __call__(self, field: str, required: bool = True) -> int | None:
        for key in ALIASES[field]:
            value = self.text.get(key)
            if value is None:
                continue
            if kv_structure.is_whole(value) and value > 0:
                return value
            if not self.strict:
                return None
            raise self.error(f"{key} must be a positive whole number, not {kv_structure.shown(value)}")
        if required and self.strict:
            raise self.error(f"{field} is missing (also looked for {', '.join(ALIASES[field][1:])})")
        return None

    def error(self, what: str) -> ConfigError:
        return _damaged(self.name, what)


def _damaged(name: str, what: str) -> ConfigError:
    return ConfigError(
        f"config.json of {name}: {what}",
        cause="the file is damaged, or it is not the config.json of a transformer language model",
        next_step="compare it with the config.json on the model's card",
    )


def _kv_heads(reader: _Reader, heads: int | None) -> int | None:
    if reader.text.get("multi_query") and not reader.text.get("new_decoder_architecture"):
        return 1
    kv_heads = reader("num_key_value_heads", required=False)
    if kv_heads is None:
        return heads  # multi-head attention: the field came with grouped queries
    if reader.strict and heads is not None and heads % kv_heads:
        raise reader.error(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    return kv_heads


def _head_dim(reader: _Reader, hidden: int | None, heads: int | None) -> int | None:
    head_dim = reader("head_dim", required=False)
    if head_dim is not None or hidden is None or heads is None:
        return head_dim
    if hidden % heads:
        if not reader.strict:
            return None
        raise reader.error(f"head_dim is missing and hidden_size {hidden} is not a multiple of {heads} heads")
    return hidden // heads


def _dtype_bytes(config: dict[str, Any], text: dict[str, Any], name: str) -> int:
    quantised = config.get("quantization_config")
    # vLLM's "auto" follows the checkpoint's own KV format for ModelOpt checkpoints only.
    if isinstance(quantised, dict) and str(quantised.get("quant_method", "")).startswith("modelopt"):
        scheme = quantised.get("kv_cache_scheme") or quantised.get("kv_cache_quant_algo")
        if str(scheme).lower() == "fp8" or (isinstance(scheme, dict) and scheme.get("num_bits") == 8):
            return 1
    found = [part[key] for part in (text, config) for key in ("dtype", "torch_dtype") if part.get(key) is not None]
    dtype = str(found[0]).removeprefix("torch.") if found else "auto"
    if dtype not in DTYPE_BYTES:
        known = ", ".join(DTYPE_BYTES)
        raise ConfigError(f"config.json of {name}: torch_dtype {dtype!r} is not known", next_step=f"use one of {known}")
    return DTYPE_BYTES[dtype]


def _grouping(heads: int | None, kv_heads: int | None) -> str:
    if heads == kv_heads:
        return "multi-head attention: a key and a value for every head"
    if kv_heads == 1:
        return "multi-query attention: one key and one value for all heads"
    return f"grouped-query attention: {heads} query heads share {kv_heads} keys and values"


@cache
def _table() -> dict[str, Any]:
    return tomllib.loads((HERE / "geometries.toml").read_text(encoding="utf-8"))


def _config(name: str) -> dict[str, Any]:
    entry = _table()["models"][name]
    return {**_table()["families"].get(entry.get("family"), {}), **entry["config"]}


def _published_one(name: str) -> Geometry:
    return from_config(_config(name), name, _table()["models"][name]["source"])


def _find(name: str) -> str:
    """The table's name for `name`: upper or lower case, with or without the organisation."""
    wanted = name.lower()
    for known, entry in _table()["models"].items():
        if wanted in (known.lower(), entry["source"].lower().removeprefix("https://huggingface.co/")):
            return known
    close = difflib.get_close_matches(wanted.rsplit("/", 1)[-1], [n.lower() for n in names()], n=1)
    guess = next((n for n in names() if close and n.lower() == close[0]), None)
    raise ConfigError(
        f"no model named {name!r}, and no such folder or file" + (f"; did you mean {guess}?" if guess else ""),
        cause="the name is not in the built-in table, and the path does not exist",
        next_step=f"give a folder with a config.json, or one of: {', '.join(names())}",
    )


def _read(file: Path) -> dict[str, Any]:
    try:
        with file.open("rb") as opened:
            data = opened.read(LARGEST_FILE + 1)
        if len(data) > LARGEST_FILE:
            raise ConfigError(
                f"{file} holds more than {LARGEST_FILE // 2**20} MiB, and a config.json has a few kB.",
                cause="it is another file of the model, such as its weights",
                next_step="give the model's config.json, or the folder in which it lies",
            )
        return json.loads(data)  # of bytes, json tells UTF-8, with its mark or without it, from UTF-16
    except RecursionError:
        raise ConfigError(
            f"{file} is nested too deeply to be a config.json.", next_step="give the model's own"
        ) from None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        raise ConfigError(
            f"cannot read {file.name} in {file.parent}: {error.strerror}",
            cause="the folder holds no Hugging Face model" if missing else None,
            next_step=f"give a folder with a config.json, or one of: {', '.join(names())}",
        ) from None
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}", next_step="download the file again") from None
