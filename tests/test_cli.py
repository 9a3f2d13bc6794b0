import json
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from typing import get_args, get_type_hints

import pytest
from notebooks_for_tests import COMMON, execute_here, notebook, own_project, printed
from typer.testing import CliRunner

from kvlab import __version__, k8s_cli, processes, profile, router_cli
from kvlab.cli import app
from kvlab.errors import EngineMissing

PARAMETERS = COMMON + "\nCLIENTS: list = []  # a list"


@pytest.fixture(autouse=True)
def project(monkeypatch, tmp_path, some_engine):
    """An own project with two notebooks that show what they were given, and a vLLM that is found."""
    show = (
        "print(PROFILE, MACHINE, MODE, CLIENTS)\nfrom kvlab import profile\nprint(profile.load_profile(PROFILE).title)"
    )
    return own_project(monkeypatch, tmp_path, ("00_start_here", "01_one", "02_two"), show, parameters=PARAMETERS)


@pytest.fixture
def here(monkeypatch):
    """Without a kernel."""
    monkeypatch.setattr("kvlab.run.execute", execute_here)


def call(*words):
    """Exit code, standard output and standard error of the command."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def started(project):
    return (project / "_build").exists()


# -- looking and computing ----------------------------------------------------------------------------------------


def test_check_says_what_is_here_and_what_would_be_measured():
    code, told, _ = call("check", "--profile", "cpu-tiny")
    assert code == 0
    assert all(word in told for word in ("hardware", "engine", "profile   cpu-tiny", "machine", "one", "two"))
    assert "No stored run of this profile says how long" in told and "0.0 minutes" not in told


def test_check_says_when_the_profile_does_not_fit_this_machine(monkeypatch):
    monkeypatch.setattr("kvlab.provenance.gpus", lambda: [])
    code, told, _ = call("check", "--profile", "h200")
    assert (
        code == 2
        and "cannot be measured here" in told
        and "needs a GPU of at least 16 GiB; no NVIDIA GPU is visible" in told
    )


def test_a_model_is_computed_to_the_block():
    code, told, _ = call("predict", "Qwen3-1.7B", "--kv-bytes", 2**30)
    assert code == 0
    numbers = {line[:44].strip(): line[44:].strip() for line in told.splitlines()}
    assert numbers["KV bytes per token"] == "114,688"
    assert numbers["blocks"] == "585 of 16 tokens"
    assert numbers["usable"] == "9,344 of 9,360 tokens; one block is vLLM's null block"


def test_a_config_file_and_fp8_are_computed(project):
    config = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 2, "head_dim": 64}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 256, "vocab_size": 1000}
    config |= {"max_position_embeddings": 4096, "torch_dtype": "bfloat16"}
    (project / "config.json").write_text(json.dumps(config))
    assert "1,024" in call("predict", "config.json")[1]
    assert "  512" in call("predict", "config.json", "--kv-dtype-bytes", 1)[1]


def test_without_a_model_the_known_ones_are_listed():  # pitfall 21
    code, told, _ = call("predict")
    lines = {line.split()[0]: line for line in told.splitlines()}
    assert code == 0 and "114,688" in lines["Qwen3-1.7B"]
    assert "does not apply" in lines["DeepSeek-V3"] and "latent" in lines["DeepSeek-V3"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["Qwen3-1.7"], "Qwen3-1.7B"),
        (["DeepSeek-V3"], "does not apply"),  # pitfall 21
        (["no/such/config.json"], "no/such/config.json"),
        (["Qwen3-1.7B", "--kv-bytes", "0"], "0 bytes"),
        (["Qwen3-1.7B", "--kv-bytes", "nan"], "nan bytes"),
        (["Qwen3-1.7B", "--tensor-parallel", "3"], "tensor parallel 3"),
    ],
)
def test_what_cannot_be_computed_is_one_error(words, message):
    code, told, error = call("predict", *words)
    assert code == 2 and told == "" and message in error
    assert "Traceback" not in error and "Next:" in error


@pytest.mark.parametrize("option", ["--block-size", "--input-tokens", "--output-tokens", "--tensor-parallel"])
def test_sizes_below_one_are_refused(option):
    assert call("predict", "Qwen3-1.7B", option, "0")[0] == 2


@pytest.mark.parametrize(
    ("size", "shown"), [("2.5GB", "2,500,000,000"), ("2.5GiB", "2,684,354,560"), ("1gib", "1,073,741,824")]
)
def test_a_size_may_carry_its_unit(size, shown):
    code, told, _ = call("predict", "Qwen3-1.7B", "--kv-bytes", size)
    assert code == 0 and f"{shown} bytes" in told


@pytest.mark.parametrize("size", ["2.5 gigs", "", "GB", "1e", "--", "2.5XB"])
def test_what_is_no_size_is_refused(size):
    code, _, error = call("predict", "Qwen3-1.7B", f"--kv-bytes={size}")
    assert code == 2 and "is no size" in error and "2.5GiB" in error


def test_a_pool_that_nobody_gave_is_called_assumed():
    told = call("predict", "Qwen3-1.7B")[1]
    assert "pool, assumed" in told and "--kv-bytes gives yours" in told
    assert "assumed " not in call("predict", "Qwen3-1.7B", "--kv-bytes=2GiB")[1]


def test_the_assumed_element_is_named_and_how_to_choose_another():
    told = call("predict", "tiny")[1]
    assert "bytes of a KV element                        2 (bf16 or fp16)" in told and "--kv-dtype-bytes" in told
    assert "The profile cpu-tiny serves tiny with 4 (float32): --kv-dtype-bytes 4." in told
    chosen = call("predict", "tiny", "--kv-dtype-bytes", 4)[1]
    assert "4 (float32)" in chosen and "Assumed" not in chosen
    assert "The profile" not in call("predict", "Qwen3-1.7B")[1]
    assert "Bytes of a KV element: 2 (bf16 or fp16)" in call("predict")[1]


def numeric_options():
    """(words of a command, option) of every option that is a number."""
    found = []
    for words, group in (([], app), (["k8s"], k8s_cli.app), (["router"], router_cli.app)):
        for command in group.registered_commands:
            for name, kind in get_type_hints(command.callback).items():
                if {int, float} & {kind, *get_args(kind)}:
                    called = command.name or command.callback.__name__
                    found.append(([*words, called], f"--{name.replace('_', '-')}"))
    return found


ARGUMENTS = {"hold": ["mine", "check"], "render": ["--image", "vllm/vllm-openai:v0"]}


@pytest.mark.parametrize(("words", "option"), numeric_options(), ids=lambda part: "-".join(part) or "kvlab")
@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "-1", "1e400", "many"])
def test_no_option_takes_what_is_no_number_for_it(monkeypatch, words, option, value):
    monkeypatch.setattr("kvlab.k8s_job.hold", lambda *_, **__: pytest.fail("it began"))
    code, told, error = call(*words, *ARGUMENTS.get(words[-1], []), f"{option}={value}")
    assert code == 2 and told == "" and option in error and "Traceback" not in error


@pytest.mark.parametrize("size", ["nan", "inf", "-1", "-2GiB", "1e400"])
def test_no_size_is_absurd(size):
    for model in ([], ["tiny"]):
        code, told, error = call("predict", *model, f"--kv-bytes={size}")
        assert code == 2 and told == "" and "A KV pool of" in error


@pytest.mark.parametrize("element", ["3", "0.3", "nan", "inf", "-1", "many", "16"])
def test_what_is_no_kv_element_names_those_that_are(element):
    code, told, error = call("predict", "Qwen3-1.7B", f"--kv-dtype-bytes={element}")
    assert code == 2 and told == "" and "--kv-dtype-bytes" in error and "1 (fp8), 2 (bf16 or fp16)" in error


def test_a_kv_element_may_be_named():
    assert (
        call("predict", "Qwen3-1.7B", "--kv-dtype-bytes", "fp8")[1]
        == call("predict", "Qwen3-1.7B", "--kv-dtype-bytes", "1")[1]
    )


def test_a_pool_that_holds_no_request_says_so():
    told = call("predict", "Qwen3-1.7B", "--kv-bytes", "10MB")[1]
    assert "none to its end (0.1)" in told and "it holds 40 blocks at its end, and the pool has 4" in told
    assert "Not one such request" not in call("predict", "Qwen3-1.7B")[1]
    assert "A KV pool of -3,000,000,000 bytes is not possible" in call("predict", "tiny", "--kv-bytes=-3e9")[2]


def test_a_gpu_becomes_a_pool_and_says_what_is_not_known():
    code, told, _ = call("predict", "Qwen3-1.7B", "--gpu-gib", 24, "--overhead-gib", 1)
    assert code == 0 and "24 x 0.92 GiB" in told and "3.20 GiB, computed in 16 bits" in told
    assert "(17.88 GiB)" in told and "The pool is an estimate" in told and "1.00 GiB, as given" in told
    assert "not counted: no start is stored" in call("predict", "Qwen3-1.7B", "--gpu-gib", 24)[1]
    both = call("predict", "Qwen3-8B", "--gpu-gib", 24, "--tensor-parallel", 2)[1]
    assert "weights on each GPU                          7.63 GiB" in both
    code, _, error = call("predict", "Qwen3-8B", "--gpu-gib", 12)
    assert code == 2 and "12 GiB leave no KV pool for Qwen3-8B" in error and "--tensor-parallel" in error
    code, _, error = call("predict", "tiny", "--gpu-gib", 24, "--kv-bytes", "1GiB")
    assert code == 2 and "give one of the two" in error


def test_the_version_is_told():
    assert call("--version") == (0, f"kvlab {__version__}\n", "")


def test_check_runs_the_checks_of_measure(project, monkeypatch):
    monkeypatch.setattr("kvlab.engine.installed_build", lambda: ("cpu", "0.31.0"))
    assert "Nothing stands against it" in call("check", "--profile", "cpu-tiny")[1]
    text = (profile.FOLDER / "cpu-tiny.toml").read_text()
    (project / "own.toml").write_text(text.replace('model = "tiny"', 'model = "./none"'))
    code, told, _ = call("check", "--profile", "own.toml")
    assert code == 2 and "There is no model folder" in told and "cannot be measured here" in told
    assert call("measure", "one", "--profile", "own.toml")[0] == 2


@pytest.mark.parametrize("words", [["check"], ["measure", "one"], ["report"]])
def test_missing_notebooks_are_named(project, monkeypatch, words):
    shutil.rmtree(project / "notebooks")
    monkeypatch.setattr("kvlab.run.FOLDER", project / "notebooks")
    code, _, error = call(*words)
    assert code == 2 and str(project / "notebooks") in error and "does not exist" in error and "git checkout" in error


# -- measuring ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["on"], "start_here, one, two"),
        (["one", "--param", "CLEINTS=[1]"], "CLIENTS"),  # pitfall 37
        (["one", "--param", "CLIENTS=8"], "must be of type list"),  # pitfall 37
        (["one", "--param", "CLIENTS"], "NAME=VALUE"),
        (["one", "--param", "MODE=replay"], "--mode"),
        (["one", "--param", "BASE_URL=x"], "--base-url"),
        (["one", "--profile", "cpu-tyni"], "cpu-tiny"),
        (["one", "--mode", "reply"], "auto, measure, replay"),
        (["one", "--machine", "My Machine"], "lower-case"),
        (["one", "--machine", "article"], "published"),
    ],
)
def test_wrong_words_stop_before_anything_starts(project, words, message):
    code, told, error = call("measure", *words)
    assert code == 2 and message in error and "Traceback" not in error
    assert not started(project) and "one " not in told


def test_a_wrong_parameter_of_the_second_section_stops_before_the_first(project):  # pitfall 37
    notebook(project / "notebooks" / "02_two.ipynb", "1", parameters=COMMON)
    assert call("measure", "one", "two", "--machine", "mine", "-p", "CLIENTS=[1]")[0] == 2
    assert not started(project)


def test_parameters_and_options_reach_the_notebook(project):
    own = (profile.FOLDER / "cpu-tiny.toml").read_text().replace('title = "', 'title = "my own ')
    (project / "own.toml").write_text(own)
    words = ["--profile", "own.toml", "--machine", "mine", "-p", "CLIENTS=[1, 8]"]
    code, told, error = call("measure", "one", *words)
    assert (code, error) == (0, "")
    shown = printed(project / "_build" / "notebooks" / "01_one.ipynb")
    assert "mine auto [1, 8]" in shown and "my own" in shown  # a relative path is found from the notebooks' folder too
    assert "machine mine" in told and "  one" in told


def test_a_failing_notebook_is_one_error_and_ends_the_command(project):
    notebook(project / "notebooks" / "01_one.ipynb", "1 / 0", parameters=PARAMETERS)
    code, told, error = call("measure", "one", "two", "--machine", "mine")
    assert code == 1 and "ZeroDivisionError: division by zero" in error and "Traceback" not in error
    assert not (project / "_build" / "notebooks" / "02_two.ipynb").exists()


def test_a_report_goes_on_after_a_failing_notebook_and_says_so(project):
    notebook(project / "notebooks" / "01_one.ipynb", "1 / 0", parameters=PARAMETERS)
    code, told, error = call("report", "--machine", "mine", "--profile", "cpu-tiny")
    assert code == 1 and "one failed" in error and "ZeroDivisionError" in error
    page = (project / "_build" / "report.html").read_text()
    assert "This notebook did not finish" in page
    assert (project / "_build" / "report.html").as_uri() in told.replace("\n", "")
    assert [line.split()[0] for line in told.splitlines() if line.startswith("  ")] == [
        "start_here",
        "one",
        "two",
        "report",
    ]


def test_sections_together_are_processes_that_take_turns(project):
    show = "import os\nprint('turns', os.environ.get('KVLAB_TAKE_TURNS'))"
    notebook(project / "notebooks" / "01_one.ipynb", show, parameters=PARAMETERS)
    notebook(project / "notebooks" / "02_two.ipynb", "1 / 0", parameters=PARAMETERS)
    code, _, error = call("measure", "one", "two", "--together", "--machine", "mine", "-p", "CLIENTS=[1]")
    assert code == 1 and "1 of 2 sections failed: two." in error and "Next:" in error
    assert "turns 1" in printed(project / "_build" / "notebooks" / "01_one.ipynb")
    assert call("measure", "on", "two", "--together")[0] == 2


def test_a_replay_without_any_data_says_so(project):
    code, _, error = call("report", "--mode", "replay")
    assert code == 1 and "No runs are stored" in error and "Next:" in error


@pytest.mark.parametrize("words", [["report"], ["measure", "one"]])
def test_a_replay_of_a_machine_without_runs_is_refused(project, words):
    code, _, error = call(*words, "--mode", "replay", "--machine", "mine")
    assert code == 2 and "Nothing was measured on the machine mine" in error
    assert "kvlab measure kv_capacity --machine mine" in error and not (project / "data").exists()


@pytest.mark.parametrize("more", [[], ["--together"]])
def test_a_replay_of_a_machine_without_runs_may_be_allowed(project, more):
    assert call("measure", "one", "--mode", "replay", "--machine", "mine", "--allow-empty", *more)[0] == 0


def test_a_machine_that_is_not_stored_is_said_before_a_missing_engine(project, monkeypatch):
    """Without vLLM a mistyped name is the likelier reason: one error names what is stored."""

    def missing(config):
        raise EngineMissing("This Python has no vLLM: python", "", "make install")

    monkeypatch.setattr("kvlab.engine.check", missing)
    monkeypatch.setattr("kvlab.store.machines", lambda: ["article", "cpu-tiny", "h200"])
    code, _, error = call("report", "--machine", "nosuch")
    assert code == 2 and "No machine nosuch is stored" in error and "stored machines: cpu-tiny, h200" in error
    assert error.count("Next:") == 1 and not started(project)
    assert "No machine" not in call("report")[2]


def test_a_replay_that_is_taken_over_says_so(project, monkeypatch):
    monkeypatch.setattr("kvlab.takeover.PACKAGE", project / "package")  # somebody may be working on the real one
    words = ["measure", "one", "--mode", "replay", "--machine", "mine", "--allow-empty"]
    assert "taken over" not in call(*words)[1]
    assert "  one              taken over unchanged" in (told := call(*words)[1]) and "--execute" in told
    assert "taken over" not in call(*words, "--execute")[1]


def test_a_failed_attempt_leaves_no_machine_behind(project):
    computed = (
        "from kvlab import store\nstore.write_text(store.machine_dir(MACHINE) / 'one' / 'computed.json', '{}')\n1 / 0"
    )
    notebook(project / "notebooks" / "01_one.ipynb", computed, parameters=PARAMETERS)
    assert call("measure", "one", "--machine", "mine")[0] == 1
    assert not (project / "data" / "mine").exists()


HOLDER = "from kvlab import quiet; lock = quiet.take_machine('section load'); print('held', flush=True); input()"


def test_a_second_measurement_is_refused_before_it_begins_and_can_be_looked_at(project, here):  # pitfall 10
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        for words in (["measure", "one"], ["report"], ["measure", "one", "--together"]):
            code, _, error = call(*words, "--machine", "mine")
            assert code == 1 and f"process {other.pid}, section load" in error and "kvlab ps" in error
        assert f"process {other.pid}, section load" in call("ps")[1] and not started(project)
        other.kill()
    assert call("measure", "one", "--machine", "mine")[0] == 0
    assert "measuring" not in call("ps")[1]


def test_a_measurement_says_what_it_does_and_where_its_results_are(project, here):
    assert "none were stated" in call("measure", "one", "--machine", "mine")[1]
    (project / "data" / "mine").mkdir(parents=True)
    (project / "data" / "mine" / "claims.csv").write_text("")
    code, told, _ = call("measure", "one", "two", "--machine", "mine", "--mode", "measure")
    assert code == 0 and "[1/2] one: measures" in told and "[2/2] two: measures" in told
    for place in ("data/mine/claims.csv", "_build/notebooks/01_one.ipynb", "kvlab report --mode replay --machine mine"):
        assert place in told


@pytest.mark.parametrize("value", ["[0,-1]", "['a']", "[nan]", "[1e400]", "[[1,-2]]", "[None]"])
def test_absurd_values_in_a_list_stop_before_anything_starts(project, value):
    declared = PARAMETERS.replace("CLIENTS: list", "CLIENTS: list[int]")
    notebook(project / "notebooks" / "01_one.ipynb", "1", parameters=declared)
    code, _, error = call("measure", "one", "-p", f"CLIENTS={value}")
    assert code == 2 and "CLIENTS" in error and "Traceback" not in error and not started(project)


def test_a_data_folder_that_cannot_be_written_is_refused_with_its_cause(project, monkeypatch):
    (project / "file").write_text("")
    monkeypatch.setenv("KVLAB_DATA", str(project / "file"))
    code, _, error = call("measure", "one", "--machine", "mine")
    assert code == 1 and f"The data folder {project / 'file'} cannot be written" in error
    assert "a file stands where a folder is needed" in error and "KVLAB_DATA" in error


def test_claims_that_cannot_be_read_are_set_aside_and_named(project, here):
    write = (
        "from kvlab import claims, store\n"
        "claim = claims.claim('one', 'n', computed=1.0, unit='count')\n"
        "claims.write_section(store.machine_dir(MACHINE), 'one', [claim])"
    )
    notebook(project / "notebooks" / "01_one.ipynb", write, parameters=PARAMETERS)
    (project / "data" / "mine").mkdir(parents=True)
    (project / "data" / "mine" / "claims.csv").write_bytes(b"\xff\x00 broken")
    code, _, error = call("measure", "one", "--machine", "mine")
    (aside,) = (project / "data" / "mine").glob("claims.broken-*.csv")
    assert code == 0 and aside.name in error and "--mode replay" in error and aside.read_bytes() == b"\xff\x00 broken"
    assert "one/n" in (project / "data" / "mine" / "claims.csv").read_text()


def test_data_of_a_newer_layout_is_refused(project):
    folder = project / "data" / "mine" / "load" / "run"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"schema_version": 999}))
    code, _, error = call("measure", "one", "--machine", "mine")
    assert code == 1 and "newer kvlab" in error and "git pull" in error and not started(project)


# -- servers ------------------------------------------------------------------------------------------------------


def server(name, folder):
    return processes.ServerProcess(name, 1, 8000, datetime.now(UTC), False, 2**30, "vllm serve", folder)


@pytest.fixture
def servers(monkeypatch):
    """Two servers, one of another clone; and the ids of what was ended."""
    ended, there = [], [server("8000-here", processes.project()), server("8001-there", "/another/clone")]
    monkeypatch.setattr("kvlab.processes.list_servers", lambda: there)
    monkeypatch.setattr("kvlab.processes.end_tree", ended.append)
    return ended


def test_stop_ends_the_servers_of_this_folder_and_names_the_others(servers):
    told = call("stop")[1]
    assert servers == ["8000-here"] and told.index("ends     8000-here") < told.index("stopped  8000-here")
    assert "stays    8001-there" in told and "from /another/clone" in told and "kvlab stop --all" in told


@pytest.mark.parametrize(
    ("words", "ended"), [(["--all"], ["8000-here", "8001-there"]), (["8001-there"], ["8001-there"])]
)
def test_stop_ends_others_where_it_is_told_to(servers, words, ended):
    code, told, _ = call("stop", *words)
    assert code == 0 and servers == ended and "stays" not in told


def test_ps_names_the_folder(servers):
    assert "from /another/clone" in call("ps")[1]


def test_nothing_runs_and_nothing_is_stopped(monkeypatch):
    monkeypatch.setattr("kvlab.processes.list_servers", list)
    assert call("ps") == (0, "No server started by kvlab is running.\n", "")
    assert call("stop") == (0, "No server started by kvlab is running.\n", "")
    code, _, error = call("stop", "8000-abc")
    assert code == 1 and "8000-abc" in error and "kvlab ps" in error


def test_the_command_lists_its_commands():
    code, told, _ = call("--help")
    assert code == 0 and all(name in told for name in ("check", "predict", "measure", "report", "ps", "stop"))
