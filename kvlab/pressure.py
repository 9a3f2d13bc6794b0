"""What runs and claims show of a KV pool under pressure: tokens computed twice, pairs that evict each other, rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd

from kvlab import beside, blocks, iterations, pauses, predict, results, stats
from kvlab.claims import Claim, parse_conditions
from kvlab.config import ServerConfig
from kvlab.errors import ConfigError

PAIR_UNITS = {
    "recomputed_tokens": "tokens",
    "found_tokens": "tokens",
    "found_share": "ratio",
    "resume_s": "s",
    "counted_hits": "tokens",
}


def engine(lab, server: ServerConfig) -> blocks.Engine:
    """Usable blocks and limits of a server. ConfigError where its pool is not pinned."""
    if server.kv_cache_memory_bytes is None:
        raise ConfigError(
            "The pool of this server is not pinned, so its blocks are not known before it starts.",
            next_step="set kv_cache_memory_bytes in the profile's [server]",
        )
    per_element = predict.kv_dtype_bytes(lab.geometry, server.kv_cache_dtype, server.dtype)
    per_token = predict.kv_bytes_per_token(lab.geometry, per_element)
    found = predict.num_blocks(server.kv_cache_memory_bytes, per_token, server.block_size or 16)
    return blocks.engine_of(server, predict.usable_blocks(found))


def recomputed(result: results.Result) -> int | None:
    """Tokens that the engine computed twice in a run, from its log; null where the log does not hold the steps."""
    log, load = result.run.log() if result.run is not None else None, result.cell.load
    if log is None:
        return None
    sent = load.requests * load.input_tokens, load.requests * load.output_tokens, load.requests
    steps = iterations.last_load(iterations.parse_iterations(log), iterations.once(*sent), _warmup_tokens(result))
    return None if steps is None else iterations.recomputed_tokens(steps, *sent)


def _warmup_tokens(result: results.Result) -> int:
    rows = result.run.requests()
    warmup = rows[rows["phase"] == "warmup"]
    return iterations.once(int(warmup["prompt_tokens"].sum()), int(warmup["output_tokens"].sum()), len(warmup))


def pair_input(pool: blocks.Engine, max_model_len: int, output_tokens: int) -> int:
    """Prompt tokens of two equal requests that fill the pool: whole blocks, half of it less one block for growth."""
    return min((pool.usable_blocks // 2 - 1) * pool.block_size, max_model_len - output_tokens)


def pair_computed(account: blocks.Account, prefill=None) -> dict[str, float | None]:
    """What the account says of the one request that a pair evicts, by quantity; `prefill` prices its way back."""
    if account.preemptions != 1:
        raise ConfigError(
            f"The pair of requests gives {account.preemptions} preemptions instead of one.",
            cause="two requests of the longest length do not fill the pool, or the output is too short to outgrow it",
            next_step="set a smaller kv_cache_memory_bytes in pair_server, or a longer pair_output_tokens",
        )
    eviction = account.evictions[0]
    again = eviction.computed_tokens + 1 - eviction.cached_tokens  # its last token was never computed before
    return {
        "recomputed_tokens": eviction.recomputed_tokens,
        "found_tokens": eviction.cached_tokens,
        "found_share": eviction.cached_tokens / eviction.computed_tokens,
        "resume_s": prefill.ttft_s(again, eviction.cached_tokens) if prefill else None,
        "counted_hits": 0,
    }


def pair_measured(result: results.Result) -> dict[str, float | None]:
    """The same of a measured pair: lost tokens from the client's events, recomputed ones from the engine's log."""
    rows = results.rows(result)
    numbers = dict.fromkeys(PAIR_UNITS)
    numbers |= {"recomputed_tokens": recomputed(result), "counted_hits": result.value("prefix_hits")}
    back = pauses.resume_s(rows)
    if back is None:
        return numbers
    pause, numbers["resume_s"] = back
    victim = rows[rows["request"] == pause.request].iloc[0]
    events = zip(victim["event_times_s"], victim["event_tokens"], strict=True)
    lost = result.cell.load.input_tokens + int(sum(n for t, n in events if t <= pause.start_s)) - 1
    if numbers["recomputed_tokens"] is not None:
        numbers["found_tokens"] = lost - numbers["recomputed_tokens"]
        numbers["found_share"] = numbers["found_tokens"] / lost
    return numbers


def same_requests(account: blocks.Account, pauses_seen: Iterable[pauses.Pause]) -> int:
    """How many of the account's evictions were seen at that very request."""
    seen = Counter(pause.request for pause in pauses_seen)
    return (Counter(eviction.request for eviction in account.evictions) & seen).total()


def mean_of(values: Iterable[Any]) -> stats.Estimate | None:
    """Mean of the values that are there, with its t interval; null where there is none."""
    found = [value for value in values if value is not None]
    return stats.mean_interval(found) if found else None


def spent(runs: Iterable[results.Result], paused: Callable[[results.Result], float | None]) -> dict[str, float | None]:
    """Mean seconds of a request: waiting in the engine, paused after a preemption, and the rest, served."""
    runs = list(runs)
    latencies = [results.rows(run)["latency_s"].dropna() for run in runs]
    queue = mean_of(run.value("queue_mean_s") for run in runs)
    stood = mean_of(paused(run) for run in runs)
    whole = mean_of(float(values.mean()) if len(values) else None for values in latencies)
    if None in (queue, stood, whole):
        return {}
    return {
        "engine queue": queue.value,
        "preempted": stood.value,
        "served": max(0.0, whole.value - queue.value - stood.value),
    }


def counted(machine: str) -> pd.DataFrame:
    """computed, measured: preemptions per 100 requests of each load of a machine that states both."""
    found = beside.points(machine, "preemption", "preemptions", "c").dropna(subset=["computed", "measured"])
    rows = []
    for row in found.to_dict("records"):
        stated = parse_conditions(row["conditions"])
        if "requests" in stated and "caching" not in stated:
            rows.append({name: 100 * row[name] / int(stated["requests"]) for name in ("computed", "measured")})
    return pd.DataFrame(rows, columns=["computed", "measured"])


def published(own: str) -> pd.DataFrame:
    """The same of the article's loads, as `own` has computed them for the smallest pool that the article names."""
    found = beside.points(own, "preemption", "article_preemptions", "capacity").dropna(subset="computed")
    rows = []
    for row in found[found["x"] == found["x"].min()].to_dict("records"):
        stated = parse_conditions(row["conditions"])
        count = beside.value("article", "preemption", "preemptions", c=stated["c"], **{"in": stated["in"]})
        if count is not None:
            rows.append({"computed": row["computed"], "measured": count, "requests": int(stated["requests"])})
    table = pd.DataFrame(rows, columns=["computed", "measured", "requests"])
    return 100 * table[["computed", "measured"]].div(table["requests"], axis=0)


# -- sentences ----------------------------------------------------------------------------------------------------


def resumed(claims: Iterable[Claim]) -> str | None:
    """Whether a resumed request hits the prefix cache."""
    pairs = [c for c in claims if "requests" not in c.conditions]
    found = {(c.quantity, parse_conditions(c.conditions).get("caching")): c.measured for c in pairs}
    share, off_share = found.get(("found_share", "on")), found.get(("found_share", "off"))
    if share is None or off_share is None:
        return None
    hits = "hits" if share > off_share + 0.01 else "does not hit"
    text = f"A resumed request {hits} the prefix cache: it found {share:.1%} of its lost tokens with caching on"
    text += f" and {off_share:.1%} with caching off"
    seconds = [found.get(("resume_s", arm)) for arm in ("on", "off")]
    if None not in seconds:
        text += f"; its way back took {seconds[0] * 1e3:,.0f} ms and {seconds[1] * 1e3:,.0f} ms"
    counted = found.get(("counted_hits", "on"))
    return text + (
        f". The hit counter of /metrics counted {counted:g} of these tokens." if counted is not None else "."
    )


def where_it_waits(claims: Iterable[Claim]) -> str | None:
    """For the lowest and the highest cap: how long requests wait, and what evictions add."""
    found: dict[int, dict[str, float]] = {}
    for c in claims:
        at = parse_conditions(c.conditions)
        if c.measured is not None and "max_num_seqs" in at and not {"over_max_num_seqs", "held_back"} & at.keys():
            found.setdefault(int(at["max_num_seqs"]), {})[c.quantity] = c.measured
    parts = [
        f"at max_num_seqs {cap} a request waits {n['queue_s']:.3g} s in the engine, {n['preemptions']:g} requests are"
        f" evicted, and throughput is {n['throughput_tok_s']:,.0f} tok/s"
        for cap, n in sorted(found.items())
        if {"queue_s", "preemptions", "throughput_tok_s"} <= n.keys()
    ]
    return "The queue only moves: " + "; ".join(parts) + "." if parts else None


def closest_capacity(computed: Iterable[Claim], published: pd.DataFrame) -> str | None:
    """At which of its capacities the article's counts come out best."""
    counts: dict[str, list[tuple[float, float]]] = {}
    for c in computed:
        at = parse_conditions(c.conditions)
        for row in published.dropna(subset="measured").to_dict("records"):
            there = parse_conditions(row["conditions"])
            if (there["c"], there["in"]) == (at["c"], at["in"]):
                counts.setdefault(at["capacity"], []).append((c.computed, row["measured"]))
    if not counts:
        return None
    best = min(counts, key=lambda k: sum(abs(a - b) for a, b in counts[k]))
    pairs = ", ".join(f"{a:g} for {b:g}" for a, b in counts[best])
    return (
        f"Of the article's capacities {int(best):,} tokens explain its counts best (computed for published: {pairs})."
    )


def cap_changes(claims: Iterable[Claim]) -> str | None:
    """What each lower cap changes against the highest one, measured and computed."""
    found: dict[str, dict[str, Claim]] = {}
    for c in claims:
        if c.quantity in ("throughput_change", "ttft_ratio") and c.measured is not None:
            found.setdefault(parse_conditions(c.conditions)["max_num_seqs"], {})[c.quantity] = c
    parts = []
    for cap, pair in found.items():
        if len(pair) == 2:
            change, ratio = pair["throughput_change"], pair["ttft_ratio"]
            text = (
                f"max_num_seqs {cap}: throughput {change.measured:+.1%}, time to the first token {ratio.measured:.2f}x"
            )
            if change.computed is not None:
                text += f" (computed {change.computed:+.1%} and {ratio.computed:.2f}x)"
            parts.append(text)
    return "Against the highest cap, " + "; ".join(parts) + "." if parts else None


def outside_of_graphs(claims: Iterable[Claim]) -> str | None:
    """Which caps let more requests run than any full CUDA graph holds, and what a step costs there."""
    by_cap: dict[int, dict[str, Claim]] = {}
    for c in claims:
        if c.quantity in ("largest_full_graph", "itl_p50_s", "running_max") and c.measured is not None:
            by_cap.setdefault(int(parse_conditions(c.conditions).get("max_num_seqs", 0)), {})[c.quantity] = c
    whole = {cap: {q: c.measured for q, c in found.items()} for cap, found in by_cap.items() if len(found) == 3}
    over = [cap for cap, at in whole.items() if at["running_max"] > at["largest_full_graph"]]
    inside = [cap for cap in whole if cap not in over]
    if not over or not inside:
        return None
    near = {cap: min(inside, key=lambda other, cap=cap: abs(other - cap)) for cap in over}
    parts = [
        f"max_num_seqs {cap}: up to {whole[cap]['running_max']:g} run, the largest full CUDA graph holds "
        f"{whole[cap]['largest_full_graph']:g}, and a step takes {whole[cap]['itl_p50_s'] * 1e3:.1f} ms against "
        f"{whole[near[cap]]['itl_p50_s'] * 1e3:.1f} ms at cap {near[cap]}"
        for cap in over
    ]
    return "A cap between two capture sizes leaves the graphs. " + "; ".join(parts) + "."


def best_cap(claims: Iterable[Claim]) -> str | None:
    """Whether the best of the measured caps is the computed one, and how sure the measurement is of it."""
    claims = list(claims)
    found = next((c for c in claims if c.quantity == "best_max_num_seqs" and "among" in c.conditions), None)
    if found is None or found.measured is None:
        return None
    caps = parse_conditions(found.conditions)["among"].replace("-", ", ")
    text = f"Of the caps {caps} the best one measured is {found.measured:g}"
    if found.computed is not None:
        same = "as computed" if found.computed == found.measured else f"computed was {found.computed:g}"
        text += f", {same}"
    wide = [c for c in claims if c.quantity == "throughput_change" and None not in (c.measured, c.ci_low, c.ci_high)]
    unsure = [parse_conditions(c.conditions)["max_num_seqs"] for c in wide if c.ci_low <= 0 <= c.ci_high]
    if unsure:
        text += f"; against the highest cap no difference can be told for {', '.join(unsure)}"
    return text + "."
