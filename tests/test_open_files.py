import asyncio
import errno
import pickle
import resource

import numpy as np
import pytest

from kvlab import open_files
from kvlab.client import send
from kvlab.config import LoadConfig
from kvlab.errors import ConfigError, LoadError
from kvlab.fake_server import Behaviour, FakeServer
from kvlab.http1 import Pool, clock
from kvlab.load import run_load
from kvlab.row_file import RowFile
from kvlab.workload import Request


@pytest.fixture
def limits(monkeypatch):
    """A system's limits on open files, (soft, hard), as the module sees them."""
    now = [1024, 4096]
    monkeypatch.setattr(resource, "getrlimit", lambda what: tuple(now))
    monkeypatch.setattr(resource, "setrlimit", lambda what, wanted: now.__setitem__(slice(None), wanted))
    return now


def test_the_soft_limit_is_raised_as_far_as_needed(limits):
    open_files.allow(100)
    assert limits == [1024, 4096]
    open_files.allow(2000)
    assert limits == [2000 + open_files.RESERVE, 4096]


def test_a_hard_limit_that_is_too_low_is_named_with_the_way_out(limits):
    with pytest.raises(
        ConfigError, match="10000 connections in one process need 10256 open files; .* allows 4096"
    ) as e:
        open_files.allow(10_000)
    assert "processes=3" in e.value.next_step
    assert limits[0] == 4096


def test_a_load_asks_before_it_starts(limits):
    load = LoadConfig(concurrency=9000, processes=2, requests=9000, input_tokens=32, output_tokens=1)
    with FakeServer() as fake, pytest.raises(ConfigError, match="4500 connections in one process"):
        run_load(fake.endpoint, load, nonce=1, progress=False)
    assert not fake.bodies


def test_the_clients_own_limit_is_no_failure_of_the_server(monkeypatch):
    async def full(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    async def one():
        with FakeServer() as fake:
            async with Pool() as pool:
                monkeypatch.setattr("kvlab.http1._connect", full)
                await send(pool, fake.endpoint, Request(0, [100] * 20, 2), zero=clock(), timeout_s=5)

    with pytest.raises(LoadError, match="may open no more connections"):
        asyncio.run(one())


def test_rows_outside_of_memory_come_back_whole_and_in_order(monkeypatch):
    monkeypatch.setattr("kvlab.row_file.IN_MEMORY_BYTES", 2000)
    rows = RowFile()
    given = [
        {"request": k, "ok": k % 2 == 0, "event_times_s": [k + 0.25, k + 0.5], "event_tokens": [1, 2], "error": None}
        for k in range(100)
    ]
    for row in given:
        rows.append(row)
        assert next(iter(rows))["request"] == 0  # reading in between does no harm
    assert rows._file._rolled and (len(rows), rows.ok) == (100, 50)
    for back in (rows, pickle.loads(pickle.dumps(rows))):
        assert [r | {n: list(r[n]) for n in ("event_times_s", "event_tokens")} for r in back] == given


def test_a_row_without_events_keeps_its_nulls():
    rows = RowFile()
    rows.append({"ok": False, "event_times_s": None, "event_tokens": None})
    assert next(iter(rows)) == {"ok": False, "event_times_s": None, "event_tokens": None}


def test_an_event_takes_few_bytes():
    rows = RowFile()
    rows.append({"ok": True, "event_times_s": np.arange(10_000) / 7, "event_tokens": [1] * 10_000})
    assert len(rows.__getstate__()[0]) < 12.2 * 10_000


@pytest.mark.slow
def test_a_thousand_streams_in_two_processes_without_an_error():
    load = LoadConfig(concurrency=1000, processes=2, requests=1000, input_tokens=32, output_tokens=3, timeout_s=60)
    with FakeServer(Behaviour(ttft_s=0.1, itl_s=0.2, together=1000)) as fake:
        result = run_load(fake.endpoint, load, nonce=1, progress=False)
    assert result.requests["ok"].all() and fake.most_running == 1000
