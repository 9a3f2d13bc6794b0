"""The workshop's questions on load, preemption and max_num_seqs. See `workshop`."""

from __future__ import annotations

import math

from kvlab import blocks, predict
from kvlab.block_account import Job
from kvlab.profile import LoadPoint
from kvlab.workshop import Choice, Facts, Number, Undecided
from kvlab.workshop_pool import block_of, blocks_of, directions

# -- 3: load ------------------------------------------------------------------------------------------------------


def _loadshape_of(f: Facts) -> dict[str, int]:
    shape = f.profile().load.shapes[0]
    return {"in": shape.input_tokens, "out": shape.output_tokens}


def _most_clients(f: Facts) -> int:
    return max(f.profile().load.shapes[0].concurrency)


def _fits(f: Facts) -> float:
    return f.value("load", "requests_that_fit_low", "computed", **_loadshape_of(f))


def _last_that_fits(f: Facts) -> int:
    return max(c for c in f.profile().load.shapes[0].concurrency if c <= _fits(f))


def _throughput(f: Facts, clients: int) -> float:
    return f.value("load", "throughput_tok_s", c=clients, **_loadshape_of(f))


def _gain(f: Facts) -> float:
    return _throughput(f, _most_clients(f)) / _throughput(f, _last_that_fits(f))


def _wait_s(f: Facts, running: float, per_request: bool = True) -> float:
    rate = _throughput(f, _most_clients(f)) / (_loadshape_of(f)["out"] if per_request else 1)
    return predict.queue_wait_at_rate_s(_most_clients(f), running, rate)


def _binds(f: Facts) -> str:
    found = f.profile().load.shapes[0]
    where = {"in": found.input_tokens, "out": found.output_tokens}
    for limit in ("kv", "compute", "max_num_seqs"):
        try:
            f.value("load", "knee_low", "computed", limit=limit, **where)
        except Undecided:
            continue
        return limit
    raise Undecided(f"{f.machine} has no computed knee.")


LOAD = {
    "3.predict": Number(
        "Throughput at the most clients ÷ throughput at the most clients that all fit: what is the ratio?",
        "times",
        _gain,
        (
            (
                lambda f: _most_clients(f) / _last_that_fits(f),
                "as if every further client brought as much as the ones before: those that do not fit wait",
            ),
        ),
        accept=lambda f: (_gain(f) * 0.8, _gain(f) * 1.2),
        because="Beyond the requests that fit, more clients bring a longer queue and no more tokens.",
    ),
    "3.explain": Choice(
        "Which limit puts the knee of your machine's first load where it is? (Run names it, in the claim knee_low.)",
        (
            (
                "the KV pool: it is full there",
                lambda f: _binds(f) == "kv",
                "The knee lies below the requests that fit.",
            ),
            (
                "computing: each further request makes every step longer, before the pool is full",
                lambda f: _binds(f) == "compute",
                "Compare the knee's interval with the requests that fit.",
            ),
            (
                "max_num_seqs: the server admits no more",
                lambda f: _binds(f) == "max_num_seqs",
                "Compare the knee's interval with max_num_seqs of the profile.",
            ),
        ),
        because="The knee and the queue are two things: throughput may bend long before the pool is full.",
    ),
    "3.most": Number(
        "By Little's law, how long does a request wait in the queue at the most clients? Take the requests that fit "
        "(lower end) as running, and the measured throughput.",
        "s",
        lambda f: _wait_s(f, _fits(f)),
        (
            (
                lambda f: _wait_s(f, _fits(f), False),
                "waiting ÷ tokens per second: a *request* is done every out ÷ X seconds",
            ),
            (lambda f: _wait_s(f, 0), "all clients ÷ rate, the whole latency: those that run do not wait"),
        ),
        accept=0.06,
        because="(clients − running) ÷ (throughput ÷ output tokens). Compare it with the measured time to first token.",
    ),
    "3.stretch": Number(
        "The article's server (blocks of 16) makes 64 clients wait. How many tokens must its pool hold for "
        "all 64 requests "
        "of 512 + 128 to their ends?",
        "tokens",
        lambda f: 64 * predict.blocks_per_request(512, 128, 16) * 16,
        (
            (lambda f: 64 * 512, "room for the inputs only"),
            (lambda f: f.value("kv_capacity", "capacity_tokens", on="article"), "what it held when they waited"),
            (
                lambda f: 64 * predict.blocks_per_request(512, 128, 16),
                "the number of blocks; the question asks for tokens",
            ),
        ),
        because="Twice the pool, as with 8-bit KV, would nearly do: that is how fp8 KV shortens a queue.",
    ),
}


# -- 4: preemption ------------------------------------------------------------------------------------------------


def _points(f: Facts) -> tuple[LoadPoint, ...]:
    return f.require(f.profile().preemption, "loads of the section on preemption").points


def _preempted(f: Facts, p: LoadPoint) -> float:
    where = {"c": p.concurrency, "in": p.input_tokens, "out": p.output_tokens, "requests": p.requests}
    return f.value("preemption", "preemptions", **where)


def _point_fit(f: Facts, p: LoadPoint) -> float:
    return predict.requests_that_fit(blocks_of(f), p.input_tokens, p.output_tokens, block_of(f)).low


def _waits(f: Facts, p: LoadPoint) -> bool:
    return _point_fit(f, p) < p.concurrency


def _quiet_point(f: Facts) -> LoadPoint:
    found = [p for p in _points(f) if _waits(f, p) and not _preempted(f, p)]
    return f.require(found[0] if found else None, "load in which requests wait and none is preempted")


def _prompts_at_once(f: Facts, p: LoadPoint) -> int:
    return predict.usable_blocks(blocks_of(f)) // math.ceil(p.input_tokens / block_of(f))


def _first_preemption(f: Facts) -> int:
    point, engine = _points(f)[0], blocks.engine_of(f.profile().server, predict.usable_blocks(blocks_of(f)))
    for clients in range(1, 2 * point.concurrency):
        jobs = [Job(point.input_tokens, point.output_tokens)] * (2 * clients)
        if blocks.closed_loop(engine, clients, jobs).evictions:
            return clients
    raise Undecided(f"Nothing is preempted up to {2 * point.concurrency} clients.")


PREEMPTION = {
    "4.predict": Number(
        "Of the section's loads (the table above), how many preempt any request at all?",
        "loads",
        lambda f: sum(_preempted(f, p) > 0 for p in _points(f)),
        (
            (
                lambda f: sum(_waits(f, p) for p in _points(f)),
                "the number of loads in which requests *wait*: waiting is not eviction",
            ),
            (lambda f: len(_points(f)), "all of them; some fit, and some only wait"),
            (lambda f: 0, "none, as if the pool never ran out once a request is admitted: outputs grow"),
        ),
        accept=0,
        because="Only where admitted requests outgrow the pool is one evicted.",
    ),
    "4.explain": Choice(
        "In one of the loads requests wait and none is ever evicted. Why?",
        (
            (
                "all its requests fit",
                lambda f: not _waits(f, _quiet_point(f)),
                "Compare its requests that fit with its clients: some wait.",
            ),
            (
                "its outputs are short: the pool admits no more prompts than can also grow to their ends",
                lambda f: _prompts_at_once(f, _quiet_point(f)) <= math.floor(_point_fit(f, _quiet_point(f))),
                "Count how many prompts fit at once, and how many requests fit at their ends.",
            ),
            (
                "max_num_seqs holds requests back before the pool is full",
                lambda f: (f.profile().server.max_num_seqs or math.inf) < _point_fit(f, _quiet_point(f)),
                "Compare max_num_seqs with the requests that fit.",
            ),
        ),
        because="Admission asks for the prompt's blocks; what is evicted is what the outputs need later.",
    ),
    "4.most": Number(
        "A preempted request comes back (the section's pair of requests, caching on). Which share of its "
        "tokens does it find "
        "in the cache?",
        "ratio",
        lambda f: f.value("preemption", "found_share", caching="on"),
        (
            (
                lambda f: 0,
                "none, as if it started from nothing: its freed blocks keep their content until somebody takes them",
            ),
            (lambda f: 1, "all of them: the last, half-filled block and what others took are computed again"),
        ),
        accept=0.015,
        because="The documentation's 'recomputed from the start' is the worst case, not the usual one.",
    ),
    "4.stretch": Number(
        "From how many clients on does the first of the loads preempt anybody, with two requests a client? "
        "Ask the block account, `blocks.closed_loop(engine, clients, jobs).preemptions`: the engine is "
        "`blocks.engine_of(server, usable)`, and jobs is a list with one "
        "`blocks.Job(point.input_tokens, point.output_tokens)` a request.",
        "clients",
        _first_preemption,
        (
            (
                lambda f: math.floor(_point_fit(f, _points(f)[0])),
                "the last number that fits to its end: one more is needed",
            ),
            (lambda f: _points(f)[0].concurrency, "the clients of the section's load: fewer are enough"),
        ),
        accept=0,
        because="The account is exact because the scheduler is: no clock and no model is in it.",
    ),
}


# -- 5: max_num_seqs ----------------------------------------------------------------------------------------------


def _caps(f: Facts) -> tuple[int, ...]:
    return tuple(sorted(f.require(f.profile().max_num_seqs, "section on max_num_seqs").caps))


def _cap_load(f: Facts) -> LoadPoint:
    return f.require(f.profile().max_num_seqs, "section on max_num_seqs").load


def _capped(f: Facts, quantity: str, cap: int, column: str = "measured", **where) -> float:
    return f.value("max_num_seqs", quantity, column, c=_cap_load(f).concurrency, max_num_seqs=cap, **where)


def _ttft_ratio(f: Facts, column: str = "measured") -> float:
    low, *_, high = _caps(f)
    return _capped(f, "ttft_ratio", low, column, over_max_num_seqs=high)


def _around(*values: float) -> tuple[float, float]:
    return min(values) * 0.85, max(values) * 1.15


def _cap_change(f: Facts, column: str) -> float:
    caps = _caps(f)
    return _capped(f, "throughput_change", caps[-2], column, over_max_num_seqs=caps[-1])


def _cap_fit(f: Facts) -> predict.Interval:
    load = _cap_load(f)
    return predict.requests_that_fit(blocks_of(f), load.input_tokens, load.output_tokens, block_of(f))


def _cap_wait_s(f: Facts, waiting: int, per_request: bool = True) -> float:
    rate = _capped(f, "throughput_tok_s", _caps(f)[0]) / (_cap_load(f).output_tokens if per_request else 1)
    return waiting / rate


CAPS = {
    "5.predict": Number(
        "With the smallest cap, how many times longer is the median time to first token than with the largest?",
        "times",
        _ttft_ratio,
        (
            (
                lambda f: _caps(f)[-1] / _caps(f)[0],
                "the ratio of the caps: what counts is how many *wait*, not how many run",
            ),
            (lambda f: 1, "no change: a request that may not run waits outside, and its first token with it"),
        ),
        accept=lambda f: _around(_ttft_ratio(f), _ttft_ratio(f, "computed")),
        because="A cap moves the queue, and below the pool's limit it makes one where none was needed.",
    ),
    "5.explain": Choice(
        "The second largest cap against the largest: what happens to throughput?",
        directions(
            _cap_change,
            "throughput_change",
            rises="it rises: fewer preemptions",
            stays="no difference can be told from these repeats",
            falls="it falls: fewer requests run",
        ),
        because="A difference whose interval holds 0 is no finding, however plausible its sign.",
    ),
    "5.most": Number(
        "Which cap would you set for this load, so that no admitted request is ever preempted and none waits "
        "needlessly?",
        "requests",
        lambda f: math.floor(_cap_fit(f).low),
        (
            (lambda f: _cap_load(f).concurrency, "the number of clients: more than the pool holds to their ends"),
            (
                lambda f: f.require(f.profile().server.max_num_seqs, "max_num_seqs"),
                "the profile's own cap, far above the pool",
            ),
            (
                lambda f: math.floor(_cap_fit(f).high),
                "the upper end: it counts on requests being half written on average",
            ),
            (lambda f: math.ceil(_cap_fit(f).high), "above the upper end of what fits"),
        ),
        accept=0,
        because="⌊usable blocks ÷ blocks of a request at its end⌋.",
    ),
    "5.stretch": Number(
        "By Little's law, how long does a request wait with the smallest cap, at the measured throughput?",
        "s",
        lambda f: _cap_wait_s(f, _cap_load(f).concurrency - _caps(f)[0]),
        (
            (
                lambda f: _cap_wait_s(f, _cap_load(f).concurrency - _caps(f)[0], False),
                "waiting ÷ tokens per second: a request is done every out ÷ X seconds",
            ),
            (lambda f: _cap_wait_s(f, _cap_load(f).concurrency), "all clients ÷ rate: those that run do not wait"),
        ),
        accept=0.05,
        because="The measured queue is a little shorter: the first requests of all find the server empty.",
    ),
}

PARTS: dict[str, Number | Choice] = LOAD | PREEMPTION | CAPS
