"""Several notebooks: measured ones in a row, replayed ones side by side, finished ones not measured again."""

import json

import notebooks_for_tests
import pytest

from kvlab import batch, run
from kvlab.errors import NotebookError

PARAMETERS = 'MACHINE: str = "m"  # folder\nMODE: str = "auto"  # mode'


@pytest.fixture
def project(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    return tmp_path


def notebook(folder, name, body):
    return notebooks_for_tests.notebook(folder / f"{name}.ipynb", body, parameters=PARAMETERS)


def run_all(paths, project, mode="auto", profile="p", go_on=True):
    given = {"MACHINE": "m", "MODE": mode}
    ended = []
    outcome = batch.execute(paths, given, project / "build", profile, go_on=go_on, told=lambda *end: ended.append(end))
    assert len(ended) == len(outcome[0]) + len(outcome[1]) and not any(taken for _, _, taken in ended)
    return outcome


def modes(project):
    return (project / "modes").read_text().split()


def test_a_finished_section_replays_until_its_runs_profile_or_notebook_change(project, monkeypatch):
    monkeypatch.setattr(run, "execute", notebooks_for_tests.execute_here)
    path = notebook(project, "01_a", f"with open({str(project / 'modes')!r}, 'a') as f: print(MODE, file=f)")
    for _ in range(2):
        timings, failures = run_all([path], project)
        assert list(timings) == ["a"] and failures == {}
    assert modes(project) == ["auto", "replay"]
    stored = project / "data" / "m" / "a" / "c1" / "run.json"
    stored.parent.mkdir(parents=True)
    stored.write_text("{}")  # another run than there was
    run_all([path], project)
    run_all([path], project, profile="another")
    run_all([path], project, profile="another", mode="measure")
    assert modes(project)[2:] == ["auto", "auto", "measure"]


def test_a_failed_section_is_named_and_measured_again(project):
    good = notebook(project, "01_good", "1")
    bad = notebook(project, "02_bad", "raise RuntimeError('broken')")
    timings, failures = run_all([bad, good], project)
    assert list(timings) == ["good"] and "broken" in failures["bad"]
    assert list(json.loads((project / "build" / batch.DONE).read_text())["m"]) == ["good"]
    with pytest.raises(NotebookError, match="broken"):
        run_all([bad, good], project, go_on=False)


def test_a_lone_replay_needs_no_further_process_and_is_told_like_the_others(project, monkeypatch):
    monkeypatch.setattr(batch, "ProcessPoolExecutor", None)
    monkeypatch.setattr(run, "execute", notebooks_for_tests.execute_here)
    timings, failures = run_all([notebook(project, "01_good", "1")], project, mode="replay")
    assert timings["good"] > 0 and failures == {} and (project / "build" / "notebooks" / "01_good.ipynb").is_file()

    def broken(*_, **__):
        raise NotebookError("broken")

    monkeypatch.setattr(run, "execute", broken)
    bad = [notebook(project, "02_bad", "1")]
    assert run_all(bad, project, mode="replay") == ({}, {"bad": "broken"})
    with pytest.raises(NotebookError, match="broken"):
        run_all(bad, project, mode="replay", go_on=False)


def test_a_replay_tells_of_failures_from_other_processes_too(project):
    paths = [notebook(project, "01_good", "1"), notebook(project, "02_bad", "raise RuntimeError('broken')")]
    timings, failures = run_all(paths, project, mode="replay")
    assert list(timings) == ["good"] and "broken" in failures["bad"]
    assert not (project / "build" / batch.DONE).exists()


def test_a_process_that_is_killed_while_it_replays_is_one_error_for_each_section(project, monkeypatch):
    """As the kernel's out-of-memory killer does."""
    monkeypatch.setattr(batch.provenance, "cores", lambda: 2)
    good = notebook(project, "01_good", "import time; time.sleep(20)")
    bad = notebook(project, "02_bad", "import os; os.kill(os.getppid(), 9)")
    timings, failures = run_all([good, bad], project, mode="replay")
    # On a busy machine the pool may notice the end of a process only with the other one's result.
    assert "bad" in failures and set(timings) | set(failures) == {"good", "bad"} and not set(timings) & set(failures)
    assert all("was killed" in said and "Next: run the same command again" in said for said in failures.values())


def test_a_command_that_ends_begins_no_further_replay(project, monkeypatch):
    monkeypatch.setattr(batch.provenance, "cores", lambda: 1)
    bad = notebook(project, "01_bad", "raise RuntimeError('broken')")
    others = [
        notebook(project, f"0{n}_x", f"open({str(project / 'begun')!r}, 'a').write('{n}'); import time; time.sleep(2)")
        for n in range(2, 6)
    ]
    with pytest.raises(NotebookError, match="broken"):
        run_all([bad, *others], project, mode="replay", go_on=False)
    assert len((project / "begun").read_text() if (project / "begun").exists() else "") <= 1  # the one under way
