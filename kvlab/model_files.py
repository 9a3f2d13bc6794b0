"""The model folder that vLLM is started with: embedded, generated from a published geometry, local, or from the hub."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from kvlab import tiny
from kvlab.config import ServerConfig
from kvlab.engine import cache_dir, write_folder_once
from kvlab.errors import ConfigError
from kvlab.files import typed

TINY = tiny.path()
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
DUMMY = ("--load-format", "dummy")
HASHED_BYTES = 2**30


def resolve_model(config: ServerConfig) -> tuple[str, tuple[str, ...]]:
    """(folder or hub name to start vLLM with, further arguments it needs); ConfigError where it cannot work."""
    name = config.model
    if name.startswith("geometry:"):
        folder = _geometry_folder(name.removeprefix("geometry:"))
    else:
        folder = TINY if name == "tiny" else typed(name)
        if not folder.exists() and HUB_NAME.fullmatch(name):
            return name, ()
        _check_folder(folder, name)
        if name == "tiny" and config.load_format != "dummy":
            tiny.check_weights(folder)
    return str(folder.resolve()), _load_arguments(config, folder, name)


def is_local(model_path: str) -> bool:
    """Whether vLLM can load it without asking the hub."""
    return Path(model_path).is_dir()


def fingerprint(config: ServerConfig) -> str | None:
    """12 hex digits of the weights of a local model: equal ones give equal answers. Null for the hub and dummy weights.

    Beyond HASHED_BYTES names and sizes stand for the content.
    """
    folder, extra = resolve_model(config)
    if config.load_format == "dummy" or extra == DUMMY or not is_local(folder):
        return None
    files = sorted(file for pattern in WEIGHT_FILES for file in Path(folder).glob(pattern))
    digest, whole = hashlib.sha256(), sum(file.stat().st_size for file in files) <= HASHED_BYTES
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size}".encode())
        digest.update(file.read_bytes() if whole else b"")
    return digest.hexdigest()[:12]


def _check_folder(folder: Path, name: str) -> None:
    # vLLM would take a missing folder for a hub name and complain about the form of that.
    if not folder.is_dir():
        raise ConfigError(
            f"There is no model folder {name!r}",
            "a typing error, or a path relative to another folder than this one: " + str(Path.cwd()),
            'give an existing folder, a hub name such as "Qwen/Qwen3-0.6B", "tiny", or "geometry:NAME"',
        )
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{name!r} is not a model folder: it holds no config.json",
            next_step="give its parent or sub"
            "folder that does; a model downloaded from the hub has config.json beside its weights",
        )


def _load_arguments(config: ServerConfig, folder: Path, name: str) -> tuple[str, ...]:
    """--load-format dummy for a generated model without weights; nothing else may lack them unasked."""
    if config.load_format == "dummy" or any(any(folder.glob(pattern)) for pattern in WEIGHT_FILES):
        return ()
    if name.startswith("geometry:"):
        return DUMMY
    raise ConfigError(
        f"The model folder {name!r} holds no weights",
        "an incomplete download (*.safetensors is missing)",
        'set load_format = "dummy" to run with random weights: same speed, meaningless text',
    )


# Nothing here chats, but Dynamo's frontend refuses a model that brings no template.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def _geometry_folder(name: str) -> Path:
    """A model folder in the cache; its name holds a hash of the content, so that a changed geometry is a new folder."""
    from kvlab import geometry

    model_config = geometry.model_config(name)
    files = {
        "config.json": json.dumps(model_config, indent=1, sort_keys=True),
        "tokenizer.json": json.dumps(word_tokenizer(vocab_size(model_config))),
        "tokenizer_config.json": json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": None, "chat_template": CHAT_TEMPLATE}
        ),
    }
    digest = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    safe = re.sub(r"[^\w.-]+", "_", name)
    return write_folder_once(cache_dir() / "models" / f"{safe}-{digest}", files)


def vocab_size(model_config: dict[str, Any]) -> int:
    """Rows of the embedding, also where the text model's fields are nested; ConfigError if the field is missing."""
    for fields in (model_config, model_config.get("text_config") or {}):
        if isinstance(fields.get("vocab_size"), int):
            return fields["vocab_size"]
    raise ConfigError("config.json has no vocab_size", next_step="use a complete config.json from the model's page")


def word_tokenizer(size: int) -> dict[str, Any]:
    """A tokenizer.json of the words t0 ... t(size-1), joined by spaces: each token id is a visible piece of text."""
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        # Of the decoders this is the one that joins whole words by spaces; the prefix never occurs.
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
        "model": {"type": "WordLevel", "vocab": {f"t{i}": i for i in range(size)}, "unk_token": "t0"},
    }


def safe_token_ids(model_path: str) -> tuple[int, int] | None:
    """(lowest, highest + 1) of ordinary token ids of a local model folder: no specials, no padding rows; else None."""
    folder = Path(model_path)
    if not (folder / "config.json").is_file():
        return None
    rows = vocab_size(_read_json(folder / "config.json"))
    special: set[int] = set()
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
        special = {token["id"] for token in tokenizer.get("added_tokens", [])}
        rows = min(rows, len(tokenizer["model"].get("vocab", ())) or rows)
    low = 0
    # Specials sit at one end of the vocabulary; some put them first (<pad>, <s>, </s>), most put them last.
    while low in special:
        low += 1
    high = min([rows, *(i for i in special if i > low)])
    return low, high


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
        if not isinstance(found, dict):
            raise ValueError("it holds no object")
    except (OSError, ValueError) as error:
        what = f"{file} cannot be read: {error}"
        raise ConfigError(what, "the file was cut off or changed", "download the model again") from None
    return found
