"""Every error that a person may see: what happened, the likely cause, the next command."""

REPLAY = 'look at what is stored: MODE = "replay" in a notebook, --mode replay on the command line'


class KvlabError(Exception):
    """A failure explained in one message.

    `what` says what happened, `cause` the likely reason, `next_step` the command or edit that helps.
    """

    def __init__(self, what: str, cause: str | None = None, next_step: str | None = None):
        self.what, self.cause, self.next_step = what, cause, next_step
        lines = [what]
        if cause:
            lines.append(f"Likely cause: {cause}")
        if next_step:
            lines.append(f"Next: {next_step}")
        super().__init__("\n".join(lines))

    def _render_traceback_(self) -> list[str]:
        """What IPython and JupyterLab show in place of a traceback: the message alone."""
        from kvlab.invocation import as_typed

        return as_typed(str(self)).splitlines()


class ConfigError(KvlabError):
    """A profile, a parameter or a model description is wrong; nothing was started."""


class FormulaDoesNotApply(ConfigError):
    """The simple KV formula would give a wrong number for this model."""


class EngineMissing(KvlabError):
    """No vLLM can be run by this Python."""


class ServerError(KvlabError):
    """A server could not be started, died, or answers for somebody else."""


class PortBusy(ServerError):
    """Something else already listens on the port."""


class ServerDied(ServerError):
    """The server ended before or while it was measured."""


class ServerStopped(ServerDied):
    """Somebody asked the server to end, as `kvlab stop` does: nothing starts another one by itself."""


class LoadError(KvlabError):
    """The load could not be generated as asked."""


class ScrapeError(KvlabError):
    """The server's metrics could not be read or understood."""


class StoreError(KvlabError):
    """Measured data could not be read or written."""


class SchemaError(StoreError):
    """Stored data has a layout that this version does not know."""


class NotebookError(KvlabError):
    """A notebook could not be run, or failed in a cell."""
