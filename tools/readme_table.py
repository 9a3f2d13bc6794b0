"""Writes the README's numbers from what is committed, so that none of them is typed by hand.

    python tools/readme_table.py

Each row names its machine and the day on which its runs were measured; a claim that is not measured says so.
"""

from pathlib import Path
from typing import Any

from kvlab import claims, display, facts, instrument, profile, run, store, time_left
from kvlab.provenance import engine_line, hardware_line

GPU, GPUS, CPU = "h200", "h200-x2", "cpu-tiny"
ROWS = (  # what a reader should see first: words, machine, the claim's id
    ("KV pool of 2.4 GiB, all blocks of it", GPU, "kv_capacity/capacity_tokens/server=bf16;kv_dtype=auto;block=16"),
    ("throughput at 32 clients (512 in, 128 out)", GPU, "load/throughput_tok_s/c=32;in=512;out=128"),
    ("time to first token at 32 clients, near the full pool", GPU, "load/ttft_p50_s/c=32;in=512;out=128"),
    ("preemptions at 64 clients, 256 requests", GPU, "preemption/preemptions/c=64;in=512;out=128;requests=256"),
    ("tokens cached of a 3,000-token prefix", GPU, "prefix_cache/cached_tokens/prefix=3000;tail=32;block=16"),
    (
        "longest pause while 32k tokens are prefilled in chunks of 4,096",
        GPU,
        "chunked_prefill/itl_max_s/chunk=4096;in=32768;inserts=3",
    ),
    (
        "hits of 480 requests: 24 prefixes, 6 workers",
        GPU,
        "service_hit_rate/requests_with_hit/prefixes=24;c=8;workers=6;requests=480",
    ),
    (
        "hit ratio with the prefixes placed by a hash",
        GPUS,
        "several_gpus/hit_ratio/service=hash;workers=6;gpus=2;prefixes=24;c=8",
    ),
    ("an fp8 cache holds, against float32", CPU, "fp8_kv/capacity_ratio/kv_dtype=fp8;over=float32"),
    ("way back of a preempted request, cache off", CPU, "preemption/resume_s/in=3360;out=128;caching=off"),
)
BEGIN, END = "<!-- made by tools/readme_table.py -->", "<!-- end -->"
CLIENT, CLIENT_END = "<!-- the load generator, made by tools/readme_table.py -->", "<!-- end of the load generator -->"

TOOK, TOOK_END = "<!-- the minutes, made by tools/readme_table.py -->", "<!-- end of the minutes -->"
FLEETS, FEW = ("service_hit_rate", "routing"), ("kv_capacity", "load", "prefix_cache")


def table() -> str:
    """The table in Markdown, with the machines and their engines below it."""
    lines = ["| | computed | measured | residual | machine | date |", "|---|--:|--:|--:|---|---|"]
    lines += [_line(*row) for row in ROWS]
    about = [f"`{machine}`: {_machine(machine)}" for machine in (GPU, GPUS, CPU)]
    note = "The GPU's weights are random, with the geometry of Qwen3-1.7B: neither time nor capacity depends on them."
    return "\n".join([*lines, "", f"*{'; '.join(about)}. {note}*"])


def _line(words: str, machine: str, wanted: str) -> str:
    known = facts.facts(machine, {machine: claims.read(store.machine_dir(machine))}).claims[machine]
    row = next((row for row in known if row["id"] == wanted), None)
    cells = {"computed": "", "measured": "", "residual": ""} if row is None else display.cells(row)
    told = cells["measured"] and not row["late"]
    measured = f"**{cells['measured']}**" if told else "not measured"
    day = _days(machine, set() if row is None else set(str(row["runs"]).split(";")))
    return f"| {words} | {cells['computed']} | {measured} | {cells['residual']} | `{machine}` | {day} |"


def _days(machine: str, runs: set[str]) -> str:
    days = sorted({manifest["created_utc"][:10] for manifest in _manifests(machine) if manifest["run_id"] in runs})
    return " to ".join(sorted({days[0], days[-1]})) if days else ""


def _manifests(machine: str) -> list[dict[str, Any]]:
    return [one.manifest for one in store.list_runs(machine) if one.valid]


def _machine(machine: str) -> str:
    manifests = _manifests(machine)
    engines = sorted({line for manifest in manifests if (line := engine_line(manifest))})
    return f"{_hardware([m['provenance'] for m in manifests])}, {' and '.join(engines)}, {len(manifests)} runs"


def _hardware(hosts: list[dict[str, Any]]) -> str:
    """The hardware of all hosts in one line, with each number of cores and each size of memory that runs saw."""
    names = " or ".join(dict.fromkeys(hardware_line(host | {"cores": None, "memory_bytes": None}) for host in hosts))
    cores = sorted({host["cores"]["usable"] for host in hosts})
    memory = sorted({round(host["memory_bytes"] / 2**30) for host in hosts})
    return f"{names}, {' or '.join(map(str, cores))} cores, {' or '.join(map(str, memory))} GiB memory"


def client() -> str:
    """What was measured of the load generator itself, with the aims that it misses."""
    found = instrument.peers()
    if found is None:
        return "The load generator itself is not measured: `make bench-client`."
    day = str(found["measured_utc"].max())[:10]
    return "\n".join(f"- {sentence}" for sentence in (*instrument.told(found), f"Measured {day}: `data/client`."))


def minutes() -> str:
    """How long measuring everything takes on two CPU cores: what the stored runs of `cpu-tiny` took."""
    took = time_left.of_sections(list(run.notebooks()), profile.load_profile(CPU), CPU)
    spent = {section: found.seconds / 60 for section, found in took.items() if found.seconds}
    fleets, few = (sum(spent[section] for section in part) for part in (FLEETS, FEW))
    return (
        f"On two CPU cores everything takes about {sum(spent.values()):.0f} minutes after the install, {fleets:.0f} of "
        f"them for the sections on several workers; `kvlab measure {' '.join(FEW)}` alone takes {few:.0f}."
    )


def with_table(text: str) -> str:
    """The README's text with what stands between its marks replaced."""
    for begin, made, end in ((BEGIN, table(), END), (CLIENT, client(), CLIENT_END), (TOOK, minutes(), TOOK_END)):
        before, rest = text.split(begin)
        text = f"{before}{begin}\n{made}\n{end}{rest.split(end)[1]}"
    return text


if __name__ == "__main__":
    readme = Path(__file__).parent.parent / "README.md"
    store.write_text(readme, with_table(readme.read_text(encoding="utf-8")))
