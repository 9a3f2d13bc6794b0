"""The article's published values as claims of the machine `article`: data/article/values.csv becomes claims.csv.

`python -m kvlab.article` rebuilds the file. Units and names are those of our own claims; a published range becomes its
midpoint with the ends as interval.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from kvlab import store
from kvlab.claims import Claim, claim, conditions_text, parse_conditions, read, write_section
from kvlab.errors import StoreError

VALUES = "values.csv"

# (chapter of the article, experiment or "" for all others) -> section
SECTIONS = {
    ("1.2", ""): "repeatability",
    ("1.3", ""): "kv_capacity",
    ("1.4", "load"): "load",
    ("1.4", "long"): "load",
    ("1.4", "capacity"): "kv_capacity",
    ("1.4", "preemption"): "preemption",
    ("1.4", "max_num_seqs"): "max_num_seqs",
    ("1.5", ""): "fp8_kv",
    ("1.6", ""): "prefix_cache",
    ("1.7", ""): "chunked_prefill",
    ("1.8", ""): "cuda_graphs",
    ("1.9", ""): "startup",
    ("2.2", ""): "service_hit_rate",
    ("2.3", ""): "service_hit_rate",
    ("2.4", ""): "hit_and_miss",
    ("2.5", ""): "service_hit_rate",
}

# (experiment, published conditions) -> ours. `a|b` in several keys goes together. What is not here is ours already.
# The load of chapter 1.4 is 512 in, 128 out throughout, as the head of that chapter says; blocks of 16 tokens are the
# default that chapter 1.7 read from the server.
CONDITIONS = {
    ("repeat", "insertion, three repeats"): "load=insertion;rep=1|2|3",
    ("restart", "c=1;3 restarts"): "c=1;in=512;out=128;restarts=3",
    ("restart", "c=32;3 restarts"): "c=32;in=512;out=128;restarts=3",
    ("capacity", "Qwen3-1.7B;28 layers;8 kv heads;head_dim 128;bf16"): (
        "model=Qwen3-1.7B;layers=28;kv_heads=8;head_dim=128;kv_dtype=bf16"
    ),
    ("capacity", "log capacity / tokens vs formula"): "source=log",
    ("capacity", "bf16, first start"): "server=bf16-first-start;kv_dtype=bf16;block=16",
    ("capacity", "fp8, first start"): "server=fp8-first-start;kv_dtype=fp8;block=16",
    ("capacity", "fp8/bf16"): "kv_dtype=fp8;over=bf16",
    ("capacity", "bf16, restarted (three servers)"): "server=bf16-restarted;kv_dtype=bf16;block=16;servers=3",
    ("capacity", "in=512;out=128;22048 tokens"): "in=512;out=128;kv_tokens=22048",
    ("capacity", "Qwen3-4B-FP8, same options"): "model=Qwen3-4B-FP8;start=1|2|3",
    ("capacity", "Qwen3-4B-FP8 with LoRA enabled"): "model=Qwen3-4B-FP8;lora=on;start=1|2",
    ("load", "c=8;in=512;out=128;max_num_seqs=64"): "c=8;in=512;out=128",
    ("load", "c=1"): "c=1;in=512;out=128",
    ("load", "c=32"): "c=32;in=512;out=128",
    ("load", "c=64;KV 22048 tokens"): "c=64;in=512;out=128;kv_tokens=22048",
    ("load", "c=64;three servers (KV 22048, 26560, 26560)"): (
        "c=64;in=512;out=128;kv_tokens=22048|26560|26560;server=1|2|3"
    ),
    ("load", "same options, six servers"): "servers=6;nth=1|2|3|4",
    ("load", "c=8;three servers"): "c=8;in=512;out=128;servers=3",
    ("load", "c=32;three servers"): "c=32;in=512;out=128;servers=3",
    ("load", "itl median, c=1 to c=64"): "c=1|64;in=512;out=128",
    ("load", "c>=32"): "c=32|64;in=512;out=128",
    ("load", "Qwen3-4B-FP8;c=32;KV 8880"): "model=Qwen3-4B-FP8;c=32;kv_tokens=8880",
    ("load", "Qwen3-4B-FP8;c=32;KV 13232"): "model=Qwen3-4B-FP8;c=32;kv_tokens=13232",
    ("long", "in=2048;out=128;22048 tokens"): "in=2048;out=128;kv_tokens=22048",
    ("long", "in=2048;c=4 to c=16"): "c=16;over_c=4;in=2048;out=128",
    ("preemption", "in=512;c=32;5 repeats"): "c=32;in=512;out=128;repeats=5",
    ("preemption", "in=2048;c=32;64 requests"): "c=32;in=2048;requests=64",
    ("preemption", "in=1500;out=256;c=64;128 requests"): "c=64;in=1500;out=256;requests=128",
    ("preemption", "in=2048;c=32"): "c=32;in=2048",
    ("preemption", "in=1500;out=256;c=64"): "c=64;in=1500;out=256",
    ("max_num_seqs", "c=64;in=512;16 vs default 64"): "c=64;in=512;out=128;max_num_seqs=16;over_max_num_seqs=64",
    ("fp8", "long input, bf16"): "input=long;kv_dtype=bf16",
    ("fp8", "long input, fp8"): "input=long;kv_dtype=fp8",
    ("perplexity", "wikitext-2 test, 40 windows of 1024 tokens; bf16, two attention backends"): (
        "text=wikitext-2;windows=40;window_tokens=1024;kv_dtype=bf16;backend=1|2"
    ),
    ("perplexity", "same; fp8 KV, two attention backends"): (
        "text=wikitext-2;windows=40;window_tokens=1024;kv_dtype=fp8;backend=1|2"
    ),
    ("perplexity", "an earlier text"): "text=earlier;kv_dtype=bf16|fp8",
    ("prefix", "3000-token shared prefix + 32-token tail, sequential, out=1; miss"): (
        "prefix=3000;tail=32;block=16;kind=miss"
    ),
    ("prefix", "same; hit"): "prefix=3000;tail=32;block=16;kind=hit",
    ("prefix_cost", "no shared prefix; caching on / off"): "caching=on|off;c=1",
    ("prefix_cost", "c=32;in=2048;out=16;96 requests;5 repeats; on / off"): ("caching=on|off;c=32;in=2048;out=16"),
    ("prefix_cost", "same; on / off"): "caching=on|off;c=32;in=2048;out=16",
    ("prefix_cost", "same"): "workload=unique;c=32;in=2048;out=16",
    ("chunk", "decode of 300 tokens, three 3500-token inputs inserted; chunk 512|1024|2048|4096|8192"): (
        "chunk=512|1024|2048|4096|8192;in=3500;inserts=3"
    ),
    ("chunk", "prefill speed"): "",
    ("chunk", "chunk 512|1024|2048|3500"): "chunk=512|1024|2048|3500",
    ("chunk", "long input; chunk 512"): "chunk=512;in=3500",
    ("chunk", "long input; chunk 1024"): "chunk=1024;in=3500",
    ("chunk", "long input; chunk 4096"): "chunk=4096;in=3500",
    ("chunk", "long input; chunk 8192"): "chunk=8192;in=3500",
    ("chunk", "chunk 512, inserted span"): "chunk=512;in=3500;span=inserted",
    ("chunk", "defaults of that version"): "vllm=0.31.0",
    ("eager", "Qwen3-1.7B"): "model=Qwen3-1.7B;graphs=off;over_graphs=on",
    ("eager", "Qwen3-1.7B;c=1; graphs / eager"): "model=Qwen3-1.7B;c=1;graphs=on|off",
    ("eager", "Qwen3-0.6B;c=1; graphs / eager"): "model=Qwen3-0.6B;c=1;graphs=on|off",
    ("eager", "Qwen3-0.6B;c=32; graphs / eager"): "model=Qwen3-0.6B;c=32;graphs=on|off",
    ("eager", "Qwen3-0.6B; graphs / eager"): "model=Qwen3-0.6B;graphs=on|off",
    ("eager", "Qwen3-4B-FP8;c=1; graphs / eager"): "model=Qwen3-4B-FP8;c=1;graphs=on|off",
    ("fleet", "Qwen3-0.6B"): "model=Qwen3-0.6B",
    ("fleet", "1 GiB per worker"): "kv_bytes=1073741824",
    ("fleet", "prefix about 2000 + tail about 300, out 64"): "out=64",
    ("fleet", "on a hit"): "kind=hit",
    ("fleet", "requests per worker"): "kv_bytes=1073741824",
    ("check", "prefixes=2;c=4;cached tokens and server counters"): "prefixes=2;c=4",
    ("compulsory", "prefixes=2;workers=6;200 requests"): "prefixes=2;workers=6;requests=200",
    ("compulsory", "prefixes=2;workers=3;200 requests"): "prefixes=2;workers=3;requests=200",
    ("affinity", "6 workers, 24 prefixes"): "prefixes=24;workers=6;routing=affinity",
}

QUANTITIES = {
    "throughput": "throughput_tok_s",
    "request_throughput": "requests_per_s",
    "capacity": "capacity_tokens",
    "relative_error": "capacity_relative_error",
    "ratio": "capacity_ratio",
    "prefill": "prefill_tok_s",
    "prefix_hits": "cost_hits",
    "ready_time": "ready_s",
    "ready_time_saved": "ready_saved_s",
    "n": "requests",
    "hits": "requests_with_hit",
} | {name: f"{name}_s" for name in ("ttft", "wall", "stall", "itl_max")}

UNITS = {"ms": ("s", 1e-3), "%": ("ratio", 1e-2)}  # published -> ours, factor


def folder() -> Path:
    """Where the published values lie: in the data folder, else beside this source."""
    own, source = store.machine_dir("article"), Path(__file__).parent.parent / "data" / "article"
    return own if (own / VALUES).is_file() else source


def claims_of(row: Mapping[str, str]) -> list[Claim]:
    """The claims in one line of values.csv. Raises StoreError where the line is not understood."""
    try:
        section = SECTIONS.get((row["section"], row["experiment"])) or SECTIONS[row["section"], ""]
        values = [_value(text) for text in _split_values(row["value"])]
        unit, factor = UNITS.get(row["unit"], (row["unit"], 1.0))
        pairs = _pair(_quantities(row["quantity"]), list(_conditions(row, len(values))), values)
    except (KeyError, ValueError) as error:
        raise StoreError(
            f"This line of the article's values is not understood: {dict(row)}",
            cause=str(error),
            next_step="add its section, or its conditions, to kvlab/article.py",
        ) from None
    if row["experiment"] == "prefix":  # a hit and a miss are two quantities with a prediction each
        pairs = [(f"ttft_{where.rpartition('=')[2]}_s", where.rpartition(";")[0], value) for _, where, value in pairs]
    return [
        _claim(section, quantity, conditions, [round(v * factor, 12) for v in value], unit, row["kind"])
        for quantity, conditions, value in pairs
    ]


def _claim(section, quantity, conditions, ends: list[float], unit: str, kind: str) -> Claim:
    middle = round(sum(ends) / len(ends), 12)
    ci = (ends[0], ends[1]) if len(ends) == 2 else None
    return claim(section, quantity, conditions, unit=unit, ci=ci, **{kind: middle})


def _split_values(text: str) -> list[str]:
    named = re.fullmatch(r"bf16 (\S+); fp8 (\S+)", text)
    return list(named.groups()) if named else text.split("|")


def _value(text: str) -> list[float]:
    """[value], or [low, high] of a range."""
    return [float(end) for end in text.split("..")]


def _quantities(text: str) -> list[str]:
    """`ttft_p50|p90` is ttft_p50_s and ttft_p90_s."""
    first, *others = text.split("|")
    names = [first, *(f"{first.rpartition('_')[0]}_{name}" for name in others)]
    return [QUANTITIES.get(name, f"{name}_s" if re.search(r"_p\d+$", name) else name) for name in names]


def _conditions(row: Mapping[str, str], n_values: int) -> Iterator[str]:
    """Each set of conditions of a line, in order: keys with lists go together."""
    text = CONDITIONS.get((row["experiment"], row["conditions"]), row["conditions"])
    text = re.sub(r";(hit|misse?)s$", lambda found: f";kind={found[1].removesuffix('e')}", text)
    # `rep=1..5` with five values names each; with one value it says how often that was seen.
    several = re.search(r"rep=1\.\.(\d+)", text)
    if several:
        each = "rep=" + "|".join(str(i + 1) for i in range(n_values))
        text = text.replace(several[0], each if int(several[1]) == n_values else f"repeats={several[1]}")
    lists = {key: value.split("|") for key, value in parse_conditions(text).items()}
    longest = max((len(values) for values in lists.values()), default=1)
    if any(len(values) not in (1, longest) for values in lists.values()):
        raise ValueError(f"lists of different lengths in {text!r}")
    for i in range(longest):
        yield conditions_text({key: values[i % len(values)] for key, values in lists.items()})


def _pair(quantities: list[str], conditions: list[str], values: list) -> list[tuple[str, str, list[float]]]:
    """One (quantity, conditions, value) a claim."""
    n = max(len(quantities), len(conditions))
    if len(values) == 1 and len(conditions) > 1 and len(values[0]) == 2:
        values = [[end] for end in values[0]]  # `15..25` over `c=1|64` goes from the one to the other
    if len(values) == 1:
        values = values * n
    if len(values) != n or min(len(quantities), len(conditions)) != 1:
        raise ValueError(f"{len(values)} values for {len(quantities)} quantities and {len(conditions)} conditions")
    return [(quantities[i % len(quantities)], conditions[i % len(conditions)], values[i]) for i in range(n)]


def _with_formula(claims: list[Claim]) -> list[Claim]:
    """Measured claims get the published formula's value where its conditions hold for them."""
    computed = [c for c in claims if c.state == "computed"]
    out = []
    for c in claims:
        own = parse_conditions(c.conditions).items()
        match = [k for k in computed if (k.section, k.quantity) == (c.section, c.quantity)]
        match = [k for k in match if parse_conditions(k.conditions).items() <= own]
        if c.measured is not None and match:
            value = match[0].computed
            c = replace(c, computed=value, residual=(c.measured - value) / value)
        out.append(c)
    return out


def build(lines: Iterable[Mapping[str, str]]) -> list[Claim]:
    """All claims in the lines of values.csv."""
    return _with_formula([c for row in lines for c in claims_of(row)])


def rebuild(into: Path | None = None) -> Path:
    """Writes claims.csv beside values.csv (or into another folder) and returns its path."""
    with (folder() / VALUES).open(encoding="utf-8", newline="") as file:
        claims = build(csv.DictReader(file))
    target = into or folder()
    (target / "claims.csv").unlink(missing_ok=True)
    for section in sorted({c.section for c in claims}):
        write_section(target, section, [c for c in claims if c.section == section])
    return target / "claims.csv"


def lookup(quantity: str, **conditions: Any) -> float | None:
    """The published number of that quantity whose conditions include these: the claim that says least beyond them.

    `in` is a Python word: write `in_=512`. Repeats of one condition give their mean; several different conditions that
    fit equally well give None, as does nothing.
    """
    wanted = parse_conditions(conditions_text({key.rstrip("_"): value for key, value in conditions.items()}))
    section = wanted.pop("section", None)
    table = read(folder())
    found: dict[int, list[tuple[str, float]]] = {}
    for row in table[table["quantity"] == quantity].fillna({"conditions": ""}).to_dict("records"):
        stated = parse_conditions(row["conditions"])
        if wanted.items() <= stated.items() and section in (None, row["section"]):
            rest = {key: value for key, value in stated.items() if key not in wanted and key != "rep"}
            number = row["computed"] if pd.isna(row["measured"]) else row["measured"]
            found.setdefault(len(rest), []).append((conditions_text(rest), float(number)))
    best = found[min(found)] if found else []
    values = [number for _, number in best]
    return sum(values) / len(values) if len({rest for rest, _ in best}) == 1 else None


if __name__ == "__main__":
    print(rebuild())
