"""The report as pages: complete, linked, nothing left of an earlier build, nothing lost by a failed one."""

import errno
import os
import re
from pathlib import Path

import pytest
from test_report import small_machine

from kvlab import files, pages, plot_small, prose, report, run, site
from kvlab.errors import ConfigError, StoreError


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(plot_small, "draw", lambda *_: "")


def links(path: Path) -> set[Path]:
    """What a page asks for on this disk: pages, styles, pictures."""
    found = re.findall(r'(?:href|src)="([^"#]+)(?:#[^"]*)?"', path.read_text())
    return {(path.parent / name).resolve() for name in found if not name.startswith(("https:", "data:"))}


def test_every_page_is_there_and_every_link_leads_to_a_file_in_both_languages(tmp_path):
    small_machine()
    folder = tmp_path / "site"
    first = site.build("mine", folder)
    assert first == folder / "index.html"
    wanted = {f"{name}.html" for name in pages.order(list(run.notebooks()), "en")} | {"index.html"}
    for place in (folder, folder / "zh"):
        assert {path.name for path in place.glob("*.html")} == wanted
    assert all(target.is_file() for page in folder.rglob("*.html") for target in links(page))
    assert (folder / "figures" / "load.svg").is_file()

    text = (folder / "evidence.html").read_text()  # a reference to another section is a link to its page
    assert 'href="load.html"' in text and 'href="#load"' not in text and 'href="#evidence-why-1"' in text
    assert 'href="zh/load.html" lang="zh-Hans"' in (folder / "load.html").read_text()
    assert 'href="../load.html" lang="en"' in (folder / "zh" / "load.html").read_text()


def test_a_build_leaves_nothing_of_an_earlier_one_and_a_failed_one_leaves_all(tmp_path, monkeypatch):
    small_machine()
    folder = tmp_path / "site"
    site.build("mine", folder)
    (folder / "old.html").write_text("old")
    site.build("mine", folder)
    assert not (folder / "old.html").exists()
    monkeypatch.setattr(pages, "check_all", fail)
    with pytest.raises(prose.ProseError):
        site.build("mine", folder)
    assert (folder / "index.html").is_file()


@pytest.mark.parametrize("killed", [False, True])
def test_a_build_that_ends_in_the_middle_leaves_the_site_that_was(tmp_path, monkeypatch, killed):
    small_machine()
    folder = tmp_path / "site"
    site.build("mine", folder)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    written = iter(range(5))
    monkeypatch.setattr(report, "render", lambda page: str(next(written)) if killed else full())
    if killed:  # nothing is tidied up then
        monkeypatch.setattr(files.shutil, "rmtree", lambda *_, **__: None)
    with pytest.raises((StoreError, StopIteration)):
        site.build("mine", folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    monkeypatch.undo()
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(plot_small, "draw", lambda *_: "")
    site.build("mine", folder)
    assert {path.name for path in tmp_path.iterdir()} == {"site", "data", "figures", ".lock"}


def full():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_file_in_the_place_of_the_site_is_told_and_kept(tmp_path):
    small_machine()
    (tmp_path / "site").write_text("mine")
    with pytest.raises(StoreError, match="a file stands where a folder is needed"):
        site.build("mine", tmp_path / "site")
    assert (tmp_path / "site").read_text() == "mine"


def fail(*_):
    raise prose.ProseError("a number without a claim")


def test_a_machine_of_which_nothing_is_stored_is_refused_before_anything_is_removed(tmp_path):
    small_machine()
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "kept.html").write_text("x")
    with pytest.raises(ConfigError, match=r"Nothing is stored of the machine 'mien'(.|\n)*use one of: .*mine"):
        site.build("mien", tmp_path / "site")
    assert (tmp_path / "site" / "kept.html").exists()
