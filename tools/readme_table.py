"""Writes the README's table from the committed claims, so that no number in it is typed by hand.

    python tools/readme_table.py
"""

from pathlib import Path

from kvlab import claims, display, store
from kvlab.provenance import engine_line, hardware_line

MACHINE = "h200"
ROWS = {  # what a reader should see first, in words -> the claim's id
    "KV pool of 2.4 GiB, in tokens": "kv_capacity/capacity_tokens/server=bf16;kv_dtype=auto;block=16",
    "throughput at 32 clients (512 in, 128 out)": "load/throughput_tok_s/c=32;in=512;out=128",
    "throughput at 64 clients": "load/throughput_tok_s/c=64;in=512;out=128",
    "gap between tokens at 64 clients": "load/itl_p50_s/c=64;in=512;out=128",
    "time to first token at 64 clients": "load/ttft_p50_s/c=64;in=512;out=128",
    "preemptions at 64 clients, 256 requests": "preemption/preemptions/c=64;in=512;out=128;requests=256",
    "longest pause while a 3,500-token prompt is prefilled": "chunked_prefill/itl_max_s/chunk=2048;in=3500;inserts=3",
    "tokens cached of a 3,000-token prefix": "prefix_cache/cached_tokens/prefix=3000;tail=32;block=16",
    "time to first token, prefix not cached": "prefix_cache/ttft_miss_s/prefix=3000;tail=32;block=16",
    "time to first token, prefix cached": "prefix_cache/ttft_hit_s/prefix=3000;tail=32;block=16",
    "hits behind a Service: 6 workers, 12 prefixes": "service_hit_rate/hit_ratio/prefixes=12;c=8;workers=6",
    "hits behind a Service: 3 workers, 12 prefixes": "service_hit_rate/hit_ratio/prefixes=12;c=8;workers=3",
}
BEGIN, END = "<!-- made by tools/readme_table.py -->", "<!-- end -->"


def table() -> str:
    """The table in Markdown, with the machine, its engine and the days of measurement below it."""
    known = {row["id"]: row for row in claims.read(store.machine_dir(MACHINE)).to_dict("records")}
    lines = ["| | computed | measured | residual |", "|---|--:|--:|--:|"]
    for words, claim in ROWS.items():
        if claim not in known:  # a section that this machine has not measured
            continue
        cells = display.cells(known[claim])
        lines.append(f"| {words} | {cells['computed']} | **{cells['measured']}** | {cells['residual']} |")
    manifests = [run.manifest for run in store.list_runs(MACHINE) if run.valid]
    days = sorted({manifest["created_utc"][:10] for manifest in manifests})
    when = " to ".join(sorted({days[0], days[-1]}))
    machine = f"{hardware_line(manifests[0]['provenance'])}; {engine_line(manifests[0])}; {when}"
    note = "geometry of Qwen3-1.7B with dummy weights, on which neither time nor capacity depends"
    return "\n".join([*lines, "", f"*{machine}; {note}. {len(manifests)} runs.*"])


def with_table(text: str) -> str:
    """The README's text with the table between its two marks replaced."""
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    readme = Path(__file__).parent.parent / "README.md"
    store.write_text(readme, with_table(readme.read_text()))
