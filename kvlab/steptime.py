"""The step-time model: throughput and latencies against concurrency, the knee, and which limit binds. Pure.

A decode step with `running` requests that hold `kv_tokens` tokens of KV together takes
    t = a + b running + c kv_tokens      [s]
a: reading the weights and fixed costs; b: work for each request; c: reading one token's KV. Beside the steps, every
request costs one prefill of input / prefill speed, in which all running requests pause.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import scipy  # its parts load where they are used: a second of every start

from kvlab.errors import ConfigError
from kvlab.predict import Interval, kv_tokens_per_request, queue_wait_s


class StepPoint(NamedTuple):
    """One measured step time: requests running, KV tokens held by all of them, seconds a step."""

    running: float
    kv_tokens: float
    step_s: float


class StepModel(NamedTuple):
    """t = a + b running + c kv_tokens; `relative_error` is the root mean square of the fit's relative residuals."""

    a_s: float
    b_s: float
    c_s: float
    relative_error: float | None = None

    def step_s(self, running: float, kv_tokens: float) -> float:
        """Seconds of one decode step."""
        return self.a_s + self.b_s * running + self.c_s * kv_tokens


class Shape(NamedTuple):
    """The requests of a load, all alike, and the machine's prefill speed (null: prefill is free)."""

    input_tokens: int
    output_tokens: int
    prefill_tok_s: float | None = None

    def prefill_s(self) -> float:
        """Seconds to prefill one request alone."""
        return 0.0 if self.prefill_tok_s is None else self.input_tokens / self.prefill_tok_s

    def mean_kv_tokens(self) -> float:
        """KV tokens of a decoding request, averaged over its life."""
        return (self.input_tokens + kv_tokens_per_request(self.input_tokens, self.output_tokens)) / 2


class Prediction(NamedTuple):
    """A closed loop of `clients`: output tokens per second, and seconds for the rest."""

    clients: float
    running: float
    throughput_tok_s: float
    itl_s: float  # of a step without a prefill: the median gap
    token_s: float  # prefill pauses included: the mean gap
    queue_s: float
    ttft_s: float  # arrivals spread evenly: queue, own prefill, one step
    ttft_wave_s: float  # all running requests start together and are prefilled one after another


class Knee(NamedTuple):
    """The concurrency beyond which more clients mostly wait, and the limit that puts it there."""

    low: float
    high: float
    limit: str


class Verdict(NamedTuple):
    """`binds`: the smallest limit. `possible`: every limit whose interval reaches below the top of the smallest.

    `queue`: what makes requests wait at this number of clients ("kv", "max_num_seqs" or null). `limits` in requests.
    """

    binds: str
    possible: tuple[str, ...]
    queue: str | None
    limits: dict[str, Interval]
    sentence: str


def fit(points: Iterable[StepPoint | tuple[float, float, float]]) -> StepModel:
    """Nonnegative least squares on relative residuals, so that short steps count as much as long ones.

    With requests of one length only, kv_tokens grows in step with running and b and c cannot be told apart: the model
    then predicts other concurrencies, but no other lengths. ConfigError on fewer than two running counts.
    """
    table = np.array([tuple(p) for p in points], dtype=float).reshape(-1, 3)
    if len(np.unique(table[:, 0])) < 2 or not (np.isfinite(table).all() and (table[:, 2] > 0).all()):
        raise ConfigError(
            f"a step-time model cannot be fitted to {len(table)} points",
            cause="it needs two or more different numbers of running requests, each with a step time > 0",
            next_step="measure more concurrencies, such as 1, 4, 8 and 16",
        )
    running, kv_tokens, step_s = table.T
    design = np.column_stack([np.ones_like(running), running, kv_tokens]) / step_s[:, None]
    scale = np.maximum(np.abs(design).max(axis=0), np.finfo(float).tiny)  # kv_tokens is thousands of times larger
    scaled, _ = scipy.optimize.nnls(design / scale, np.ones_like(step_s))
    coefficients = scaled / scale
    error = float(np.sqrt(np.mean((design @ coefficients - 1) ** 2)))
    return StepModel(*map(float, coefficients), error)


def step_from_throughput(running: float, throughput_tok_s: float, shape: Shape) -> float:
    """The decode step behind a measured throughput: running / X - running x prefill / output tokens."""
    return running / throughput_tok_s - running * shape.prefill_s() / shape.output_tokens


def token_s(model: StepModel, running: float, shape: Shape) -> float:
    """Seconds between two output tokens of one request, on average, prefill pauses included.

    During a request's life every one of the running ones is replaced once, and each replacement is a prefill:
    t(running) + running x (input / prefill speed) / output.
    """
    step = model.step_s(running, running * shape.mean_kv_tokens())
    return step + running * shape.prefill_s() / shape.output_tokens


def predict(model: StepModel, clients: float, shape: Shape, running_limit: float | None = None) -> Prediction:
    """A closed loop of `clients`, of which at most `running_limit` run at once (what fits, or max_num_seqs).

    The mean TTFT lies between `ttft_s` and `ttft_wave_s`: equal requests that start together tend to stay together.
    """
    running = clients if running_limit is None else min(clients, running_limit)
    per_token = token_s(model, running, shape)
    itl = model.step_s(running, running * shape.mean_kv_tokens())
    queue = queue_wait_s(clients, running, shape.output_tokens * per_token)
    ttft, wave = (queue + prefills * shape.prefill_s() + itl for prefills in (1, (running + 1) / 2))
    return Prediction(clients, running, running / per_token, itl, per_token, queue, ttft, wave)


def ttft_median_s(model: StepModel, found: Prediction, shape: Shape, alone_s: float | None = None) -> float:
    """Median TTFT of a closed loop: midway between arrivals spread evenly and one wave.

    `alone_s`, the TTFT of a request sent alone, adds what it holds beyond prefill and one step: the way through the
    server, which delays its own request and holds no other one up.
    """
    own_way_s = 0.0 if alone_s is None else alone_s - shape.prefill_s() - model.step_s(1, shape.mean_kv_tokens())
    return (found.ttft_s + found.ttft_wave_s) / 2 + max(0.0, own_way_s)


def _added_s(model: StepModel, shape: Shape, kv_tokens: float) -> float:
    """Seconds that one more running request adds to every token."""
    return model.b_s + model.c_s * kv_tokens + shape.prefill_s() / shape.output_tokens


def compute_knee(model: StepModel, shape: Shape) -> Interval | None:
    """N* = (a + k) / k: where the straight line of low load meets the ceiling; k is what each request adds to a step.

    An interval, because k grows while a request's KV grows from its input to its end. null where k is 0.
    Source: Denning and Buzen, The operational analysis of queueing network models, ACM Computing Surveys 10(3), 1978.
    """
    end = kv_tokens_per_request(shape.input_tokens, shape.output_tokens)
    added = [_added_s(model, shape, kv) for kv in (end, shape.input_tokens)]
    return Interval(*(1 + model.a_s / k for k in added)) if min(added) > 0 else None


def limits(
    fitting: Interval, max_num_seqs: int | None = None, model: StepModel | None = None, shape: Shape | None = None
) -> dict[str, Interval]:
    """Each limit on useful concurrency, in requests: "kv", "max_num_seqs", and "compute" where a model is given."""
    found = {"kv": fitting}
    if max_num_seqs is not None:
        found["max_num_seqs"] = Interval(max_num_seqs, max_num_seqs)
    if model is not None and shape is not None and (compute := compute_knee(model, shape)):
        found["compute"] = compute
    return found


def knee(
    fitting: Interval, max_num_seqs: int | None = None, model: StepModel | None = None, shape: Shape | None = None
) -> Knee:
    """The smallest of the limits, as an interval in concurrency. `fitting` is `requests_that_fit`."""
    found = limits(fitting, max_num_seqs, model, shape)
    limit = min(found, key=lambda name: sum(found[name]))
    return Knee(min(i.low for i in found.values()), min(i.high for i in found.values()), limit)


def binding_limit(
    clients: float,
    fitting: Interval,
    max_num_seqs: int | None = None,
    model: StepModel | None = None,
    shape: Shape | None = None,
) -> Verdict:
    """Which of "clients", "max_num_seqs", "kv" and "compute" binds: the one that allows the fewest requests.

    "clients" means that more of them would still bring throughput. It is not always the KV that binds: with a model,
    "compute" can lie far below it.
    """
    found = {"clients": Interval(clients, clients), **limits(fitting, max_num_seqs, model, shape)}
    binds = min(found, key=lambda name: sum(found[name]))
    top = found[binds].high
    possible = tuple(name for name, interval in found.items() if interval.low <= top)
    queue = _queue(clients, found)
    return Verdict(binds, possible, queue, found, _sentence(clients, binds, possible, queue, found))


def _queue(clients: float, found: dict[str, Interval]) -> str | None:
    admission = {name: found[name] for name in ("kv", "max_num_seqs") if name in found}
    smallest = min(admission, key=lambda name: sum(admission[name]))
    return smallest if clients > admission[smallest].low else None


def _sentence(
    clients: float, binds: str, possible: tuple[str, ...], queue: str | None, found: dict[str, Interval]
) -> str:
    meaning = {
        "clients": "more clients would still raise throughput",
        "max_num_seqs": "max_num_seqs holds requests back",
        "kv": "the KV cache is full",
        "compute": "each further request slows all others",
    }[binds]
    low, high = found[binds]
    where = f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"
    text = f"At {clients:g} clients {binds} binds ({where} requests): {meaning}"
    if also := [name for name in possible if name != binds]:
        text += f"; {', '.join(also)} may bind too"
    if queue and queue != binds:
        text += f"; requests wait for {queue}"
    return text + "."
