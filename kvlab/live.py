"""A running server, watched while a load runs: the picture follows in one cell while another cell has sent the load.

session = live.open_session(base_url="")      # attach, or start a server of the profile
session.view()                                # a picture that follows
sending = session.send(LoadConfig(...))       # returns at once; the kernel stays free
sending.wait(); session.close()

A view, not a measurement: nothing is stored.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from matplotlib.figure import Figure

from kvlab import existing, log_folder, measure, plot, profile, provenance, quiet, scrape, store
from kvlab.client import Endpoint, clock
from kvlab.config import LoadConfig
from kvlab.errors import ConfigError, EngineMissing, KvlabError, ScrapeError, ServerError, StoreError

if TYPE_CHECKING:
    import ipywidgets

INTERVAL_S = 0.5
DRAW_EVERY = 2  # samples: drawing takes longer than asking
KEPT = 1200  # samples, ten minutes


class Watch:
    """Asks one server for its gauges and counters in the background, every `interval_s`."""

    def __init__(self, endpoint: Endpoint, interval_s: float = INTERVAL_S):
        self.endpoint, self.interval_s = endpoint, interval_s
        self.failure: str | None = None
        self._rows: list[dict[str, Any]] = []
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._began, self._thread = clock(), None
        self._followers: list[Callable[[pd.DataFrame], None]] = []

    def start(self) -> Watch:
        """Begins to ask; safe to call twice."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, daemon=True, name="kvlab-watch")
            self._thread.start()
        return self

    def stop(self) -> None:
        """Ends the asking; the samples stay. Safe to call twice."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(scrape.SCRAPE_TIMEOUT_S + 1)

    def frame(self) -> pd.DataFrame:
        """One row a sample: t_s since the start, and the sample columns of `records`."""
        with self._lock:
            return scrape.sample_frame([{"worker": None} | row for row in self._rows])

    def follow(self, draw: Callable[[pd.DataFrame], None]) -> None:
        """Calls `draw` with the samples so far, again and again, from the watching thread."""
        self._followers.append(draw)

    def _run(self) -> None:
        asked = 0
        while not self._stop.is_set():
            self._ask()
            asked += 1
            if asked % DRAW_EVERY == 0:
                self._tell()
            self._stop.wait(self.interval_s)
        self._tell()

    def _ask(self) -> None:
        try:
            row = {"t_s": clock() - self._began} | scrape.fetch(self.endpoint)
        except (ScrapeError, ValueError) as error:
            self.failure = str(error)
            return
        self.failure = None
        with self._lock:
            self._rows = [*self._rows[-KEPT:], row]

    def _tell(self) -> None:
        for draw in self._followers:
            with contextlib.suppress(KvlabError):  # a picture that fails must not end the watching
                draw(self.frame())


class Sending:
    """A load on its way, in a thread of its own."""

    def __init__(self, endpoint: Endpoint, load: LoadConfig):
        self.load, self.failure, self._result = load, None, None
        self._thread = threading.Thread(target=self._run, args=(endpoint,), daemon=True, name="kvlab-load")
        self._thread.start()

    def _run(self, endpoint: Endpoint) -> None:
        from kvlab.load import run_load

        try:
            self._result = run_load(endpoint, self.load, nonce=secrets.randbits(48), progress=False)
        except Exception as error:  # raised again where somebody waits for it
            self.failure = error

    @property
    def done(self) -> bool:
        """Whether the load has drained."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> pd.DataFrame:
        """The requests of the load, one a row, once it has drained. Raises what the load raised."""
        self._thread.join(timeout_s)
        if not self.done:
            raise KvlabError(
                f"The load still runs after {timeout_s:g} s.",
                next_step="wait longer: sending.wait(), or look at the view",
            )
        if self.failure is not None:
            raise self.failure
        return self._result.requests


class Session:
    """A server that is watched. `close` stops the watch, and the server where it was started here."""

    def __init__(self, server: Any, held: quiet.Quiet | None = None, logs: Path | None = None):
        self.server, self._held, self._logs = server, held, logs
        self.watch = Watch(server.endpoint).start()

    def send(self, load: LoadConfig) -> Sending:
        """Starts a load and returns at once."""
        return Sending(self.server.endpoint, load)

    def view(self) -> ipywidgets.VBox:
        """A picture that follows the server until the session is closed."""
        return view(self.watch)

    def close(self) -> None:
        """Ends watch and server; safe to call twice."""
        self.watch.stop()
        stop = getattr(self.server, "stop", None)  # one that somebody else runs has none
        if stop is not None:
            stop()
        if self._held is not None:
            self._held.close()
            self._held = None
        if self._logs is not None:
            shutil.rmtree(self._logs, ignore_errors=True)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def can_start() -> bool:
    """Whether a vLLM is installed here."""
    return provenance.hardware().has_vllm


def open_session(base_url: str = "", profile_name: str = "auto") -> Session:
    """Attaches to the server at `base_url`, or starts one of the profile (17 s to minutes).

    Holds this computer as a measurement does, so that nobody measures beside it. Raises ConfigError or ServerError.
    """
    existing.check_address(base_url)
    if base_url:
        return Session(existing.attach(base_url))
    if not can_start():
        raise EngineMissing(
            "No vLLM is installed here.",
            next_step="install one with `make install`, or name a running server: BASE_URL = 'http://host:8000'",
        )
    from kvlab.server import VllmServer

    hardware = provenance.hardware()
    chosen = profile.load_profile(profile.choose(hardware) if profile_name == "auto" else profile_name)
    profile.check_fits(chosen, hardware)
    held = quiet.take_machine()
    logs = log_folder.make()
    server = VllmServer(chosen.server, log_dir=logs)
    try:
        with held.starting():
            server.start()
    except BaseException as error:
        held.close()
        if not isinstance(error, ServerError):  # its message names the log
            shutil.rmtree(logs, ignore_errors=True)
        raise
    return Session(server, held, logs)


# -- pictures -----------------------------------------------------------------------------------------------------


def figure(samples: pd.DataFrame, title: str = "") -> Figure:
    """Running and waiting requests, KV use and preemptions over time, from samples of a server."""
    made, (left, middle, right) = plot.panels(
        3, titles=[f"Requests {title}".strip(), "KV in use", "Preemptions"], width=4
    )
    t = samples["t_s"] - samples["t_s"].min() if len(samples) else samples["t_s"]
    for column, color in (("running", plot.MEASURED), ("waiting", plot.MISS)):
        _steps(left, t, samples[column], color, column)
    _steps(middle, t, samples["kv_usage"] * 100, plot.MEASURED, "% of the blocks")
    preempted = samples["preemptions"]
    _steps(
        right, t, preempted - (preempted.dropna().iloc[0] if preempted.notna().any() else 0), plot.LIMIT, "since start"
    )
    middle.set_ylim(0, 104)
    for axis in (left, right):
        axis.set_ylim(bottom=0)
    right.yaxis.get_major_locator().set_params(integer=True)
    for axis in (left, middle, right):
        axis.set_xlabel("seconds")
        axis.legend(loc="best")
        plot.say_where_empty(axis)
    return made


def _steps(axis, t: pd.Series, values: pd.Series, color: str, label: str) -> None:
    known = values.notna()
    axis.step(t[known].astype(float), values[known].astype(float), where="post", color=color, label=label)


def stored(machine: str, section: str = "load") -> Figure:
    """The same picture from a stored run: the one of the section in which most requests waited. Raises StoreError."""
    runs = [run for run in store.list_runs(machine, section) if run.valid]
    if not runs:
        raise StoreError(
            f"{machine} has no run of the section {section}.", next_step=f"use one of: {', '.join(store.machines())}"
        )
    busiest = max(runs, key=lambda run: (run.manifest["summary"] or {}).get("waiting_max") or 0)
    return figure(busiest.samples(), f"({machine}, {busiest.manifest['cell']['name']})")


def view(watch: Watch) -> ipywidgets.VBox:
    """A picture that is drawn again while the watch runs, with the last values in words."""
    import ipywidgets

    from kvlab.sliders import png

    image, said = ipywidgets.Image(format="png"), ipywidgets.Label("waiting for the first sample")

    def draw(samples: pd.DataFrame) -> None:
        if watch.failure is not None:
            said.value = watch.failure.splitlines()[0]
        elif len(samples):
            said.value = last_words(samples)
            image.value = png(figure(samples))

    watch.follow(draw)
    return ipywidgets.VBox([said, image])


def last_words(samples: pd.DataFrame) -> str:
    """The newest sample in one line; what the server does not tell is left out."""
    last = samples.iloc[-1]
    parts = [f"{last[name]:.0f} {name}" for name in ("running", "waiting") if pd.notna(last[name])]
    parts += [f"{last['kv_usage']:.0%} of the KV in use"] if pd.notna(last["kv_usage"]) else []
    parts += [f"{last['preemptions']:.0f} preemptions"] if pd.notna(last["preemptions"]) else []
    return f"{last['t_s']:.0f} s: " + ", ".join(parts)


def replay_machine(machine: str = "") -> str:
    """The machine whose stored run stands in for a live one. Raises ConfigError for the published values."""
    if machine == measure.PUBLISHED:
        raise ConfigError("The article published no samples over time.", next_step="use another machine")
    return machine or store.default_replay_machine()
