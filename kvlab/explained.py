"""How a command ends that could not do what it was asked."""

from __future__ import annotations

import contextlib

import typer

from kvlab import files
from kvlab.errors import ConfigError, KvlabError
from kvlab.invocation import as_typed


@contextlib.contextmanager
def errors_explained():
    """One message on standard error and exit code 1 (2 for bad input) in place of a traceback."""
    try:
        yield
    except KvlabError as error:
        _say(str(error))
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from None
    except KeyboardInterrupt:
        _say("Interrupted. What was measured is kept; the same command resumes.")
        raise typer.Exit(130) from None
    except BrokenPipeError:  # `kvlab check | head`
        raise typer.Exit(1) from None
    except OSError as error:
        if error.filename is None and not files.is_full(error):
            raise
        _say(str(files.explained(error, str(error.filename or "A file"))))
        raise typer.Exit(1) from None


def _say(text: str) -> None:
    typer.secho(as_typed(text), err=True, fg="red")
