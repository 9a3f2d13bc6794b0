"""Arms that took turns are compared turn by turn, with an interval of the turns; others by their means, and say so."""

from types import SimpleNamespace

import pytest

from kvlab import article, claims, paired, profile
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
    assert found.value == pytest.approx((2.0 * 2.1 * 1.9) ** (1 / 3)) and found.n == 3 and not found.note
    assert 1.7 < found.low < 1.8 and 2.2 < found.high < 2.3  # of the means alone it would be twice as wide
    change = paired.paired_change(*(arm(*side) for side in DRIFT), "x")
    assert [change.value, change.low, change.high] == pytest.approx([found.value - 1, found.low - 1, found.high - 1])


def test_no_ratio_goes_below_zero_however_its_turns_scatter():
    found = paired.paired_ratio(arm([1.0, 5.0, 25.0], [0, 2, 4]), arm([1.0, 1.0, 1.0], [1, 3, 5]), "x")
    assert found.value == pytest.approx(5.0) and 0 < found.low < 1 and found.high > 100


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
    assert found.value == pytest.approx((8 / 2 * 2 / 2) ** 0.5)
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
    one = paired.paired_ratio(arm([3.0], [1]), arm([2.0], [0]), "x")
    assert (one.value, one.low) == (pytest.approx(1.5), None) and "fewer than three turns" in one.note
    assert paired.paired_change(arm([None], [0]), arm([1.0], [1]), "x") is None
    assert paired.paired_ratio(arm([1.0, 2.0], [0, 2]), arm([0.0, 0.0], [1, 3]), "x") is None


# -- what the sections make of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize("machine", ["cpu-tiny", "h200"])
def test_what_compares_arms_has_an_interval_or_says_why_it_has_none(machine):
    every = claims.from_frame(claims.read(article.folder().parent / machine))
    compared = [
        c for c in every if c.quantity in ("ttft_change", "resume_ratio") or c.quantity.startswith("cross_check")
    ]
    compared = [c for c in compared if c.measured is not None and "client=" not in c.conditions]
    assert {"ttft_change", "resume_ratio"} <= {c.quantity for c in compared}
    assert not [c.id for c in compared if c.ci_low is None and not c.reason]
    assert all(c.ci_low is not None for c in compared if c.quantity == "resume_ratio")


def test_the_profile_of_the_cpu_gives_its_comparisons_the_turns_that_an_interval_needs():
    of = profile.load_profile("cpu-tiny")
    turns = [s.repeats for s in of.chunked_prefill.inputs] + [of.preemption.pair_repeats, of.cuda_graphs.runs]
    assert min([*turns, of.load.cross_check_turns]) >= paired.FEWEST
    assert of.chunked_prefill.side_by_side and of.preemption.side_by_side and of.cuda_graphs.side_by_side
    assert of.preemption.log_steps and of.preemption.server == of.preemption.pair_server  # one server for both


def test_turns_that_nobody_ran_are_no_missing_runs():
    some, other = arm([3.0], [1]), arm([2.0], [0])
    nobody = [Result(some[0].cell, None)] * 2  # a profile with more repeats than the stored runs have
    found = paired.paired_ratio([*some, *nobody], [*other, *nobody], "x")
    assert (found.value, found.low, found.note) == (1.5, None, "fewer than three turns: too few for an interval")
