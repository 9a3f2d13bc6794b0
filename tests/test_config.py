"""Wrong values of a notebook or a program are ConfigErrors in words, wherever they enter."""

import pytest

from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import ConfigError
from kvlab.profile import load_profile

GOOD = {"requests": 1, "input_tokens": 8, "output_tokens": 2}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"concurrency": 0}, "concurrency: must be greater than 0, not 0"),
        ({"concurrency": -1}, "greater than 0, not -1"),
        ({"concurrency": "a"}, "concurrency: must be a whole number, not 'a'"),
        ({"concurrency": True}, "must be a whole number, not True"),
        ({"timeout_s": float("nan")}, "timeout_s: must be"),
        ({"timeout_s": float("inf")}, "timeout_s: must be"),
        ({"arrival": "burst"}, "'closed', 'poisson' or 'constant'"),
        ({"rate_per_s": 2.0}, "use concurrency"),
        ({"cells": 1}, "no such field"),
    ],
)
def test_a_wrong_load_is_told_in_words(wrong, message):
    with pytest.raises(ConfigError) as caught:
        LoadConfig(**(GOOD | wrong))
    told = str(caught.value)
    assert told.startswith("The load is not valid:") and message in told and "Next:" in told
    assert "pydantic" not in told and "input_value" not in told


def test_a_changed_copy_is_checked_too():
    shape = load_profile("cpu-tiny").load.shapes[0]
    assert shape.model_copy(update={"concurrency": (1, 2)}).concurrency == (1, 2)
    for wrong in ((0, -1), ("a",), (), [1]):
        with pytest.raises(ConfigError, match="The request shape is not valid"):
            shape.model_copy(update={"concurrency": wrong})


def test_a_cell_keeps_its_parts_and_names_what_is_wrong():
    server, load = ServerConfig(model="tiny"), LoadConfig(**GOOD)
    assert Cell(name="a", server=server, load=load).load is load
    with pytest.raises(ConfigError, match="name"):
        Cell(name="a b", server=server, load=load)
