"""A laboratory without vLLM: the fake server in the place of VllmServer, and a list of what happened to it."""

from pathlib import Path

from kvlab import measure
from kvlab.config import Cell, LoadConfig
from kvlab.control import Capacity
from kvlab.errors import ServerDied
from kvlab.fake_server import Behaviour, FakeServer

EVENTS: list[str] = []  # what happened, in order: start, stop, fails
BEHAVIOUR = Behaviour()  # of the servers started next
FAILS_TO_START: list[bool] = []
OUT_OF_MEMORY = ServerDied("The server ended during its start-up.", cause="no memory was left", next_step="free some")
SAYS = [OUT_OF_MEMORY]  # the error of a start that fails


class FakeVllm:
    """The read side of VllmServer. It is dead as soon as its fake has been told to die and has done so."""

    def __init__(self, config, *, log_dir, on_phase=None, **_):
        self.config, self.log_path = config, Path(log_dir) / "server.log"
        self.capacity = Capacity(metric_blocks=101, metric_block_size=config.block_size)
        self.fake = None

    def start(self):
        self.log_path.write_text("a log\n")
        if FAILS_TO_START and FAILS_TO_START.pop(0):
            EVENTS.append("fails")
            raise SAYS[0]
        EVENTS.append("start")
        self.fake = FakeServer(BEHAVIOUR).__enter__()
        return self

    @property
    def endpoint(self):
        return self.fake.endpoint

    def check_alive(self):
        after = self.fake.behaviour.die_after
        if after is not None and len(self.fake.bodies) > after:
            raise ServerDied("The server ended while it was in use.", cause="it was told to")

    def reset_prefix_cache(self):
        if self.fake.cache is not None:
            self.fake.cache.clear()

    def describe(self):
        return {"version": "fake", "started_utc": "2026-01-01T00:00:00+00:00", "ready_s": 0.1}

    def stop(self):
        if self.fake is not None:
            EVENTS.append("stop")
            self.fake.__exit__()
            self.fake = None


def install(monkeypatch, tmp_path, **behaviour):
    """No vLLM, no GPU, no data, and a lock of its own."""
    EVENTS.clear()
    FAILS_TO_START.clear()
    SAYS[:] = [OUT_OF_MEMORY]
    monkeypatch.setattr("kvlab.server.VllmServer", FakeVllm)
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(**behaviour))
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))


def open_lab(mode="auto", machine="fake", section="load", **more):
    """A laboratory with the CPU profile; only the machine `fake` may hold what a fake server answered."""
    return measure.open_lab(section, profile_name="cpu-tiny", machine=machine, mode=mode, **more)


def cell(lab, c=1, *, server=None, repeat=0, fresh=False, requests=4, **load):
    """A small cell of `c` clients."""
    load = LoadConfig(**({"concurrency": c, "requests": requests, "input_tokens": 16, "output_tokens": 3} | load))
    return Cell(name=f"c{c}", server=server or lab.server(), load=load, repeat=repeat, fresh=fresh)
