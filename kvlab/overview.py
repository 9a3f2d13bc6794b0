"""What `kvlab check` and `kvlab predict` print."""

from __future__ import annotations

import pandas as pd

from kvlab import geometry, measure, predict, profile, provenance, run, store


def text(profile_name: str, machine: str) -> str:
    """Hardware, engine, profile, and for each section what is stored and how long the rest may take."""
    hardware = provenance.hardware()
    lab = measure.open_lab("kv_capacity", profile_name=profile_name, machine=machine, mode="replay")
    engine = f"vllm {hardware.vllm_version} ({hardware.engine})" if hardware.has_vllm else "none; `make install` adds one"
    lines = [
        f"hardware  {provenance.hardware_line(provenance.collect())}",
        f"engine    {engine}",
        f"profile   {lab.profile.name}: {lab.profile.title}",
        f"machine   {lab.machine} (measurements go to {store.machine_dir(lab.machine)})",
        "",
        f"{'section':<16} {'stored runs':>11} {'estimated':>12}",
    ]
    total = 0.0
    for section in run.notebooks():
        seconds = estimate_s(section, lab.profile.name)
        total += seconds or 0
        stored = len([r for r in store.list_runs(lab.machine, section) if r.manifest.get("valid")])
        lines.append(f"{section:<16} {stored:>11} {'' if seconds is None else f'{seconds:.0f} s':>12}")
    lines += ["", f"Measuring everything anew takes about {total / 60:.1f} minutes, going by the stored runs of this profile."]
    try:
        profile.check_fits(lab.profile, hardware)
    except Exception as error:
        lines += ["", str(error)]
    return "\n".join(lines)


def estimate_s(section: str, profile_name: str) -> float | None:
    """Seconds that the section took where this profile was last measured: its loads and its server starts; None unknown."""
    for machine in store.machines():
        runs = [r for r in store.list_runs(machine, section) if r.manifest.get("profile") == profile_name]
        if runs:
            starts = {r.manifest["server"].get("started_utc"): r.manifest["server"].get("ready_s") or 0 for r in runs}
            return sum(r.manifest["duration_s"] for r in runs) + sum(starts.values())
    return None


def prediction(
    model: str, kv_bytes: int, block_size: int, kv_dtype_bytes: float, input_tokens: int, output_tokens: int, tp: int
) -> str:
    """The capacity calculator as a table; without a model the table of published geometries."""
    if not model:
        return pd.DataFrame(geometry.table()).to_string(index=False, na_rep="")
    shape = geometry.load(model)
    per_token = predict.kv_bytes_per_token(shape, kv_dtype_bytes, tp)
    blocks = predict.num_blocks(kv_bytes, per_token, block_size)
    low, high = predict.requests_that_fit(blocks, input_tokens, output_tokens, block_size)
    rows = [
        ("model", shape.name),
        ("KV bytes per token" + (f" and rank, tensor parallel {tp}" if tp > 1 else ""), f"{per_token:,.0f}"),
        ("pool", f"{kv_bytes:,} bytes ({kv_bytes / 2**30:.2f} GiB)"),
        ("blocks, one of them reserved", f"{blocks:,} of {block_size} tokens"),
        ("capacity", f"{(blocks - 1) * block_size:,} tokens"),
        (f"requests of {input_tokens} + {output_tokens} that fit", f"{low:.1f} to {high:.1f}"),
    ]
    return "\n".join(f"{name:<44} {value}" for name, value in rows)
