"""A profile: the parameters of a machine, in one strict TOML file. It holds what is asked for, never a result."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from kvlab import profile_file
from kvlab.config import NAME, ServerConfig, Strict, build
from kvlab.errors import REPLAY, ConfigError
from kvlab.load_grid import Count, Load, Shape, Variant
from kvlab.profile_file import FOLDER as FOLDER
from kvlab.profile_file import built_in as built_in  # names are offered here too


class KvServer(Variant):
    """`burst`: in place of the section's, where more would teach nothing."""

    burst: int | None = Field(None, gt=0)


class KvCapacity(Strict):
    servers: tuple[KvServer, ...] = Field(min_length=1)
    input_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    burst: int = Field(gt=0)  # requests sent at once to see how many run together
    side_by_side: bool = False  # all the servers fit into memory together, and start at once


class PrefixCache(Strict):
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    prefix_tokens: int = Field(gt=0)
    tail_tokens: int = Field(gt=0)
    prefixes: int = Field(gt=0)
    requests: int = Field(gt=0)  # sent one by one over all the prefixes
    cost_input_tokens: int = Field(gt=0)
    cost_output_tokens: int = Field(gt=0)
    cost_concurrency: int = Field(gt=0)
    cost_requests: int = Field(gt=0)
    cost_repeats: int = Field(2, gt=0)
    single_requests: int = Field(6, gt=0)  # of each run with one client
    single_repeats: int = Field(3, gt=0)  # with one client, caching on and off in turn
    cost_side_by_side: bool = False  # on and off take turns on two servers; else each repeat has a server of its own


class KvFormat(Strict):
    """A server whose perplexity is compared with that of the format named `base`; a base has none."""

    name: str = Field(pattern=NAME)
    set: dict[str, str | int | float | bool] = Field(default_factory=dict)
    base: str | None = None
    repeats: int = Field(2, gt=0)  # of all windows on one server: only a second one shows what does not repeat


class Fp8Kv(Strict):
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    base_name: str = Field(pattern=NAME)  # what the KV cache holds without the flag, such as bf16
    short: Shape  # first concurrency: compared in turns; the others: for the step-time model
    long: Shape  # first concurrency: the queue; the others: for the step-time model
    repeats: int = Field(gt=1)
    side_by_side: bool = False  # both servers fit into memory together and take turns
    quality_server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    formats: tuple[KvFormat, ...] = Field(min_length=2)
    text: str = "heldout"  # of the embedded model, or the path of a text file
    windows: int = Field(gt=1)
    window_tokens: int = Field(gt=1)
    reference_windows: int = Field(4, ge=0)  # of these, how many go through transformers too; 0: none


class LongInputs(Strict):
    """Three long inputs into one decoding request, at fixed times."""

    input_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=1)  # of the decoding request: long enough to outlast the inputs
    every_s: float = Field(gt=0)
    repeats: int = Field(3, gt=1)


class Repeatability(Strict):
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    shape: Shape
    repeats: int = Field(gt=2)  # on the first server
    starts: int = Field(gt=1)  # servers, the first one included; each later one measures once
    side_by_side: bool = False  # all the servers fit into memory together, and start at once
    half_width: float = Field(0.01, gt=0)  # relative: the precision for which the repeats are counted
    insertion: LongInputs | None = None  # the longest gap of a decoding request, repeated on the first server
    weights_turns: int = Field(0, ge=0)  # of the largest load, with trained and with random weights; 0: none


class LoadPoint(Strict):
    """One closed loop: its requests, its clients, and how many requests they send."""

    input_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    concurrency: int = Field(gt=0)
    requests: int = Field(gt=0)


class Preemption(Strict):
    """`fit` gives the step time, at low concurrency; the first of the `points` is drawn over time.

    The pair is two equal requests that fill the pool of `pair_server`, so that the first one evicts the second one.
    """

    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    fit: Shape
    points: tuple[LoadPoint, ...] = Field(min_length=1)
    repeats: int = Field(1, gt=0)
    pair_server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    pair_output_tokens: int = Field(gt=0)
    pair_repeats: int = Field(3, gt=0)
    map_input_tokens: tuple[Count, ...] = Field(min_length=2)
    map_output_tokens: tuple[Count, ...] = Field(min_length=1)
    map_concurrency: tuple[Count, ...] = Field(min_length=2)
    map_rounds: int = Field(2, gt=0)
    log_steps: bool = False  # of the loads too, as the pair needs it: one server less, where the engine takes that flag
    side_by_side: bool = False  # its three servers fit into memory together
    measure_map: bool = False  # false: the map is computed, and only the points are measured


class MaxNumSeqs(Strict):
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    fit: Shape
    load: LoadPoint
    caps: tuple[Count, ...] = Field(min_length=2)  # below, at and above the requests that fit
    repeats: int = Field(1, gt=0)
    side_by_side: bool = False  # the servers of all caps fit into memory together and take turns


class Insertion(Strict):
    """Long inputs of one length, beside one decoding request."""

    input_tokens: int = Field(gt=0)
    chunks: tuple[Count, ...] = Field(min_length=1)  # max_num_batched_tokens; the first measures the prefill speed
    inserts: int = Field(3, gt=0)
    repeats: int = Field(1, gt=0)


class ChunkedPrefill(Strict):
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    inputs: tuple[Insertion, ...] = Field(min_length=1)
    side_by_side: bool = False  # the servers of all chunks fit into memory together and take turns


class GraphModel(Strict):
    """One model size; `geometry` names it in claims, and its layers scale the launch time of a step."""

    geometry: str
    set: dict[str, str | int | float | bool] = Field(default_factory=dict)


class CudaGraphs(Strict):
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    models: tuple[GraphModel, ...] = Field(min_length=1)  # the smallest first: it gives the launch time
    concurrency: tuple[Count, ...] = Field(min_length=1)  # the lowest first
    input_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    rounds: int = Field(2, gt=0)
    min_requests: int = Field(4, gt=0)
    repeats: int = Field(1, gt=0)  # each on a server of its own, the two arms in turn
    runs: int = Field(1, gt=0)  # measurements of each point on one server
    side_by_side: bool = False  # both servers of a model fit into memory together; with one start each they take turns


class Startup(Strict):
    servers: tuple[Variant, ...] = Field(min_length=1)
    starts: int = Field(2, gt=1)  # the first with empty caches, the others with what it left
    unpinned: bool = False  # leave the size of the KV pool to the engine
    input_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    requests: int = Field(4, gt=1)  # sent one by one after the start: the first shows what is compiled even then


class FleetPoints(Strict):
    """Cells of one fleet and one concurrency, a cell for each number of prefixes."""

    workers: int = Field(gt=0)
    concurrency: int = Field(gt=0)
    prefixes: tuple[int, ...] = Field(min_length=1)
    repeats: int = Field(1, gt=0)


class Lengths(Strict):
    """A shared prefix, the tail of each request and its output, in tokens, over so many prefixes."""

    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    prefix_tokens: int = Field(gt=0)
    tail_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    prefixes: int = Field(gt=0)


class HitLimits(Strict):
    """What the plain law leaves out; each point is one cell of the first points' fleet and concurrency."""

    prefixes: int = Field(gt=1)
    zipf: tuple[float, ...] = ()  # popularity exponents
    orders: tuple[str, ...] = ()  # cycle, runs
    step_tokens: int = Field(0, ge=0)  # two prefix lengths, so much below and above
    ample: Lengths | None = None  # all prefixes fit into each worker
    scaled: Lengths | None = None  # other lengths and another pool, the same ratios: one server
    proxies: tuple[str, ...] = ()  # services that pick by themselves, where they are installed


class ServiceHitRate(Strict):
    geometry: str
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    prefix_tokens: int = Field(gt=0)
    tail_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    points: tuple[FleetPoints, ...] = Field(min_length=1)  # in the order of importance; repeats come last
    requests_per_prefix: int = Field(20, gt=0)
    min_requests: int = Field(200, gt=0)
    limits: HitLimits | None = None


class Route(Strict):
    """A way of picking the worker; `together`: also with a warm-up by all clients at once, beside one after another."""

    service: str  # as in Cell
    name: str | None = Field(None, pattern=NAME)  # in claims; needed where two routes differ in their args only
    args: tuple[str, ...] = ()
    together: bool = False
    hop: bool = False  # measure what it adds to the first token of a request that hits nothing


class Routing(Strict):
    """The lengths, the pool and the geometry are those of [service_hit_rate]."""

    workers: int = Field(gt=1)
    concurrency: int = Field(gt=0)
    prefixes: int = Field(gt=1)
    requests: int = Field(gt=0)
    routes: tuple[Route, ...] = Field(min_length=1)
    hop_requests: int = Field(40, gt=0)
    hop_input_tokens: int = Field(64, gt=0)


class SeveralGpus(Strict):
    """One server over all GPUs against one on each behind a service; and the fleet of [service_hit_rate] spread out."""

    gpus: int = Field(gt=1)
    shape: Shape  # its concurrencies, whole multiples of `gpus` or 1, of all servers together
    repeats: int = Field(1, gt=0)
    workers: int = Field(gt=1)
    concurrency: int = Field(gt=0)
    prefixes: int = Field(gt=1)
    services: tuple[str, ...] = Field(min_length=1)  # as in Cell
    placements: tuple[Literal["packed", "one"], ...] = ()  # the first service's fleet, placed so too (kvlab.fleet)


class Profile(Strict):
    name: str = Field(pattern=NAME)
    title: str
    geometry: str  # name of the model's geometry: computed numbers come from it
    min_gpu_gib: float = Field(0, ge=0)  # 0: needs no GPU
    server: ServerConfig
    kv_capacity: KvCapacity
    load: Load
    prefix_cache: PrefixCache
    chunked_prefill: ChunkedPrefill | None = None
    cuda_graphs: CudaGraphs | None = None
    startup: Startup | None = None
    preemption: Preemption | None = None
    max_num_seqs: MaxNumSeqs | None = None
    fp8_kv: Fp8Kv | None = None
    repeatability: Repeatability | None = None
    routing: Routing | None = None  # needs service_hit_rate
    several_gpus: SeveralGpus | None = None  # needs service_hit_rate
    service_hit_rate: ServiceHitRate | None = None  # hit_and_miss reads its runs, and a section of routers its workers

    def server_with(self, changes: dict) -> ServerConfig:
        """The profile's server with some fields changed; an unknown field is a ConfigError."""
        values = self.server.model_dump(mode="json") | dict(changes)
        return build(ServerConfig, values, f"the server of profile {self.name}")

    def section_server(self, section: str) -> ServerConfig:
        """The server as that section's grid wants it."""
        return self.server_with(getattr(getattr(self, section, None), "server", {}))


def load_profile(name_or_path: str) -> Profile:
    """The built-in profile of that name, or the TOML file at that path. Raises ConfigError.

    A relative model, geometry or text in a file is found from the folder of that file.
    """
    where, values = profile_file.read(name_or_path)
    profile = build(Profile, values, where)
    for changes in _server_changes(profile):
        profile.server_with(changes)
    return profile


def _server_changes(part: Strict) -> Iterator[dict]:
    """What the sections change of the server: a wrong flag is found on reading, not at the tenth start."""
    for name in type(part).model_fields:
        value = getattr(part, name)
        if isinstance(value, dict) and name.endswith(("set", "server")):
            yield value
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Strict):
                yield from _server_changes(inner)


def choose(hardware) -> str:
    """The built-in profile for this hardware (`provenance.Hardware`): by GPU name, then by GPU memory, else the CPU."""
    if not hardware.gpus:
        return "cpu-tiny"
    gpu = hardware.gpus[0]
    if "H200" in gpu["name"]:
        return "h200"
    return "gpu-8gb"


def check_fits(profile: Profile, hardware) -> None:
    """Raises ConfigError where the machine's largest GPU is too small for the profile, and says what would fit."""
    if not profile.min_gpu_gib:
        return
    best = max((gpu["memory_bytes"] for gpu in hardware.gpus), default=0) / 2**30
    if best < profile.min_gpu_gib:
        have = f"the largest GPU here has {best:.1f} GiB" if best else "no NVIDIA GPU is visible here"
        fitting = [known for name in built_in() if (known := load_profile(name)).min_gpu_gib <= best]
        largest = max(fitting, key=lambda known: known.min_gpu_gib)
        raise ConfigError(
            f"Profile {profile.name} needs a GPU of at least {profile.min_gpu_gib:g} GiB; {have}.",
            next_step=f"use --profile {largest.name}, which fits, or your own TOML file with a smaller model and "
            f"kv_cache_memory_bytes, or {REPLAY}",
        )
