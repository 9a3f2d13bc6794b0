"""Other parameters are a what-if and leave what is stored alone, unless somebody measures and names the machine."""

import errno
import json
import os
import shutil

import pytest
from notebooks_for_tests import COMMON, execute_here, notebook, own_project, printed
from typer.testing import CliRunner

from kvlab import beside, claims, cli, outcome, provenance, run, store
from kvlab.errors import ConfigError

STATE = """\
from kvlab import beside, measure, plot
lab = measure.open_lab("one", profile_name=PROFILE, machine=MACHINE, mode=MODE, base_url=BASE_URL)
lab.write([lab.claim("n", {"c": c}, computed=float(c), unit="count") for c in CLIENTS or [1, 2]])
print("drawn", list(beside.points(lab.machine, "one", "n", "c")["x"]))
figure, axes = plot.panels(1)
axes[0].plot(CLIENTS or [1, 2])
plot.save(figure, lab, "one", alt="a line")"""
PARAMETERS = COMMON + "\nCLIENTS: list[int] = []  # clients; empty: the profile's"


@pytest.fixture(autouse=True)
def project(monkeypatch, tmp_path):
    return own_project(monkeypatch, tmp_path, ("00_start_here", "01_one"), STATE, parameters=PARAMETERS)


@pytest.fixture
def here(monkeypatch):
    """Without a kernel."""
    monkeypatch.setattr(run, "execute", execute_here)


def replay(*words):
    options = ["--mode", "replay", "--machine", "mine", "--profile", "cpu-tiny", "--allow-empty"]
    result = CliRunner().invoke(cli.app, ["measure", "one", *options, *words])
    assert result.exit_code == 0, result.output
    return result.stdout


def kept(project):
    """Everything that is stored."""
    files = [path for name in ("data", "figures") for path in (project / name).rglob("*") if path.is_file()]
    return {path: path.read_bytes() for path in files}


def test_a_replay_with_other_parameters_leaves_claims_and_figures_alone_and_says_where_its_own_are(project):
    assert "what if" not in replay()
    before = kept(project)
    assert any(path.name == "one.svg" for path in before) and any(path.name == "claims.csv" for path in before)
    told = replay("-p", "CLIENTS=[5]")
    assert kept(project) == before
    aside = project / "_build" / "what-if" / "mine" / "one"
    assert {path.name for path in aside.glob("[!.]*")} == {"claims.csv", "one.json", "one.png", "one.svg"}
    assert "what if    CLIENTS = [5]" in told and "_build/what-if/mine/one" in told
    assert [line.split()[1] for line in told.splitlines() if line.startswith("claims ")] == [
        "_build/what-if/mine/one/claims.csv"
    ]
    shown = printed(project / "_build" / "notebooks" / "01_one.ipynb")
    assert "What if: CLIENTS = [5]" in shown and "_build/what-if/mine/one" in shown
    assert "drawn [5.0]" in shown  # its own claims, not the stored ones
    assert list(claims.read(aside)["conditions"]) == ["c=5"]
    replay()
    assert kept(project).keys() == before.keys()


def test_a_value_typed_into_a_cell_is_a_what_if_too(project, here):
    replay()
    before = kept(project)
    path = notebook(project / "notebooks" / "01_one.ipynb", "CLIENTS = [7]", STATE, parameters=PARAMETERS)
    run.execute(path, {"MODE": "replay", "MACHINE": "mine", "PROFILE": "cpu-tiny"}, project / "out.ipynb")
    assert kept(project) == before and "What if: CLIENTS = [7]" in printed(project / "out.ipynb")


def test_a_replay_that_cannot_state_claims_is_refused_before_it_begins(project, monkeypatch):
    def read_only(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("kvlab.files.tempfile.TemporaryFile", read_only)
    options = ["--mode", "replay", "--machine", "mine", "--profile", "cpu-tiny", "--allow-empty"]
    result = CliRunner().invoke(cli.app, ["measure", "one", *options])
    assert result.exit_code == 1 and "cannot be written: Read-only file system" in result.stderr
    assert "KVLAB_DATA" in result.stderr and not (project / "_build").exists()


def stored_run(machine, profile):
    path = store.machine_dir(machine) / "load" / "run" / "run.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"profile": profile}, indent=1))


def test_another_profile_than_the_measured_one_is_a_what_if():
    stored_run("a", "h200")
    assert outcome.changes("one", {}, "a", "h200") == []
    assert outcome.changes("one", {}, "a", "cpu-tiny") == ["profile cpu-tiny"]
    stored_run("imported", None)
    assert outcome.changes("one", {}, "imported", "cpu-tiny") == []
    assert outcome.changes("one", {}, "nobody", "cpu-tiny") == []


@pytest.mark.parametrize(
    ("line", "value", "asks"),
    [
        ("N: int = 0  # repeats; 0: the profile's", 0, False),
        ("N: int = 0  # repeats; 0: the profile's", 3, True),
        ("N: int = 3  # repeats; 0: the profile's", 3, True),  # edited and saved
        ("N: list = [1, 2]  # sizes to compare", [1, 2], False),
        ("N: list = [1, 2]  # sizes to compare", [1], True),
        ("N: bool = True  # the limits too", True, False),
        ("N: bool = True  # the limits too", False, True),
    ],
)
def test_what_asks_for_something_else(project, line, value, asks):
    notebook(project / "notebooks" / "01_one.ipynb", "1", parameters=f"{COMMON}\n{line}")
    given = {"N": value, "MODE": "replay", "MACHINE": "m"}
    assert bool(outcome.changes("one", given, "m", "cpu-tiny")) == asks


def test_claims_are_read_where_they_are_written_and_the_stand_in_ends(project):
    folder, other = store.machine_dir("mine"), project / "aside"
    claims.write_section(folder, "one", [claims.claim("one", "n", {"c": 1}, computed=1.0, unit="count")])
    stored = (folder / "claims.csv").read_bytes()
    claims.stand_in(folder, other)
    claims.write_section(folder, "two", [claims.claim("two", "n", computed=2.0, unit="count")])
    assert set(claims.read(folder)["section"]) == {"one", "two"} and (folder / "claims.csv").read_bytes() == stored
    assert list(beside.points("mine", "one", "n", "c")["computed"]) == [1.0]
    claims.stand_in(folder, None)
    assert set(claims.read(folder)["section"]) == {"one"}


# -- measuring ----------------------------------------------------------------------------------------------------


def measure(*words):
    result = CliRunner().invoke(cli.app, ["measure", "one", "--profile", "cpu-tiny", *words])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def measures(monkeypatch):
    """Nothing is measured by these notebooks, but they may."""
    monkeypatch.setattr("kvlab.ready.require", lambda lab: None)
    return provenance.machine_name()


def stated(machine):
    return list(claims.read(store.machine_dir(machine))["conditions"])


@pytest.mark.parametrize("mode", ["auto", "measure"])
def test_a_measurement_with_other_parameters_leaves_the_claims_of_the_machine_alone(project, measures, mode, here):
    assert "what if" not in measure()
    before = kept(project)
    told = measure("-p", "CLIENTS=[5]", "--mode", mode)
    assert {path: data for path, data in kept(project).items() if path in before} == before
    assert stated(measures) == ["c=1", "c=2"]
    aside = project / "_build" / "what-if" / measures / "one"
    assert list(claims.read(aside)["conditions"]) == ["c=5"] and (aside / "one.svg").is_file()
    assert told.count("CLIENTS = [5]: claims and figures go to") == 2  # before it measures, and at the end
    assert f"--machine {measures}" in told and "TOML" in told
    assert "What if: CLIENTS = [5]" in printed(project / "_build" / "notebooks" / "01_one.ipynb")


def test_a_value_typed_into_a_cell_that_measures_is_a_what_if_until_the_machine_is_named(project, measures, here):
    path = notebook(project / "notebooks" / "01_one.ipynb", "CLIENTS = [7]", STATE, parameters=PARAMETERS)
    run.execute(path, {"MODE": "auto", "PROFILE": "cpu-tiny"}, project / "out.ipynb")
    assert stated(measures) == [] and "What if: CLIENTS = [7]" in printed(project / "out.ipynb")
    run.execute(path, {"MODE": "auto", "PROFILE": "cpu-tiny", "MACHINE": "mine"}, project / "out.ipynb")
    assert stated("mine") == ["c=7"] and "What if" not in printed(project / "out.ipynb")


def test_whoever_names_the_machine_gets_these_claims_there_and_a_replay_keeps_them(project, measures, here):
    measure()
    assert "what if" not in measure("--machine", measures, "-p", "CLIENTS=[5]")
    assert stated(measures) == ["c=5"]
    assert "what if" not in measure("--machine", measures, "-p", "CLIENTS=[5]", "--mode", "replay", "--allow-empty")
    assert "not CLIENTS = [5]" in measure("--machine", measures, "--mode", "replay", "--allow-empty")
    assert "CLIENTS = [6]" in measure("--machine", measures, "-p", "CLIENTS=[6]", "--mode", "replay", "--allow-empty")
    assert stated(measures) == ["c=5"]
    measure("--machine", measures)  # as the profile has it
    assert stated(measures) == ["c=1", "c=2"] and not list((project / "data").rglob("asked.json"))


def test_a_machine_of_another_name_leaves_the_claims_of_the_hardware_alone(project, measures, here):
    measure()
    assert "what if" not in measure("--machine", "larger", "-p", "CLIENTS=[5]")
    assert stated("larger") == ["c=5"] and stated(measures) == ["c=1", "c=2"]


# -- what a cell may hold -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("CLIENTS = 8", r"CLIENTS is 8, of type int; it must be of type list\[int\]"),
        ("CLIENTS = (1, 8)", "it must be of type list"),
        ("CLIENTS = [1, 'a']", "'a' is no whole number"),
        ("CLIENTS = '[1, 8]'", r"must be of type list(.|\n)*papermill .* -y 'NAME: \[1, 8\]'"),
        ("MACHINE = None", "MACHINE is None"),
        ("CLEINTS = [8]", r"no parameter 'CLEINTS'(.|\n)*CLIENTS"),  # pitfall 37: papermill by itself injects it
    ],
)
def test_a_wrong_value_in_a_cell_is_one_error_before_anything_starts(project, here, typed, message):
    path = notebook(project / "notebooks" / "01_one.ipynb", typed, STATE, parameters=PARAMETERS)
    with pytest.raises(ConfigError, match=message) as caught:
        run.execute(path, {"MODE": "replay"}, project / "out.ipynb")
    assert "Next:" in str(caught.value) and not (project / "data").exists()


def test_a_wrong_value_in_a_cell_of_a_kernel_is_that_error(project):
    path = notebook(project / "notebooks" / "01_one.ipynb", "CLIENTS = 8", STATE, parameters=PARAMETERS)
    with pytest.raises(ConfigError, match=r"CLIENTS is 8, of type int(.|\n)*Next:"):
        run.execute(path, {"MODE": "replay"}, project / "out.ipynb")


def test_other_names_of_a_notebook_are_its_own(project, here):
    path = notebook(project / "notebooks" / "01_one.ipynb", "TOTAL = 8", STATE, parameters=PARAMETERS)
    given = {"MODE": "replay", "MACHINE": "mine", "PROFILE": "cpu-tiny"}
    run.execute(path, given, project / "out.ipynb")
    assert "What if" not in printed(project / "out.ipynb")


def test_nothing_is_asked_outside_of_a_notebook(project):
    assert outcome.asked("one") == {} == outcome.asked("nothing")
    shutil.rmtree(project / "notebooks")
