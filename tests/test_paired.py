"""Arms that took turns are compared turn by turn, with an interval of the turns; others by their means, and say so."""

from types import SimpleNamespace

import pytest

from kvlab import paired
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.results import Result

CELL = Cell(name="a", server=ServerConfig(model="tiny"), load=LoadConfig(requests=1, input_tokens=8, output_tokens=3))


def arm(values, starts):
    """One run a value, measured at that second; a value of None was not measured."""
    found = []
    for value, at in zip(values, starts, strict=True):
        manifest = {"created_utc": f"2026-11-29T10:00:{at:02d}.000Z", "summary": {"x": value}}
        found.append(Result(CELL, None if value is None else SimpleNamespace(manifest=manifest)))
    return found


DRIFT = ([2.0, 4.2, 7.6], [0, 3, 4]), ([1.0, 2.0, 4.0], [1, 2, 5])  # each turn slower; the second one in reverse


def test_a_drift_that_both_arms_share_is_not_in_their_ratio():
    found = paired.paired_ratio(*(arm(*side) for side in DRIFT), "x")
    assert found.value == pytest.approx((2.0 + 2.1 + 1.9) / 3) and found.n == 3 and not found.note
    assert 1.7 < found.low < 1.8 and 2.2 < found.high < 2.3  # of the means alone it would be twice as wide
    change = paired.paired_change(*(arm(*side) for side in DRIFT), "x")
    assert [change.value, change.low, change.high] == pytest.approx([found.value - 1, found.low - 1, found.high - 1])


def test_arms_one_after_the_other_have_no_pairs_and_say_so():  # pitfall 16
    changed, base = arm([2.0, 4.0, 9.0], [0, 1, 2]), arm([1.0, 2.0, 3.0], [3, 4, 5])
    assert not paired.took_turns(changed, base)
    found = paired.paired_ratio(changed, base, "x")
    assert (found.value, found.low, found.high, found.note) == (2.5, None, None, paired.APART)


def test_several_numbers_of_a_run_count_by_their_mean_in_a_turn_and_each_in_a_mean_of_all():
    each = {0: [1.0, 3.0], 1: [2.0], 2: [8.0, 8.0, 8.0], 3: []}

    def numbers(result):
        return each[result.value("x")]

    found = paired.paired_ratio(arm([2, 0], [0, 2]), arm([0, 1], [1, 3]), numbers)
    assert found.value == pytest.approx((8 / 2 + 2 / 2) / 2)
    assert paired.paired_ratio(arm([2, 0], [0, 1]), arm([1, 3], [2, 3]), numbers).value == pytest.approx(28 / 5 / 2)


@pytest.mark.parametrize(
    ("changed", "base"),
    [
        (arm([1.0, 1.0], [0, 2]), arm([1.0], [1])),  # an arm that went on alone
        (arm([1.0], [0]), arm([1.0], [1])),  # one turn shows no order
        (arm([1.0, None], [0, 2]), arm([1.0, 1.0], [1, 3])),
        (arm([1.0, 1.0], [0, 1]), arm([1.0, 1.0], [2, 3])),
    ],
)
def test_what_are_no_turns(changed, base):
    assert not paired.took_turns(changed, base)


def test_two_turns_are_too_few_and_nothing_is_nothing():
    found = paired.paired_ratio(arm([2.0, 4.0], [0, 2]), arm([1.0, 2.0], [1, 3]), "x")
    assert (found.value, found.low) == (2.0, None) and "too few" in found.note
    assert paired.paired_change(arm([None], [0]), arm([1.0], [1]), "x") is None
    assert paired.paired_ratio(arm([1.0, 2.0], [0, 2]), arm([0.0, 0.0], [1, 3]), "x") is None
