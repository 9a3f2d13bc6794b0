"""What `kvlab check` and `kvlab predict` print."""

from __future__ import annotations

from kvlab import geometry, measure, predict, profile, provenance, run, store
from kvlab.errors import ConfigError


def text(profile_name: str, machine: str) -> str:
    """Hardware, engine, profile, and for each section what is stored and how long the rest may take."""
    hardware = provenance.hardware()
    lab = measure.open_lab("kv_capacity", profile_name=profile_name, machine=machine, mode="replay")
    engine = "none; `make install` adds one"
    if hardware.has_vllm:
        engine = f"vLLM {hardware.vllm_version} ({hardware.engine})"
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
    if total:
        about = f"Measuring everything anew takes about {total / 60:.1f} minutes, going by stored runs of this profile."
    else:
        about = "No stored run of this profile says how long measuring takes."
    lines += ["", about]
    try:
        profile.check_fits(lab.profile, hardware)
    except ConfigError as error:
        lines += ["", str(error)]
    return "\n".join(lines)


def estimate_s(section: str, profile_name: str) -> float | None:
    """Seconds that the section took where this profile was measured, its server starts included; None: unknown."""
    for machine in store.machines():
        manifests = [r.manifest for r in store.list_runs(machine, section)]
        manifests = [m for m in manifests if m["profile"] == profile_name]
        if manifests:
            servers = [m["server"] or {} for m in manifests]
            starts = {server.get("started_utc"): server.get("ready_s") or 0 for server in servers}
            return sum(m["duration_s"] or 0 for m in manifests) + sum(starts.values())
    return None


def prediction(
    model: str,
    kv_bytes: float,
    block_size: int,
    kv_dtype_bytes: float | None,
    input_tokens: int,
    output_tokens: int,
    tensor_parallel: int,
) -> str:
    """The capacity calculator as a table; without a model the table of published geometries. Raises ConfigError."""
    if not model:
        return known_models()
    if not 0 < kv_bytes < 1e18:
        raise ConfigError(f"A KV pool of {kv_bytes:g} bytes is none.", next_step="give its bytes, such as 2.5e9")
    shape = geometry.load(model)
    per_token = predict.kv_bytes_per_token(shape, kv_dtype_bytes, tensor_parallel)
    blocks = predict.num_blocks(int(kv_bytes), per_token, block_size)
    low, high = predict.requests_that_fit(blocks, input_tokens, output_tokens, block_size)
    rank = f" and rank, tensor parallel {tensor_parallel}" if tensor_parallel > 1 else ""
    rows = [
        ("model", shape.name),
        (f"KV bytes per token{rank}", f"{per_token:,.0f}"),
        ("pool", f"{int(kv_bytes):,} bytes ({kv_bytes / 2**30:.2f} GiB)"),
        ("blocks, one of them reserved", f"{blocks:,} of {block_size} tokens"),
        ("capacity", f"{predict.capacity_tokens(blocks, block_size):,} tokens"),
        (f"requests of {input_tokens} + {output_tokens} that fit", f"{low:.1f} to {high:.1f}"),
    ]
    return "\n".join(f"{name:<44} {value}" for name, value in rows)


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
    return "\n".join(lines)
