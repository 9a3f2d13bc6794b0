"""A replay is taken over where nothing has changed, and executed where anything has."""

import json
import os

import notebooks_for_tests
import pytest

from kvlab import batch, claims, outcome, run, store, takeover

GIVEN = {"MACHINE": "m", "MODE": "replay", "PROFILE": "p"}
PARAMETERS = 'MACHINE: str = "m"  # folder\nMODE: str = "auto"  # mode'


@pytest.fixture
def replayed(tmp_path, monkeypatch):
    """A replay that has just ended, made by hand, with a small package."""
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(takeover, "PACKAGE", tmp_path / "package")
    path, out = tmp_path / "notebooks" / "02_load.ipynb", tmp_path / "build" / "notebooks" / "02_load.ipynb"
    texts = {
        path: "source",
        out: "executed",
        tmp_path / "package" / "predict.py": "1",
        tmp_path / "package" / "tiny" / "weights": "2",
        tmp_path / "data" / "m" / "load" / "run" / "run.json": "{}",
        tmp_path / "data" / "other" / "claims.csv": "id",
        tmp_path / "figures" / "m" / "load.json": '{"notebook": "load"}',
        tmp_path / "figures" / "m" / "load.svg": "<svg/>",
        tmp_path / "own.txt": "text",
    }
    for file, text in texts.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    takeover.remember({path: 3.5}, GIVEN, tmp_path / "build", takeover.inputs(PROFILE))
    return tmp_path


PROFILE = '{"text": "heldout"}{"CONCURRENCY": [1]}'


def found(project, given=GIVEN, profile=PROFILE):
    path = project / "notebooks" / "02_load.ipynb"
    return takeover.take(path, given, project / "build", takeover.inputs(profile))


def test_nothing_has_changed(replayed):
    os.utime(replayed / "data" / "other" / "claims.csv", ns=(1, 1))  # written again, with the same content
    (replayed / "data" / "m" / ".lock").touch()
    assert found(replayed) == 3.5


CHANGED = {
    "the notebook": "notebooks/02_load.ipynb",
    "a module": "package/predict.py",
    "the embedded model": "package/tiny/weights",
    "a run": "data/m/load/run/run.json",
    "a new run": "data/m/load/new/run.json",
    "another machine's claims": "data/other/claims.csv",
    "a new machine": "data/new/claims.csv",
    "a figure": "figures/m/load.svg",
}


@pytest.mark.parametrize("file", CHANGED.values(), ids=list(CHANGED))
def test_a_changed_file_executes_again(replayed, file):
    (replayed / file).parent.mkdir(parents=True, exist_ok=True)
    (replayed / file).write_text("another")
    assert found(replayed) is None


@pytest.mark.parametrize("file", ["figures/m/load.svg", "figures/m/load.json", "build/replayed/m/02_load.ipynb"])
def test_what_the_replay_left_has_to_be_there(replayed, file):
    (replayed / file).unlink()
    assert found(replayed) is None


def test_the_executed_notebook_is_kept_for_each_machine(replayed):
    """`MACHINE=a make replay`, `MACHINE=b make replay`, and back again."""
    path, out = (replayed / folder / "02_load.ipynb" for folder in ("notebooks", "build/notebooks"))
    out.write_text("executed for b")
    takeover.remember({path: 7.0}, GIVEN | {"MACHINE": "b"}, replayed / "build", takeover.inputs(PROFILE))
    assert found(replayed) == 3.5 and out.read_text() == "executed"
    assert found(replayed, GIVEN | {"MACHINE": "b"}) == 7.0 and out.read_text() == "executed for b"
    out.unlink()
    assert found(replayed) == 3.5 and out.read_text() == "executed"
    assert found(replayed, GIVEN | {"MACHINE": "c"}) is None


def test_other_parameters_profiles_and_versions_execute_again(replayed, monkeypatch):
    assert found(replayed, GIVEN | {"REPEATS": 1}) is None
    assert found(replayed, profile="{}") is None
    (replayed / "site" / "numpy-99.dist-info").mkdir(parents=True)
    monkeypatch.syspath_prepend(str(replayed / "site"))
    assert found(replayed) is None


def test_a_file_that_the_profile_names_is_an_input(replayed):
    named = json.dumps({"fp8_kv": {"text": str(replayed / "own.txt")}})
    path = replayed / "notebooks" / "02_load.ipynb"
    takeover.remember({path: 1.0}, GIVEN, replayed / "build", takeover.inputs(named))
    assert found(replayed, profile=named) == 1.0
    (replayed / "own.txt").write_text("another text")
    assert found(replayed, profile=named) is None


def test_what_a_what_if_left_has_to_be_there(replayed):
    aside = outcome.what_if_dir("m", "load") / "load.svg"
    aside.parent.mkdir(parents=True)
    aside.write_text("x")
    assert found(replayed) is None


# -- several notebooks --------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.setattr(run, "execute", notebooks_for_tests.execute_here)
    monkeypatch.setattr(takeover, "PACKAGE", tmp_path / "package")  # somebody may be working on the real one
    return tmp_path


def run_all(paths, project, mode, **options):
    told = []
    given = {"MACHINE": "m", "MODE": mode}
    arguments = (paths, given, project / "build", "p")
    batch.execute(*arguments, go_on=True, told=lambda name, seconds, taken: told.append((name, taken)), **options)
    return told


def logs_its_mode(project, more=""):
    log = f"with open({str(project / 'modes')!r}, 'a') as f: print(MODE, file=f)\n{more}"
    return notebooks_for_tests.notebook(project / "01_a.ipynb", log, parameters=PARAMETERS)


def modes(project):
    return (project / "modes").read_text().split()


def test_a_second_replay_executes_nothing_unless_it_is_told_to(project):
    path = logs_its_mode(project)
    assert run_all([path], project, "replay") == [("a", False)]
    assert run_all([path], project, "replay") == [("a", True)]
    assert modes(project) == ["replay"]
    assert run_all([path], project, "replay", again=True) == [("a", False)]
    assert run_all([path], project, "measure") == [("a", False)]
    assert modes(project) == ["replay", "replay", "measure"]


def test_what_a_report_has_measured_is_settled_and_its_second_time_taken_over(project):
    path = logs_its_mode(project)
    assert run_all([path], project, "auto", settle=True) == [("a", False)]
    assert run_all([path], project, "auto", settle=True) == [("a", True)]
    assert modes(project) == ["auto", "replay"]


def test_whoever_installs_what_was_missing_gets_it_measured(project, monkeypatch):
    """A section that left cells out for want of a router has finished all the same, until the router is there."""
    path = logs_its_mode(project)
    assert batch.unfinished([path], {"MACHINE": "m", "MODE": "auto"}, project / "build", "p") == [path]
    run_all([path], project, "auto")
    assert batch.unfinished([path], {"MACHINE": "m", "MODE": "auto"}, project / "build", "p") == []
    monkeypatch.setattr(batch.router_packages, "version", lambda product: "9.9")
    assert batch.unfinished([path], {"MACHINE": "m", "MODE": "auto"}, project / "build", "p") == [path]


SETTLES = """
from kvlab import claims, store
import os
n = 0.0 if MODE == "auto" else 1.0  # as one that reads the claims of a section that is measured after it
claims.write_section(store.machine_dir(MACHINE), "a", [claims.claim("a", "n", computed=n, unit="count")])
"""


def test_a_report_whose_claims_change_as_they_settle_is_taken_over_the_second_time_too(project):
    path = logs_its_mode(project, SETTLES)
    assert run_all([path], project, "auto", settle=True) == [("a", False)]
    assert run_all([path], project, "auto", settle=True) == [("a", True)]
    assert modes(project) == ["auto", "replay", "replay"]


STATE = """
from kvlab import claims, store
import os
n = float(len(open(os.environ["COUNTER"]).read()))
claims.write_section(store.machine_dir(MACHINE), "a", [claims.claim("a", "n", computed=n, unit="count")])
"""


def test_a_replay_that_changed_a_claim_is_executed_until_it_does_not(project, monkeypatch):
    """Another notebook may have read the claim before it changed."""
    counter = project / "counter"
    monkeypatch.setenv("COUNTER", str(counter))
    path = logs_its_mode(project, STATE)
    counter.write_text("x")
    assert [run_all([path], project, "replay")[0][1] for _ in range(3)] == [False, False, True]
    assert claims.read(store.machine_dir("m"))["computed"].tolist() == [1.0]
