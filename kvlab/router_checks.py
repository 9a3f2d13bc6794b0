"""Whether a router does what its mode says, from its own metrics and log: pure functions over their texts.

A mode that cannot do its work falls back without an error, as a rule to the least loaded worker; its hits then look
like those of no routing at all.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from kvlab.startup_log import plain

ENOUGH = 10  # requests, before a mode is judged
SHARE = 0.9  # of the requests, that must have been placed as the mode says
HEARD = 0.5  # of the cached tokens that engines found, that a router with their events expected; it knows nearly all
HASH_KEY = re.compile(r"Extracted hash key: ([\w-]+:[\w-]+|\S+)")
COMPLETIONS = "/v1/completions"
REFUSAL = re.compile(r'Error adding model from discovery.* error="([^"]+)"')


@dataclass(frozen=True)
class Decisions:
    """What a router counted: completions, the policies that placed them, how prefixes decided, requests a worker."""

    completions: int = 0
    policies: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    workers: dict[str, int] = field(default_factory=dict)


# product -> (completions and their label, policies, outcomes of prefix decisions, requests a worker)
NAMES = {
    "vllm-router": (
        ("vllm_router_requests_total", "route"),
        ("vllm_router_policy_decisions_total", "policy"),
        ("vllm_router_prefix_routing_decisions_total", "outcome"),
        ("vllm_router_processed_requests_total", "worker"),
    ),
    "smg": (
        ("smg_http_requests_total", "path"),
        ("smg_worker_selection_total", "policy"),
        ("smg_cache_aware_policy_branch_total", "branch"),
        ("smg_worker_requests_total", "worker"),
    ),
}
# Outcomes of a decision that looked at the prefix, found or not.
LOOKED = {
    "vllm-router": ("prefix_hit", "prefix_miss", "prefix_balanced"),
    "smg": ("tree_match", "spill", "expected_wait_fallback", "tree_miss", "min_load", "imbalanced"),
}

# Those that knew it from an earlier request.
FOUND = {"vllm-router": ("prefix_hit", "prefix_balanced"), "smg": ("tree_match", "spill")}


def decisions(product: str, metrics: str) -> Decisions:
    """The counters of one /metrics text."""
    counts: dict[tuple[str, str], Counter] = {pair: Counter() for pair in NAMES[product]}
    wanted = {name: (name, label) for name, label in NAMES[product]}
    for family in text_string_to_metric_families(_useful(metrics, tuple(wanted))):
        for sample in family.samples:
            if pair := wanted.get(sample.name):
                counts[pair][sample.labels.get(pair[1], "")] += int(sample.value)
    asked, policies, outcomes, workers = (dict(+counts[pair]) for pair in NAMES[product])
    return Decisions(asked.get(COMPLETIONS, 0), policies, outcomes, workers)


def _useful(metrics: str, names: tuple[str, ...]) -> str:
    """Only the lines of these samples: a release with an odd line elsewhere must not hide them."""
    return "\n".join(line for line in metrics.splitlines() if line.startswith(names)) + "\n"


def fallbacks(
    product: str,
    policy: str,
    found: Decisions,
    log: str = "",
    session_header: str | None = None,
    hit_tokens: float = 0.0,
) -> list[str]:
    """What does not follow the mode, in words; nothing where all is well, or too few requests were placed to tell.

    `hit_tokens`: cached tokens that the engines counted meanwhile, so that prefixes did come again.
    """
    if found.completions < ENOUGH:
        return []
    problems = [
        f"{n} decisions were made by {name}, not by {policy}" for name, n in found.policies.items() if name != policy
    ]
    if not found.policies:
        problems.append(f"{found.completions} requests, and no decision of {policy} was counted")
    if policy in ("cache_aware", "kv_aware"):
        problems += _without_prefix(product, found) or _without_hit(product, found, hit_tokens)
    if session_header:
        problems += _other_keys(log, session_header)
    return problems


def _without_prefix(product: str, found: Decisions) -> list[str]:
    looked = sum(found.outcomes.get(name, 0) for name in LOOKED[product])
    if looked >= SHARE * found.completions:
        return []
    others = (
        ", ".join(f"{name} {n}" for name, n in found.outcomes.items() if name not in LOOKED[product]) or "none counted"
    )
    return [
        f"only {looked} of {found.completions} requests were placed by their prefix (other decisions: {others}); "
        "the rest went wherever the load was least"
    ]


def _without_hit(product: str, found: Decisions, hit_tokens: float) -> list[str]:
    if not hit_tokens or any(found.outcomes.get(name, 0) for name in FOUND[product]):
        return []
    told = ", ".join(f"{name} {n}" for name, n in found.outcomes.items())
    return [f"the engines found {hit_tokens:.0f} cached tokens, and the router knew no prefix again ({told})"]


def _other_keys(log: str, session_header: str) -> list[str]:
    keys = Counter(HASH_KEY.findall(plain(log)))
    wrong = {key: n for key, n in keys.items() if key != f"header:{session_header}"}
    if sum(wrong.values()) <= (1 - SHARE) * sum(keys.values()):
        return []
    told = ", ".join(f"{key} {n}" for key, n in list(wrong.items())[:3])
    return [f"{sum(wrong.values())} of {sum(keys.values())} requests were not hashed by {session_header} but by {told}"]


DYNAMO = {
    "completions": "dynamo_frontend_input_sequence_tokens_count",
    "looked": "dynamo_router_overhead_indexer_find_matches_ms_count",  # requests whose blocks were looked up
    "expected_tokens": "dynamo_component_router_kv_selected_cached_prefix_tokens_total",  # cached ones, as it believes
    "mismatched": "dynamo_component_router_kv_event_source_mismatch_workers",
}


# Releases without that counter: the sum of the cached shares that it expects, request by request, and of their tokens.
SHARES, TOKENS = "dynamo_component_router_kv_hit_rate_sum", "dynamo_frontend_input_sequence_tokens_sum"


def dynamo_counts(metrics: str) -> dict[str, int]:
    """What the frontend counted, summed over labels: requests, look-ups, expected cached tokens, odd event sources.

    Where a release counts no expected tokens, they are shares times mean input, and `estimated` is 1: the shorter
    requests, such as the first one of each frontend, make that a little too low.
    """
    names = (*DYNAMO.values(), SHARES, TOKENS)
    sums: Counter = Counter()
    for family in text_string_to_metric_families(_useful(metrics, names)):
        for sample in family.samples:
            if sample.name in names:
                sums[sample.name] += sample.value
    counts = {key: int(sums[name]) for key, name in DYNAMO.items()}
    if DYNAMO["expected_tokens"] not in sums and SHARES in sums and counts["completions"]:
        counts |= {"expected_tokens": round(sums[SHARES] * sums[TOKENS] / counts["completions"]), "estimated": 1}
    return counts


def dynamo_fallbacks(counts: dict[str, int], hit_tokens: float) -> list[str]:
    """What does not follow Dynamo's KV mode. `hit_tokens`: cached tokens that the engines counted meanwhile."""
    asked, looked = counts["completions"], counts["looked"]
    if asked < ENOUGH:
        return []
    problems = []
    if looked < SHARE * asked:
        problems.append(f"only {looked} of {asked} requests had their blocks looked up")
    elif (expected := counts["expected_tokens"]) < HEARD * hit_tokens:
        told = f"expected {expected}: it misses events" if expected else "expected none: it hears no events"
        problems.append(f"the engines found {hit_tokens:.0f} cached tokens, and the router {told}")
    if counts["mismatched"]:
        problems.append(f"{counts['mismatched']} workers publish events that the router cannot match")
    return problems


def dynamo_refusal(log: str) -> str | None:
    """Why Dynamo's frontend does not take the model that its workers offer, by its log's last word on it."""
    return next((found[1] for line in reversed(plain(log).splitlines()) if (found := REFUSAL.search(line))), None)


def death(log: str) -> str | None:
    """The line of a log that says why a router ended."""
    lines = [line.strip() for line in plain(log).splitlines() if line.strip() and not line.startswith("[leash]")]
    errors = [line for line in lines if re.search(r"\berror\b|panicked|Error:|ERROR|FATAL", line)]
    return (errors or lines or [None])[-1]
