"""Other builds of the model, such as weights in 8 bits, beside the plain server: in words, and as rows of a figure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes

from kvlab import claims, plot
from kvlab.claims import Claim

STEP = "variant_itl_p50_s"


def told(plain_s: Mapping[int, float], found: Iterable[Claim]) -> list[str]:
    """One sentence a number of clients: how far each build's gap between tokens is from the plain server's.

    `plain_s`: that gap in seconds by clients.
    """
    by_clients: dict[int, list[str]] = {}
    for claim in found:
        clients = int(_where(claim, "c"))
        if claim.quantity == STEP and claim.measured and clients in plain_s:
            change = claim.measured / plain_s[clients] - 1
            expected = "" if claim.computed is None else f" (computed {claim.computed / plain_s[clients] - 1:+.0%})"
            by_clients.setdefault(clients, []).append(f"{_where(claim, 'variant')} {change:+.0%}{expected}")
    return [
        f"Gap between tokens at {clients} {'client' if clients == 1 else 'clients'}, against the plain server: "
        f"{', '.join(parts)}."
        for clients, parts in by_clients.items()
    ]


def draw(axis: Axes, plain_s: float | None, found: Iterable[Claim]) -> None:
    """A row a build: computed bar, measured dot, interval and residual in milliseconds; the plain server on top."""
    steps = [claim for claim in found if claim.quantity == STEP]
    if plain_s is not None:
        axis.axvline(1e3 * plain_s, color=plot.COMPUTED, ls=":", lw=1.2, zorder=1, label="plain server")
        axis.plot([1e3 * plain_s], [0], "o", color=plot.MEASURED, zorder=4, label="measured")
    for y, claim in enumerate(steps, 1):
        if claim.measured is None:
            axis.text(0.02, y, "not measured", transform=axis.get_yaxis_transform(), va="center", fontsize=9)
            continue
        if None not in (claim.ci_low, claim.ci_high):
            axis.plot([1e3 * claim.ci_low, 1e3 * claim.ci_high], [y, y], color=plot.MEASURED, lw=1.6, alpha=0.7)
        axis.plot([1e3 * claim.measured], [y], "o", color=plot.MEASURED, zorder=4)
        if claim.computed is not None:
            axis.plot([1e3 * claim.computed], [y], "|", ms=20, mew=2.5, color=plot.COMPUTED, zorder=3)
            residual = f"{claim.measured / claim.computed - 1:+.1%}"
            axis.text(1.01, y, residual, transform=axis.get_yaxis_transform(), va="center", fontsize=9)
    axis.set_yticks(range(len(steps) + 1), ["plain", *(_where(claim, "variant") for claim in steps)])
    axis.plot([], [], "|", ms=14, mew=2.5, color=plot.COMPUTED, label="computed")
    axis.text(1.01, 0, "residual", transform=axis.get_yaxis_transform(), va="center", fontsize=9)
    axis.set_ylim(len(steps) + 0.6, -0.6)
    axis.set_xlim(left=0)
    axis.set_xlabel("ms")


def _where(claim: Claim, key: str) -> str:
    return claims.parse_conditions(claim.conditions)[key]
