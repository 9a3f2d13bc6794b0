"""The guide to a new section runs as it stands in CONTRIBUTING.md; the README's table is honest."""

import importlib.util
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import fakes
import nbformat
import pandas as pd
from notebooks_for_tests import notebook, own_project

from kvlab import claims, facts, pages, parameters, prose, prose_check, report, run, store

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


def written():
    """The text of step 3 and the section and line of its table, as the guide shows them."""
    (text,) = re.findall(r"^    (With blocks of .*\n    .*)$", GUIDE, re.M)
    (table,) = re.findall(r"` ```side (block_size) ` with lines `(words: [^`]+)`", GUIDE)
    return text, table


def test_a_section_made_by_the_guide_is_measured_and_stands_in_the_report(tmp_path, monkeypatch):
    """Its steps as a contributor does them: notebook, texts, measurement (on the fake server), report."""
    own_project(monkeypatch, tmp_path, ["00_start_here"], parameters=CELLS[1])
    fakes.install(monkeypatch, tmp_path)
    assert "notebooks/NN_block_size.ipynb" in GUIDE
    path = notebook(tmp_path / "notebooks" / "15_block_size.ipynb", CELLS[0], *CELLS[2:], parameters=CELLS[1])
    made = nbformat.read(path, as_version=4)
    made.cells.insert(0, nbformat.v4.new_markdown_cell("# See what a larger block costs\n\nWhole blocks are held."))
    nbformat.write(made, path)
    assert run.notebook_of("block_size") == path
    given = {"PROFILE": "cpu-tiny", "MACHINE": "fake", "MODE": "auto", "BLOCKS": [64, 128]}
    parameters.check_parameters(path, given)
    space = {}
    for cell in [cell.source for cell in made.cells if cell.cell_type == "code"]:
        exec(cell, space)
        space |= given if "PROFILE: str" in cell else {}
    stored = claims.from_frame(claims.read(store.machine_dir("fake")))
    assert [(c.conditions, c.state) for c in stored] == [("block=64", "measured"), ("block=128", "measured")]
    assert all(c.computed and c.measured and len(c.runs) == 1 for c in stored)
    assert [path.stem for path in store.figure_files("fake", "block_size")] == ["block_size"]
    _write_texts(monkeypatch, tmp_path / "text")
    monkeypatch.setattr(report, "refuse_fake", lambda machine: None)  # else it refuses what a fake has answered
    for file in report.build_all("fake", tmp_path / "report.html", timings={}, failures={}):
        page = file.read_text()
        page = page[page.index('id="block_size"') :]
        assert "data:image/svg" in page and display_of(stored[1]) <= set(re.findall(r"[\d,.]+", page))


def display_of(claim):
    return {f"{claim.computed:g}", f"{claim.measured:g}"}


def _write_texts(monkeypatch, folder):
    """Step 3, in both languages."""
    shutil.copytree(ROOT / "kvlab" / "text", folder)
    text, (section, line) = written()
    table = f"```side {section}\n{line}\n```"
    for language, words in (("en", "Whole blocks are held."), ("zh", "占用的是整块。")):
        (folder / language / f"{section}.md").write_text(f"# Blocks\n\n{words}\n\n{table}\n\n{text}\n")
    monkeypatch.setattr(pages, "_folder", lambda language: folder / language)


def test_its_text_is_filled_from_its_claims():
    text, table = written()
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
