"""Whether this computer may be measured, asked beforehand: it is only looked at."""

import os
from pathlib import Path

import pytest

from kvlab import quiet
from kvlab.errors import ConfigError, StoreError


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder that may become the cache: it is not there yet."""
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "some" / "cache"))
    return tmp_path / "some" / "cache"


def everything(folder):
    return sorted(str(path) for path in folder.rglob("*"))


def test_a_cache_folder_that_can_be_made_is_not_made(cache, tmp_path):
    quiet.check()
    assert everything(tmp_path) == []


def test_nothing_is_written_beside_a_measurement_that_runs(cache, tmp_path):
    held = quiet.take_machine("one")
    before, text = everything(tmp_path), (cache / "measuring.lock").read_text()
    quiet.check()
    assert everything(tmp_path) == before and (cache / "measuring.lock").read_text() == text
    assert "one" in quiet.measuring()  # it is held as before
    held.close()


def read_only(folder, monkeypatch):
    """Root may write into any folder but one on a read-only disk, which this then looks like."""
    folder.chmod(0o555)
    if os.geteuid() == 0:
        real = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != folder and real(path, mode))


@pytest.mark.parametrize("there", ["", "some", "some/cache"])
def test_a_read_only_folder_is_refused_at_any_height(there, cache, tmp_path, monkeypatch):
    (folder := tmp_path / there).mkdir(parents=True, exist_ok=True)
    read_only(folder, monkeypatch)
    with pytest.raises(StoreError, match="cannot be written") as refused:
        quiet.check()
    folder.chmod(0o755)
    assert "KVLAB_CACHE" in refused.value.next_step and everything(folder) == []


def test_a_folder_that_nobody_may_enter_is_refused(cache, tmp_path):
    tmp_path.chmod(0)
    if (child := os.fork()) == 0:  # root may enter any: a child that is not root asks
        code = 1
        try:
            if os.geteuid() == 0:
                os.setresuid(65534, 65534, 65534)
            quiet.check()
        except StoreError:
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    tmp_path.chmod(0o755)
    assert os.waitstatus_to_exitcode(status) == 0


@pytest.mark.parametrize("named", ["some", "some/cache"])
def test_a_cache_that_names_a_file_is_refused_and_left_alone(named, cache, tmp_path):
    (file := tmp_path / named).parent.mkdir(exist_ok=True)
    file.write_text("mine")
    with pytest.raises(StoreError, match="cannot be written"):
        quiet.check()
    with pytest.raises(StoreError, match="cannot be written"):
        quiet.take_machine()
    assert file.read_text() == "mine"


def test_a_lock_that_belongs_to_somebody_else_is_refused(cache, monkeypatch):
    cache.mkdir(parents=True)
    (lock := cache / "measuring.lock").touch()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != lock)
    with pytest.raises(StoreError, match="cannot be written"):
        quiet.check()


def test_a_word_that_takes_no_turns_is_refused_here_too(cache, monkeypatch):
    monkeypatch.setenv(quiet.TURNS, "yes")
    with pytest.raises(ConfigError, match="KVLAB_TAKE_TURNS is 'yes'"):
        quiet.check()
