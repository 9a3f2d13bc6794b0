"""The embedded model: a trained Qwen3 of 7.2 M parameters that vLLM and transformers load as any other folder."""

from __future__ import annotations

import hashlib
import lzma
from functools import cache
from pathlib import Path

from kvlab.errors import ConfigError, KvlabError

HERE = Path(__file__).parent
RESTORE = "git checkout kvlab/tiny brings it back; without git: install kvlab anew"


def path() -> Path:
    """The model folder: config.json, model.safetensors, tokenizer.json and what belongs to them."""
    return HERE


def heldout_text() -> str:
    """The held-out text (1.65 MB): whole documents that training never saw, joined by the end-of-text token."""
    file = HERE / "heldout.txt.xz"
    try:
        return lzma.decompress(file.read_bytes()).decode("utf-8")
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        raise ConfigError(f"The held-out text {file} cannot be read: {error}", "it was cut off", RESTORE) from None


def heldout_tokens(limit: int | None = None) -> list[int]:
    """Token ids of the held-out text, the first `limit` of them; documents in hash order, so a prefix is a mixture.

    Raises KvlabError where the `tokenizers` package, which comes with vLLM, is missing.
    """
    ids = _tokenizer().encode(heldout_text()).ids
    return ids if limit is None else ids[:limit]


def encode(text: str) -> list[int]:
    """Token ids of `text`, no special tokens added. Any Unicode text is encodable and `decode` gives it back."""
    return _tokenizer().encode(text).ids


def decode(ids: list[int]) -> str:
    """The text of token ids, special tokens included."""
    return _tokenizer().decode(ids, skip_special_tokens=False)


def facts(folder: Path = HERE) -> dict[str, str]:
    """What MODEL_CARD.md states in its first lines, as text: heldout_perplexity, weights_sha256, ..."""
    card = folder / "MODEL_CARD.md"
    try:
        front = card.read_text("utf-8").split("---\n", 2)[1]
        return dict(line.split(": ", 1) for line in front.splitlines())
    except (OSError, ValueError, IndexError) as error:
        what = f"The card of the embedded model cannot be read: {card}: {error}"
        raise ConfigError(what, "the file was changed or is missing", RESTORE) from None


def check_weights(folder: Path = HERE) -> None:
    """Raises ConfigError where the weights are not those of the card: what is measured would be another model."""
    file, stated = folder / "model.safetensors", facts(folder)
    try:
        data = file.read_bytes()
    except OSError as error:
        raise ConfigError(f"The embedded model has no weights: {error}", "they were removed", RESTORE) from None
    if hashlib.sha256(data).hexdigest() != stated.get("weights_sha256"):
        raise ConfigError(
            f"The embedded model's weights are not those that its card states: {file} has {len(data):,} bytes, and"
            f" {int(stated.get('weights_bytes', '0')):,} are due",
            "the file was cut off, stands for one that was not fetched, or was trained anew beside an old card",
            RESTORE,
        )


@cache
def _tokenizer():
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise KvlabError(
            "The held-out text cannot be turned into tokens: the Python package tokenizers is missing",
            "this environment has no vLLM, which brings it along",
            "pip install tokenizers, or install vLLM with make install",
        ) from None
    return Tokenizer.from_file(str(HERE / "tokenizer.json"))
