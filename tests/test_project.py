"""What the project says of itself: one list of dependencies, targets that exist, modules that can be read."""

import ast
import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from replays_for_tests import ROOT, Replay
from typer.testing import CliRunner

import kvlab
from kvlab import beside, claims, cli, pages, plot, profile, run

CONDA_NAMES = {"prometheus-client": "prometheus_client", "matplotlib": "matplotlib-base"}
# Committed machines whose claims must follow from their runs.
MACHINES = ("cpu-tiny", "h200", "h200-x2")
TEXTS = {".py", ".md", ".toml", ".yml", ".ipynb", ".html", ".mplstyle", ".cfg", ""}


def tracked():
    """The files that belong to the project, by git; all of them where there is no git."""
    git = shutil.which("git")
    listed = subprocess.run([git or "false", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True)
    if listed.returncode == 0:
        return [ROOT / name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    skipped = {".venv", "_build", ".git"}
    return [path for path in ROOT.rglob("*") if path.is_file() and not skipped & set(path.relative_to(ROOT).parts)]


def makefile_targets():
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.M))


# -- dependencies -------------------------------------------------------------------------------------------------


def test_conda_and_pip_install_the_same():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {f"python{project['requires-python']}", "pip"}
    for line in project["dependencies"]:
        name = re.match(r"[\w-]+", line)[0]
        wanted.add(line.partition(";")[0].replace(name, CONDA_NAMES.get(name, name), 1))  # conda knows no markers
    lines = (ROOT / "environment.yml").read_text().splitlines()
    listed = [line.strip()[2:] for line in lines[lines.index("dependencies:") :] if line.strip().startswith("- ")]
    assert sorted(listed) == sorted(wanted)


def test_every_imported_package_is_a_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.match(r"[\w-]+", line)[0].replace("-", "_") for line in project["dependencies"]}
    declared |= {"pynvml", "IPython", "nbformat", "nbclient", "yarl"}  # of nvidia-ml-py, jupyterlab, papermill, aiohttp
    declared |= {"yaml", "traitlets"}  # of papermill
    declared |= {"kubernetes", "urllib3"}  # of the extra k8s
    declared |= {"dynamo"}  # in an environment of its own: kvlab router install dynamo
    declared |= {"torch", "uvloop", "vllm", "transformers", "tokenizers"}  # optional, or come with vLLM
    used = set()
    for path in (ROOT / "kvlab").rglob("*.py"):
        used |= set(re.findall(r"^\s*(?:import|from) (\w+)", path.read_text(), re.M))
    assert {name for name in used if name not in sys.stdlib_module_names} - {"kvlab"} <= declared


# -- the front door -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_help_lists_what_is_documented():
    told = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    documented = set(re.findall(r"^([a-z][a-z0-9-]*):.*## ", (ROOT / "Makefile").read_text(), re.M))
    assert documented == {word for word in re.findall(r"^  make ([a-z0-9-]+)", told, re.M)}
    assert {"report", "measure", "replay", "test", "lab", "help"} <= documented
    for option in ("PROFILE", "MACHINE", "ENGINE", "PYTHON"):
        assert f"{option}=" in told


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_the_notebooks_open_without_an_engine():
    """`make lab` installs no vLLM: a replay needs none."""
    told = subprocess.run(["make", "-C", str(ROOT), "-n", "lab"], capture_output=True, text=True, check=True).stdout
    assert "jupyter lab notebooks" in told and "install_engine" not in told


def test_what_is_to_be_typed_works_in_every_shell():
    """zsh takes brackets that are not quoted for a pattern; the folder of the workshop holds both of its parts."""
    readme = (ROOT / "README.md").read_text()
    assert "--param 'CONCURRENCY=[1,8,32]'" in readme and not re.search(r"(?:--param|-p) \w+=\[", readme)
    setup = (ROOT / "notebooks" / "workshop" / "SETUP.md").read_text()
    assert "cp -r <the folder>/kvlab <the folder>/wheels . && cd kvlab" in setup and '"$PWD/../wheels"' in setup


def test_the_caption_of_the_first_picture_says_what_is_seen():
    """It says of h200 that the time to the first token falls just beyond the pool, and of no other machine."""
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert "on `h200` it falls just beyond that point" in readme and "as on the others" in readme
    where, falls = {"in": 512, "out": 128}, []
    for machine in ("article", "cpu-tiny", "h200"):
        fit = beside.value(machine, "load", "requests_that_fit_low", "computed", **where)
        fit = fit or beside.article_fit(machine, **where)
        points = beside.points(machine, "load", "ttft_p50_s", "c", **where).dropna(subset="measured")
        if plot.falls_beyond(points["x"] / fit, points["measured"]):
            falls.append(machine)
    assert falls == ["h200"]


def test_the_readme_names_commands_that_exist():
    readme = re.sub(r" #.*", "", (ROOT / "README.md").read_text())
    assert {
        name for name in re.findall(r"\bmake ([a-z][a-z-]*)(?=[ `\n])", readme) if name != "it"
    } <= makefile_targets()
    commands = {command.name or command.callback.__name__ for command in cli.app.registered_commands}
    blocks = "\n".join(re.findall(r"```.*?```|`kvlab [^`]*`", readme, re.S))
    assert set(re.findall(r"\bkvlab ([a-z]+)\b", blocks)) - {"import"} <= commands
    helps = {name: CliRunner().invoke(cli.app, [name, "--help"], env={"COLUMNS": "200"}).stdout for name in commands}
    used = re.findall(r"\bkvlab ([a-z]+)\b.*?(--[a-z-]+)", blocks)
    assert used and all(option in helps[command] for command, option in used)


def test_the_readme_links_to_files_that_are_there():
    readme = (ROOT / "README.md").read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", readme) if "://" not in link]
    ours = [link for link in links if not link.startswith(("figures/", "data/"))]
    assert ours and all((ROOT / link).exists() for link in ours)


def test_the_readme_names_every_profile():
    readme = (ROOT / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in profile.built_in())


def test_citation_changelog_and_package_agree():
    cited = dict(re.findall(r"^([\w-]+): (\S.*)$", (ROOT / "CITATION.cff").read_text(), re.M))
    first, state = re.search(r"^## (\S+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.M).groups()
    assert cited["version"] == kvlab.__version__ == first
    assert cited.get("date-released", "unreleased") == state
    licence = re.search(r'^license = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    name, number = licence.rsplit("-", 1)
    assert cited["license"] == licence and f"{name} License\n" in (text := (ROOT / "LICENSE").read_text())
    assert f"Version {number}" in text and f"Licence: {licence}" in (ROOT / "README.md").read_text()


def test_the_readme_shows_two_commands_first_and_the_citation_names_both_articles():
    first = (ROOT / "README.md").read_text().partition("\n## ")[0]
    commands = [line for block in re.findall(r"```\n(.*?)```", first, re.S) for line in block.splitlines()]
    assert [line.split("#")[0].strip() for line in commands] == ["make report", "make test"]
    cited = (ROOT / "CITATION.cff").read_text().partition("\nreferences:")[2]
    dates = set(re.findall(r"- type: article\n.*?date-released: (\S+)", cited, re.S))
    assert dates == set(re.findall(r"\{lit (2026-[-\d]+) \| date\}", pages.source("versions", "en")))


# -- what is committed --------------------------------------------------------------------------------------------


def test_modules_stay_readable():
    long = {path.name: n for path in (ROOT / "kvlab").glob("*.py") if (n := len(path.read_text().splitlines())) > 350}
    assert not long


def test_text_files_have_one_encoding_wherever_they_are_read():
    """What a locale says, such as GBK or Latin-1, is no encoding of ours."""
    named = re.compile(r"""encoding=|\(["']utf-8["']""")
    bare = []
    for path in [*(ROOT / "kvlab").rglob("*.py"), *(ROOT / "tools").rglob("*.py")]:
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                whose, name = ast.unparse(node.func.value), node.func.attr
                if name in ("read_text", "write_text") and whose not in ("store", "files", "perplexity"):
                    call = ast.unparse(node)
                    bare += [] if named.search(call) else [f"{path.name}:{node.lineno}: {call}"]
    assert not bare


def test_no_text_names_a_folder_of_its_author():
    """Paths of one person's machine help nobody and tell too much."""
    pattern = re.compile(r"(?<![\w.~/-])/(?:root|work|home/[a-z]\w*|Users/\w+|tmp/\w)[\w./-]*")
    allowed = {
        "privacy.py",
        "test_privacy.py",
        "test_store.py",
        "test_provenance.py",
    }  # they feed such paths on purpose
    found = {}
    for path in tracked():
        if (
            path.suffix in TEXTS
            and path.name not in allowed
            and "fixtures" not in path.parts
            and path != Path(__file__)
        ):
            lines = path.read_text(errors="replace").splitlines()
            hits = [f"{n}: {match[0]}" for n, line in enumerate(lines, 1) if (match := pattern.search(line))]
            if hits:
                found[str(path.relative_to(ROOT))] = hits[:3]
    assert not found


def test_stored_runs_name_no_folder_of_their_author():
    pattern = re.compile(r"(?<![\w.~/-])/(?:root|home|work)/")
    runs = [path for path in tracked() if path.name == "run.json"]
    assert not [str(path) for path in runs if pattern.search(path.read_text())]


def measured_sections():
    """A replay for each section of which a committed machine has a measured number."""
    notebooks, found = run.notebooks(), []
    for machine in MACHINES:
        if (ROOT / "data" / machine / "claims.csv").is_file():
            table = claims.read(ROOT / "data" / machine)
            sections = set(table.loc[table["measured"].notna(), "section"])
            found += [Replay(machine, path.stem) for section, path in notebooks.items() if section in sections]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("replay", measured_sections(), ids=str)
def test_claims_follow_from_the_committed_runs(replay, replays):
    table = replays.result(replay).data / replay.machine / "claims.csv"
    committed = (ROOT / "data" / replay.machine / "claims.csv").read_text().splitlines()
    again = table.read_text().splitlines()
    mine = f"{replay.notebook[3:]}/"
    assert [line for line in again if line.startswith(mine)] == [line for line in committed if line.startswith(mine)]
    assert {line.partition("/")[0] for line in again} == {line.partition("/")[0] for line in committed}


def test_the_readme_shows_what_was_measured():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "tools" / "readme_table.py")
    readme_table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(readme_table)
    text = (ROOT / "README.md").read_text()
    assert readme_table.with_table(text) == text
