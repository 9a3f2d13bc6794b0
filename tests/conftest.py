"""For every test: Ctrl-C means something, also where the suite runs in the background of a shell."""

import signal


def pytest_configure(config):
    # A background job inherits an ignored SIGINT, and Python then never raises KeyboardInterrupt.
    if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
        signal.signal(signal.SIGINT, signal.default_int_handler)
