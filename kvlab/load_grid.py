"""What the section on load asks of a profile: request shapes, other builds of the model, pools that differ."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from kvlab.config import NAME, Strict

Count = Annotated[int, Field(gt=0)]


class Variant(Strict):
    """A server that differs from the profile's default in the fields of `set`."""

    name: str = Field(pattern=NAME)
    set: dict[str, str | int | float | bool] = Field(default_factory=dict)


class ModelVariant(Variant):
    """Another build of the model, or another model: then `geometry` names it."""

    geometry: str | None = None


class Shape(Strict):
    """A request: prompt and output length in tokens, and the concurrencies at which it is sent."""

    input_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    concurrency: tuple[Count, ...] = Field(min_length=1)
    rounds: int = Field(4, gt=0)  # measured requests = rounds x concurrency, at least min_requests
    min_requests: int = Field(8, gt=0)
    repeats: int | None = Field(None, gt=0)  # of this shape; empty: the grid's

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def requests(self, concurrency: int) -> int:
        """Measured requests of a point."""
        return max(self.rounds * concurrency, self.min_requests)


class Border(Strict):
    """Servers that differ in their KV pool alone, at the fewest clients that the first one does not hold to their end.

    The pool is left to the engine at each of the `starts`, one after another, the first with empty compile caches; or
    it is set by hand to each of the `pools`, in bytes.
    """

    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    starts: int = Field(0, ge=0)
    pools: tuple[Count, ...] = ()
    input_tokens: int = Field(gt=0)
    output_tokens: int = Field(gt=0)
    rounds: int = Field(4, gt=0)  # measured requests = rounds x clients

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.starts > 1) == (len(self.pools) > 1) or min(self.starts, len(self.pools)):
            raise ValueError("give either two or more starts, or two or more pools")
        return self


class Load(Strict):
    server: dict[str, str | int | float | bool] = Field(default_factory=dict)
    shapes: tuple[Shape, ...] = Field(min_length=1)
    fit_up_to: int = Field(gt=0)  # the step-time model sees only points up to this concurrency
    repeats: int = Field(1, gt=0)
    starts: int = Field(1, gt=0)  # servers of the same configuration that the repeats go round
    side_by_side: bool = False  # these servers and the variants fit into memory together, and start at once
    variants: tuple[ModelVariant, ...] = ()  # other builds, at the first shape and `variant_concurrency`
    variant_concurrency: tuple[int, ...] = (1,)
    variant_repeats: int | None = Field(None, gt=0)  # empty: the grid's
    cross_check: int = Field(0, ge=0)  # clients at which `vllm bench serve` sends the first shape too; 0: nowhere
    cross_check_turns: int | None = Field(None, gt=0)  # empty: as many as repeats
    border: Border | None = None  # what the size of the pool decides from start to start
