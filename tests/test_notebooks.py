"""Every notebook, executed as a reader without any measurement would: in replay, on an empty machine."""

import shutil
import time
from pathlib import Path

import pytest
from notebooks_for_tests import outputs, printed

from kvlab import claims, run, store

ROOT = Path(run.__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """The published values and nothing else."""
    shutil.copytree(ROOT / "data" / "article", tmp_path / "data" / "article")
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_an_empty_machine_is_computed_and_says_what_was_not_measured(path, tmp_path):
    section = path.stem[3:]
    published = (tmp_path / "data" / "article" / "claims.csv").read_bytes()
    out = tmp_path / "out.ipynb"
    began = time.monotonic()
    run.execute(path, {"MODE": "replay", "MACHINE": "empty", "PROFILE": "cpu-tiny"}, out)
    assert time.monotonic() - began < 60  # a few seconds; the rest is for a busy machine
    assert (tmp_path / "data" / "article" / "claims.csv").read_bytes() == published
    assert not list((tmp_path / "data" / "empty").glob("*/*/run.json")) and not list((tmp_path / "cache").glob("*"))
    if section == "start_here":
        return
    table = claims.read(store.machine_dir("empty"))
    assert set(table["section"]) == {section} and table["measured"].isna().all()
    missing = table[table["state"] == "not measured"]
    assert len(missing) and missing["reason"].notna().all() and missing["ci_low"].isna().all()
    if section == "kv_capacity":
        assert table["computed"].notna().any()  # what a formula says needs no measurement
    assert any("not measured" in text for text in (printed(out), *_markdown(out)))
    pictures = [o for o in outputs(out) if "image/png" in o.get("data", {})]
    assert len(pictures) == len(list(store.figures_dir("empty").glob("*.svg"))) > 0  # pitfall 38
    assert not [o for o in outputs(out) if o.output_type == "error"]


def _markdown(path):
    return [o["data"]["text/markdown"] for o in outputs(path) if "text/markdown" in o.get("data", {})]
