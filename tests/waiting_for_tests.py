"""Waiting in tests: for a condition, in place of a time that was enough on a fast and idle machine."""

import time

LIMIT_S = 60.0


def until(condition, within_s=LIMIT_S):
    """The condition's first true value; an AssertionError where there is none within `within_s`."""
    deadline = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited for {within_s:g} s in vain"
        time.sleep(0.02)
    return found
