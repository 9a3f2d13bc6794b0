"""Sentences about routes, made of claims: how near each comes to its bound, what the warm-up and the hop change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvlab import provenance
from kvlab.claims import Claim, parse_conditions
from kvlab.measure import Result
from kvlab.router_grid import ONE, TOGETHER


def by_route(claims: Iterable[Claim], quantity: str) -> dict[tuple[str, str], Claim]:
    """(routing, warmup) -> measured claim of a quantity."""
    found = {}
    for c in claims:
        where = parse_conditions(c.conditions)
        if c.quantity == quantity and c.measured is not None and "routing" in where:
            found[where["routing"], where.get("warmup", "")] = c
    return found


def reached(claims: Sequence[Claim], affinity: float, hashed: float) -> str | None:
    """Every route's share of the perfect bound, the best first."""
    found = sorted(by_route(claims, "hit_ratio").items(), key=lambda item: -item[1].measured)
    if not found:
        return None
    listed = ", ".join(f"{name} ({warm}) {c.measured:.0%}" for (name, warm), c in found)
    above = sum(c.measured > hashed for _, c in found)
    return (
        f"A perfect placement is bounded by {affinity:.1%}, a hash by {hashed:.1%}; {above} of {len(found)} routes "
        f"pass the hash. Hits: {listed}."
    )


def foretold(claims: Iterable[Claim]) -> str | None:
    """What a simulation of this very order says of the routes whose picks are known, beside what was counted."""
    found = by_route(claims, "order_hit_ratio")
    listed = [f"{name} {c.computed:.1%} (measured {c.measured:.1%})" for (name, _), c in found.items() if c.computed]
    if not listed:
        return None
    return (
        f"Simulated block by block, this very order of requests hits: {', '.join(listed)}. Where that differs from the "
        "law of many requests, it is the order that does it and not the route."
    )


def warmed(claims: Sequence[Claim]) -> str | None:
    """What the order of the warm-up alone changes, router by router."""
    found, busiest = by_route(claims, "hit_ratio"), by_route(claims, "busiest_worker_share")
    pairs = [
        (name, found[name, ONE], found[name, TOGETHER])
        for name, warm in found
        if warm == TOGETHER and (name, ONE) in found
    ]
    if not pairs:
        return None
    parts = []
    for name, one, both in pairs:
        loads = [busiest[name, warm].measured for warm in (ONE, TOGETHER) if (name, warm) in busiest]
        told = f"; the busiest worker got {loads[0]:.1f} and {loads[1]:.1f} times its share" if len(loads) == 2 else ""
        parts.append(
            f"{name} hits {one.measured:.1%} after a warm-up one by one, {both.measured:.1%} after one together{told}"
        )
    return "; ".join(parts) + "."


def quicker(claims: Sequence[Claim]) -> str | None:
    """Whether more hits are a quicker first token and more requests a second, against the route that hits least."""
    hit = by_route(claims, "hit_ratio")
    ttft, rate = by_route(claims, "ttft_p50_s"), by_route(claims, "requests_per_s")
    routes = [route for route in hit if route in ttft and route in rate]
    if len(routes) < 2:
        return None
    low, high = min(routes, key=lambda r: hit[r].measured), max(routes, key=lambda r: hit[r].measured)
    fastest = max(routes, key=lambda r: rate[r].measured)
    sooner, more = ttft[low].measured / ttft[high].measured, rate[high].measured / rate[low].measured
    return (
        f"From {low[0]} ({hit[low].measured:.0%} hits) to {high[0]} ({hit[high].measured:.0%}) the median first token "
        f"comes {sooner:.1f} times as fast, and {more:.1f} times as many requests are served; most are served by "
        f"{fastest[0]} ({fastest[1]}), {rate[fastest].measured:.1f} a second."
    )


def hop(claims: Iterable[Claim], noise_s: float | None) -> str | None:
    """What each router adds to the first token of a lone miss, beside what two direct runs differ by."""
    found = by_route(claims, "hop_adds_ttft_s")
    if not found:
        return None
    listed = ", ".join(f"{name} {1e3 * c.measured:+.2f} ms" for (name, _), c in found.items())
    beside = "" if noise_s is None else f"; two runs without a router differ by {1e3 * noise_s:.2f} ms"
    return f"The extra hop changes the median first token of a lone request that hits nothing by {listed}{beside}."


def hosts(results: Iterable[tuple[str, Result]]) -> str | None:
    """Which routes were measured on another host than the first one, where there are such."""
    known = [(name, r.run.manifest["provenance"]) for name, r in results if r.run is not None]
    other = [name for name, where in known if not provenance.same_host(where, known[0][1])]
    if not other:
        return None
    return (
        f"Measured on another host than the rest: {', '.join(other)}. Hits do not depend on it; "
        "their times and requests per second compare only roughly."
    )


def decided(results: Iterable[tuple[str, Result]]) -> str | None:
    """What the routers counted themselves: outcomes, or how many cached tokens they expected by the workers' events."""
    parts = []
    for name, result in results:
        counted = _decisions(result)
        if outcomes := counted.get("outcomes"):
            total = sum(outcomes.values())
            parts.append(f"{name}: " + ", ".join(f"{what} {n / total:.0%}" for what, n in outcomes.items()))
        elif found := counted.get("found_tokens"):
            expected = f"{'about ' if counted.get('estimated') else ''}{counted['expected_tokens']:,}"
            parts.append(
                f"{name}: it expected {expected} cached tokens where it sent requests, and {found:,} were found"
            )
    return f"By the routers' own counters: {'; '.join(parts)}." if parts else None


def _decisions(result: Result) -> Mapping:
    if result.run is None:
        return {}
    return ((result.run.manifest["server"] or {}).get("service") or {}).get("decisions") or {}
