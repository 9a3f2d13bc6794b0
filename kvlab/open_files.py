"""How many connections a process may hold open."""

from __future__ import annotations

import contextlib

from kvlab.errors import ConfigError

RESERVE = 256  # libraries, pipes, logs, connections to /metrics


def allow(connections: int, processes: int = 1) -> None:
    """Raises the limit on open files so that each process can hold its connections; child processes inherit it.

    Raises ConfigError where the system's hard limit is lower.
    """
    try:
        import resource
    except ImportError:  # Windows has no such limit
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed, unlimited = connections + RESERVE, resource.RLIM_INFINITY
    if soft == unlimited or soft >= needed:
        return
    limit = needed if hard == unlimited else min(needed, hard)
    with contextlib.suppress(ValueError, OSError):  # macOS caps it below what it reports
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    if limit < needed:
        more = -(-connections * processes // max(1, hard - RESERVE))
        raise ConfigError(
            f"{connections} connections in one process need {needed} open files; this system allows {hard}.",
            cause="the hard limit on open files (ulimit -Hn)",
            next_step=f"use processes={more}, or raise it: ulimit -Hn {needed} as root, or LimitNOFILE= of the service",
        )
