"""Whether a measurement can run at all: everything that is known to fail, found before the first notebook."""

from __future__ import annotations

from collections.abc import Callable

from kvlab import engine, files, model_files, predict, profile, provenance, quiet, store
from kvlab.errors import KvlabError
from kvlab.measure import Lab


def checks(lab: Lab) -> dict[str, Callable[[], object]]:
    """What must hold, by name; each call raises the KvlabError that says why it does not."""
    own = {
        "hardware": lambda: profile.check_fits(lab.profile, provenance.hardware()),
        "engine": lambda: engine.check(lab.profile.server),
        "model": lambda: model_files.resolve_model(lab.profile.server),
    }
    every = {
        "geometry": lambda: predict.kv_bytes_per_token(lab.geometry),
        "data folder": lambda: files.check_writable(store.root()),
        "cache folder": quiet.check,
    }
    return every if lab.base_url else own | every


def require(lab: Lab) -> None:
    """Raises the first error of `checks`."""
    for check in checks(lab).values():
        check()


def problems(lab: Lab) -> list[KvlabError]:
    """Every error of `checks`."""
    found = []
    for check in checks(lab).values():
        try:
            check()
        except KvlabError as error:
            found.append(error)
    return found
