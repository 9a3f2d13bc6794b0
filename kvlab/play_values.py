"""Where the sliders start: the values of one machine, from its claims; and the reader's own model."""

from __future__ import annotations

import json
import math
from functools import lru_cache
from pathlib import Path

import pandas as pd

from kvlab import beside, claims, display, geometry, measure, predict, provenance, steptime, store
from kvlab.claims import parse_conditions
from kvlab.errors import ConfigError, FormulaDoesNotApply
from kvlab.steptime import Shape, StepModel, StepPoint

ARTICLE_SERVER = {"model": "Qwen3-1.7B", "block_size": 16, "max_num_seqs": 64}  # what it says of its method


MEASURED = ("pool_tokens", "pool_gib", "prefill_tok_s", "step_ms", "per_request_ms", "per_ktoken_us", "fixed_ms")


def values_of(machine: str) -> dict[str, float | str]:
    """Slider values by name: settings of the machine's server, and of MEASURED what it measured.

    GiB, tokens, tokens per second, milliseconds, microseconds. Raises ConfigError for a machine without measurements.
    """
    path = store.machine_dir(machine) / claims.FILE
    if not path.is_file() or machine not in store.machines():
        known = {
            "cause": "a typing error, or nothing was measured there yet",
            "next_step": f"use one of: {', '.join(machines())}",
        }
        about = known if machines() else store.nothing_stored()
        raise ConfigError(f"There is no machine {machine!r} with measurements.", **about)
    return dict(_values(machine, path, path.stat().st_mtime_ns))


@lru_cache(maxsize=32)  # five boards ask for every machine, and its profile is read from its runs
def _values(machine: str, _path: Path, _changed: int) -> dict[str, float | str]:
    found = dict(ARTICLE_SERVER) if machine == measure.PUBLISHED else _profile_values(machine)
    tokens = _pool_tokens(machine)
    found |= {"pool_tokens": tokens, "prefill_tok_s": prefill_speed(machine)}
    per_token = predict.kv_bytes_per_token(geometry.load(str(found["model"])), found.get("kv_bytes"))
    found["pool_gib"] = math.ceil(tokens * per_token / 2**30 * 1e4) / 1e4 if tokens else None
    if model := step_model(machine):
        found |= {"step_ms": model.a_s * 1e3, "per_request_ms": model.b_s * 1e3, "per_ktoken_us": model.c_s * 1e9}
    hits = beside.points(machine, "prefix_cache", "ttft_hit_s", "tail").dropna(subset="measured")
    if len(hits) and found["prefill_tok_s"]:
        hit_s, tail = hits[["measured", "x"]].iloc[0].tolist()
        found["fixed_ms"] = max(0.0, hit_s - tail / found["prefill_tok_s"]) * 1e3
    return {name: value for name, value in found.items() if value is not None}


def _profile_values(machine: str) -> dict[str, float | str | None]:
    profile = measure.open_lab("load", machine=machine, mode="replay").profile
    server, shape = profile.server, geometry.load(profile.geometry)
    size = predict.kv_dtype_bytes(shape, server.kv_cache_dtype, server.dtype)
    return {
        "model": profile.geometry,
        "kv_bytes": size,
        "block_size": server.block_size,
        "max_num_seqs": server.max_num_seqs,
    }


def _pool_tokens(machine: str) -> int | None:
    found = beside.points(machine, "kv_capacity", "capacity_tokens", "block").dropna(subset="measured")
    plain = found[~found["conditions"].str.contains("kv_dtype=fp8", regex=False).astype(bool)]
    return int(plain.iloc[0]["measured"]) if len(plain) else None


def prefill_speed(machine: str) -> float | None:
    """Prefill speed in tok/s, from the section that measured it last."""
    found = (beside.value(machine, section, "prefill_tok_s") for section in ("prefix_cache", "chunked_prefill"))
    return next((speed for speed in found if speed), None)


def step_model(machine: str) -> StepModel | None:
    """The step-time model from the machine's claims at clients that all fit: the median gap, else the throughput."""
    speed, points = prefill_speed(machine), {}
    table = claims.read(store.machine_dir(machine))
    load = table[(table["section"] == "load") & table["measured"].notna()]
    for quantity in ("throughput_tok_s", "itl_p50_s"):  # the gap replaces what the throughput says
        for row in load[load["quantity"] == quantity].to_dict("records"):
            where = parse_conditions(row["conditions"])
            if set(where) != {"c", "in", "out"}:
                continue
            clients, shape = int(where["c"]), Shape(int(where["in"]), int(where["out"]), speed)
            fit = _fit(machine, shape)
            if fit is None or clients > fit:
                continue
            direct = quantity == "itl_p50_s"
            step_s = row["measured"] if direct else steptime.step_from_throughput(clients, row["measured"], shape)
            if step_s > 0:
                points[clients, shape] = StepPoint(clients, clients * shape.mean_kv_tokens(), step_s)
    try:
        return steptime.fit(points.values())
    except ConfigError:
        return None


def _fit(machine: str, shape: Shape) -> float | None:
    where = {"in": shape.input_tokens, "out": shape.output_tokens}
    own = beside.value(machine, "load", "requests_that_fit_low", "computed", **where)
    return own if own is not None else beside.article_fit(machine, **where)


def machines() -> list[str]:
    """Where the sliders can start: this computer first if it measured something, then the published and committed."""
    here = provenance.machine_name()
    return sorted(store.machines(), key=lambda name: (name != here, name != measure.PUBLISHED, name))


# -- the reader's own model ---------------------------------------------------------------------------------------


def read_model(text: str | Path | dict) -> geometry.Geometry:
    """The geometry in a pasted config.json, at a path, or of a known name. Raises ConfigError."""
    if isinstance(text, dict):
        return geometry.from_config(text, "your model")
    words = str(text).strip()
    if not words.startswith(("{", "[")):
        if not words:
            raise ConfigError("No model was given.", next_step="paste a config.json, or give a path or a name")
        return geometry.load(words)
    try:
        config = json.loads(words)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"The pasted text is not valid JSON: {error}",
            cause="a part of the file is missing, or it was pasted twice",
            next_step="copy the whole config.json, from the first { to the last }",
        ) from None
    name = config.get("_name_or_path") if isinstance(config, dict) else None
    return geometry.from_config(config, str(name or "your model"))


def what_if(
    model: str | Path | dict | geometry.Geometry,
    pool_gib: float = 16.0,
    block_size: int = 16,
    input_tokens: int = 512,
    output_tokens: int = 128,
    kv_bytes: float | None = None,
    tensor_parallel: int = 1,
) -> pd.DataFrame:
    """What the formulas say of a model: quantity and value. Where they do not apply the only row says why."""
    shape = model if isinstance(model, geometry.Geometry) else read_model(model)
    try:
        predict.require_formula(shape)
    except FormulaDoesNotApply as refusal:
        rows = [("the formula does not apply", f"{refusal.cause}. Next: {refusal.next_step}")]
        return pd.DataFrame(rows, columns=["quantity", "value"]).set_index("quantity")
    per_token = predict.kv_bytes_per_rank(shape, kv_bytes, tensor_parallel)
    blocks = predict.num_blocks(int(pool_gib * 2**30), per_token, block_size)
    fit = predict.requests_that_fit(blocks, input_tokens, output_tokens, block_size)
    longest = predict.longest_model_len(blocks, block_size)
    weights = predict.weight_bytes(shape)
    rows = [
        ("attention", shape.structure),
        ("KV bytes per token" + (" and rank" if tensor_parallel > 1 else ""), f"{per_token:,.0f}"),
        ("blocks", f"{blocks:,} of {block_size} tokens"),
        ("usable", display.usable_tokens(blocks, block_size)),
        (f"requests of {input_tokens:,} + {output_tokens:,} that fit", display.fit(*fit)),
        ("longest single request", f"{min(longest, shape.max_len or longest):,} tokens"),
        ("weights, in 16 bits", f"{weights / 2**30:.2f} GiB" if weights else "not modelled for this architecture"),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value"]).set_index("quantity")
