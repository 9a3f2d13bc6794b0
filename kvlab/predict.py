"""Formulas for capacity, blocks, cached prefixes and prefill: pure functions, no I/O.

Units: bytes, tokens, seconds; tokens per second for speeds; the block size is always the last argument.
The step-time model is in `steptime`, hit ratios in `hits`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import scipy  # its parts load where they are used: a second of every start

from kvlab.errors import ConfigError, FormulaDoesNotApply

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvlab.geometry import Geometry

# Bytes of one KV element by vLLM's --kv-cache-dtype; "auto" is the geometry's own dtype_bytes.
KV_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
KV_NAMES = {"half": "float16", "float": "float32"}  # vLLM's other names for --dtype


class Interval(NamedTuple):
    """A prediction that is honest about its width: `low` to `high`, in the unit of the quantity."""

    low: float
    high: float


def kv_dtype_bytes(geometry: Geometry, kv_cache_dtype: str | None = None, model_dtype: str | None = None) -> int:
    """Bytes of one KV element for vLLM's --kv-cache-dtype; ConfigError if unknown.

    null and "auto" take the model's type: --dtype (`model_dtype`) where it is given, else the checkpoint's own.
    """
    if kv_cache_dtype in (None, "auto"):
        kv_cache_dtype = KV_NAMES.get(model_dtype or "auto", model_dtype or "auto")
    if kv_cache_dtype == "auto":
        return geometry.dtype_bytes
    if kv_cache_dtype not in KV_DTYPE_BYTES:
        raise ConfigError(
            f"no KV size is known for kv_cache_dtype {kv_cache_dtype!r}",
            cause="formats with scales for each head or block have no whole number of bytes per element",
            next_step=f"use one of auto, {', '.join(KV_DTYPE_BYTES)}",
        )
    return KV_DTYPE_BYTES[kv_cache_dtype]


def require_formula(geometry: Geometry) -> None:
    """FormulaDoesNotApply, in words, where 2 x layers x KV heads x head_dim x bytes would be a wrong number."""
    if not geometry.applies:
        mla = geometry.mla_bytes_per_token
        hint = f"; its latent cache takes {mla:,} bytes a token" if mla else ""
        raise FormulaDoesNotApply(
            f"the KV formula does not apply to {geometry.name}",
            cause=f"{geometry.why_not}{hint}",
            next_step="read the capacity from a running server (its log or /metrics) instead",
        )


def kv_bytes_per_token(geometry: Geometry, dtype_bytes: float | None = None, tp: int = 1) -> float:
    """KV bytes of one token on each tensor-parallel rank: 2 x L x Hkv x D x bytes / tp.

    2: a key and a value; L layers, Hkv KV heads, D head dimension. FormulaDoesNotApply for models without that
    structure, and for tp above Hkv, where heads are replicated (`kv_bytes_per_rank` gives that number).
    Source: Qwen3-1.7B, 2 x 28 x 8 x 128 x 2 = 114,688 bytes.
    """
    if geometry.applies and tp > geometry.kv_heads:
        replicated = kv_bytes_per_rank(geometry, dtype_bytes, tp)
        raise FormulaDoesNotApply(
            f"{geometry.name} has {geometry.kv_heads} KV heads for {tp} tensor-parallel ranks",
            cause=f"each head is replicated: a rank keeps one, {replicated:,} bytes a token, not 1/{tp} of the whole",
            next_step=f"use kv_bytes_per_rank, or tensor parallel up to {geometry.kv_heads}",
        )
    return kv_bytes_per_rank(geometry, dtype_bytes, tp)


def kv_bytes_per_rank(geometry: Geometry, dtype_bytes: float | None = None, tp: int = 1) -> float:
    """KV bytes of one token on each rank, replicated heads included: a rank keeps max(1, Hkv / tp) heads.

    vLLM needs the query heads to divide by tp, and of Hkv and tp one to divide by the other; ConfigError if not.
    """
    require_formula(geometry)
    kv_heads = geometry.kv_heads
    if tp < 1 or geometry.query_heads % tp or (kv_heads % tp and tp % kv_heads):
        raise ConfigError(
            f"tensor parallel {tp} does not divide {geometry.query_heads} query and {kv_heads} KV heads",
            next_step="use a tensor-parallel size that divides both, such as a power of two up to the KV heads",
        )
    size = geometry.dtype_bytes if dtype_bytes is None else dtype_bytes
    total = 2 * geometry.layers * max(1, kv_heads // tp) * geometry.head_dim * size
    return int(total) if total == int(total) else total


def weight_bytes(geometry: Geometry, bytes_per_parameter: float = 2) -> int | None:
    """Bytes of the weights; null where the geometry gives no parameter count. Activations and graphs come on top."""
    return None if geometry.params is None else math.ceil(geometry.params * bytes_per_parameter)


def num_blocks(kv_cache_bytes: int, bytes_per_token: float, block_size: int) -> int:
    """Blocks in a pool: floor(kv_cache_bytes / (block_size x bytes_per_token)), vLLM's null block included.

    1 GiB at 114,688 B and 16 tokens: 585.
    """
    return int(kv_cache_bytes // (block_size * bytes_per_token))


def usable_blocks(blocks: int) -> int:
    """Blocks that requests can use: vLLM keeps one, the null block. 585 -> 584."""
    return max(0, blocks - 1)


def capacity_tokens(blocks: int, block_size: int) -> int:
    """Tokens that requests can really hold: usable blocks x block size. Below what the log prints by one block."""
    return usable_blocks(blocks) * block_size


def log_max_concurrency(blocks: int, max_model_len: int, block_size: int) -> float:
    """The "Maximum concurrency" of vLLM's start-up log: blocks / ceil(max_model_len / block_size), null block counted.

    Source: vllm/v1/core/kv_cache_utils.py, get_max_concurrency_for_kv_cache_config.
    """
    return blocks / math.ceil(max_model_len / block_size)


def log_capacity_tokens(blocks: int, max_model_len: int, block_size: int) -> int:
    """The "KV cache size: N tokens" of vLLM's start-up log, float arithmetic and cut-off included.

    int(blocks / ceil(max_model_len / block_size) x max_model_len): blocks x block_size only where max_model_len is a
    multiple of the block size. Source: get_kv_cache_capacity in the same file.
    """
    return int(log_max_concurrency(blocks, max_model_len, block_size) * max_model_len)


def longest_model_len(blocks: int, block_size: int) -> int:
    """The largest max_model_len with which vLLM 0.31 starts: one request must fit into the usable blocks."""
    return capacity_tokens(blocks, block_size)


def kv_tokens_per_request(input_tokens: int, output_tokens: int) -> int:
    """Tokens whose KV is written at the end of a request: input + output - 1, as the last token is never an input."""
    return input_tokens + max(0, output_tokens - 1)


def blocks_per_request(input_tokens: int, output_tokens: int, block_size: int) -> int:
    """Blocks that a request holds at its end: ceil((input + output - 1) / block_size). 2,300 + 64 at 16: 148."""
    return math.ceil(kv_tokens_per_request(input_tokens, output_tokens) / block_size)


def mean_blocks_per_request(input_tokens: int, output_tokens: int, block_size: int) -> float:
    """Blocks that a decoding request holds, averaged over its output tokens: between input and input + output."""
    if output_tokens < 1:
        return float(math.ceil(input_tokens / block_size))
    held = (math.ceil((input_tokens + done) / block_size) for done in range(output_tokens))
    return sum(held) / output_tokens


def requests_that_fit(blocks: int, input_tokens: int, output_tokens: int, block_size: int) -> Interval:
    """How many requests of one size run at once, as an interval.

    low: every request holds the blocks of its end, so that none is ever preempted: C / blocks(in + out).
    high: the requests are spread evenly over their lives, half of the output is written: C / mean blocks.
    C usable blocks. The two ends are C / (in + out) and C / (in + out / 2) with whole blocks.
    """
    usable = usable_blocks(blocks)
    return Interval(
        usable / blocks_per_request(input_tokens, output_tokens, block_size),
        usable / mean_blocks_per_request(input_tokens, output_tokens, block_size),
    )


def prompts_that_fit(blocks: int, input_tokens: int, block_size: int) -> int:
    """Requests that may run before any of them grows: one is admitted with the blocks of its prompt alone."""
    return usable_blocks(blocks) // math.ceil(input_tokens / block_size)


def cached_tokens(shared_tokens: int, prompt_tokens: int, block_size: int) -> int:
    """Prompt tokens taken from the prefix cache when the first `shared_tokens` of the prompt are cached.

    Whole blocks only, and at least the last token is computed: floor(min(shared, prompt - 1) / block) x block.
    At block 32 a wholly cached prompt of 992 tokens hits 960. Source: get_computed_blocks in vLLM's KV cache manager.
    """
    return max(0, min(shared_tokens, prompt_tokens - 1)) // block_size * block_size


def ttft_saved_s(cached: int, prefill_tok_s: float) -> float:
    """Seconds of prefill that a hit saves: cached tokens / prefill speed."""
    return cached / prefill_tok_s


def chunk_stall_s(chunk_tokens: int, input_tokens: int, prefill_tok_s: float) -> float:
    """The longest pause of a decoding request while a long input is prefilled beside it: one chunk.

    min(chunk, input) / prefill speed; chunk is max_num_batched_tokens. The decode step itself comes on top.
    """
    return min(chunk_tokens, input_tokens) / prefill_tok_s


def preemption_cost_s(recomputed_tokens: int, prefill_tok_s: float) -> float:
    """Seconds of prefill that one preemption repeats: (input + output so far) / prefill speed, if nothing is cached."""
    return recomputed_tokens / prefill_tok_s


def queue_wait_s(clients: int, running: float, service_s: float) -> float:
    """Mean wait of a request in a closed loop of `clients`, of which `running` are served at once for `service_s` each.

    Little's law over the whole loop: clients = X (wait + service), X = running / service, so
    wait = max(0, clients - running) x service / running. Add the prefill to have the TTFT.
    """
    return max(0.0, clients - running) * service_s / running


def queue_wait_at_rate_s(clients: int, running: float, request_rate_per_s: float) -> float:
    """The same wait from a request rate X: max(0, clients - running) / X."""
    return max(0.0, clients - running) / request_rate_per_s


def eager_step_s(fast_step_s: float, overhead_s: float, *, asynchronous: bool) -> float:
    """A decode step without compilation and graphs, from the step with them and what starting the kernels costs.

    A GPU computes while the next kernels are started: the longer of the two counts, so that a large model hides the
    starting. A CPU does one after the other: they add up. The overhead grows with the layers, not with the requests.
    """
    return max(fast_step_s, overhead_s) if asynchronous else fast_step_s + overhead_s


def step_overhead_s(fast_step_s: float, eager_step_s: float, *, asynchronous: bool) -> float:
    """The overhead in `eager_step_s` of one model: on a GPU at most the eager step, on a CPU the difference."""
    return eager_step_s if asynchronous else max(0.0, eager_step_s - fast_step_s)


def doubled_beyond(clients: Iterable[int], limit: float) -> tuple[int, int] | None:
    """Two numbers of clients from the limit on, the second twice the first or as little more as there is; or null."""
    beyond = [c for c in clients if c >= limit]
    pairs = [(many / few, few, many) for few in beyond for many in beyond if many >= 2 * few]
    return min(pairs)[1:] if pairs else None


def gain_of_shorter_step(fast_step_s: float, eager_step_s: float, fast_tok_s: float, clients: int) -> float:
    """Throughput gained over eager by a shorter step: whatever else a token takes (clients / throughput) stays."""
    return (eager_step_s - fast_step_s) * fast_tok_s / clients


class PrefillModel(NamedTuple):
    """TTFT of a request sent alone: fixed + per_token n + per_pair n (m + n / 2), n new tokens after m cached ones.

    Every new token passes through the weights once (`per_token_s`) and attends to all tokens before it (`per_pair_s`):
    n m pairs with the cached ones and n^2 / 2 among the new ones.
    """

    fixed_s: float
    per_token_s: float
    per_pair_s: float

    def ttft_s(self, new_tokens: int, cached_tokens: int = 0) -> float:
        """Seconds to the first token."""
        pairs = new_tokens * (cached_tokens + new_tokens / 2)
        return self.fixed_s + self.per_token_s * new_tokens + self.per_pair_s * pairs

    def speed_tok_s(self, tokens: int) -> float:
        """Prefill speed of a prompt of that length, the fixed part left out."""
        return tokens / (self.ttft_s(tokens) - self.fixed_s)


def chunk_costs_s(model: PrefillModel, chunk_tokens: int, input_tokens: int, decoding: int = 1) -> list[float]:
    """Seconds of prefill in each step of a long input, with attention: pieces of the `chunk_tokens` of a step.

    Each request that decodes beside it takes one token of every step. The step itself (`fixed_s`) is not in it; later
    pieces attend to more tokens, so that of equal pieces the last one takes longest.
    """
    room = chunk_tokens - decoding
    if room < 1:
        raise ConfigError(f"{decoding} decoding requests leave no room for prefill in steps of {chunk_tokens} tokens")
    cuts = [*range(0, input_tokens, room), input_tokens]
    return [model.ttft_s(end - start, start) - model.fixed_s for start, end in zip(cuts, cuts[1:], strict=False)]


def prefill_model(points: list[tuple[int, float | None]], chunk_tokens: int | None = None) -> PrefillModel | None:
    """Fitted to (prompt tokens, TTFT in seconds) of requests sent alone, none of them cached; null below three lengths.

    Nonnegative least squares on relative residuals: a straight line through long prompts alone can give a negative
    fixed part, since attention grows with the square of the length. With `chunk_tokens` a prompt takes a step for each
    chunk, and the fixed part is that of one step: on a fast GPU it is most of a small chunk.
    """
    known = [(tokens, ttft_s) for tokens, ttft_s in points if ttft_s]
    if len({tokens for tokens, _ in known}) < 3:
        return None
    n, seconds = np.array(known, dtype=float).T
    steps = np.ones_like(n) if chunk_tokens is None else np.ceil(n / chunk_tokens)
    design = np.column_stack([steps, n, n * n / 2]) / seconds[:, None]
    scale = np.abs(design).max(axis=0)
    found, _ = scipy.optimize.nnls(design / scale, np.ones_like(n))
    model = PrefillModel(*(found / scale).tolist())
    return model if model.ttft_s(int(n.max())) > model.fixed_s else None


def largest_full_graph(max_num_seqs: int) -> int:
    """The largest batch of one-token steps for which vLLM captures a full CUDA graph: its sizes are 1, 2, 4, 8, 16 ...

    From 8 on every eighth, from 256 on every sixteenth, and none above max_num_seqs: a cap of 34 leaves its own full
    batches of 33 and 34 outside. Source: vLLM 0.26, vllm/config/compilation.py and the startup logs of this dataset.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]
    return max(size for size in sizes if size <= max(1, max_num_seqs))
