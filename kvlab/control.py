"""The few plain calls to a server around a measurement: is it ready, what does it serve, how big is its KV cache."""

from __future__ import annotations

import json
import random
import re
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlab.errors import ScrapeError, ServerError
from kvlab.startup_log import StartupReport

if TYPE_CHECKING:
    from kvlab.client import Endpoint

LOCAL = ("127.0.0.1", "localhost", "::1")
GUESSED_VOCAB = (1000, 30000)  # ordinary tokens of almost every model
GUESSED_BLOCK = 128  # the largest default block; a multiple of the others
RESET_TRIES = 25  # blocks of a request that ended just now may still be held
CALL_S = 30.0  # a server that is busy or on a slow machine answers late


@dataclass(frozen=True)
class Capacity:
    """The KV cache as the server itself states it. Null where a source does not say.

    The null block that vLLM reserves is counted in `metric_blocks` and not taken off here.
    `metric_tokens` and `log_tokens` are whole requests of max_model_len, not blocks x block size.
    """

    metric_blocks: int | None = None
    metric_block_size: int | None = None
    metric_tokens: int | None = None
    log_tokens: int | None = None
    log_line: str | None = None
    cache_dtype: str | None = None
    prefix_caching: bool | None = None

    @property
    def tokens(self) -> int | None:
        """The metric's number, else the log's, else blocks x block size."""
        if self.metric_tokens is not None or self.log_tokens is not None:
            return self.metric_tokens if self.metric_tokens is not None else self.log_tokens
        if self.metric_blocks is None or self.metric_block_size is None:
            return None
        return self.metric_blocks * self.metric_block_size


def call(endpoint: Endpoint, path: str, body: Any = None, *, post: bool = False, timeout_s: float = CALL_S):
    """(status, text) of one request; a status of 400 and more is an answer too. OSError if there is none."""
    data = json.dumps(body).encode() if body is not None else b"" if post else None
    headers = {"Content-Type": "application/json", **endpoint.headers}
    request = urllib.request.Request(str(endpoint.url(path)), data=data, headers=headers)
    # A proxy from the environment cannot reach this machine's own addresses.
    handlers = [urllib.request.ProxyHandler({})] if request.host.rpartition(":")[0].strip("[]") in LOCAL else []
    try:
        with urllib.request.build_opener(*handlers).open(request, timeout=timeout_s) as answer:
            return answer.status, answer.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except (ConnectionError, TimeoutError):
        raise
    except (urllib.error.URLError, ValueError) as error:
        raise OSError(str(getattr(error, "reason", error))) from None
    except Exception as error:  # http.client's own errors: what answers there does not speak HTTP
        raise OSError(f"no HTTP answer: {error!r}") from None


def served_models(endpoint: Endpoint, timeout_s: float = CALL_S) -> list[dict[str, Any]]:
    """The entries of /v1/models; ServerError if the answer is none. OSError if nobody answers."""
    status, text = call(endpoint, "/v1/models", timeout_s=timeout_s)
    refuse_locked(endpoint, status)
    models = parse_object(text).get("data")
    if status != 200 or not isinstance(models, list):
        raise ServerError(
            f"{endpoint.base_url}/v1/models answers HTTP {status}: {gist(text)}",
            "it is no OpenAI-compatible server, or the address has a wrong path",
            "give the address without /v1, such as http://127.0.0.1:8000; curl shows what answers there",
        )
    return [model for model in models if isinstance(model, dict)]


def refuse_locked(endpoint: Endpoint, status: int) -> None:
    """ServerError where the answer says that the API key is missing or wrong."""
    if status in (401, 403):
        raise ServerError(
            f"{endpoint.base_url} refuses the request (HTTP {status})",
            "it wants an API key" if endpoint.api_key is None else "the API key is not accepted",
            "export KVLAB_API_KEY=... with the server's key",
        )


def gist(text: str) -> str:
    """What an answer says, in one short line: the message of an error, the title of a web page, or its beginning."""
    if not text.strip():
        return "nothing"
    if re.match(r"\s*<(?:!doctype|html|\?xml|head|body|h1)\b", text, re.I):
        title = re.search(r"<(?:title|h1)[^>]*>([^<]+)<", text, re.I)
        return f"a web page titled {' '.join(title[1].split())[:80]!r}" if title else "a web page"
    found = parse_object(text)
    error = found.get("error") or found.get("detail") or found.get("message")
    said = error.get("message") if isinstance(error, dict) else error
    plain = " ".join((said if isinstance(said, str) else text).split())
    return repr(plain if len(plain) <= 160 else f"{plain[:157]}...")


def parse_object(text: str) -> dict[str, Any]:
    """The JSON object of an answer; {} where it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def complete(endpoint: Endpoint, prompt: list[int], timeout_s: float = 60.0) -> tuple[int, dict[str, Any]]:
    """(status, answer) of a completion of one token."""
    body = {"model": endpoint.model, "prompt": prompt, "max_tokens": 1, "temperature": 0}
    status, text = call(endpoint, "/v1/completions", body, timeout_s=timeout_s)
    return status, parse_object(text)


def answers(status: int, answer: dict[str, Any]) -> bool:
    """Whether this is a completion, and not merely an HTTP 200."""
    return status == 200 and bool(answer.get("choices")) and "error" not in answer


def version(endpoint: Endpoint) -> str | None:
    """The release that /version states; None where there is no such path."""
    try:
        status, text = call(endpoint, "/version")
    except OSError:
        return None
    return parse_object(text).get("version") if status == 200 else None


def read_capacity(endpoint: Endpoint, startup: StartupReport | None = None) -> Capacity:
    """The capacity from /metrics and from the startup log, side by side."""
    from kvlab import scrape

    startup = startup or StartupReport()
    info: dict[str, Any] = {}
    try:
        status, text = call(endpoint, "/metrics")
        info = scrape.capacity_info(text) or {} if status == 200 else {}
    except (OSError, ScrapeError):
        pass  # servers other than vLLM have no such metric
    return Capacity(
        metric_blocks=info.get("num_gpu_blocks"),
        metric_block_size=info.get("block_size"),
        metric_tokens=info.get("kv_cache_size_tokens"),
        log_tokens=startup.capacity_tokens,
        log_line=startup.capacity_line,
        cache_dtype=info.get("cache_dtype"),
        prefix_caching=info.get("enable_prefix_caching"),
    )


def reset_prefix_cache(endpoint: Endpoint, capacity: Capacity) -> None:
    """Empty the prefix cache and prove it: a prompt that was cached before is not cached after.

    There is nothing to do where the server runs without a prefix cache.
    ServerError if it is refused, or answered well and not done (seen: HTTP 200 and a full cache).
    """
    if capacity.prefix_caching is False:
        return
    try:
        _reset_and_probe(endpoint, _probe_prompt(endpoint, capacity.metric_block_size or GUESSED_BLOCK))
    except OSError as error:
        raise ServerError(
            f"The server does not answer: {error}", "it ended, or hangs", "kvlab ps shows whether it still runs"
        ) from None


def _probe_prompt(endpoint: Endpoint, block_size: int) -> list[int]:
    # Three whole blocks and one token: the last token is always computed, its block never reused whole.
    length = 3 * block_size + 1
    longest = [model.get("max_model_len") for model in served_models(endpoint) if model.get("id") == endpoint.model]
    if longest and isinstance(longest[0], int):
        length = min(length, longest[0] - 1)
    dice = random.SystemRandom()
    return [dice.randrange(*endpoint.vocab) for _ in range(length)]


def _reset_and_probe(endpoint: Endpoint, prompt: list[int]) -> None:
    _cached_tokens(endpoint, prompt)
    if not _cached_tokens(endpoint, prompt):
        raise ServerError(
            "A prompt sent twice is not found in the prefix cache, so a reset cannot be verified",
            "prefix caching is off, or the cache is smaller than a few blocks",
            "set enable_prefix_caching = true, or measure without a reset",
        )
    _post_reset(endpoint)
    if still := _cached_tokens(endpoint, prompt):
        raise ServerError(
            f"The server says that its prefix cache was reset, but {still} tokens are still cached",
            "the reset does nothing in this release or with this KV connector",
            "restart the server instead (a cell with fresh = true does)",
        )


def _cached_tokens(endpoint: Endpoint, prompt: list[int]) -> int:
    status, answer = complete(endpoint, prompt)
    if not answers(status, answer):
        raise ServerError(f"The probe of the prefix cache failed with HTTP {status}: {gist(json.dumps(answer))}")
    cached = ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is None:
        raise ServerError(
            "The server does not report cached tokens, so a reset of its prefix cache cannot be verified",
            "it runs without --enable-prompt-tokens-details",
            "start it with that flag, or restart it in place of a reset",
        )
    return cached


def _post_reset(endpoint: Endpoint) -> None:
    for _ in range(RESET_TRIES):
        status, text = call(endpoint, "/reset_prefix_cache", post=True, timeout_s=60)
        if status == 404:
            raise ServerError(
                "The server has no /reset_prefix_cache (HTTP 404)",
                "it runs without the developer mode",
                "start it with VLLM_SERVER_DEV_MODE=1 in its environment, or restart it in place of a reset",
            )
        # Older releases answer with an empty body; the probe decides then.
        if status == 200 and parse_object(text).get("success", True) is True:
            return
        time.sleep(0.2)
    raise ServerError(
        f"The server did not reset its prefix cache: HTTP {status}, {gist(text)}",
        "requests are still running, and hold blocks",
        "wait until no request is running, or restart the server",
    )
