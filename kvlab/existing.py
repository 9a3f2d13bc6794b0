"""A server that somebody else runs, measured over its address alone."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kvlab import control, k8s, model_files, provenance
from kvlab.config import Cell, ServerConfig
from kvlab.errors import ConfigError, ServerDied, ServerError
from kvlab.startup_log import StartupReport

if TYPE_CHECKING:
    from kvlab.client import Endpoint
    from kvlab.profile import Profile

EXISTING = "existing server"  # in place of the model's name, where somebody else started the server
KEY_VARIABLE = "KVLAB_API_KEY"
SMALLER_VOCABS = (8000, 4000, 1000, 250)


class AttachedServer:
    """The read side of VllmServer. What the server does not tell is null; it is never stopped from here."""

    pid = log_path = started_utc = ready_s = None

    def __init__(self, endpoint: Endpoint):
        self.endpoint, self.base_url = endpoint, endpoint.base_url
        self.port: int | None = endpoint.url("/").port
        self.argv: list[str] = []
        self.startup = StartupReport()
        self.version = control.version(endpoint)
        self.capacity = control.read_capacity(endpoint, self.startup)

    def __enter__(self) -> AttachedServer:
        return self

    def __exit__(self, *_) -> None:
        pass

    def check_alive(self) -> None:
        """ServerDied if it no longer answers."""
        try:
            control.served_models(self.endpoint)
        except OSError as error:
            raise ServerDied(
                f"{self.base_url} no longer answers: {error}", next_step="look at that server's log"
            ) from None

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache, and verify by a probe that it is empty; ServerError if it is not."""
        control.reset_prefix_cache(self.endpoint, self.capacity)

    def describe(self) -> dict[str, Any]:
        """What a stored run says about its server."""
        return {"version": self.version, "base_url": self.base_url, "capacity": asdict(self.capacity)}


def open_outside(base_url: str) -> Callable[[Cell], Any] | None:
    """Attaches once, so that what cannot be measured is an error now; for a cluster what gives a cell its workers."""
    if not k8s.is_target(base_url):
        attach(base_url)
        return None
    from kvlab.k8s_cluster import Cluster

    return Cluster(k8s.parse_target(base_url)).use


def unreachable(cell: Cell, profile: Profile, section: str, base_url: str, outside: Any = None) -> str | None:
    """Why a cell cannot be measured on what somebody else runs; None where it can. `outside`: of `open_outside`.

    An existing server stands for the profile's; the pods of a cluster for the profile's as the section wants it.
    """
    cluster = k8s.is_target(base_url)
    if cell.fresh or cell.server != (profile.section_server(section) if cluster else profile.server):
        return "an existing server cannot be restarted with other flags"
    if cluster:
        return k8s.cannot_serve(cell, None if outside is None else outside.__self__.count)
    return "an existing server is one; several workers stand behind a Service: --kubernetes" if cell.service else None


def as_served(cell: Cell, base_url: str) -> Cell:
    """The cell as it is stored: the flags of an existing server are unknown, and its address stays private."""
    if not base_url:
        return cell
    update = {"server": ServerConfig(model=f"{EXISTING} {provenance.external_name(base_url)}")}
    if k8s.is_target(base_url) and cell.service:
        update |= {"service": k8s.SCHEME, "service_args": ()}
    return cell.model_copy(update=update)


def check_address(base_url: str) -> None:
    """ConfigError where a given address is none; an empty one is fine."""
    if k8s.is_target(base_url):
        k8s.parse_target(base_url)
        return
    try:
        parts = urlsplit(base_url)
        good = not base_url or (parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0)
        (parts.hostname or "").encode("idna")
    except ValueError:  # of the encoding too
        good = False
    if not good or parts.query or parts.fragment:
        raise ConfigError(f"{base_url!r} is not an address.", next_step="write it like http://127.0.0.1:8000")
    _check_key(os.environ.get(KEY_VARIABLE, ""))


def _check_key(key: str) -> None:
    """ConfigError for a key that no HTTP header can carry; the key itself is not told."""
    if not (key.isascii() and key.isprintable()) or key != key.strip():
        raise ConfigError(
            f"{KEY_VARIABLE} holds characters that an HTTP header cannot carry.",
            cause="a line break, a space at an end, or a letter outside ASCII was copied with it",
            next_step=f"export {KEY_VARIABLE}=... again, with the key alone",
        )


def attach(base_url: str, model: str | None = None, api_key: str | None = None) -> AttachedServer:
    """The server at `base_url`, with or without /v1; `api_key` defaults to $KVLAB_API_KEY.

    `model` may be left out where the server serves one only. ServerError if it cannot be reached or refuses the key.
    """
    from kvlab.client import Endpoint

    if "://" not in base_url:
        base_url = f"http://{base_url}"
    base_url = base_url.rstrip("/").removesuffix("/v1")
    key = api_key if api_key is not None else os.environ.get(KEY_VARIABLE) or None
    entry = _choose(Endpoint(base_url, model or "", key), model)
    endpoint = Endpoint(base_url, entry["id"], key, vocab=_vocab_of(entry) or control.GUESSED_VOCAB)
    if _vocab_of(entry) is None:
        endpoint = Endpoint(base_url, entry["id"], key, vocab=_probed_vocab(endpoint))
    return AttachedServer(endpoint)


def _choose(endpoint: Endpoint, model: str | None) -> dict[str, Any]:
    try:
        entries = [entry for entry in control.served_models(endpoint) if entry.get("id")]
    except OSError as error:
        raise ServerError(
            f"No server answers at {endpoint.base_url}: {error}",
            "it is not running, still starting, or the address or port is wrong",
            f"curl {endpoint.base_url}/v1/models",
        ) from None
    names = [entry["id"] for entry in entries]
    if model is None and len(names) == 1:
        return entries[0]
    if model in names:
        return entries[names.index(model)]
    what = f"does not serve {model!r}" if model else f"serves {len(names)} models, and none was chosen"
    raise ServerError(
        f"{endpoint.base_url} {what}", next_step=f"choose the model among: {', '.join(names) or '(it lists none)'}"
    )


def _vocab_of(entry: dict[str, Any]) -> tuple[int, int] | None:
    """From the model's own folder, where vLLM names one that can be read here."""
    root = entry.get("root")
    return model_files.safe_token_ids(root) if isinstance(root, str) and Path(root).is_absolute() else None


def _probed_vocab(endpoint: Endpoint) -> tuple[int, int]:
    """The widest of a few ranges whose last token id the server takes; where it takes none, the usual guess."""
    for high in (control.GUESSED_VOCAB[1], *SMALLER_VOCABS):
        try:
            answer = control.complete(endpoint, [high - 1])
        except OSError as error:
            raise ServerError(f"{endpoint.base_url} lists its model but answers no completion: {error}") from None
        control.refuse_locked(endpoint, answer[0])
        if control.answers(*answer):
            return min(control.GUESSED_VOCAB[0], high // 4), high
    return control.GUESSED_VOCAB
