"""Preemptions as their client sees them."""

import pytest
from tables_for_tests import request, requests

from kvlab.pauses import longest_pauses, paused_s, resume_s

STEADY = request(events=[(0.1 * k, 1) for k in range(1, 21)], request=0)  # ends at 2.0
EVICTED = request(events=[(0.5, 1), (0.6, 1), (2.25, 1), (2.35, 1)], request=1)


def test_the_longest_gap_of_each_request():
    pauses = longest_pauses(requests(STEADY, EVICTED))
    assert [p.request for p in pauses] == [0, 1]
    assert pauses[1].seconds == pytest.approx(1.65)


def test_the_evicted_one_comes_back_after_the_others_end():
    pause, seconds = resume_s(requests(STEADY, EVICTED))
    assert pause.request == 1 and seconds == pytest.approx(0.25)


def test_a_pause_that_ended_before_is_no_resume():
    early = request(events=[(0.5, 1), (1.5, 1), (1.6, 1)], request=1)
    assert resume_s(requests(STEADY, early)) is None
    assert resume_s(requests(STEADY)) is None


def test_only_long_gaps_are_pauses():
    rows = requests(STEADY, EVICTED)
    assert paused_s(rows, 0.5) == pytest.approx(1.65 / 2)
    assert paused_s(rows, 2.0) == 0
    assert paused_s(requests(), 0.5) is None
