"""Every notebook, executed as a reader without any measurement would: in replay, on an empty machine."""

import pytest
from notebooks_for_tests import outputs, printed
from replays_for_tests import EMPTY, ROOT, Replay

from kvlab import claims, store

NOTEBOOKS = sorted((ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("replay", [Replay(EMPTY, path.stem) for path in NOTEBOOKS], ids=str)
def test_an_empty_machine_is_computed_and_says_what_was_not_measured(replay, replays, monkeypatch):
    section = replay.notebook[3:]
    done = replays.result(replay)
    out = done.out
    monkeypatch.setenv("KVLAB_DATA", str(done.data))
    assert done.cpu_s < 60  # a few seconds; the rest is for a slow machine
    published = (ROOT / "data" / "article" / "claims.csv").read_bytes()
    assert (done.data / "article" / "claims.csv").read_bytes() == published
    assert not list((done.data / EMPTY).glob("*/*/run.json")) and not list(out.parent.glob("cache/*"))
    said = printed(out)
    assert r"\n" not in said and "np.float64(" not in said  # texts and tables, no reprs of them
    if section == "start_here":
        lines = said.splitlines()
        assert [line for line in lines if line.startswith("hardware  ")]
        assert "Nothing stands against it" in said or any(line.startswith("Next: ") for line in lines)
        return
    table = claims.read(store.machine_dir(EMPTY))
    assert set(table["section"]) == {section} and table["measured"].isna().all()
    missing = table[table["state"] == "not measured"]
    assert len(missing) and missing["reason"].notna().all() and missing["ci_low"].isna().all()
    if section == "kv_capacity":
        assert table["computed"].notna().any()  # what a formula says needs no measurement
    assert any("not measured" in text for text in (said, *_markdown(out)))
    pictures = [o for o in outputs(out) if "image/png" in o.get("data", {})]
    assert len(pictures) == len(list(store.figures_dir(EMPTY).glob("*.svg"))) > 0  # pitfall 38
    assert not [o for o in outputs(out) if o.output_type == "error"]


def _markdown(path):
    return [o["data"]["text/markdown"] for o in outputs(path) if "text/markdown" in o.get("data", {})]
