"""Numbers in the words of notebooks: results come from cells; what may stand in a text is listed with its reason."""

import re
from pathlib import Path

import nbformat
import pytest
from test_numbers_elsewhere import CODE, KNOWN

from kvlab import prose_check, stray

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted([*(ROOT / "notebooks").glob("[0-9]*.ipynb"), *(ROOT / "notebooks" / "play").glob("*.ipynb")])
TIME = re.compile(r"\*\*Time\*\*: .*?(?=\*\*Hardware\*\*)", re.S)  # what to expect, not what was measured
FORMULA = re.compile(
    r"\$\$.*?\$\$|\$[^$\n]+\$|(?<=[×÷·−=] )[012](?![\d.,%])|(?<![\d.,])[12](?= [×÷·−])|min\(1,|√2", re.S
)
LISTED = {
    # what a text itself counts
    "four numbers": "of a config.json, which the formula names",
    "two things": "listed there",
    "three things differ": "listed there",
    "three constants": "of the formula above",
    "three parts": "of the formula above",
    "three sources": "listed there",
    "four limits": "listed there",
    "four rules": "listed there",
    "two bounds": "perfect and hashed placement",
    "two populations": "listed there",
    "two formulas": "both stand above",
    "two happens": "queue and eviction",
    "two times": "both are named",
    "two machines": "the call names them",
    "two arms": "base and fp8",
    "two sides": "with and without a cache",
    "two bars": "cold and warm",
    "two perplexities": "a comparison has two",
    "two starts": "a comparison has two",
    "between two events": "a gap has two ends",
    "difference of the two": "float32 and bfloat16",
    "two *single* measurements": "a comparison has two",
    # how something is built
    "two requests": "the pair that fills the pool",
    "half of the pool": "the pair that fills the pool",
    "computed twice": "computed again",
    "prompts of four lengths": "the cell below",
    "prefixes of two lengths": "the cell below",
    "imports twice": "the server and its engine each import",
    "two operations a parameter": "a multiplication and an addition",
    "half written on average": "spread evenly over their lives",
    "95%": "the level of every interval",
    "in one case of twenty": "the level of every interval",
    "reads half of the weights": "one of two GPUs",
    "each of two GPUs": "the layouts that are compared",
    "the other half": "one of two GPUs",
    "two GPUs": "the layouts that are compared",
    "two servers double": "the layouts that are compared",
    "per 100": "a unit",
    "χ²": "the name of the test",
    "two or four": "bytes of an element in 16 and 32 bits",
    "8 bits": "the name of a format",
    "16 bits": "the name of a format",
    # what a machine must have
    "two or more": "the section needs as many",
    "six small workers": "the largest fleet of the profiles",
    "two cores": "the smallest machine",
    "8 GB": "what the fleet needs",
    "12 GB": "what the fleet and the routers need",
    "1 GiB of KV cache": "the pool of a worker",
    # what exercises and guesses ask for
    "half, or nothing": "an answer to choose",
    "twice as": "what is changed in the question",
    "twice the number": "what is changed in the question",
    "hits as often": "asked there",
    "half of the requests": "asked there",
    "Double": "what is to be changed",
    "Halve": "what is to be changed",
    "hundred windows": "a thought experiment",
    "512 input tokens": "a length to try",
    "0 to 20 servers": "a thought experiment",
    "four GPUs": "a thought experiment",
    "over four, two over two each, or four": "a thought experiment",
    "8 KV heads on 16 ranks": "a thought experiment",
    "two long inputs": "a thought experiment",
}


def words_of(path):
    """The texts of a notebook without code, formulas, links and times to expect."""
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "markdown"]
    text = prose_check._without_list("\n\n".join(cells))
    for pattern in (CODE, TIME, FORMULA):
        text = pattern.sub(" ", text)
    return text


def stray_number(text):
    for phrase in sorted(LISTED, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.,]){re.escape(phrase)}(?!\w)", " ", text, flags=re.I)
    return stray.number_in(text, "en", KNOWN.conditions, KNOWN.names)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_says_no_number_that_is_typed_by_hand(path):
    assert stray_number(words_of(path)) == ""


def test_every_listed_number_stands_in_some_notebook():
    text = " ".join(map(words_of, NOTEBOOKS)).lower()
    assert not [phrase for phrase in LISTED if phrase.lower() not in text]


@pytest.mark.parametrize(
    "text", ["The article reports 0, 7 and 22 preemptions.", "It is twelve percent faster.", "at 64"]
)
def test_a_typed_number_is_found(text):
    assert stray_number(text)
