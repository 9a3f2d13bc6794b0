"""The guide to a new section works as it stands in CONTRIBUTING.md, step by step; the README's table is honest."""

import importlib.util
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import fakes
import nbformat
import pandas as pd
import pytest
import test_run
from committed_for_tests import MACHINES
from notebooks_for_tests import COMMON, own_project

from kvlab import claims, facts, pages, parameters, predict, prose, prose_check, report, run, store, stored_figures

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "CONTRIBUTING.md").read_text()
FORMULA, TEST, PARAMETER, *CELLS = re.findall(r"^```python\n(.*?)^```$", GUIDE, re.M | re.S)
TEXTS = dict(re.findall(r"`kvlab/text/(en|zh)/block_size\.md`.*?\n\n````\n(.*?)^````$", GUIDE, re.M | re.S))
NAME = "block_size"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def section(monkeypatch, tmp_path):
    """Steps 1 and 2 in a project of its own: the formula in kvlab.predict, and the notebook with its cells filled."""
    own_project(monkeypatch, tmp_path, ["00_start_here"], parameters=COMMON)
    monkeypatch.setattr(predict, "requests_at_full_length", None, raising=False)
    exec(FORMULA, vars(predict))
    (command,) = re.findall(r"^    \.venv/bin/python tools/new_section\.py (\S+) '(.+)'$", GUIDE, re.M)
    path = tool("new_section").write(*command, tmp_path / "notebooks")
    made = nbformat.read(path, as_version=4)
    (sentence,) = re.findall(r'first cell\'s sentence, "(.+?)"', GUIDE)
    made.cells[0].source = made.cells[0].source.replace("One sentence: what decides it.", sentence)
    declared, *empty = [cell for cell in made.cells if cell.cell_type == "code"]
    declared.source += f"\n{PARAMETER.rstrip()}"
    assert not any(cell.source for cell in empty)
    for cell, source in zip(empty, CELLS, strict=True):  # one empty cell for each printed one
        cell.source = source.rstrip()
    nbformat.write(made, path)
    return path


def executed(path, **given):
    """What each of its cells shows: the value of the last line, as in a notebook."""
    parameters.check_parameters(path, given)
    space, shown = {}, []
    for cell in [c for c in nbformat.read(path, as_version=4).cells if c.cell_type == "code"]:
        *lines, last = re.split(r"\n(?=\S)", cell.source)
        if last.startswith(")"):  # the end of a call
            lines, last = lines[:-1], f"{lines[-1]}\n{last}"
        exec("\n".join(lines), space)
        try:
            shown.append(eval(last, space))
        except SyntaxError:
            shown.append(exec(last, space))
        if "parameters" in cell.metadata.get("tags", []):
            space |= given
    return shown


def test_the_notebook_has_the_shape_that_all_of_them_share(section):
    assert section.name == "01_block_size.ipynb" and run.notebook_of(NAME) == section
    test_run.test_every_notebook_has_the_common_shape(section)
    test_run.test_every_parameter_is_typed_and_explained(section)
    parameters.check_kernel(section)


def test_its_list_is_checked_before_it_is_used(section):
    with pytest.raises(Exception, match="BLOCKS is 8, of type int; it must be of type list"):
        executed(_with(section, "BLOCKS = 8"), PROFILE="cpu-tiny", MACHINE="empty-test", MODE="replay")


def _with(path, line):
    made = nbformat.read(path, as_version=4)
    made.cells[1].source = made.cells[1].source.replace(PARAMETER.rstrip(), line)
    nbformat.write(made, path)
    return path


def test_it_runs_with_nothing_measured(section):
    executed(section, PROFILE="cpu-tiny", MACHINE="empty-test", MODE="replay")
    stored = claims.from_frame(claims.read(store.machine_dir("empty-test")))
    assert [c.conditions for c in stored] == ["block=32", "block=64", "block=128"]
    assert [c.computed for c in stored] == sorted((c.computed for c in stored), reverse=True)
    assert {c.state for c in stored} == {"not measured"} and all(c.reason for c in stored)
    assert [path.stem for path in stored_figures.of_section("empty-test", NAME)] == [NAME]


def test_it_is_measured_shows_its_figure_and_stands_in_the_report(section, tmp_path, monkeypatch):
    """Measured on the fake server; then step 3 and the report."""
    fakes.install(monkeypatch, tmp_path)
    shown = executed(section, PROFILE="cpu-tiny", MACHINE="fake", MODE="auto", BLOCKS=[64, 128])
    assert [type(one).__name__ for one in shown].count("Figure") == 1
    stored = claims.from_frame(claims.read(store.machine_dir("fake")))
    assert [(c.conditions, c.state) for c in stored] == [("block=64", "measured"), ("block=128", "measured")]
    assert all(c.computed and c.measured and len(c.runs) == 1 for c in stored)
    assert [path.stem for path in stored_figures.of_section("fake", NAME)] == [NAME]
    shutil.copytree(ROOT / "kvlab" / "text", tmp_path / "text")
    for language, text in TEXTS.items():
        (tmp_path / "text" / language / f"{NAME}.md").write_text(text)
    monkeypatch.setattr(pages, "_folder", lambda language: tmp_path / "text" / language)
    monkeypatch.setattr(report, "refuse_fake", lambda machine: None)  # else it refuses what a fake has answered
    for file in report.build_all("fake", tmp_path / "report.html", timings={}, failures={}):
        page = file.read_text()
        page = page[page.index('id="block_size"') :]
        assert "data:image/svg" in page and display_of(stored[1]) <= set(re.findall(r"[\d,.]+", page))


def display_of(claim):
    return {f"{claim.computed:g}", f"{claim.measured:g}"}


@pytest.mark.parametrize("language", ["en", "zh"])
def test_its_text_is_filled_from_its_claims(language):
    stated = [claims.claim(NAME, "running_max", {"block": 128}, computed=11, measured=10, unit="requests")]
    rows = pd.DataFrame([asdict(claim) for claim in stated])
    known = facts.facts("mine", {"mine": rows})
    writer = prose.Writer(known, pages.words(language), pages.sources(), lambda name: {})
    prose_check.check(pages.SIDE.sub("", TEXTS[language]), "CONTRIBUTING.md", writer)
    last = TEXTS[language].rstrip().rpartition("\n\n")[2]
    filled = " ".join(re.sub(r"<[^>]+>", "", pages.inline(last, writer, prose.Notes("guide"))).split())
    if language == "en":
        assert filled == "With blocks of 128 tokens 10 requests ran together (computed: 11 requests)."
    assert re.findall(r"\d+", filled) == ["128", "10", "11"]
    (table,) = re.findall(r"^```side block_size\n(.*?)\n```$", TEXTS[language], re.M | re.S)
    assert [row[1:] for row in pages.side_rows(NAME, table, writer)] == [("running_max", {"": "block=128"})]
    assert sorted(pages.places(TEXTS["en"])) == sorted(pages.places(TEXTS["zh"]))


def test_its_formula_passes_its_printed_test(section):
    space = {"predict": predict}
    exec(TEST, space)
    (check,) = [value for name, value in space.items() if name.startswith("test_")]
    check()
    assert "import" not in FORMULA  # kvlab/predict.py has what it needs


def test_its_commands_are_typed_as_they_work_there():
    assert not re.findall(r"^    kvlab .*$|`kvlab [a-z]+ -", GUIDE, re.M)


def test_a_section_that_is_there_is_left_alone(section, tmp_path):
    write, before = tool("new_section").write, section.read_text()
    for name, said in ((NAME, "there already"), ("Block", "no section name")):
        with pytest.raises(SystemExit, match=said):
            write(name, "x", tmp_path / "notebooks")
    assert section.read_text() == before


def test_the_committed_machines_are_known():
    assert {"article", "cpu-tiny", "h200"} <= set(MACHINES) and "empty-test" not in MACHINES


def test_the_readmes_table_says_what_is_not_measured(tmp_path, monkeypatch):
    table = tool("readme_table")
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    row = claims.claim("load", "x", {"c": 8}, computed=2, unit="s")
    claims.write_section(store.machine_dir("h200"), "load", [row])
    assert table._line("a time", "h200", "load/x/c=8") == "| a time | 2,000 ms | not measured |  | `h200` |  |"
    assert table._line("a time", "h200", "load/x/c=9") == "| a time |  | not measured |  | `h200` |  |"
