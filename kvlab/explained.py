"""How a command ends that could not do what it was asked."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import warnings

import typer

from kvlab import files
from kvlab.errors import ConfigError, KvlabError
from kvlab.invocation import as_typed


def finite(value: float | None) -> float | None:
    """For an option that is a number: nan and infinity are no numbers, and no limit of an option refuses nan."""
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number.")
    return value


def print_anything() -> None:
    """What the terminal's encoding has no sign for is printed as `?`: no result is lost over the sign of a unit."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, ValueError):  # a stand-in of a test or a notebook, or a closed one
            stream.reconfigure(errors="replace")


@contextlib.contextmanager
def errors_explained(failed: int = 1):
    """One message on standard error and exit code `failed` (2 for bad input) in place of a traceback.

    SIGTERM ends a command as Ctrl-C does: in order, with nothing left behind.
    """
    warnings.showwarning = _warn
    with contextlib.suppress(ValueError):  # not in the main thread
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KvlabError as error:
        _say(str(error))
        raise typer.Exit(2 if isinstance(error, ConfigError) else failed) from None
    except KeyboardInterrupt:
        _say("Interrupted. What was measured is kept; the same command resumes.")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # `kvlab check | head`
        raise typer.Exit(failed) from None
    except OSError as error:
        if error.filename is None and not files.is_full(error):
            raise
        _say(str(files.unusable(error)))
        raise typer.Exit(failed) from None


def _warn(message, category, filename, lineno, file=None, line=None) -> None:
    """Our own warnings without the line of code that gave them; others only matter to whoever writes that code."""
    if category is UserWarning:
        typer.secho(as_typed(f"Warning: {message}"), err=True, fg="yellow")


def _say(text: str) -> None:
    typer.secho(as_typed(text), err=True, fg="red")
