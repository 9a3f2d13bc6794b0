"""Numbers outside the write-up: the README's first screen, and what the workshop says."""

import importlib.util
import re
from pathlib import Path

import nbformat
import pytest
from committed_for_tests import MACHINES

from kvlab import claims, facts, profile, run, stray, time_left, workshop

ROOT = Path(__file__).parent.parent
KNOWN = facts.facts("h200", {name: claims.read(ROOT / "data" / name) for name in MACHINES})
NUMBER = re.compile(r"(?<![\w.^])\d[\d,]*(?:\.\d+)?")
CODE = re.compile(r"```.*?```|`[^`\n]+`|\]\([^)\s]+\)|https?://\S+", re.S)


def plain(text, *phrases):
    """A text without code, links and the phrases that may stand."""
    text = CODE.sub(" ", text)
    for phrase in phrases:
        assert phrase in text, phrase
        text = text.replace(phrase, " ")
    return text


def readme_table():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "tools" / "readme_table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_first_screen_of_the_readme_holds_no_number_outside_its_table():
    made = readme_table()
    first = (ROOT / "README.md").read_text().partition("\n## ")[0]
    before, _, rest = first.partition(made.BEGIN)
    text = plain(before + rest.partition(made.END)[2], "At 1 the pool is full", "Python 3.11 or newer")
    assert stray.number_in(text, "en", KNOWN.conditions, KNOWN.names) == ""


def test_the_readme_names_the_cores_and_the_memory_of_all_hosts():
    def host(cores, gib):
        return {"gpus": [{"name": "GPU"}], "cpu": "CPU", "cores": {"usable": cores}, "memory_bytes": gib * 2**30}

    told = readme_table()._hardware([host(16, 126), host(32, 252), host(16, 252)])
    assert told == "GPU, CPU, 16 or 32 cores, 126 or 252 GiB memory"
    assert readme_table()._hardware([host(2, 24)]) == "GPU, CPU, 2 cores, 24 GiB memory"


def test_the_words_of_the_readmes_table_name_the_conditions_of_its_claims():
    for words, machine, wanted in readme_table().ROWS:
        held = {value.replace(",", "") for pair in wanted.split("/")[-1].split(";") for value in pair.split("=")[1:]}
        for number, thousands in re.findall(r"(?<![\w.])(\d[\d.,]*)(k?)", words):
            value = str(int(float(number)) * 1024) if thousands else number.strip(",").replace(",", "")
            pool = profile.load_profile(machine).server.kv_cache_memory_bytes if "GiB" in words else 0
            assert value in held or f"{pool / 2**30:.1f}" == value or words == f"float{value}" or value == "32", words


# -- the workshop -------------------------------------------------------------------------------------------------

# What the questions themselves give: bits, blocks, requests of a thought experiment, levels of confidence.
GIVEN = {"0", "1", "1.96", "2", "4", "5", "8", "10", "16", "31", "32", "64", "95", "100", "128", "300", "2000", "2048"}


def said_by(asked):
    yield asked.ask
    yield asked.because
    if isinstance(asked, workshop.Number):
        yield from (why for _, why in asked.wrong)
    else:
        for statement, _, overlooked in asked.options:
            yield from (statement, overlooked)


def published():
    rows = KNOWN.claims["article"]
    return {f"{row[column]:g}" for row in rows for column in ("measured", "computed") if row[column] is not None}


@pytest.mark.parametrize("name", list(workshop.parts()))
def test_a_question_tells_no_result_that_is_typed_by_hand(name):
    """Given numbers and conditions may stand in it, and what the article published; a measured number never."""
    allowed = GIVEN | KNOWN.settings | published()
    texts = [re.sub(r"Qwen3-\S+", " ", text) for text in said_by(workshop.parts()[name])]
    numbers = [found.replace(",", "") for text in texts for found in NUMBER.findall(text)]
    assert not [number for number in numbers if number not in allowed]


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks" / "workshop").glob("*.ipynb")), ids=lambda path: path.stem)
def test_an_exercise_says_no_number_but_its_time(path):
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    text = re.sub(r"^# Exercise \d+:|\*\*Time\*\*: \d+ minutes(?:; the live part about \d+ s)?", " ", "\n".join(cells))
    allowed = ("two CPU cores", "8 bits", "three true numbers", "four numbers of a model", "two things", "many times")
    for phrase in allowed:
        text = text.replace(phrase, " ")
    text = re.sub(r"\[\d\d_\w+\]\(\.\./\d\d_\w+\.ipynb\)", " ", text)  # a section's notebook, by its file name
    assert stray.number_in(CODE.sub(" ", text), "en", KNOWN.conditions, KNOWN.names) == ""


def test_the_minutes_of_a_notebook_are_those_of_the_stored_runs():
    took = time_left.of_sections(list(run.notebooks()), profile.load_profile("cpu-tiny"), "cpu-tiny")
    said = {
        section: re.search(r"\*\*Time\*\*: about (\w+) minutes? on two CPU cores", path.read_text())
        for section, path in run.notebooks().items()
    }
    for section, found in said.items():
        if found:
            minutes = 1 if found[1] == "one" else int(stray.value_of(found[1]))
            assert abs(minutes - took[section].seconds / 60) <= 0.6, section
    assert sum(map(bool, said.values())) == 12
