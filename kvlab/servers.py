"""The servers of one laboratory: one at a time, or several side by side that take turns."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvlab import log_folder, progress
from kvlab.config import Cell, ServerConfig
from kvlab.errors import ServerError, ServerStopped
from kvlab.quiet import Quiet

REFUSED = re.compile(r"(value|validation|import) ?error|not ?implemented|unrecognized|argument", re.IGNORECASE)
PASSING = re.compile(r"memory|port |in use|timed out|not ready", re.IGNORECASE)


@dataclass
class Servers:
    """At most one server is in use; `side_by_side`: the others wait for their next turn instead of ending."""

    side_by_side: bool = False
    _current: Any = None
    _config: ServerConfig | None = None
    _aside: dict[str, Any] = field(default_factory=dict)
    _logs: Path | None = None
    _refused: dict[str, ServerError] = field(default_factory=dict)  # flags that no second try makes right
    fleet_sizes: dict[str, int] = field(default_factory=dict)  # configuration -> most workers that any cell wants
    outside: Callable[[Cell], Any] | None = None  # gives the workers of a cell, where somebody else runs them
    _fleets: dict[str, Any] = field(default_factory=dict)
    keep_logs: bool = False  # an error names them; else each run has its own, and the folder goes with the servers

    def serve(self, cell: Cell, quiet: Quiet, bar, base_url: str = "") -> Any:
        """The server for this cell, running. Raises ServerError where it does not start; `bar` shows the phases."""
        from kvlab import server

        if cell.service:
            return self._fleet_for(cell, quiet, bar)
        if base_url:
            self._current = self._current or server.attach(base_url)
        elif self._current is None or self._config != cell.server or cell.fresh:
            self._current, self._config = self._turn(cell, quiet), cell.server
        if self._current is None:
            if refused := self._refused.get(cell.server.model_dump_json()):
                raise refused
            progress.show(bar, "starting a server")
            self._logs = self._logs or log_folder.make()
            self._current = server.VllmServer(
                cell.server,
                log_dir=self._logs,
                on_phase=lambda phase, s: progress.show(bar, f"starting a server: {phase}, {s:.0f} s"),
            )
            with quiet.starting():
                self._start(cell.server)
        return self._current

    def _start(self, config: ServerConfig) -> None:
        try:
            self._current.start()
        except ServerError as error:
            if _flags_refused(error):
                self._refused[config.model_dump_json()] = error
            raise

    def will_serve(self, cells: list[Cell]) -> None:
        """What is coming: a fleet is started once, as large as the largest cell of its configuration wants it.

        Raises ConfigError for a service that does not exist: nothing has started yet.
        """
        from kvlab.deployment import check_kind

        for cell in cells:
            if self.outside is None:
                check_kind(cell.service)
            name = cell.server.model_dump_json()
            self.fleet_sizes[name] = max(cell.workers, self.fleet_sizes.get(name, 1))

    def _fleet_for(self, cell: Cell, quiet: Quiet, bar) -> Any:
        """The fleet of this cell with its service in front, running; one that is large enough is used again."""
        if self.outside is not None:
            return self.outside(cell)
        place = _place(cell)
        there = self._fleets.get(place)
        if there is None or not there.serves(cell) or cell.fresh:
            if not self.side_by_side:
                self._end_all()
            elif there is not None:
                self._fleets.pop(place).stop()
            there = self._new_fleet(cell)
            progress.show(bar, f"starting {there.workers} servers")
            with quiet.starting():
                there.start()
            self._fleets[place] = there
        return there.use(cell)

    def _new_fleet(self, cell: Cell) -> Any:
        from kvlab.deployment import Deployment
        from kvlab.dynamo import DynamoDeployment, is_kind

        most = max(cell.workers, self.fleet_sizes.get(cell.server.model_dump_json(), 1))
        self._logs = self._logs or log_folder.make()
        workers = cell.workers if cell.fresh else most
        kind = DynamoDeployment if is_kind(cell.service) else Deployment
        return kind(cell.server, workers, self._logs, cell.placement)

    def start_together(self, cells: list[Cell], quiet: Quiet) -> None:
        """Starts every server that is not up yet at once, where notebooks take turns; an idle one disturbs nobody.

        The workers of a service too, where they have a GPU: on the CPU there are few cores for many of them.
        One that cannot start is left to its own cell, which tries again alone and tells why; not where vLLM refused its
        flags, which it would do again, and not where somebody stopped it: that raises, and ends the measurement.
        """
        from kvlab import server

        up = {*self._aside, *([self._config.model_dump_json()] if self._current is not None else [])}
        wanted = {cell.server.model_dump_json(): cell.server for cell in cells if not cell.service}
        self._logs = self._logs or log_folder.make()
        new = {name: server.VllmServer(c, log_dir=self._logs) for name, c in wanted.items() if name not in up}
        fleets = [cell for cell in cells if cell.service and cell.server.engine == "cuda" and self.outside is None]
        groups = {_place(cell): self._new_fleet(cell) for cell in fleets if _place(cell) not in self._fleets}
        errors = _start_all(new | groups, quiet)
        self._aside |= {name: one for name, one in new.items() if errors[name] is None}
        self._fleets |= {name: one for name, one in groups.items() if errors[name] is None}
        self.keep_logs |= any(errors.values())
        self._refused |= {name: e for name, e in errors.items() if isinstance(e, ServerError) and _flags_refused(e)}
        if stopped := [error for error in errors.values() if isinstance(error, ServerStopped)]:
            raise stopped[0]  # who has stopped it does not want it back

    def _turn(self, cell: Cell, quiet: Quiet) -> Any:
        """The server that waits for this cell, or None; the one in use steps aside, or all end."""
        waiting = None if cell.fresh else self._aside.pop(cell.server.model_dump_json(), None)
        if not self.side_by_side or (cell.fresh and not quiet.turns):
            self._end_all()  # the logs stay: the one that waited goes on writing to its own
        elif self._current is not None:
            self._aside[self._config.model_dump_json()] = self._current
        return waiting

    def end_current(self) -> None:
        """Ends the server in use, and every fleet; an existing one goes on."""
        fleets, self._fleets = self._fleets, {}
        for fleet in fleets.values():
            fleet.stop()
        server, self._current, self._config = self._current, None, None
        if hasattr(server, "stop"):
            server.stop()

    def _end_all(self) -> None:
        self.end_current()
        for server in self._aside.values():
            server.stop()
        self._aside = {}

    def stop(self) -> None:
        """Ends every server of the laboratory. Safe to call twice."""
        self._end_all()
        if self._logs is not None and not self.keep_logs:
            shutil.rmtree(self._logs, ignore_errors=True)
            self._logs = None


def _place(cell: Cell) -> str:
    """Names the fleet of a cell: cells of the same configuration share one, and Dynamo's workers are others."""
    from kvlab.dynamo import is_kind

    family = "dynamo" if is_kind(cell.service) else "fleet"
    return f"{family} {cell.placement} {cell.server.model_dump_json()}"


def _start_all(new: dict[str, Any], quiet: Quiet) -> dict[str, BaseException | None]:
    """Starts these servers and fleets at once; what each start raised. Ctrl-C meanwhile ends all of them."""
    pool = ThreadPoolExecutor(max_workers=max(1, len(new)))
    try:
        with quiet.starting():
            starts = {name: pool.submit(one.start) for name, one in new.items()}
            wait(starts.values())
    except BaseException:
        for again in (True, False):  # once more for one that was about to be launched
            for one in new.values():
                one.stop()
            pool.shutdown(wait=again, cancel_futures=True)
        raise
    return {name: start.exception() for name, start in starts.items()}


def _flags_refused(error: ServerError) -> bool:
    """Whether vLLM said no to the configuration itself: nothing that a quieter or emptier machine would change."""
    return bool(REFUSED.search(error.what)) and not PASSING.search(str(error))
