"""What is started and what is sent: strict, frozen descriptions that hash and print the same everywhere."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from kvlab import wrong_fields
from kvlab.errors import ConfigError

# A cell that leaves such a field at its default keeps the key that it had before the field existed.
ADDED_LATER = {
    "": ("workers", "service", "service_args", "placement"),
    "server": ("caches", "quantization", "enable_lora"),
    "load": (
        "text",
        "decode_input_tokens",
        "pick_seed",
        "warmup_concurrency",
        "prefix_order",
        "prefix_step_tokens",
        "client",
    ),
}
NOT_IN_KEY = ("preload",)  # of a server: how it comes up, not what it is then
NAMES = {"LoadConfig": "The load", "ServerConfig": "The server", "Cell": "The cell", "Shape": "The request shape"}
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"


class _Explained(type(BaseModel)):
    """Makes `LoadConfig(concurrency=0)` in a notebook a ConfigError; what pydantic itself builds is not affected."""

    def __call__(cls, *args, **values):
        try:
            return super().__call__(*args, **values)
        except ValidationError as error:
            raise _wrong(cls, error) from None


class Strict(BaseModel, metaclass=_Explained):
    """A frozen model in which an unknown field, a wrong type or a number that is not finite is an error."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    def model_copy(self, *, update: dict[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy whose changed fields are checked like all others; raises ConfigError."""
        return type(self)(**dict(self) | dict(update or {})) if update else super().model_copy(deep=deep)


class ServerConfig(Strict):
    """One vLLM server. `None` means: vLLM's own default, no flag is passed."""

    model: str  # "tiny" (embedded), "geometry:NAME" (published geometry, dummy weights), a folder, or a hub name
    engine: Literal["cpu", "cuda"] = "cuda"
    served_name: str = "kvlab"
    load_format: Literal["auto", "dummy"] = "auto"
    dtype: str | None = None
    max_model_len: int | None = Field(None, gt=0)
    block_size: int | None = Field(None, gt=0)
    kv_cache_memory_bytes: int | None = Field(None, gt=0)
    gpu_memory_utilization: float | None = Field(None, gt=0, le=1)
    kv_cache_dtype: str | None = None
    num_gpu_blocks_override: int | None = Field(None, gt=0)
    max_num_seqs: int | None = Field(None, gt=0)
    max_num_batched_tokens: int | None = Field(None, gt=0)
    enable_prefix_caching: bool | None = None
    enable_chunked_prefill: bool | None = None
    enforce_eager: bool = False
    tensor_parallel_size: int = Field(1, gt=0)
    attention_backend: str | None = None
    quantization: str | None = None  # of the weights, such as "fp8": 8 bits, made from the loaded ones at the start
    enable_lora: bool = False
    extra_args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    caches: Literal["user", "cold", "kept"] = "user"  # compile caches: the user's; a folder of kvlab's, emptied or not
    preload: bool = True  # a CPU server may be forked from a process that has imported vLLM; false: vLLM's own start


class LoadConfig(Strict):
    """One load: who arrives when, and with which prompts. Lengths in tokens, times in seconds."""

    arrival: Literal["closed", "poisson", "constant"] = "closed"
    concurrency: int = Field(1, gt=0)  # closed loop: clients
    rate_per_s: float | None = Field(None, gt=0)  # open loop: offered requests per second
    requests: int = Field(gt=0)  # measured requests, after the warm-up
    warmup_requests: int = Field(0, ge=0)  # sent first, drained, kept in the rows as phase "warmup"
    warmup_concurrency: int = Field(0, ge=0)  # clients of the warm-up; 0: as many as in the load
    workload: Literal["unique", "shared_prefix", "perplexity", "insertion"] = "unique"
    text: str | None = None  # perplexity: "heldout" (of the embedded model, the default) or the path of a text file
    input_tokens: int = Field(gt=0)  # the whole prompt, the shared prefix included
    output_tokens: int = Field(gt=0)
    prefix_tokens: int = Field(0, ge=0)
    prefixes: int = Field(1, gt=0)
    zipf: float = Field(0.0, ge=0)  # popularity exponent over the prefixes; 0 is uniform
    prefix_order: Literal["random", "cycle", "runs"] = "random"  # runs: ten requests of one prefix after another
    prefix_step_tokens: int = Field(0, ge=0)  # every other prefix is so much shorter, the others so much longer
    decode_input_tokens: int = Field(64, gt=0)  # insertion: prompt of the decoding request; input_tokens are inserted
    seed: int = 0
    pick_seed: int = 0  # of a service that this client picks for; the order of the requests stays that of `seed`
    timeout_s: float = Field(600.0, gt=0)  # one request, start to last event
    new_connection: bool = False  # a connection of its own for each request
    processes: int = Field(1, gt=0)
    client: Literal["kvlab", "vllm-bench"] = "kvlab"  # who sends it; another one only for a cross-check
    sample_interval_s: float = Field(0.25, gt=0, le=0.5)

    @model_validator(mode="after")
    def _consistent(self):
        if self.arrival != "closed" and self.rate_per_s is None:
            raise ValueError("open-loop arrivals need rate_per_s")
        if self.arrival == "closed" and self.rate_per_s is not None:
            raise ValueError("rate_per_s has no meaning in a closed loop; use concurrency")
        if self.workload == "shared_prefix" and not 0 < self.prefix_tokens < self.input_tokens:
            raise ValueError("a shared prefix must be longer than 0 and shorter than input_tokens")
        if self.workload == "perplexity" and (self.arrival, self.concurrency, self.output_tokens) != ("closed", 1, 1):
            raise ValueError("perplexity windows are sent one by one, in a closed loop with output_tokens = 1")
        if self.workload == "insertion" and self.decode_input_tokens > self.input_tokens:
            raise ValueError("decode_input_tokens may not be larger than input_tokens")
        if self.workload == "insertion" and (self.arrival != "constant" or self.requests < 2):
            raise ValueError("an insertion is one decoding request, then others: constant arrival, requests >= 2")
        if self.text is not None and self.workload != "perplexity":
            raise ValueError("text has a meaning for the workload perplexity only")
        if self.client != "kvlab" and (self.arrival, self.workload) != ("closed", "unique"):
            raise ValueError("another client sends unique prompts in a closed loop only")
        return self


class Cell(Strict):
    """One point of a grid: this load on this server, `repeat` counting measurements of the same point.

    `fresh` asks for a server of its own; other cells of the same ServerConfig share one. With a `service` the load goes
    to several workers of that configuration (kinds: kvlab.service, "l4:nginx", "kube_proxy", "router:<kind>").
    """

    name: str = Field(pattern=NAME)  # file name of the run, such as "c32-in512-out128"
    server: ServerConfig
    load: LoadConfig
    repeat: int = Field(0, ge=0)
    fresh: bool = False
    workers: int = Field(1, gt=0)
    service: str = Field("", pattern=r"^([a-z0-9_]+(:[A-Za-z0-9._-]+)?)?$")  # who picks the worker; empty: no service
    service_args: tuple[str, ...] = ()  # flags of the router or proxy
    placement: Literal["spread", "packed", "one"] = "spread"  # of the workers on several GPUs: kvlab.fleet

    @model_validator(mode="after")
    def _served(self):
        if not self.service and (self.workers > 1 or self.service_args):
            raise ValueError("several workers need a service that picks one, such as random_connection")
        return self


def build(model: type[Strict], values: dict[str, Any], where: str) -> Any:
    """`model` made from plain values; raises ConfigError that names `where` and each wrong field."""
    try:
        # JSON mode: lists stand for tuples, as TOML and notebooks write them; other types stay strict.
        return model.model_validate_json(json.dumps(values))
    except ValidationError as error:
        lines = "\n".join(f"  {line}" for line in wrong_fields.lines(error, model))
        raise ConfigError(f"{where} is not valid:\n{lines}", next_step="correct these fields") from None


def _wrong(model: type[BaseModel], error: ValidationError) -> ConfigError:
    """A value that a notebook or a program passed: the file is right, or was not even read."""
    lines = "\n".join(f"  {line}" for line in wrong_fields.lines(error, model))
    return ConfigError(
        f"{NAMES.get(model.__name__, model.__name__)} is not valid:\n{lines}",
        "a parameter of the notebook, or what it is combined with in the profile",
        "correct that parameter (-p NAME=VALUE, or the notebook's first code cell)",
    )


def key(cell: Cell) -> str:
    """12 hex digits that name the configuration of a cell; equal configurations have equal keys."""
    values = cell.model_dump(mode="json", exclude={"name": True, "server": set(NOT_IN_KEY)})
    for part, names in ADDED_LATER.items():
        model, there = (getattr(cell, part), values[part]) if part else (cell, values)
        for name in names:
            if there[name] in (type(model).model_fields[name].default, []):
                del there[name]
    text = json.dumps(values, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
