"""Whether processes have ended, for tests."""

import time

import psutil
from waiting_for_tests import LIMIT_S


def alive(tree, within_s=LIMIT_S):
    """Those of `tree` that still live after `within_s`, which one that is ending gets.

    A process that ended under an init that has not collected it yet is gone too.
    """
    deadline = time.monotonic() + within_s
    while True:
        left = [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.01)
