"""Several workers behind one address: who picks the worker of a request, and whether the workers belong together.

Service(endpoints, "random_connection")        # this client picks, as Kubernetes' Service would: per connection
Service(endpoints, "url", entrance=endpoint)   # an address that picks by itself: a proxy, a router, a cluster's Service
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd

from kvlab import control
from kvlab.client import Endpoint
from kvlab.config import LoadConfig
from kvlab.control import Capacity
from kvlab.errors import ConfigError, ServerError
from kvlab.scrape import counter_delta
from kvlab.workload import ROLES, Request

# Picked here, at the time of planning, so that a seed repeats every pick.
CLIENT_PICKS = ("random_connection", "random_request", "round_robin", "hash", "placed", "fixed")
PER_CONNECTION = ("random_connection", "l4", "kube_proxy", "kubernetes")  # kinds whose picks hold for a connection
PICK = 7  # random stream of the picks, beside those of workload.py


@dataclass(frozen=True)
class Service:
    """`endpoints`: the workers, each with its name in `worker`; their counters are watched during a load.

    `how`: random_connection, random_request (uniform, seeded), round_robin (in the order of sending), hash (of the
    prefix), placed (prefix k on worker k mod N: a perfect placement), fixed (the first worker). Any other kind has an
    `entrance`, the address that picks by itself; which worker answered is then null in the rows, and each worker's
    counters tell its share. A kind of PER_CONNECTION, up to its colon, asks for a new connection for each request.
    """

    endpoints: Sequence[Endpoint]
    how: str = "random_connection"
    seed: int = 0
    entrance: Endpoint | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def __post_init__(self):
        if not self.endpoints:
            raise ConfigError(
                "A service without workers serves nobody.", next_step="start workers, or wait until one is ready"
            )
        names = [endpoint.worker for endpoint in self.endpoints]
        if len(names) > 1 and (None in names or len(set(names)) < len(names)):
            raise ConfigError(f"Workers need names of their own; these are {names}.", next_step="set Endpoint.worker")
        if self.how not in CLIENT_PICKS and self.entrance is None:
            raise ConfigError(
                f"The service {self.how!r} is not picked by the client, and has no address.",
                next_step=f"give its entrance, or use one of: {', '.join(CLIENT_PICKS)}",
            )

    @property
    def first(self) -> Endpoint:
        """Where a single request may go: the entrance, or the first worker."""
        return self.entrance or self.endpoints[0]

    @property
    def addresses(self) -> list[Endpoint]:
        """Every address that requests are sent to."""
        return list(self.endpoints) if self.entrance is None else [self.entrance]

    @property
    def vocab(self) -> tuple[int, int]:
        """Token ids that every worker takes."""
        if self.entrance is not None and self.entrance.words is not None:
            return self.entrance.vocab  # numbers of words, not of tokens
        ranges = [endpoint.vocab for endpoint in self.endpoints]
        return max(low for low, _ in ranges), min(high for _, high in ranges)

    @property
    def per_connection(self) -> bool:
        """Whether a pick holds as long as the connection does."""
        return self.how.partition(":")[0] in PER_CONNECTION

    def check_load(self, load: LoadConfig) -> None:
        """ConfigError for a client that would stay with one worker: it reuses connections that are picked once."""
        if self.per_connection and not load.new_connection:
            raise ConfigError(
                f"The service {self.how!r} picks a worker per connection, and this load reuses connections.",
                cause="each client would stay with the worker of its first request, and hit more than it should",
                next_step="set new_connection = true, or pick per request (random_request)",
            )

    def targets(self, requests: Sequence[Request], phase: str) -> list[Endpoint]:
        """The endpoint of each request, in order."""
        if self.entrance is not None:
            return [self.entrance] * len(requests)
        return [self.endpoints[pick] for pick in self._picks(requests, phase)]

    def _picks(self, requests: Sequence[Request], phase: str) -> list[int]:
        n = len(self.endpoints)
        if self.how.startswith("random"):
            rng = np.random.default_rng([self.seed, PICK, ROLES[phase]])
            return rng.integers(n, size=len(requests)).tolist()
        if self.how == "round_robin":
            return [request.index % n for request in requests]
        if self.how == "fixed":
            return [0] * len(requests)
        owned = [request.index if request.prefix is None else request.prefix for request in requests]
        return [number % n if self.how == "placed" else hashed(self.seed, number, n) for number in owned]


def hashed(seed: int, prefix: int, workers: int) -> int:
    """The worker of a prefix by a hash: the same in every process, independent of the other prefixes."""
    digest = hashlib.sha256(f"{seed}/{prefix}".encode()).digest()
    return int.from_bytes(digest[:8], "big") % workers


def of(target: Endpoint | Service) -> Service:
    """A lone endpoint as a service of one worker."""
    return target if isinstance(target, Service) else Service([target], "fixed")


# -- do the workers belong together? ------------------------------------------------------------------------------


def check_workers(endpoints: Sequence[Endpoint]) -> list[Capacity]:
    """The capacity of each worker. ServerError where one is unreachable or foreign, hides its hits, or differs.

    Foreign: it serves another model, or no vLLM answers there. Different block sizes or pools would make one hit ratio
    a mixture of several.
    """
    capacities = [_capacity(endpoint) for endpoint in endpoints]
    check_alike(endpoints, capacities)
    return capacities


def check_alike(endpoints: Sequence[Endpoint], capacities: Sequence[Capacity]) -> None:
    """ServerError where the workers have different models, block sizes or pools, or only some of them cache."""
    models = {e.worker: e.model for e in endpoints}
    if len(set(models.values())) > 1:
        told = ", ".join(f"{worker}: {model}" for worker, model in models.items())
        raise ServerError(f"The workers serve different models: {told}", next_step="start all of one model")
    for name in ("metric_block_size", "metric_blocks", "prefix_caching"):
        values = {e.worker: getattr(c, name) for e, c in zip(endpoints, capacities, strict=True)}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{worker}: {value}" for worker, value in values.items())
            raise ServerError(
                f"The workers differ in {name.removeprefix('metric_')}: {told}",
                "they were started with different flags, or an old one is among them",
                "start all workers from one configuration",
            )


def _capacity(endpoint: Endpoint) -> Capacity:
    who = f"The worker {endpoint.worker or ''} at {endpoint.base_url}".replace("  ", " ")
    try:
        names = [model.get("id") for model in control.served_models(endpoint)]
    except (OSError, ServerError) as error:
        raise ServerError(
            f"{who} does not answer: {error}",
            "it is not running, still starting, or another program listens there",
            f"curl {endpoint.url('/v1/models')}",
        ) from None
    if endpoint.model not in names:
        raise ServerError(
            f"{who} serves {', '.join(map(str, names)) or 'nothing'}, not {endpoint.model}",
            "a server of somebody else, or workers of two models",
            "give the addresses of workers of one model",
        )
    capacity = control.read_capacity(endpoint)
    if capacity.metric_block_size is None:
        raise ServerError(
            f"{who} has no counters of vLLM in its /metrics",
            "it is a router or another kind of server, and hits could not be checked",
            "give the addresses of the workers themselves",
        )
    if not reports_cached_tokens(endpoint):
        raise ServerError(
            f"{who} does not report cached tokens: every request would look like a miss",
            "it runs without --enable-prompt-tokens-details",
            "start it with that flag",
        )
    return capacity


def reports_cached_tokens(endpoint: Endpoint) -> bool:
    """Whether usage.prompt_tokens_details.cached_tokens is there, hit or not."""
    status, answer = control.complete(endpoint, [endpoint.vocab[0]])
    if not control.answers(status, answer):
        raise ServerError(f"{endpoint.base_url} answers no completion: HTTP {status}, {str(answer)[:200]}")
    return ((answer.get("usage") or {}).get("prompt_tokens_details") or {}).get("cached_tokens") is not None


# -- what each worker did -----------------------------------------------------------------------------------------


def by_worker(requests: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
    """One row a worker, warm-up included: requests, prompt_tokens, cached_tokens (of the rows), and the growth of its
    counters finished, prefix_queries, prefix_hits. The rows' columns are null where an entrance picked the worker.
    """
    found = []
    known = requests["worker"].notna().any()
    for name, sampled in samples.groupby(samples["worker"].fillna(""), sort=True):
        rows = requests[(requests["worker"].fillna("") == name) & requests["ok"].fillna(False)]
        own = {name: int(rows[name].sum()) if known else None for name in ("prompt_tokens", "cached_tokens")}
        grown = {name: counter_delta(sampled, name) for name in ("requests_finished", "prefix_queries", "prefix_hits")}
        found.append({"worker": name, "requests": len(rows) if known else None} | own | grown)
    return pd.DataFrame(found)
