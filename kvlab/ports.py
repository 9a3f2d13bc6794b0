"""Which local port is free, and who listens on one that is not."""

from __future__ import annotations

import contextlib
import random
import socket

import psutil

from kvlab.errors import PortBusy, ServerError
from kvlab.leash import MARKER
from kvlab.processes import GONE, environment_of

# Below the ephemeral range: between this choice and vLLM's bind, seconds later, no outgoing connection takes it.
PORTS = range(18000, 30000)


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1:port now."""
    with socket.socket() as probe:
        # As vLLM does: connections of an earlier server that linger in TIME_WAIT are no obstacle, a listener is.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True


def free_port() -> int:
    """A port that is free now."""
    for port in random.SystemRandom().sample(PORTS, 200):
        if is_free(port):
            return port
    raise ServerError("No free port was found between 18000 and 30000", next_step="give a port yourself")


def refuse_busy(port: int) -> None:
    """PortBusy, with the name of who holds it, if something listens on the port."""
    if is_free(port):
        return
    holder = holder_of(port)
    own = holder is not None and "of kvlab" in holder
    raise PortBusy(
        f"Port {port} is taken by {holder or 'another process (of another user)'}",
        "a server that was started earlier still runs" if own else None,
        "kvlab ps lists the servers of kvlab, kvlab stop ends them" if own else "choose another port, or none at all",
    )


def holder_of(port: int) -> str | None:
    """The process that listens on a local port, for people: name, pid, and the server of kvlab it belongs to."""
    with contextlib.suppress(*GONE, RuntimeError):
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.status == psutil.CONN_LISTEN:
                if connection.pid is None:
                    return None
                process = psutil.Process(connection.pid)
                own = environment_of(process).get(MARKER)
                return f"{process.name()} (pid {process.pid}{f', server {own} of kvlab' if own else ''})"
    return None


def listens(pid: int, port: int) -> bool | None:
    """Whether this process or one under it listens on the port; None where the system does not tell."""
    with contextlib.suppress(*GONE):
        main = psutil.Process(pid)
        for process in (main, *main.children(recursive=True)):
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                    return True
        return False
    return None
