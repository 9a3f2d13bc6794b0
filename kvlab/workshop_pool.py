"""The workshop's questions on the KV pool: bytes per token, capacity, requests that fit. See `workshop`."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd

from kvlab import claims, geometry, predict, store
from kvlab.claims import parse_conditions
from kvlab.workshop import Choice, Facts, Number, Undecided

GIB = 2**30
QWEN = "Qwen3-1.7B"


def _qwen(dtype_bytes: int = 2) -> float:
    return predict.kv_bytes_per_token(geometry.load(QWEN), dtype_bytes)


def directions(
    change: Callable[[Facts, str], float], quantity: str, *, rises: str, stays: str, falls: str
) -> tuple[tuple[str, Callable[[Facts], bool], str], ...]:
    """The statements of a Choice on a difference, told by the interval of its claim: `change(facts, column)`."""
    look = f"Look at the interval of {quantity}: does it"
    return (
        (rises, lambda f: change(f, "ci_low") > 0, f"{look} lie above 0?"),
        (stays, lambda f: change(f, "ci_low") <= 0 <= change(f, "ci_high"), f"{look} hold 0?"),
        (falls, lambda f: change(f, "ci_high") < 0, f"{look} lie below 0?"),
    )


# -- 1: bytes per token -------------------------------------------------------------------------------------------


def _own_bytes(f: Facts) -> float:
    """Bytes of one KV element on the machine's server."""
    return predict.kv_dtype_bytes(shape_of(f), f.profile().server.kv_cache_dtype, f.profile().server.dtype)


def shape_of(f: Facts) -> geometry.Geometry:
    return geometry.load(f.profile().geometry)


def per_token(f: Facts) -> float:
    return predict.kv_bytes_per_token(shape_of(f), _own_bytes(f))


def _grouped(shape: geometry.Geometry) -> float:
    return shape.query_heads / shape.kv_heads


QUERY_HEADS = "what you get with the query heads: the cache keeps keys and values, and only the KV heads have them"
ONE_OF_TWO = "one of the two: a token leaves a key *and* a value behind, hence the 2 in front"
ONE_LAYER = "one layer: every layer keeps its own keys and values"
FLOAT32 = "what float32 would take: this one keeps 16 bits, 2 bytes an element"

BYTES = {
    "1.predict": Number(
        f"How many bytes of KV does one token of {QWEN} leave behind, in bf16?",
        "bytes",
        lambda f: _qwen(),
        (
            (lambda f: _qwen() * _grouped(geometry.load(QWEN)), QUERY_HEADS),
            (lambda f: _qwen(4), FLOAT32),
            (lambda f: _qwen() / 2, ONE_OF_TWO),
            (lambda f: _qwen() / geometry.load(QWEN).layers, ONE_LAYER),
            (lambda f: _qwen() / 1024, "the number in KiB; the question asks for bytes"),
        ),
        because="2 × layers × KV heads × head dimension × bytes: nothing else of the model matters.",
    ),
    "1.explain": Choice(
        f"Qwen3-0.6B has about a third of the parameters of {QWEN}. Its KV bytes per token are",
        (
            (
                "about a third: a smaller model keeps less",
                lambda f: _ratio_to_small() < 0.45,
                "The parameters are not in the formula. Compare the four numbers that are.",
            ),
            ("the same", lambda f: _ratio_to_small() == 1, "Put both models into the formula and compare."),
            (
                "half: its hidden size is half as wide",
                lambda f: 0.45 <= _ratio_to_small() < 0.55,
                "The hidden size is not in the formula: heads × head dimension need not equal it.",
            ),
        ),
        because="A smaller model does not mean a smaller cache.",
    ),
    "1.most": Number(
        "And one token of the model of your machine's profile, in the type that its server keeps?",
        "bytes",
        per_token,
        (
            (
                lambda f: predict.kv_bytes_per_token(shape_of(f)),
                "what the checkpoint's own type gives; look at `dtype` of the profile's server",
            ),
            (lambda f: per_token(f) * _grouped(shape_of(f)), QUERY_HEADS),
            (lambda f: per_token(f) / 2, ONE_OF_TWO),
            (lambda f: per_token(f) / shape_of(f).layers, ONE_LAYER),
        ),
        because="The server's --dtype decides, not the checkpoint's.",
    ),
    "1.stretch": Number(
        f"{QWEN} runs on 16 GPUs with tensor parallel 16. How many bytes of KV does a token take on *each* of them?",
        "bytes",
        lambda f: predict.kv_bytes_per_rank(geometry.load(QWEN), tp=16),
        (
            (lambda f: _qwen() / 16, "the whole ÷ 16: there are only 8 KV heads to hand out, and none is cut in two"),
            (lambda f: _qwen(), "the whole model's: each rank keeps only the heads that it computes with"),
        ),
        because="Beyond the number of KV heads, more ranks hold more copies: all pools together stop growing.",
    ),
}


def _ratio_to_small() -> float:
    return predict.kv_bytes_per_token(geometry.load("Qwen3-0.6B")) / _qwen()


# -- 2: capacity and requests that fit ----------------------------------------------------------------------------


def _pool(f: Facts) -> int:
    return f.require(f.profile().server.kv_cache_memory_bytes, "pinned pool (kv_cache_memory_bytes)")


def block_of(f: Facts) -> int:
    return f.require(f.profile().server.block_size, "block_size in its profile")


def blocks_of(f: Facts) -> int:
    return predict.num_blocks(_pool(f), per_token(f), block_of(f))


def _odd(f: Facts) -> dict[str, float]:
    """The claims of a server whose longest request is no whole number of blocks."""
    for variant in f.profile().kv_capacity.servers:
        server = f.profile().server_with(variant.set)
        if server.max_model_len and server.block_size and server.max_model_len % server.block_size:
            names = ("num_blocks", "capacity_tokens", "log_tokens")
            found = {name: f.value("kv_capacity", name, server=variant.name) for name in names}
            return found | {"block": server.block_size, "max_len": server.max_model_len}
    raise Undecided(f"{f.machine} has no server whose maximum length is not a multiple of its block.")


def _log_formula(o: dict[str, float]) -> int:
    return predict.log_capacity_tokens(int(o["num_blocks"]), int(o["max_len"]), int(o["block"]))


def _burst(f: Facts) -> tuple[int, int]:
    grid = f.profile().kv_capacity
    return grid.input_tokens, grid.output_tokens


def _fit(f: Facts) -> predict.Interval:
    return predict.requests_that_fit(blocks_of(f), *_burst(f), block_of(f))


def _never_preempted_gib(extra_block: bool = True, input_only: bool = False) -> float:
    size = 2048 if input_only else 2048 + 128 - 1
    needed = 64 * math.ceil(size / 16) + extra_block
    return needed * 16 * _qwen() / GIB


def capacities(machine: str) -> pd.DataFrame:
    """The capacities of each server that a machine measured: num_blocks, capacity_tokens, usable_tokens, log_tokens.

    No claim states the usable ones: they are the counted blocks less the null block.
    """
    table = claims.read(store.machine_dir(machine))
    table = table[(table["section"] == "kv_capacity") & (table["state"] != "not measured")]
    rows: list[dict] = []
    for row in table[table["quantity"].isin(("num_blocks", "capacity_tokens", "log_tokens"))].to_dict("records"):
        rows.append(row)
        if row["quantity"] == "capacity_tokens":
            block = int(parse_conditions(row["conditions"])["block"])
            less = {column: row[column] - block for column in ("computed", "measured") if not pd.isna(row[column])}
            residual = {"residual": less["measured"] / less["computed"] - 1} if len(less) == 2 else {}
            because = {"quantity": "usable_tokens", "reason": "less the null block"}
            rows.append(row | less | residual | because)
    return claims.show(pd.DataFrame(rows, columns=table.columns))


CAPACITY = {
    "2.predict": Number(
        "How many tokens can requests hold in the pool of your machine's server, to the block?",
        "tokens",
        lambda f: predict.capacity_tokens(blocks_of(f), block_of(f)),
        (
            (lambda f: blocks_of(f) * block_of(f), "one block too many: vLLM keeps one for itself, the null block"),
            (lambda f: _pool(f) / per_token(f), "pool ÷ bytes per token: the pool is cut into whole blocks first"),
            (
                lambda f: _pool(f) // per_token(f) - 1,
                "pool ÷ bytes per token, less one *token*: it is cut into blocks first, and one *block* is kept",
            ),
            (lambda f: blocks_of(f), "the number of blocks; the question asks for tokens"),
            (lambda f: blocks_of(f) - 1, "the number of usable blocks; the question asks for tokens"),
        ),
        accept=1e-6,
        because="⌊pool ÷ (block × bytes per token)⌋, less the null block, × block: `usable_tokens`. All blocks "
        "together are `capacity_tokens`.",
    ),
    "2.explain": Choice(
        "The server whose maximum length is no multiple of its block logs fewer tokens than blocks × block size. Why?",
        (
            (
                "its log leaves out the null block",
                lambda f: _odd(f)["log_tokens"] == _odd(f)["capacity_tokens"] - _odd(f)["block"],
                "Take one block off blocks × block size and compare with the log: it is another number.",
            ),
            (
                "its log counts how many requests of maximum length fit, times that length; their last blocks are "
                "not full",
                lambda f: _log_formula(_odd(f)) == _odd(f)["log_tokens"] < _odd(f)["capacity_tokens"],
                "Compute blocks ÷ ⌈maximum length ÷ block⌉ × maximum length for that server.",
            ),
            (
                "it got a smaller pool",
                lambda f: _odd(f)["capacity_tokens"] < 0.9 * predict.capacity_tokens(blocks_of(f), block_of(f)),
                "All servers of the section have the same pinned pool; compare blocks × block size of both.",
            ),
        ),
        because="One pool, three true numbers: blocks × block size, what requests can hold, and what the log prints.",
    ),
    "2.most": Number(
        "The section sends more requests at once than fit. How many of them run together while others wait?",
        "requests",
        lambda f: f.value("kv_capacity", "running_while_waiting"),
        (
            (lambda f: f.profile().kv_capacity.burst, "all that were sent: some of them wait"),
            (
                lambda f: f.require(f.profile().server.max_num_seqs, "max_num_seqs"),
                "max_num_seqs: the pool is full first",
            ),
            (
                lambda f: predict.capacity_tokens(blocks_of(f), block_of(f)) // _burst(f)[0],
                "tokens ÷ input: a request also keeps what it has written",
            ),
        ),
        accept=lambda f: (math.floor(_fit(f).low), math.ceil(_fit(f).high)),
        because="It lies between ⌊usable blocks ÷ blocks at the end⌋ and usable blocks ÷ mean blocks.",
    ),
    "2.stretch": Number(
        f"How large must the pool of {QWEN} be (bf16, blocks of 16) so that 64 requests of 2,048 + 128 are "
        "never preempted?",
        "GiB",
        lambda f: _never_preempted_gib(),
        (
            (lambda f: _never_preempted_gib() * GIB / 1e9, "the number in GB (10^9 bytes); a GiB is 2^30 bytes"),
            (
                lambda f: _never_preempted_gib(input_only=True),
                "room for the inputs only: at its end a request holds its output too",
            ),
            (lambda f: _never_preempted_gib() / 2, ONE_OF_TWO),
        ),
        accept=0.002,
        because="64 × ⌈(in + out − 1) ÷ block⌉ blocks and the null block.",
    ),
}

PARTS: dict[str, Number | Choice] = BYTES | CAPACITY
