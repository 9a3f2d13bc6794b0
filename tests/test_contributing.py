"""The guide to a new section runs as it stands in CONTRIBUTING.md; the README's table is honest."""

import importlib.util
import re
from dataclasses import asdict
from pathlib import Path

import pandas as pd

from kvlab import claims, facts, pages, prose, prose_check, store

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
CELLS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.M | re.S)


def test_the_small_section_runs_with_nothing_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    given = 'PROFILE, MACHINE, MODE = "cpu-tiny", "empty-test", "replay"'
    assert len(CELLS) == 6 and all(len(cell.splitlines()) <= 25 for cell in CELLS)
    space = {}
    for cell in CELLS:
        exec(cell + (given if "PROFILE: str" in cell else ""), space)
    stored = claims.from_frame(claims.read(store.machine_dir("empty-test")))
    assert [c.conditions for c in stored] == ["block=32", "block=64", "block=128"]
    assert [c.computed for c in stored] == sorted((c.computed for c in stored), reverse=True)
    assert {c.state for c in stored} == {"not measured"} and all(c.reason for c in stored)
    assert [path.stem for path in store.figure_files("empty-test", "block_size")] == ["block_size"]


def test_its_text_is_filled_from_its_claims():
    (text,) = re.findall(r"^    (With blocks of .*\n    .*)$", GUIDE, re.M)
    (table,) = re.findall(r"` ```side (block_size) ` with lines `(words: [^`]+)`", GUIDE)
    where = {"block": 128}
    stated = [claims.claim("block_size", "running_max", where, computed=11, measured=10, unit="requests")]
    rows = pd.DataFrame([asdict(claim) for claim in stated])
    writer = prose.Writer(facts.facts("mine", {"mine": rows}), pages.words("en"), pages.sources(), lambda name: {})
    prose_check.check(text, "CONTRIBUTING.md", writer)
    filled = re.sub(r"<[^>]+>", "", pages.inline(text, writer, prose.Notes("guide")))
    assert " ".join(filled.split()) == "With blocks of 128 tokens 10 requests ran together (computed: 11 requests)."
    assert pages.side_rows(*table, writer) == [("words", "running_max", {"": "block=128"})]


def test_its_formula_knows_whole_blocks():
    space = {}
    exec(CELLS[0], space)
    # 584 usable blocks of 16 tokens and requests of 2,363 + 1 - 1 tokens: 148 blocks each, 3.95 of them fit.
    assert space["requests_at_full_length"](584, 2363, 16) == 3
    assert space["requests_at_full_length"](3 * 148, 2363, 16) == 3


def test_the_readmes_table_says_what_is_not_measured(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "tools" / "readme_table.py")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    row = claims.claim("load", "x", {"c": 8}, computed=2, unit="s")
    claims.write_section(store.machine_dir("h200"), "load", [row])
    assert table._line("a time", "h200", "load/x/c=8") == "| a time | 2,000 ms | not measured |  | `h200` |  |"
    assert table._line("a time", "h200", "load/x/c=9") == "| a time |  | not measured |  | `h200` |  |"
