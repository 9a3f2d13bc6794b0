"""What `kvlab check` and `kvlab predict` print."""

from __future__ import annotations

import math
import re

from kvlab import (
    claims,
    display,
    geometry,
    gpu_pool,
    measure,
    predict,
    profile,
    provenance,
    ready,
    run,
    store,
    time_left,
)
from kvlab.errors import ConfigError, KvlabError


def text(profile_name: str, machine: str) -> tuple[str, list[KvlabError]]:
    """(what to print, what stands against measuring): hardware, engine, profile, and for each section what is stored.

    Raises ConfigError where the profile cannot be read or there are no notebooks.
    """
    run.require_notebooks()
    hardware = provenance.hardware()
    machine = machine or provenance.machine_name()  # asks what would be measured here, not what is replayed
    lab = measure.open_lab("kv_capacity", profile_name=profile_name, machine=machine, mode="replay")
    engine = "none; `make install` adds one"
    if hardware.has_vllm:
        engine = f"vLLM {hardware.vllm_version} ({hardware.engine})"
    lines = [
        f"hardware  {provenance.hardware_line(provenance.collect())}",
        f"engine    {engine}",
        f"profile   {lab.profile.name}: {lab.profile.title}",
        *_builds(lab.profile),
        f"machine   {lab.machine} (measurements go to {store.machine_dir(lab.machine)})",
        "",
        f"{'section':<16} {'stored runs':>11} {'wait for one':>12} {'seconds':>9}  measured before on",
    ]
    sections, waiting = list(run.notebooks()), without_run(lab.machine)
    took = time_left.of_sections(sections, lab.profile, lab.machine)
    for section, found in took.items():
        stored = len([r for r in store.list_runs(lab.machine, section) if r.manifest.get("valid")])
        shown = "-" if found.seconds is None else f"{found.seconds:.0f}"
        lines.append(
            f"{section:<16} {stored:>11} {waiting.get(section, ''):>12} {shown:>9}  {found.machine or found.why}"
        )
    if waiting:
        lines += ["", "Wait for one: claims of the last replay or measurement whose point has no run on this machine."]
    about = [_in_all(took), time_left.gpu_told(took, lab.profile.server.engine)]
    against = ready.problems(lab)
    passed = f"Checked as before measuring: {', '.join(ready.checks(lab))}. Nothing stands against it."
    verdict = "\n".join(["This profile cannot be measured here:", *map(str, against)]) if against else passed
    return "\n".join([*lines, "", *filter(None, about), "", verdict]), against


def _in_all(took: dict[str, time_left.Took]) -> str:
    total = sum(found.seconds or 0 for found in took.values())
    if not total:
        return "No stored run of this profile says how long measuring takes; each notebook's first lines name a time."
    left_out = [f"{name} ({found.why})" for name, found in took.items() if found.why in time_left.WANTED]
    without = f" Not in it: {', '.join(left_out)}." if left_out else ""
    return (
        f"Measuring everything anew takes about {_minutes(total)}: the sum of what the stored runs of this "
        f"profile took on those machines, server starts included.{without} Another machine takes another time."
    )


def _minutes(seconds: float) -> str:
    """Whole minutes: the next machine differs by more; of less than two, the seconds."""
    return f"{seconds / 60:.0f} minutes" if seconds >= 120 else f"{seconds:.0f} seconds"


def _builds(chosen: profile.Profile) -> list[str]:
    names = [variant.name for variant in chosen.load.variants]
    return [f"          other builds of the model, in the section load: {', '.join(names)}"] if names else []


def without_run(machine: str) -> dict[str, int]:
    """By section, how many claims of a machine were stated without a run of their point; none where there are none."""
    table = claims.read(store.machine_dir(machine))
    lacking = table[table["reason"].fillna("").str.startswith(measure.NO_RUN)]
    return {str(section): int(n) for section, n in lacking["section"].value_counts(sort=False).items()}


def size_bytes(text: str) -> float:
    """2.5e9, 2.5GB (10^9) or 2.5GiB (2^30) as bytes; ConfigError for anything else."""
    match = re.fullmatch(r"\s*([-+\d.e_]+|[-+]?(?:nan|inf))\s*([kmgt]?)(i?)b?\s*", text, re.I)
    try:
        number = float(match[1])
    except (TypeError, ValueError):
        raise ConfigError(f"{text!r} is no size.", next_step="write 2.5e9, 2.5GB or 2.5GiB") from None
    power = " kmgt".index(match[2].lower() or " ")
    return number * (1024 if match[3] else 1000) ** power


def element_bytes(text: str | None) -> float | None:
    """Bytes of a KV element from a number or vLLM's name of a type; null for null. ConfigError for what is none."""
    if text is None:
        return None
    try:
        size = float(predict.KV_DTYPE_BYTES.get(text, text))
    except ValueError:
        size = math.nan
    if size not in ELEMENTS:
        raise ConfigError(
            f"--kv-dtype-bytes is {text!r}; no KV element has so many bytes.",
            next_step=f"give one of {', '.join(f'{size:g} ({name})' for size, name in ELEMENTS.items())}",
        )
    return size


def prediction(
    model: str,
    kv_bytes: float | None,
    block_size: int,
    kv_dtype_bytes: float | None,
    input_tokens: int,
    output_tokens: int,
    tensor_parallel: int,
    gpu: gpu_pool.Gpu | None = None,
) -> str:
    """The capacity calculator as a table; without a model the table of published geometries. Raises ConfigError.

    The pool is `kv_bytes`, or what is estimated for a GPU, or KV_BYTES where neither is given.
    """
    if kv_bytes is not None and gpu is not None:
        raise ConfigError("--kv-bytes and --gpu-gib both say how large the pool is.", next_step="give one of the two")
    if kv_bytes is not None and not 0 < kv_bytes < 1e18:
        raise ConfigError(
            f"A KV pool of {kv_bytes:,.0f} bytes is not possible.", next_step="give a size above 0, such as 2.5GB"
        )
    if kv_dtype_bytes is not None and not 0 < kv_dtype_bytes <= 16:
        raise ConfigError(f"{kv_dtype_bytes:g} bytes are no KV element.", next_step="give 1, 2 or 4")
    if not model:
        return known_models()
    shape = geometry.load(model)
    pool = gpu_pool.estimate(shape, gpu, tensor_parallel) if gpu else None
    assumed = pool is None and kv_bytes is None
    kv_bytes = pool.bytes if pool else kv_bytes or KV_BYTES
    per_token = predict.kv_bytes_per_token(shape, kv_dtype_bytes, tensor_parallel)
    blocks = predict.num_blocks(int(kv_bytes), per_token, block_size)
    if predict.usable_blocks(blocks) < 1:
        raise ConfigError(
            f"A pool of {kv_bytes:,.0f} bytes holds no block of {per_token * block_size:,.0f} bytes.",
            cause="the unit may be missing",
            next_step="write the size with it, such as 2.5GB or 2.5GiB",
        )
    low, high = predict.requests_that_fit(blocks, input_tokens, output_tokens, block_size)
    rank = f" and rank, tensor parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    rows = [
        ("model", shape.name),
        ("bytes of a KV element", _element(shape.dtype_bytes if kv_dtype_bytes is None else kv_dtype_bytes)),
        (f"KV bytes per token{rank}", f"{per_token:,.0f}"),
        *(pool.rows if pool else []),
        (
            "pool, estimated" if pool else "pool, assumed" if assumed else "pool",
            f"{int(kv_bytes):,} bytes ({kv_bytes / 2**30:.2f} GiB)",
        ),
        ("blocks", f"{blocks:,} of {block_size} tokens"),
        ("usable", display.usable_tokens(blocks, block_size)),
        (f"requests of {input_tokens} + {output_tokens} that fit", display.fit(low, high)),
    ]
    lines = [f"{name:<44} {value}" for name, value in rows]
    if low < 1:
        needs, has = predict.blocks_per_request(input_tokens, output_tokens, block_size), predict.usable_blocks(blocks)
        lines += ["", f"Not one such request fits: it holds {needs:,} blocks at its end, and the pool has {has:,}."]
    lines += ["", *pool.notes] if pool else []
    lines += ["", "The pool is an example: --kv-bytes gives yours, --gpu-gib estimates a GPU's."] if assumed else []
    return "\n".join(lines if kv_dtype_bytes is not None else [*lines, "", *_assumed(shape, model)])


KV_BYTES = 2 * 2**30
ELEMENTS = {1: "fp8", 2: "bf16 or fp16", 4: "float32"}  # bytes -> what a KV element of that size is


def _element(size: float) -> str:
    return f"{size:g} ({ELEMENTS[size]})" if size in ELEMENTS else f"{size:g}"


def _assumed(shape: geometry.Geometry, model: str) -> list[str]:
    """Which size was assumed where none was given, how to choose another one, and which profile has another one."""
    others = ", ".join(f"{size} ({name})" for size, name in ELEMENTS.items() if size != shape.dtype_bytes)
    lines = [
        f"Assumed: {_element(shape.dtype_bytes)}, as vLLM keeps this model by itself (--dtype auto).",
        f"Another one: --kv-dtype-bytes with {others}.",
    ]
    for name in profile.built_in():
        known = profile.load_profile(name)
        size = predict.kv_dtype_bytes(shape, known.server.kv_cache_dtype, known.server.dtype)
        if known.geometry == model and size != shape.dtype_bytes:
            lines.append(f"The profile {name} serves {model} with {_element(size)}: --kv-dtype-bytes {size}.")
    return lines


def known_models() -> str:
    """The built-in geometries, one line each; where the formula does not apply, why."""
    rows = geometry.table()
    lines = [
        f"{'model':<22} {'layers':>6} {'KV heads':>8} {'head dim':>8} {'bytes/token':>11} "
        f"{'GiB at ' + format(rows[0]['context_tokens'], ','):>13}"
    ]
    for row in rows:
        start = f"{row['name']:<22} {row['layers']:>6}"
        if row["applies"]:
            sizes = f"{row['kv_bytes_per_token']:>11,} {row['kv_bytes_at_context'] / 2**30:>13.2f}"
            lines.append(f"{start} {row['kv_heads']:>8} {row['head_dim']:>8} {sizes}")
        else:
            lines.append(f"{start}   the formula does not apply: {row['why_not']}")
    sizes = sorted({_element(shape.dtype_bytes) for shape in geometry.published() if shape.applies})
    lines += [f"Bytes of a KV element: {', '.join(sizes)}, as vLLM keeps these models by itself (--dtype auto)."]
    return "\n".join([*lines, "Another one: kvlab predict MODEL --kv-dtype-bytes 1 (fp8) or 4 (float32)."])
