"""The write-up as a small static site: a first page and one page a section, figures as files, no script, no network."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from kvlab import files, pages, report, store
from kvlab.errors import ConfigError


def build(machine: str, folder: Path) -> Path:
    """Writes the site of a machine into `folder` and returns its first page. What an earlier build left is removed.

    English lies at the top, the other languages in folders of their own. Raises ConfigError for a machine of which
    nothing is stored, and what `report.content` raises; the site that is there stays until the new one is whole.
    """
    if machine not in (known := store.machines()):
        raise ConfigError(
            f"Nothing is stored of the machine {machine!r} under {store.root()}.",
            "a typing error, or it was never measured",
            f"use one of: {', '.join(known) or '(none)'}",
        )
    pictures = report.small_pictures(machine)
    told = {language: report.content(machine, language, pictures=pictures) for language in pages.LANGUAGES}
    with files.whole_folder(folder) as new:
        store.write_text(new / "report.css", report.style())
        for language, content in told.items():
            _language(content, new, language)
    return folder / "index.html"


def _language(content: Mapping[str, Any], folder: Path, language: str) -> None:
    up, place = ("", folder) if language == "en" else ("../", folder / language)
    shared = {
        "style": "",
        "style_url": f"{up}report.css",
        "link": lambda name: f"{name}.html",
        "picture": lambda figure: f"{up}figures/{figure['name']}.svg",
    }
    for page in content["contents"]:
        for figure in page["figures"]:
            store.write_text(folder / "figures" / f"{figure['name']}.svg", figure["file"].read_text(encoding="utf-8"))
    listed = content["contents"]
    neighbours = zip(listed, [None, *listed[:-1]], [*listed[1:], None], strict=True)
    for page, before, after in neighbours:
        own = {"first": False, "shown": [page], "home": "index.html", "before": before, "after": after}
        _write(place / f"{page['name']}.html", content | shared | own, language)
    _write(place / "index.html", content | shared | {"first": True, "shown": [], "home": None}, language)


def _write(path: Path, page: Mapping[str, Any], language: str) -> None:
    other = f"zh/{path.name}" if language == "en" else f"../{path.name}"
    here = {shown["name"] for shown in page["shown"]}
    elsewhere = {listed["name"] for listed in page["contents"]} - here
    text = report.render(page | {"other_language": other})
    store.write_text(path, re.sub(r'href="#(\w+)"', partial(_to_page, elsewhere), text))


def _to_page(elsewhere: set[str], link: re.Match) -> str:
    """A link of a text to another section is one to another page here."""
    return f'href="{link[1]}.html"' if link[1] in elsewhere else link[0]
