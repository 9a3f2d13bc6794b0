"""One real server: watched while a load runs, and shared by the live part of an exercise."""

import shutil
import threading
from pathlib import Path

import live_for_tests
from notebooks_for_tests import printed

from kvlab import live, run, store
from kvlab.config import LoadConfig

ROOT = Path(run.__file__).resolve().parent.parent
pytestmark = live_for_tests.MARKS


def test_a_server_is_watched_and_shared(tmp_path, monkeypatch):
    for machine in ("article", "cpu-tiny"):
        shutil.copytree(ROOT / "data" / machine, tmp_path / "data" / machine)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLAB_TAKE_TURNS", "1")  # the exercise measures while the session holds this computer
    load = LoadConfig(concurrency=16, requests=20, input_tokens=512, output_tokens=128, sample_interval_s=0.5)
    with live.open_session(profile_name="cpu-tiny") as session:
        view = session.view()
        rows = session.send(load).wait(400)
        assert rows["ok"].all() and view.children[1].value[:4] == b"\x89PNG"
        frame = session.watch.frame()
        assert frame["waiting"].max() > 0 and frame["kv_usage"].max() > 0.7 and frame["running"].max() >= 8

        given = {"LIVE": True, "BASE_URL": session.server.base_url}
        exercise = ROOT / "notebooks" / "workshop" / "07_prefix_cache.ipynb"
        run.execute(exercise, given, tmp_path / "out.ipynb")
    assert "cached_tokens" in printed(tmp_path / "out.ipynb")
    (measured,) = [r for r in store.list_runs("workshop", "prefix_cache") if r.valid]
    assert measured.manifest["summary"]["n"] == 12
    assert not any(thread.name == "kvlab-watch" for thread in threading.enumerate())
