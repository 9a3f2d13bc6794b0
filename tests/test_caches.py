"""Cold and warm compile caches: the folder, what is emptied, and what the server is told."""

import pytest

from kvlab import caches
from kvlab.config import ServerConfig


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path))


def server(policy: str, **more) -> ServerConfig:
    return ServerConfig(model="m", caches=policy, **more)


def test_the_users_own_caches_are_left_alone():
    assert caches.environment(server("user")) == {}
    assert caches.prepare(server("user")) is None


def test_a_cold_start_finds_nothing_and_the_next_one_what_it_left():
    assert caches.prepare(server("cold")) == 0
    place = caches.environment(server("cold"))
    assert place == caches.environment(server("kept"))
    for name, folder in place.items():
        path = caches.folder(server("cold")) / folder.rpartition("/")[2] / "deep"
        path.mkdir(parents=True)
        (path / name).write_text("compiled")
    assert caches.prepare(server("kept")) == len(place)
    assert caches.prepare(server("cold")) == 0


def test_servers_do_not_share_a_folder():
    eager = server("cold", enforce_eager=True)
    assert caches.folder(server("cold")) != caches.folder(eager)
    caches.prepare(server("kept"))
    (caches.folder(server("kept")) / "file").write_text("compiled")
    caches.prepare(eager)
    assert caches.prepare(server("kept")) == 1
