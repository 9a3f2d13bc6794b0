"""Stored measurements get published: no home folder, host name or secret may go with them."""

from __future__ import annotations

import functools
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HIDDEN = "<hidden>"
SECRET_NAME = r"(?:[\w-]*api[_-]?key|[\w-]*secret|[\w-]*password|(?:[\w-]*[_-])?(?:hf|hub|auth|access|bearer)[_-]token)"
# As a field or environment variable, as `--name=value` or `--name value`, and as vLLM logs its arguments.
SECRETS = (
    re.compile(rf"((?:--|['\"]|\b){SECRET_NAME}['\"]?\s*[:=]\s*)(?:\[?['\"][^'\"]*['\"]\]?|[^\s,'\"\]}}]+)", re.I),
    re.compile(rf"(--{SECRET_NAME}\s+)\S+", re.I),
    re.compile(r"(\b)(?:hf_|sk-)[A-Za-z0-9]{16,}"),
)


def scrub(value: Any) -> Any:
    """`value` (text, or lists and mappings of it) without home, project and Python paths, host name and secrets."""
    if isinstance(value, str):
        for pattern in SECRETS:
            value = pattern.sub(rf"\1{HIDDEN}", value)
        for pattern, instead in _private():
            value = pattern.sub(instead, value)
        return value
    if isinstance(value, Mapping):
        return {name: _field(name, item) for name, item in value.items()}
    return _words(value) if isinstance(value, list) else value


def _field(name: Any, item: Any) -> Any:
    return HIDDEN if isinstance(item, str) and re.fullmatch(SECRET_NAME, str(name), re.I) else scrub(item)


def _words(words: list) -> list:
    # A command line: the word after --api-key is the key.
    named = [False, *(isinstance(w, str) and re.fullmatch(f"--{SECRET_NAME}", w, re.I) for w in words)]
    return [HIDDEN if after and isinstance(w, str) else scrub(w) for w, after in zip(words, named, strict=False)]


def _private() -> list[tuple[re.Pattern, str]]:
    return _patterns(
        os.path.expanduser("~"), sys.prefix, str(Path(__file__).resolve().parent.parent), socket.gethostname()
    )


@functools.lru_cache(maxsize=4)
def _patterns(home: str, prefix: str, project: str, host: str) -> list[tuple[re.Pattern, str]]:
    instead = {prefix: "<python>", home: "~"}
    if not project.startswith(prefix):  # installed among the packages, it has no folder of its own
        instead[project] = "<kvlab>"
    # The longest first, as one often lies inside the other. "/" or "/usr" belongs to nobody, and stands in many words.
    paths = sorted((p for p in instead if p.count("/") > 1 or p == "/root"), key=len, reverse=True)
    found = [(re.compile(rf"(?<![\w.~-]){re.escape(path)}(?![\w.-])"), instead[path]) for path in paths]
    # A host called "gpu" or "model" would take ordinary words with it.
    if re.search(r"[\d.-]", host) and len(host) > 5 and not host.startswith("localhost"):
        found.append((re.compile(rf"(?<![\w.-]){re.escape(host)}(?![\w-])"), "<host>"))
    return found
