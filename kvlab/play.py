"""The formulas as pictures that follow their values: values -> figure, without widgets (`sliders` moves the values).

Lines and bands are computed from the values given; points are what machines measured and the article published, drawn
only where they belong to the axes. Units of the arguments: GiB, tokens, milliseconds, tokens per second.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvlab import beside, display, geometry, hits, plot, predict, steptime, store
from kvlab.claims import parse_conditions

GIB = 2**30
ARTICLE = "article"
CLIENTS = [2 ** (i / 4) for i in range(33)]  # 1 to 256
CHUNKS = [2 ** (i / 4) for i in range(24, 57)]  # 64 to 16,384
FILLS = ("none", "full", "left", "bottom", "right", "top")
PREFIXES = [*range(1, 13), 14, 16, 20, 24, 28, 32, 40, 48]


def machines() -> list[str]:
    """Machines with claims, the article first."""
    return sorted(store.machines(), key=lambda name: (name != ARTICLE, name))


def capacity(
    model: geometry.Geometry | str,
    pool_gib: float = 2.4,
    block_size: int = 16,
    input_tokens: int = 512,
    output_tokens: int = 128,
    kv_bytes: float | None = None,
    tensor_parallel: int = 1,
) -> Figure:
    """Tokens that requests can hold, and how many requests fit. `kv_bytes`: of a KV element, null the model's own.

    A model for which the formula does not apply gives a picture that says so.
    """
    shape = geometry.load(model) if isinstance(model, str) else model
    if not shape.applies:
        return _refusal(shape)
    per_token = predict.kv_bytes_per_rank(shape, kv_bytes, tensor_parallel)
    blocks = predict.num_blocks(int(pool_gib * GIB), per_token, block_size)
    tokens = predict.capacity_tokens(blocks, block_size)
    fit = predict.requests_that_fit(blocks, input_tokens, output_tokens, block_size)
    usable = display.usable_tokens(blocks, block_size).replace("; ", ";\n")  # a line is as wide as its panel
    titles = [
        f"{shape.name}: {display.digits(per_token)} bytes a token\nusable: {usable}",
        f"{input_tokens:,} + {output_tokens:,} tokens, requests that fit: {display.fit(*fit)}",
    ]
    figure, (left, right) = plot.panels(2, titles=titles, width=5.2)
    _capacity_axis(left, per_token, block_size, pool_gib, tokens)
    _fit_axis(right, blocks, block_size, input_tokens, output_tokens)
    plot.shared_legend(figure, left, right)
    return figure


def _capacity_axis(axis: Axes, per_token: float, block_size: int, pool_gib: float, tokens: int) -> None:
    pools = np.geomspace(min(pool_gib, 0.03) / 1.5, max(pool_gib, 8) * 1.5, 60)
    held = [predict.num_blocks(int(p * GIB), per_token, block_size) for p in pools]
    plot.computed_line(axis, pools, [predict.capacity_tokens(b, block_size) for b in held], "this model, computed")
    axis.plot([pool_gib], [tokens], "*", ms=15, color=plot.LIMIT, mec=plot.COMPUTED, zorder=6, label="your values")
    axis.annotate(f"{tokens:,} usable", (pool_gib, tokens), xytext=(10, -14), textcoords="offset points")
    for machine, pool, usable, kv_dtype in capacity_points():
        fp8 = kv_dtype.startswith("fp8")  # half the bytes a token or less: above the line of its own model
        _point(axis, machine, [pool], [usable], f"{machine}, fp8 KV" if fp8 else "", fill="left" if fp8 else "")
    axis.set_xlabel("KV pool, GiB")
    axis.set_ylabel("usable tokens")
    plot.plain_log_x(axis)
    plot.plain_log_y(axis)


def capacity_points() -> Iterator[tuple[str, float, float, str]]:
    """(machine, pool in GiB, usable tokens, KV type or ""): bytes per token x all tokens is the pool.

    The null block is not usable. The article gives only the tokens: its pool is what the formula says for them, so that
    its points lie on the line of its model by construction.
    """
    article = {"bf16": 2, "fp8": 1}
    for machine in machines():
        for row in beside.points(machine, "kv_capacity", "capacity_tokens", "block").to_dict("records"):
            where = parse_conditions(row["conditions"])
            per_token = beside.value(machine, "kv_capacity", "kv_bytes_per_token", **where)
            if machine == ARTICLE and where.get("kv_dtype") in article:
                per_token = predict.kv_bytes_per_token(geometry.load("Qwen3-1.7B"), article[where["kv_dtype"]])
            if per_token and not pd.isna(row["measured"]):
                yield machine, row["measured"] * per_token / GIB, row["measured"] - row["x"], where.get("kv_dtype", "")


def _fit_axis(axis: Axes, blocks: int, block_size: int, input_tokens: int, output_tokens: int) -> None:
    lengths = np.unique(np.geomspace(16, 8192, 50).astype(int))
    found = [predict.requests_that_fit(blocks, int(n), output_tokens, block_size) for n in lengths]
    low, high = zip(*found, strict=True)
    total = lengths + output_tokens
    axis.fill_between(
        total, low, high, color=plot.LIMIT, alpha=0.4, lw=0, label="fit: all at their end to half written"
    )
    plot.computed_line(axis, total, low, "fit, none ever preempted", ls="--")
    for machine in machines():
        pairs = [(request, fit) for request, fit in _fitting(machine) if fit]
        if pairs:
            _point(axis, machine, *zip(*pairs, strict=True))
    axis.axvline(input_tokens + output_tokens, color=plot.COMPUTED, ls=":", lw=1)
    axis.set_xlabel("tokens of a request, input + output")
    axis.set_ylabel("requests at once")
    plot.plain_log_x(axis)
    plot.plain_log_y(axis)


def _fitting(machine: str) -> Iterator[tuple[int, float]]:
    """(tokens of a request, requests that ran at once); what the article computed."""
    sections = (("kv_capacity", "running_while_waiting", "measured"), *_ARTICLE_FITS)
    for section, quantity, column in sections:
        for row in beside.points(machine, section, quantity, "in").to_dict("records"):
            where = parse_conditions(row["conditions"])
            if where.keys() >= {"in", "out"} and not pd.isna(row[column]):
                yield int(where["in"]) + int(where["out"]), row[column]


_ARTICLE_FITS = (("kv_capacity", "requests_that_fit", "computed"), ("load", "requests_that_fit", "computed"))


def knee(
    step_ms: float = 15.0,
    per_request_ms: float = 0.2,
    per_ktoken_us: float = 100.0,
    prefill_tok_s: float = 8200,
    pool_tokens: int = 22_048,
    block_size: int = 16,
    max_num_seqs: int = 64,
    input_tokens: int = 512,
    output_tokens: int = 128,
) -> Figure:
    """Throughput and time to first token against clients, with the interval of the knee.

    A decode step takes step + per_request x running + per_ktoken x thousands of KV tokens held.
    """
    model = steptime.StepModel(step_ms / 1e3, per_request_ms / 1e3, per_ktoken_us / 1e9)
    shape = steptime.Shape(input_tokens, output_tokens, prefill_tok_s)
    fit = predict.requests_that_fit(pool_tokens // block_size, input_tokens, output_tokens, block_size)
    turn = steptime.knee(fit, max_num_seqs, model, shape)
    limit = min(fit.low, max_num_seqs)
    found = [steptime.predict(model, clients, shape, limit) for clients in CLIENTS]
    titles = [f"The knee: {display.span(turn.low, turn.high)} clients ({turn.limit} binds)", "Time to first token"]
    figure, (left, right) = plot.panels(2, titles=titles, width=5.2)
    plot.computed_line(left, CLIENTS, [p.throughput_tok_s for p in found], "computed")
    right.fill_between(
        CLIENTS,
        [p.ttft_s * 1e3 for p in found],
        [p.ttft_wave_s * 1e3 for p in found],
        color=plot.COMPUTED,
        alpha=0.25,
        lw=0,
        label="computed: spread evenly to all at once",
    )
    for axis, quantity, unit, factor in ((left, "throughput_tok_s", "tok/s", 1), (right, "ttft_p50_s", "ms", 1e3)):
        plot.computed_band(axis, turn.low, turn.high, "the knee")
        axis.axvline((turn.low + turn.high) / 2, color=plot.LIMIT, lw=1, zorder=0)  # the band may be a hair wide
        _loads(axis, quantity, factor, input_tokens, output_tokens)
        axis.set_ylabel(unit)
        axis.set_xlabel("clients")
        plot.plain_log_y(axis)
        plot.log2_axis(axis, [1, 2, 4, 8, 16, 32, 64, 128, 256])
    plot.shared_legend(figure, left, right)
    return figure


def _loads(axis: Axes, quantity: str, factor: float, input_tokens: int, output_tokens: int) -> None:
    """What was measured with exactly these lengths."""
    for machine in machines():
        found = beside.points(machine, "load", quantity, "c", **{"in": input_tokens, "out": output_tokens})
        elsewhere = found["conditions"].str.contains("server", regex=False).astype(bool)  # of one server among several
        found = found[~elsewhere].dropna(subset="measured").drop_duplicates("x")
        if len(found):
            _point(axis, machine, found["x"], found["measured"] * factor)


def hit_ratio(
    pool_tokens: int = 9_360,
    block_size: int = 16,
    prefix_tokens: int = 2000,
    tail_tokens: int = 300,
    output_tokens: int = 64,
    workers: int = 6,
) -> Figure:
    """Share of requests whose prefix is cached, against the number of prefixes, behind an even split.

    C / K; what a least-recently-used cache gives one request at a time; and the bound with routing by prefix.
    """
    usable = predict.usable_blocks(pool_tokens // block_size)
    prefix = prefix_tokens // block_size
    whole = predict.blocks_per_request(prefix_tokens + tail_tokens, output_tokens, block_size)
    fit = hits.prefixes_that_fit(usable, whole)
    exact = [hits.stack_hit_ratios(usable, prefix, max(0, whole - prefix), k) for k in PREFIXES]
    title = f"One worker holds {fit:.2f} requests of {whole} blocks"
    figure, (axis,) = plot.panels(1, titles=[title], width=6.6, height=4.2)
    plot.computed_line(axis, PREFIXES, [100 * hits.hit_ratio(fit, k) for k in PREFIXES], "C / K: no N in it")
    axis.fill_between(
        PREFIXES, [100 * r.full for r in exact], [100 * r.any for r in exact], color=plot.HIT, alpha=0.3, lw=0
    )
    axis.fill_between([], [], [], color=plot.HIT, alpha=0.3, label="LRU, block by block: whole prefix to any of it")
    bound = [100 * hits.affinity_bound(fit, k, workers) for k in PREFIXES]
    plot.computed_line(axis, PREFIXES, bound, f"routed by prefix to {workers} workers, at best", ls="--")
    counts = sorted({n for machine in machines() for n in _worker_counts(machine)}, key=float)
    fills = dict(zip(counts, itertools.cycle(FILLS), strict=False))
    for machine in machines():
        for n in _worker_counts(machine):
            found = beside.points(machine, "service_hit_rate", "hit_ratio", "prefixes", workers=n)
            found = found.dropna(subset="measured")
            _point(axis, machine, found["x"], found["measured"] * 100, f"{machine}, {n} workers", fill=fills[n])
    axis.set_xlabel("prefixes in use, K")
    axis.set_ylabel("% of requests that hit")
    axis.set_ylim(0, 104)
    plot.shared_legend(figure, axis)
    return figure


def _worker_counts(machine: str) -> list[str]:
    found = beside.points(machine, "service_hit_rate", "hit_ratio", "workers").dropna(subset="measured")
    return sorted({f"{n:g}" for n in found["x"]}, key=float)


def stall(
    chunk_tokens: int = 2048, input_tokens: int = 3500, prefill_tok_s: float = 8200, step_ms: float = 15.0
) -> Figure:
    """The longest pause of a decoding request while a long input is prefilled beside it, against the chunk size."""
    plain = [predict.chunk_stall_s(int(chunk), input_tokens, prefill_tok_s) * 1e3 for chunk in CHUNKS]
    own = predict.chunk_stall_s(chunk_tokens, input_tokens, prefill_tok_s) * 1e3
    title = f"A chunk of {chunk_tokens:,} tokens pauses the others for {own:,.0f} ms"
    figure, (axis,) = plot.panels(1, titles=[title], width=6.6, height=4.2)
    axis.fill_between(CHUNKS, plain, [ms + step_ms for ms in plain], color=plot.COMPUTED, alpha=0.25, lw=0)
    axis.fill_between([], [], [], color=plot.COMPUTED, alpha=0.25, label="and the decode step on top")
    plot.computed_line(axis, CHUNKS, plain, "min(chunk, input) ÷ prefill speed")
    axis.plot([chunk_tokens], [own], "*", ms=15, color=plot.LIMIT, mec=plot.COMPUTED, zorder=6, label="your values")
    for machine in machines():
        found = beside.points(machine, "chunked_prefill", "itl_max_s", "chunk", **{"in": input_tokens})
        found = found.dropna(subset="measured").drop_duplicates("x")
        if len(found):
            _point(axis, machine, found["x"], found["measured"] * 1e3)
    axis.set_xlabel("chunk, tokens (max_num_batched_tokens)")
    axis.set_ylabel("longest pause, ms")
    plot.plain_log_y(axis)
    plot.log2_axis(axis, [64, 256, 1024, 4096, 16384])
    plot.shared_legend(figure, axis)
    return figure


def ttft_saved(
    prefix_tokens: int = 3000,
    tail_tokens: int = 32,
    block_size: int = 16,
    prefill_tok_s: float = 8200,
    fixed_ms: float = 20.0,
) -> Figure:
    """Time to first token with and without the prefix in the cache, against its length."""
    cached = _cached(prefix_tokens, tail_tokens, block_size)
    saved = predict.ttft_saved_s(cached, prefill_tok_s) * 1e3
    lengths = np.unique(np.append(np.arange(0, max(8192, prefix_tokens), 4 * block_size), prefix_tokens))
    miss = [fixed_ms + (n + tail_tokens) / prefill_tok_s * 1e3 for n in lengths]
    hit = [
        m - predict.ttft_saved_s(_cached(int(n), tail_tokens, block_size), prefill_tok_s) * 1e3
        for n, m in zip(lengths, miss, strict=True)
    ]
    title = f"{cached:,} of {prefix_tokens:,} shared tokens come from the cache and save {saved:,.0f} ms of prefill"
    figure, (axis,) = plot.panels(1, titles=[title], width=6.6, height=4.2)
    plot.computed_line(axis, lengths, miss, "miss, computed", color=plot.MISS)
    plot.computed_line(axis, lengths, hit, "hit, computed", color=plot.HIT)
    axis.axvline(prefix_tokens, color=plot.COMPUTED, ls=":", lw=1)
    for machine in machines():
        for kind in ("miss", "hit"):
            found = beside.points(machine, "prefix_cache", f"ttft_{kind}_s", "prefix").dropna(subset="measured")
            if len(found):
                _point(axis, machine, found["x"], found["measured"] * 1e3)
    axis.set_xlabel("length of the shared prefix, tokens")
    axis.set_ylabel("time to first token, ms")
    plot.plain_log_y(axis)
    plot.shared_legend(figure, axis)
    return figure


def _cached(prefix_tokens: int, tail_tokens: int, block_size: int) -> int:
    return predict.cached_tokens(prefix_tokens, prefix_tokens + tail_tokens, block_size)


def _point(axis: Axes, machine: str, x, y, label: str = "", *, fill: str = "") -> None:
    """`fill`: which part of the marker is filled, where a machine has several kinds of points; "": its own style."""
    label = label or machine
    known = axis.get_legend_handles_labels()[1]  # one entry a machine, however many points
    style = plot.machine_style(machine)
    if fill:
        style |= {"fillstyle": fill, "mfc": style["color"], "markerfacecoloralt": "white"}
    axis.plot(list(x), list(y), ls="", mew=1.5, zorder=5, label=None if label in known else label, **style)


def _refusal(shape: geometry.Geometry) -> Figure:
    figure, (axis,) = plot.panels(1, titles=[f"{shape.name}: the formula does not apply"], width=7, height=2)
    axis.text(0.02, 0.5, f"{shape.why_not}\n\nNo number is given.", transform=axis.transAxes, va="center", wrap=True)
    axis.set_axis_off()
    return figure
