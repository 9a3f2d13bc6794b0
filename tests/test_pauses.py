"""Preemptions as their client sees them."""

import random
from itertools import pairwise
from statistics import median

import pytest
from tables_for_tests import request, requests

from kvlab.pauses import longest_pauses, paused_s, preempted, resume_s

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


def test_a_request_that_stands_still_alone_was_preempted():
    rows = requests(STEADY, EVICTED)
    assert [(p.request, p.start_s, p.end_s) for p in preempted(rows)] == [(1, 0.6, 2.25)]
    assert paused_s(rows) == pytest.approx(1.65 / 2)
    assert paused_s(requests()) is None


def test_a_stall_of_all_requests_is_no_preemption():
    times = [0.1, 0.2, 0.3, 2.3, 2.4, 2.5]
    rows = requests(*(request(events=[(t + 0.01 * n, 1) for t in times], request=n) for n in range(3)))
    assert preempted(rows) == [] and paused_s(rows) == 0


def test_a_stall_after_which_events_arrive_one_by_one_is_no_preemption():
    waits = request(events=[(0.1, 1), (0.2, 1), (1.5, 1), (1.6, 1)], request=0)
    first = request(events=[(0.1, 1), (0.2, 1), (1.30, 1), (1.31, 1), (1.32, 1), (1.33, 1), (1.6, 1)], request=1)
    assert preempted(requests(waits, first)) == []


def test_events_that_come_late_and_together_are_no_preemption():
    late = request(events=[(0.1, 1), (0.2, 1), (0.52, 3), (0.6, 1)], request=1)
    assert preempted(requests(STEADY, late)) == []


def goes_on_by_hand(times, pause, step_s):
    inside = [t for t in times if pause[0] < t < pause[1]]
    return sum(b - a >= step_s / 2 for a, b in pairwise(inside)) >= 4


def test_pauses_among_many_requests_are_those_found_one_by_one():
    draw = random.Random(1)
    streams = []
    for _ in range(24):
        steps = [draw.choice([0.001, *[0.1] * 12, 0.7, 1.5]) for _ in range(draw.randint(1, 40))]
        start = draw.uniform(0, 3)
        streams.append([round(start + sum(steps[:k]), 6) for k in range(len(steps))])
    rows = requests(*(request(events=[(t, 1) for t in times], request=n) for n, times in enumerate(streams)))
    step_s = median(b - a for times in streams for a, b in pairwise(times))
    expected = []
    for n, times in enumerate(streams):
        for pause in pairwise(times):
            others = [o for m, o in enumerate(streams) if m != n and o[0] < pause[1] and o[-1] > pause[0]]
            alone = others and 2 * sum(goes_on_by_hand(o, pause, step_s) for o in others) >= len(others)
            if alone and pause[1] - pause[0] > 4 * step_s:
                expected.append((n, *pause))
    assert [(p.request, p.start_s, p.end_s) for p in preempted(rows)] == expected
    assert 5 < len(expected) < sum(b - a > 4 * step_s for times in streams for a, b in pairwise(times))
