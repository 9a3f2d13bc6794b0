"""The step lines of the engine's log."""

from kvlab.iterations import last_load, parse_iterations, recomputed_tokens, resumes

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


def test_the_last_load_is_cut_off_from_those_before():
    steps = parse_iterations(log((1, 50, 0, 0), (0, 0, 1, 1), PROBE, *PAIR))
    assert len(last_load(steps, 8)) == len(PAIR)
    assert last_load(steps, 9) is None  # no step begins there: rather no number than a wrong one


def test_what_was_computed_twice_is_counted():
    steps = last_load(parse_iterations(log(PROBE, *PAIR)), 8)
    assert recomputed_tokens(steps, 8, 12, 2) == 3
    assert resumes(steps)["again"].tolist() == [4]


def test_a_load_without_preemptions_computes_nothing_twice():
    steps = last_load(parse_iterations(log((1, 4, 0, 0), *[(0, 0, 1, 1)] * 5)), 4)
    assert recomputed_tokens(steps, 4, 6, 1) == 0
    assert resumes(steps).empty
