"""The workshop: exercises pass with their solutions and not without, and the checker knows what is usually confused."""

import contextlib
import importlib.util
import io
import json
import math
import re
import shutil
from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from typer.testing import CliRunner

from kvlab import (
    cli,
    predict,
    sliders,
    store,
    workshop,
    workshop_check,
    workshop_number,
    workshop_pool,
    workshop_progress,
)
from kvlab.errors import ConfigError, NotebookError
from kvlab.workshop import PASSED, UNANSWERED, UNDECIDED, WRONG, Choice, Facts, Number

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "notebooks" / "workshop"
EXERCISES = workshop_check.exercises(FOLDER)
PARTS = workshop.parts()
VAST = pytest.param(10**5000, id="more digits than Python writes out")


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(workshop, "_verdicts", {})
    monkeypatch.delenv("KVLAB_DATA", raising=False)
    monkeypatch.chdir(FOLDER)


def executed(notebook, **given):
    """The verdicts of a notebook whose cells are executed here: no kernel, hence fast. `given`: parameters."""
    workshop._verdicts.clear()
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for cell in notebook.cells:
            if cell.cell_type == "code":
                exec(compile(cell.source, "cell", "exec"), names)
            if "parameters" in cell.metadata.get("tags", []):
                names |= given
    return {name: verdict.state for name, verdict in workshop.verdicts().items()}


# -- the exercises ------------------------------------------------------------------------------------------------


def test_there_are_ten_exercises_of_four_questions_each():
    assert [path.name[:2] for path in EXERCISES] == [f"{n:02d}" for n in range(1, 11)]
    assert set(PARTS) == {f"{n}.{part}" for n in range(1, 11) for part in workshop.LEVELS}
    for n, path in enumerate(EXERCISES, 1):
        asked = workshop_check.questions(nbformat.read(path, as_version=4))
        assert asked == [f"answer_{n}_{part}" for part in workshop.LEVELS]
        assert set(workshop_check.solutions_of(path)) >= set(asked)


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_an_exercise_passes_with_its_solutions_and_not_unanswered(path):
    notebook = nbformat.read(path, as_version=4)
    assert set(executed(notebook).values()) == {UNANSWERED}
    solved = executed(workshop_check.filled(notebook, workshop_check.solutions_of(path)))
    assert len(solved) == 4 and set(solved.values()) == {PASSED}, workshop.verdicts()


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_an_exercise_gives_nothing_away(path):
    notebook = nbformat.read(path, as_version=4)
    text = "\n".join(cell.source for cell in notebook.cells).replace(",", "")
    assert "letter(" not in text and "solution" not in text.lower()
    for name in [name.removeprefix("answer_").replace("_", ".") for name in workshop_check.questions(notebook)]:
        asked = PARTS[name]
        if isinstance(asked, Number) and (right := asked.right(Facts())) >= 100:
            assert f"{right:.0f}" not in text + asked.ask.replace(",", ""), name


@pytest.mark.parametrize("path", EXERCISES, ids=lambda path: path.stem)
def test_run_shows_nothing_before_something_was_predicted(path, monkeypatch):
    """*Run All Cells* on an exercise that nobody has answered is how everybody checks the setup."""
    shown = []
    for module, name in ((workshop, "claims_of"), (workshop_pool, "capacities"), (sliders, "static")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, real=real, **b: (shown.append(a), real(*a, **b))[1])
    notebook = nbformat.read(path, as_version=4)
    said = []
    monkeypatch.setattr(workshop, "display", lambda markdown: said.append(markdown.data))
    assert executed(notebook) and not shown
    first = [text for text in said if text.startswith("**Predict first**")]
    assert first and all("LOOK = True" in text for text in first)
    assert executed(notebook, LOOK=True) and len(shown) == len(first)
    shown.clear()
    executed(workshop_check.filled(notebook, {n: f"{n} = 0.9" for n in workshop_check.questions(notebook)}))
    assert len(shown) == len(first)  # a wrong prediction opens it too


def test_nothing_is_shown_after_a_question_that_does_not_exist():
    with pytest.raises(ConfigError, match="There is no question"):
        workshop.after("1.guess", lambda: None)


@pytest.mark.parametrize("n", range(1, 11))
def test_an_exercise_links_the_notebook_that_teaches_it_and_says_what_it_needs(n):
    path = EXERCISES[n - 1]
    texts = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    link = workshop.link(f"{n}.predict")
    assert link in texts[0]
    (given,) = [text for text in texts if text.startswith("## What is given")]
    assert link in given and given.count(". ") >= 2
    target = re.search(r"\((.*)\)", link)[1]
    assert (path.parent / target).is_file()
    section = nbformat.read(path.parent / target, as_version=4)
    assert any(cell.source.startswith("## Computed") for cell in section.cells)
    behind = (FOLDER / "solutions" / f"{path.stem}.md").read_text()
    assert f"(../../{Path(target).name})" in behind


def test_the_second_exercise_shows_the_usable_tokens_beside_all_blocks():
    """Who was told that 6,784 is right must find it in the table, and why 6,816 stands there too."""
    for machine in ("cpu-tiny", "h200"):
        facts = Facts(machine)
        table = workshop_pool.capacities(machine)
        assert list(table.index[:4]) == ["num_blocks", "capacity_tokens", "usable_tokens", "log_tokens"]
        usable, every = table.iloc[2], table.iloc[1]
        blocks, block = workshop_pool.blocks_of(facts), workshop_pool.block_of(facts)
        assert usable["computed"] == usable["measured"] == f"{PARTS['2.predict'].right(facts):,.0f} tokens"
        assert every["measured"] == f"{blocks * block:,} tokens" and "null block" in usable["remark"]
    run = next(c.source for c in nbformat.read(EXERCISES[1], as_version=4).cells if c.source.startswith("## Run"))
    assert all(name in run for name in ("capacity_tokens", "usable_tokens", "null block"))


def test_an_exercise_needs_no_solutions_folder(tmp_path, monkeypatch):
    shutil.copy(EXERCISES[0], tmp_path)
    path = tmp_path / EXERCISES[0].name
    with pytest.raises(NotebookError, match="withheld"):
        workshop_check.solutions_of(path)
    assert set(executed(nbformat.read(path, as_version=4)).values()) == {UNANSWERED}


# -- make workshop-check ------------------------------------------------------------------------------------------


def small(folder, *, answer="None", solution="2 * 28 * 8 * 128 * 2", checked=True):
    """A folder with one exercise of one question, and its solution."""
    check = [v4.new_code_cell("check('1.predict', answer_1_predict)")] if checked else []
    first = v4.new_code_cell("from kvlab.workshop import check")
    asked = v4.new_code_cell(f"answer_1_predict = {answer}  # your number", metadata={"tags": ["answer"]})
    notebook = v4.new_notebook(cells=[first, asked, *check])
    (folder / "solutions").mkdir()
    nbformat.write(notebook, folder / "01_small.ipynb")
    (folder / "solutions" / "01_small.md").write_text(f"```python\nanswer_1_predict = {solution}\n```\n")
    return folder / "01_small.ipynb"


def test_the_check_accepts_an_exercise_that_passes_only_with_its_solution(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    small(tmp_path)
    assert workshop_check.main([tmp_path]) == 0
    assert "1 of 1" in capsys.readouterr().out


def test_the_check_fails_on_a_wrong_solution_and_on_one_that_passes_unanswered(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    small(tmp_path, answer="2 * 28 * 8 * 128 * 2", solution="28 * 8 * 128 * 2")
    assert workshop_check.main([tmp_path]) == 1
    said = capsys.readouterr().out
    assert "1.predict, unanswered: passed instead of unanswered" in said
    assert "1.predict, solved: wrong instead of passed" in said and "key *and* a value" in said


def test_the_check_fails_on_a_question_that_nothing_checks_and_on_a_missing_solution(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    path = small(tmp_path, checked=False)
    monkeypatch.setattr(workshop_check, "verdicts_of", lambda notebook, where: {})
    assert "1.predict is not checked" in workshop_check.problems_of(path)
    (tmp_path / "solutions" / "01_small.md").write_text("nothing")
    assert workshop_check.problems_of(path) == ["There is no solution for answer_1_predict."]
    assert workshop_check.main([tmp_path / "solutions"]) == 1  # no exercises at all


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "{}"])
def test_the_check_names_an_exercise_that_cannot_be_read(tmp_path, capsys, text):
    (tmp_path / "01_small.ipynb").write_text(text)
    assert workshop_check.main([tmp_path]) == 1
    assert "01_small.ipynb cannot be read" in capsys.readouterr().out


# -- the checker --------------------------------------------------------------------------------------------------


def said(name, answer, machine="cpu-tiny"):
    """(state, message) of an answer."""
    found = workshop.judge(name, answer, machine)
    return found.state, found.message


def throughput(facts):
    return facts.value("load", "throughput_tok_s", c=24, **{"in": 512, "out": 128})


BLOCKS = predict.num_blocks(41943040, 6144, 32)


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("1.predict", 2 * 28 * 16 * 128 * 2, "query heads"),
        ("1.predict", 28 * 8 * 128 * 2, "a key *and* a value"),
        ("1.predict", 2 * 8 * 128 * 2, "every layer"),
        ("1.predict", 112, "KiB"),
        ("1.predict", 2 * 28 * 8 * 128 * 16, "bits for bytes"),
        ("4.predict", 16, "one by one"),  # eight times as many loads are no bits
        ("4.predict", 1, "one by one"),  # half of two loads is nothing that counts twice
        ("5.most", 5, "one by one"),
        ("10.stretch", lambda f: PARTS["10.stretch"].right(f) - 1, "one by one"),  # no rounding to blocks
        ("3.predict", 2, "less than a factor of two"),  # the question accepts a wide range
        ("5.predict", 1000, "far"),
        ("1.predict", -3072, "cannot be below zero"),
        ("4.most", 97.2271386431, "right, but in percent"),
        ("1.most", 3072, "the checkpoint's own type"),
        ("1.most", 5000, "too low, by less than a factor of two"),
        ("2.predict", 6700, "rounding to whole blocks"),
        ("1.stretch", 114688 / 16, "8 KV heads"),
        ("2.predict", BLOCKS * 32, "null block"),
        ("2.predict", 41943040 / 6144, "whole blocks"),
        ("2.predict", 41943040 // 6144, "whole blocks"),
        ("2.predict", 41943040 // 6144 - 1, "one *block* is kept"),
        ("2.predict", (BLOCKS + 1) * 32, "the null block, or one token"),
        ("2.predict", BLOCKS - 1, "asks for tokens"),
        ("2.most", 16, "some of them wait"),
        ("2.most", 64, "max_num_seqs"),
        ("2.stretch", 15.9737, "GB"),
        ("3.predict", 24 / 8, "those that do not fit wait"),
        ("3.most", lambda f: 24 / (throughput(f) / 128), "those that run do not wait"),
        ("4.predict", 3, "waiting is not eviction"),
        ("4.most", 0, "keep their content"),
        ("5.most", 16, "number of clients"),
        ("6.predict", 2, "16 to 8 bits"),
        ("7.predict", 3000, "only whole blocks"),
        ("7.most", 31 * 32, "next token"),
        ("8.predict", 1 / 6, "1/N"),
        ("8.predict", 1.0, "nobody routes"),
        ("8.predict", 16.7, "in percent, and the question asks for a ratio: 0.5 and not 50. As a ratio it is 1/N"),
        ("8.predict", 8.3, "As a ratio it is 1/K"),
        ("8.predict", 33, "right, but in percent"),
        ("8.predict", 60, "As a ratio it is too high"),
        ("8.predict", 146 * 4 / 148, "what one worker holds"),
        ("8.most", 3, "asks for the fraction"),
        ("8.most", 4, "asks for the fraction"),
        ("8.most", 3.9, "rounded on the way"),
        ("3.predict", 300, "those that do not fit wait"),
        ("8.stretch", 12, "have filled some"),
        ("9.predict", lambda f: 3500 / f.value("chunked_prefill", "prefill_tok_s") * 1e3, "after every *chunk*"),
        ("9.most", 8192 / 8200 * 1e3, "no chunk is longer"),
        ("9.most", 0.4268, "thousands"),
        ("10.predict", 16, "Student's t"),
        ("10.predict", 4, "one standard error"),
    ],
)
def test_the_usual_mistakes_are_named(name, answer, message):
    state, text = said(name, answer(Facts()) if callable(answer) else answer)
    assert state == WRONG and message in text


def test_of_several_known_mistakes_the_exact_one_is_named_alone():
    exact = said("2.predict", BLOCKS * 32)[1]
    assert exact.startswith("this is one block too many") and "; or" not in exact
    two_blocks = said("2.predict", (BLOCKS + 1) * 32)[1]
    assert "this is" not in two_blocks


@pytest.mark.parametrize("name", [name for name, asked in PARTS.items() if isinstance(asked, Number)])
def test_an_unknown_mistake_is_told_where_the_rule_is_and_nothing_of_counting_twice(name):
    asked = PARTS[name]
    low, high = asked.ends(Facts())
    far = said(name, 13.7 * high + 17)[1]
    if "percent" not in far:
        assert workshop.link(name) in far
    if asked.unit in workshop_number.COUNTED or high > 1.05 * low:
        texts = [said(name, value)[1] for value in (low / 2, high / 2, low * 2, high * 2)]
        assert not any("counts twice" in text for text in texts)


def test_a_fraction_is_asked_for_where_one_is_right():
    for name, asked in PARTS.items():
        if (
            isinstance(asked, Number)
            and (right := asked.right(Facts())) != round(right)
            and asked.unit not in ("s", "ms")
        ):
            assert asked.unit in ("times", "ratio", "GiB") or "fraction" in asked.ask, name


@pytest.mark.parametrize("name", [name for name, asked in PARTS.items() if isinstance(asked, Number)])
def test_every_known_mistake_is_wrong_and_the_right_answer_is_not_given_away(name):
    asked, facts = PARTS[name], Facts()
    right = asked.right(facts)
    assert said(name, right)[0] == PASSED
    for fact, why in asked.wrong:
        state, text = said(name, fact(facts))
        near_right = math.isclose(fact(facts), right, rel_tol=workshop.CLOSE)
        assert state == WRONG or near_right, (why, fact(facts))
        assert right < 100 or f"{right:.0f}" not in text.replace(",", "")
    assert said(name, right * 3 + 10)[0] == WRONG and said(name, None)[0] == UNANSWERED


@pytest.mark.parametrize("name", [name for name, asked in PARTS.items() if isinstance(asked, Choice)])
def test_exactly_one_statement_is_true_and_the_others_say_where_to_look(name):
    letters = "abcdef"[: len(PARTS[name].options)]
    states = [said(name, letter)[0] for letter in letters]
    assert states.count(PASSED) == 1 and states.count(WRONG) == len(letters) - 1
    assert all(said(name, letter)[1] for letter in letters)
    assert said(name, "z")[0] == said(name, 3)[0] == UNANSWERED and said(name, " A ")[0] in (PASSED, WRONG)


def test_the_right_letters_follow_no_pattern():
    right = [asked.right(Facts()) for asked in PARTS.values() if isinstance(asked, Choice)]
    assert len(set(right)) > 2


@pytest.mark.parametrize(
    "answer", ["114688", "114,688", True, float("nan"), float("inf"), [1], 10**400, VAST, "x" * 9999, "9" * 9999]
)
def test_what_is_no_number_is_told(answer):
    state, text = said("1.predict", answer)
    assert "plain number" in text and len(text) < 300
    assert state == (WRONG if ": write " in text else UNANSWERED)  # Run stays closed where no number was written


@pytest.mark.parametrize(
    ("answer", "better"),
    [
        ((114, 688), "114_688"),
        ("114,688", "114_688"),
        ("114 688", "114_688"),
        ("114_688", "114_688"),
        ((1, 114, 688), "1_114_688"),
        ("114688", "114688"),
        ((0, 33), "0.33"),
        ("0,33", "0.33"),
        ("33 %", "0.33"),
    ],
)
def test_what_is_nearly_a_number_is_written_out(answer, better):
    assert said("1.predict", answer)[1].endswith(f": write {better}.")


@pytest.mark.parametrize("answer", ["many", "", (), (1.5, 2), [114, "x"], VAST, "1,2,3", {"a": 1}])
def test_what_is_nowhere_near_a_number_is_only_told(answer):
    assert said("1.predict", answer)[0] == UNANSWERED and "write" not in said("1.predict", answer)[1]


@pytest.mark.parametrize("name", PARTS)
def test_another_machine_is_judged_by_its_own_data_or_says_that_they_do_not_decide(name):
    state, text = said(name, 1e-9 if isinstance(PARTS[name], Number) else "a", "h200")
    assert state in (WRONG, PASSED, UNDECIDED)
    assert state != UNDECIDED or "MACHINE" in text


def test_right_answers_follow_the_data(tmp_path, monkeypatch):
    """Nothing is typed: with other claims another answer is right."""
    shutil.copytree(ROOT / "data" / "cpu-tiny", tmp_path / "cpu-tiny")
    path = tmp_path / "cpu-tiny" / "claims.csv"
    old = "chunked_prefill,prefill_tok_s,in=3500,,"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if old in line)
    measured = lines[at].split(old)[1].split(",")[0]
    lines[at] = lines[at].replace(old + measured, f"{old}{10 * float(measured)!r}")
    path.write_text("\n".join(lines) + "\n")
    before = PARTS["9.predict"].right(Facts())
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    assert PARTS["9.predict"].right(Facts()) == pytest.approx(before / 10)


def test_unknown_questions_machines_and_statements_are_explained():
    for wrong in (lambda: workshop.part("11.predict"), lambda: said("1.predict", 1, "nobody")):
        with pytest.raises(ConfigError, match="There is no"):
            wrong()
    with pytest.raises(ConfigError, match="0 statements"):
        workshop.letter("1.explain", "a quarter")


def test_progress_is_in_the_order_of_the_page(monkeypatch):
    texts = []
    monkeypatch.setattr(workshop, "display", lambda markdown: texts.append(markdown.data))
    order = ["2.predict", "2.explain", "2.most", "2.stretch", "10.predict"]
    for name in ("10.predict", "2.stretch", "2.explain", "2.most", "2.predict"):
        workshop.check(name, None)
    workshop.progress()
    assert re.findall(r"^\| (\d\S+) \|", texts[-1], re.M) == order


def test_a_question_that_needs_a_call_shows_its_form():
    text = PARTS["4.stretch"].ask
    assert all(part in text for part in ("closed_loop(engine, clients, jobs)", "engine_of(server, usable)", "Job("))


def test_questions_and_progress_are_shown(capsys):
    workshop.ask("1.explain")
    workshop.check("1.predict", 1)
    workshop.check("1.stretch", None)
    workshop.progress()
    assert len(workshop.verdicts()) == 2 and json.dumps(sorted(workshop.verdicts()))
    assert "cpu-tiny" in store.machines()


# -- where everybody is --------------------------------------------------------------------------------------------


def room(folder, *texts):
    """The exercises as JupyterLab saves them, the first one with these outputs."""
    for path in EXERCISES:
        notebook = nbformat.read(path, as_version=4)
        if path == EXERCISES[0]:
            for cell, text in zip([c for c in notebook.cells if c.source.startswith("check(")], texts, strict=False):
                cell.outputs = [v4.new_output("display_data", {"text/markdown": text})]
        nbformat.write(notebook, folder / path.name)
    return folder


def checked(name, answer, monkeypatch):
    """What `check` shows of an answer."""
    texts = []
    monkeypatch.setattr(workshop, "display", lambda markdown: texts.append(markdown.data))
    workshop.check(name, answer)
    return texts[0]


def test_the_overview_reads_what_the_checks_said(tmp_path, capsys, monkeypatch):
    right = checked("1.predict", 114_688, monkeypatch)
    texts = [right, checked("1.explain", "a", monkeypatch), checked("1.most", None, monkeypatch)]
    assert workshop_progress.saved(room(tmp_path, *texts) / EXERCISES[0].name) == {
        "1.predict": "✓",
        "1.explain": "✗",
        "1.most": "…",
    }
    assert workshop_progress.main([str(tmp_path), str(FOLDER)]) == 0
    head, mine, untouched = capsys.readouterr().out.splitlines()[:3]
    assert head.split() == [*map(str, range(1, 11)), "pass"]
    assert mine.split()[:3] == [str(tmp_path), "✓✗…·", "····"] and mine.endswith("1 of 40")
    assert untouched.split()[0] == str(FOLDER) and untouched.endswith("0 of 40")


def test_the_overview_goes_on_where_a_notebook_is_damaged_and_says_what_is_no_folder_of_exercises(tmp_path, capsys):
    room(tmp_path)
    (tmp_path / EXERCISES[1].name).write_text("{half")
    (tmp_path / EXERCISES[2].name).write_text("[]")
    assert workshop_progress.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[1:4] == ["····", "unreadable", "unreadable"]
    assert workshop_progress.main([str(tmp_path / "nothing")]) == 1
    assert "does not hold the exercises" in capsys.readouterr().err


# -- the pages around them ----------------------------------------------------------------------------------------


def test_the_schedule_links_every_exercise_with_its_minutes_and_fits_half_a_day():
    rows = re.findall(r"^\| (\d):(\d\d) \| (\d+) \| (.*) \|$", (FOLDER / "README.md").read_text(), re.M)
    clock = 0
    for hours, minutes, length, _ in rows:
        assert int(hours) * 60 + int(minutes) == clock  # no gap and no overlap
        clock += int(length)
    assert clock == 240
    linked = {link: int(length) for _, _, length, text in rows for link in re.findall(r"\((\w+\.ipynb)\)", text)}
    for path in EXERCISES:
        first = nbformat.read(path, as_version=4).cells[0].source
        assert f"**Time**: {linked.pop(path.name)} minutes" in first
    assert not linked


def test_the_pages_name_files_targets_and_commands_that_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.M))
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    for page in FOLDER.glob("*.md"):
        text = page.read_text()
        assert {name for name in re.findall(r"\bmake ([a-z][a-z-]*)", text) if name != "it"} <= targets
        assert set(re.findall(r"^(?:\.venv/bin/)?kvlab ([a-z]+)", text, re.M)) <= commands
        links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
        assert all((FOLDER / link).exists() for link in links)


def test_an_install_without_network_finds_what_it_builds_with():
    spec = importlib.util.spec_from_file_location("build_wheels", ROOT / "tools" / "build_wheels.py")
    build_wheels = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_wheels)
    assert any(name.startswith("setuptools") for name in build_wheels.build_requirements())


def test_the_checks_of_the_setup_end_well_and_are_short():
    """Thirty people read them at once: an exit code of 1 or a long table makes each of them ask."""
    block = re.search(r"## Is it all there\?\n+```\n(.*?)```", (FOLDER / "SETUP.md").read_text(), re.S)[1]
    lines = [line.partition("#")[0].split() for line in block.splitlines()]
    assert lines and all(words[0] == ".venv/bin/kvlab" for words in lines)
    for words in lines:
        done = CliRunner().invoke(cli.app, words[1:])
        assert done.exit_code == 0 and len(done.stdout.splitlines()) <= 20, words


def test_setup_readme_and_instructor_say_alike_that_run_stays_closed():
    for name, phrase in (
        ("README.md", "Run stays closed"),
        ("SETUP.md", '"Predict first"'),
        ("INSTRUCTOR.md", "Run stays closed"),
    ):
        assert phrase in (FOLDER / name).read_text()


def test_claims_that_a_machine_has_not_name_those_that_have_them():
    assert len(workshop.claims_of("cpu-tiny", "service_hit_rate", "hit_ratio")) > 3
    told = workshop.claims_of("h200-x2", "service_hit_rate", "hit_ratio").data
    assert "`h200-x2` measured nothing" in told and told.endswith("one of: article, cpu-tiny, h200.")


def test_exercise_8_shows_the_hits_of_the_machine_beside_the_articles():
    cells = nbformat.read(next(FOLDER.glob("08_*.ipynb")), as_version=4).cells
    shown = [re.search(r"claims_of\(([^,]+),", cell.source) for cell in cells]
    assert [found[1] for found in shown if found] == ['"article"', "MACHINE"]
