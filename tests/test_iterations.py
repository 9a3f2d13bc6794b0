"""The step lines of the engine's log."""

import re
from pathlib import Path

import pytest

from kvlab.iterations import PROBE_TOKENS, last_load, once, parse_iterations, recomputed_tokens, resumes
from kvlab.workload import MIN_VOCAB, probe_prompt

FIXTURES = Path(__file__).parent / "fixtures"
LINE = (
    "(APIServer pid=7) INFO 11-29 16:00:00 [loggers.py:188] Engine 000: Iteration({n}): {c} context requests, "
    "{ct} context tokens, {g} generation requests, {gt} generation tokens, iteration elapsed time: 12.50 ms, "
    "CPU KV cache usage: 50.0%"
)


def log(*steps):
    lines = [LINE.format(n=n, c=c, ct=ct, g=g, gt=gt) for n, (c, ct, g, gt) in enumerate(steps)]
    return "INFO: other\n" + "\n".join(lines) + "\nEngine 000: Avg prompt throughput: 1.0 tokens/s\n"


PROBE = (1, 8, 0, 0)
# Two requests of 4 + 6 tokens in 4 blocks of 4 tokens: the second one is evicted with 7 tokens computed and comes back
# with 8 to have, 4 of them cached.
PAIR = [(1, 4, 0, 0), (1, 4, 1, 1), *[(0, 0, 2, 2)] * 3, (0, 0, 1, 1), (0, 0, 1, 4), (0, 0, 1, 1)]


def test_lines_become_rows():
    steps = parse_iterations(log(PROBE, *PAIR))
    assert len(steps) == 9
    assert steps["context_tokens"].tolist()[:3] == [8, 4, 4]
    assert steps["generation_requests"].tolist()[-3:] == [1, 1, 1]


def test_a_log_without_the_flag_has_no_rows():
    steps = parse_iterations("INFO Engine 000: Avg prompt throughput: 1.0 tokens/s\n")
    assert steps.empty and last_load(steps, 8) is None


def test_a_line_without_times_counts():
    text = "Iteration(3): 1 context requests, 5 context tokens, 0 generation requests, 0 generation tokens"
    assert parse_iterations(text)["context_tokens"].tolist() == [5]


def recorded(release, arm):
    """The step lines of a server that was sent two pairs, one after the other; equal steps stand once, counted."""
    text = (FIXTURES / f"steps-{release}-caching-{arm}.log").read_text()
    return re.sub(r"(.*\n)\((\d+) more steps like this one\)\n", lambda m: m[1] * (1 + int(m[2])), text)


@pytest.mark.parametrize(
    ("release", "arm", "input_tokens", "recomputed", "again"),
    [
        ("gpu-0.26", "off", 3472, 3488, [2048, 1441]),  # the first part as a context request, the rest not
        ("gpu-0.26", "on", 3472, 96, [97]),
        ("cpu-0.31", "off", 3360, 3390, [2048, 1343]),
        ("cpu-0.31", "on", 3360, 94, [95]),
    ],
)
def test_both_releases_count_alike(release, arm, input_tokens, recomputed, again):
    sent = 2 * input_tokens, 2 * 128, 2
    steps = last_load(parse_iterations(recorded(release, arm)), once(*sent))
    assert steps["iteration"].iloc[0] > 200 and steps["context_tokens"].iloc[0] == 2048  # the second pair, all of it
    assert recomputed_tokens(steps, *sent) == recomputed
    assert resumes(steps, sent[0])["again"].tolist() == again  # the last token of a resumed request is new


def test_the_last_load_is_cut_off_from_those_before():
    steps = parse_iterations(log(PROBE, *PAIR, *PAIR, PROBE, *PAIR))
    assert len(last_load(steps, once(8, 12, 2))) == len(PAIR)
    assert last_load(steps, 40) is None  # too few: rather no number than a wrong one
    assert last_load(parse_iterations(log(*PAIR)), once(8, 12, 2)) is None


@pytest.mark.parametrize("back", [(0, 0, 1, 4), (1, 4, 0, 0)])  # as 0.31 and as 0.26 write it
def test_what_was_computed_twice_is_counted(back):
    pair = [back if step == (0, 0, 1, 4) else step for step in PAIR]
    steps = last_load(parse_iterations(log(PROBE, *pair)), once(8, 12, 2))
    assert recomputed_tokens(steps, 8, 12, 2) == 3
    assert resumes(steps, 8)["again"].tolist() == [4]


def test_the_warm_up_is_left_out():
    warmup = [(1, 4, 0, 0), (1, 4, 1, 1), (0, 0, 1, 1)]  # two requests of 4 + 2 tokens
    steps = parse_iterations(log(PROBE, *warmup, *PAIR))
    assert len(last_load(steps, once(8, 12, 2), once(8, 4, 2))) == len(PAIR)
    assert last_load(steps, once(8, 12, 2), once(8, 6, 2)) is None  # no step ends there


def test_a_short_way_back_is_no_probe():
    alone = [(1, 4, 0, 0), (0, 0, 1, 1), (1, 3, 0, 0), (0, 0, 1, 1), (0, 0, 1, 1)]
    assert len(last_load(parse_iterations(log(PROBE, *alone)), 5)) == len(alone)


def test_no_probe_is_longer_than_the_limit():
    assert len(probe_prompt((0, MIN_VOCAB), 1)) == PROBE_TOKENS


def test_a_load_without_preemptions_computes_nothing_twice():
    steps = last_load(parse_iterations(log(PROBE, (1, 4, 0, 0), *[(0, 0, 1, 1)] * 5)), once(4, 6, 1))
    assert recomputed_tokens(steps, 4, 6, 1) == 0
    assert resumes(steps, 4).empty
