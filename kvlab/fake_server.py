"""A server that only pretends, for fast tests of the client: good answers at chosen times, or one kind of wrong ones.

Every response carries `x-kvlab-fake: 1`, so that no number measured against it is taken for a real one.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from kvlab.client import FAKE_HEADER, Endpoint

METRICS = {  # counter -> sample name in /metrics
    "finished": "vllm:request_success_total",
    "prompt": "vllm:prompt_tokens_total",
    "generated": "vllm:generation_tokens_total",
    "queries": "vllm:prefix_cache_queries_total",
    "hits": "vllm:prefix_cache_hits_total",
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "ttft_sum": "vllm:time_to_first_token_seconds_sum",
    "ttft_count": "vllm:time_to_first_token_seconds_count",
}


@dataclass
class Behaviour:
    """How the fake answers. Times in seconds; `fault` spoils every answer, or every `fault_every`-th one.

    Faults: http_500, http_429, error_event, truncated, malformed, no_done, no_finish, no_usage, abort, short (one token
    missing), wrong_prompt (usage counts one prompt token more), hang (never goes on after the first event), silent (a
    success without any content).
    """

    ttft_s: float = 0.005
    itl_s: float = 0.001
    together: int = 0  # after the first request, a probe, nobody gets a token before so many have run at once
    tokens_per_event: int = 1
    token_ids: bool = True
    running_usage: bool = False  # usage repeated in every event
    tail_delay_s: float = 0.0  # between the last content and the events that end the stream
    lead: str | None = None  # "role" or "empty": an event without content, sent at once
    reasoning: bool = False  # chat deltas with reasoning text in place of text
    cached_tokens: int | None = 0  # in the usage and in the hits counter; None: no details, as vLLM without its flag
    fault: str | None = None
    fault_every: int = 1
    refuses: tuple[str, ...] = ()  # fields that are answered with 400
    metrics_text: str | None = None  # in place of the live counters
    die_after: int | None = None  # requests, then connections are refused
    cache_blocks: int | None = None  # a prefix cache of so many blocks decides on cached_tokens
    block_size: int = 16


class LruBlocks:
    """A prefix cache of whole blocks; of a request the last block is lost first. Blocks in use are not held."""

    def __init__(self, blocks: int, block_size: int):
        self.blocks, self.block_size = blocks, block_size
        self._kept: dict[int, None] = {}  # block, named by everything up to its end; the oldest first

    def use(self, prompt: list[int], output_tokens: int) -> int:
        """Cached tokens of this prompt, which is then kept with its output."""
        names = self._names(prompt + [7] * (output_tokens - 1))
        limit = (len(prompt) - 1) // self.block_size
        found = next((i for i, name in enumerate(names[:limit]) if name not in self._kept), min(limit, len(names)))
        for name in names[::-1]:
            self._kept.pop(name, None)
            self._kept[name] = None
        while len(self._kept) > self.blocks:
            del self._kept[next(iter(self._kept))]
        return found * self.block_size

    def _names(self, tokens: list[int]) -> list[int]:
        names, name = [], 0
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            name = hash((name, *tokens[end - self.block_size : end]))
            names.append(name)
        return names

    def clear(self) -> None:
        """Forgets everything."""
        self._kept.clear()


@dataclass
class FakeServer:
    """`with FakeServer(Behaviour(...)) as fake:` serves from a thread; `fake.endpoint` is where."""

    behaviour: Behaviour = field(default_factory=Behaviour)
    port: int = 0
    host: str = "127.0.0.1"
    counts: Counter = field(default_factory=Counter)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    connections: set = field(default_factory=set)
    most_running: int = 0
    cache: LruBlocks | None = None

    def __post_init__(self):
        if self.behaviour.cache_blocks is not None:
            self.cache = LruBlocks(self.behaviour.cache_blocks, self.behaviour.block_size)

    def __enter__(self) -> FakeServer:
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), daemon=True)
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_) -> None:
        self._loop.call_soon_threadsafe(self._end_of_service.set)
        self._thread.join()

    @property
    def endpoint(self) -> Endpoint:
        """Where it listens."""
        return Endpoint(f"http://{self.host}:{self.port}", "fake")

    async def _main(self) -> None:
        self._loop, self._end_of_service = asyncio.get_running_loop(), asyncio.Event()
        await self.start()
        self._ready.set()
        await self._end_of_service.wait()
        await self._runner.cleanup()

    async def start(self) -> None:
        """Listens, in the running loop."""
        self._all_here = asyncio.Event()
        app = web.Application(client_max_size=2**30)
        app.on_response_prepare.append(_stamp)
        app.router.add_get("/health", _plain)
        app.router.add_get("/version", _version)
        app.router.add_get("/v1/models", _models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/reset_prefix_cache", self._reset)
        app.router.add_post("/tokenize", _tokenize)
        app.router.add_post("/detokenize", _detokenize)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self.host, self.port)
        await self._site.start()
        self.port = self._runner.addresses[0][1]

    async def _metrics(self, _) -> web.Response:
        if self.behaviour.metrics_text is not None:
            return web.Response(text=self.behaviour.metrics_text)
        lines = [f'{name}{{engine="0",model_name="fake"}} {self.counts[key]}' for key, name in METRICS.items()]
        if self.cache is not None:
            lines.append(
                f'vllm:cache_config_info{{engine="0",num_gpu_blocks="{self.cache.blocks + 1}",'
                f'block_size="{self.cache.block_size}",enable_prefix_caching="True"}} 1.0'
            )
        return web.Response(text="\n".join(lines) + "\n")

    async def _reset(self, _) -> web.Response:
        if self.cache is not None:
            self.cache.clear()
        return web.json_response({"success": True})

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        if isinstance(asked["prompt"], str):
            asked["prompt"] = _token_ids(asked["prompt"])
        self.bodies.append(asked)
        self.connections.add(request.transport.get_extra_info("peername"))
        refused = [name for name in self.behaviour.refuses if name in asked]
        if refused:
            return _error(400, f"Unrecognized request argument supplied: {refused[0]}")
        if self.behaviour.die_after is not None and len(self.bodies) > self.behaviour.die_after:
            await self._site.stop()
            request.transport.abort()
            return web.Response(status=500)
        fault = self.behaviour.fault if len(self.bodies) % self.behaviour.fault_every == 0 else None
        if fault in ("http_500", "http_429"):
            return _error(int(fault[5:]), "as told")
        self.counts["running"] += 1
        self.most_running = max(self.most_running, self.counts["running"])
        if len(self.bodies) == 1 or self.most_running >= self.behaviour.together:
            self._all_here.set()
        elif len(self.bodies) == 2:
            self._all_here.clear()
        try:
            return await self._answer(request, asked, fault)
        finally:
            self.counts["running"] -= 1

    async def _answer(self, request: web.Request, asked: dict, fault: str | None) -> web.StreamResponse:
        began = time.perf_counter()
        cached = self.behaviour.cached_tokens
        if self.cache is not None and cached is not None:
            cached = self.cache.use(asked["prompt"], asked["max_tokens"])
        if not asked.get("stream"):
            return self._whole(asked, cached)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.behaviour.lead:
            await response.write(_event(_lead(self.behaviour.lead)))
        await self._all_here.wait()
        await asyncio.sleep(self.behaviour.ttft_s)
        self.counts["ttft_sum"] += time.perf_counter() - began
        self.counts["ttft_count"] += 1
        wanted = asked["max_tokens"] - (fault == "short")
        made = 0
        while made < wanted and fault != "silent":
            n = min(self.behaviour.tokens_per_event, wanted - made)
            made += n
            await response.write(_event(self._chunk(asked, n, made, None)))
            if fault in ("error_event", "truncated", "malformed", "hang"):
                return await _spoil(fault, request, response)
            if made < wanted:
                await asyncio.sleep(self.behaviour.itl_s)
        return await self._end(response, asked, made, fault, cached)

    def _chunk(self, asked: dict, n: int, made: int, finish: str | None) -> dict[str, Any]:
        choice: dict[str, Any] = {"index": 0, "text": "x" * n, "logprobs": None, "finish_reason": finish}
        if self.behaviour.reasoning:
            choice = {"index": 0, "delta": {"reasoning_content": "x" * n}, "finish_reason": finish}
        if self.behaviour.token_ids and asked.get("return_token_ids"):
            choice["token_ids"] = [7] * n
        chunk = {"id": "cmpl-0", "object": "text_completion", "created": 1, "model": "fake", "choices": [choice]}
        if self.behaviour.running_usage:
            chunk["usage"] = {"prompt_tokens": len(asked["prompt"]), "completion_tokens": made}
        return chunk

    def _whole(self, asked: dict, cached: int | None) -> web.Response:
        prompt, made = len(asked["prompt"]), asked["max_tokens"]
        self.counts.update(finished=1, prompt=prompt, generated=made, queries=prompt, hits=cached or 0)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": made}
        usage["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
        return web.json_response({"choices": [{"text": "x" * made, "finish_reason": "length"}], "usage": usage})

    async def _end(self, response: web.StreamResponse, asked: dict, made: int, fault: str | None, cached: int | None):
        prompt = len(asked["prompt"])
        usage = {"prompt_tokens": prompt + (fault == "wrong_prompt"), "completion_tokens": made}
        usage["prompt_tokens_details"] = None if cached is None else {"cached_tokens": cached}
        last = self._chunk(asked, 0, made, {"abort": "abort", "no_finish": None}.get(fault, "length"))
        tail = _event(last)
        if fault != "no_usage":
            tail += _event({"choices": [], "usage": usage})
        if fault != "no_done":
            tail += b"data: [DONE]\n\n"
        await asyncio.sleep(self.behaviour.tail_delay_s)
        self.counts.update(finished=1, prompt=prompt, generated=made, queries=prompt, hits=cached or 0)
        await response.write(tail)
        await response.write_eof()
        return response


async def _spoil(fault: str, request: web.Request, response: web.StreamResponse) -> web.StreamResponse:
    if fault == "error_event":
        await response.write(_event({"error": {"message": "the engine died", "code": 500}}) + b"data: [DONE]\n\n")
    elif fault == "malformed":
        await response.write(b'data: {"choices": [\n\n')
    elif fault == "truncated":
        request.transport.abort()
    else:
        while request.transport is not None and not request.transport.is_closing():
            await asyncio.sleep(0.02)
    return response


def _lead(kind: str) -> dict[str, Any]:
    choice = {"delta": {"role": "assistant", "content": ""}} if kind == "role" else {"text": ""}
    return {"choices": [{"index": 0, "finish_reason": None} | choice]}


def _event(values: dict) -> bytes:
    return b"data: " + json.dumps(values, separators=(",", ":")).encode() + b"\n\n"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "code": status}}, status=status)


def _token_ids(text: str) -> list[int]:
    """Words t0, t1, ... are tokens."""
    return [int(word[1:]) for word in text.split()]


async def _tokenize(request: web.Request) -> web.Response:
    text = (await request.json())["prompt"]
    return web.json_response({"tokens": _token_ids(text), "token_strs": text.split()})


async def _detokenize(request: web.Request) -> web.Response:
    tokens = (await request.json())["tokens"]
    return web.json_response({"prompt": " ".join(f"t{i}" for i in tokens)})


async def _version(_) -> web.Response:
    return web.json_response({"version": "fake"})


async def _models(_) -> web.Response:
    return web.json_response({"object": "list", "data": [{"id": "fake"}]})


async def _plain(_) -> web.Response:
    return web.Response()


async def _stamp(_, response: web.StreamResponse) -> None:
    response.headers[FAKE_HEADER] = "1"


async def _forever(port: int) -> None:
    fake = FakeServer(port=port)
    await fake.start()
    print(fake.endpoint.base_url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    import sys

    asyncio.run(_forever(int(sys.argv[1]) if len(sys.argv) > 1 else 0))
