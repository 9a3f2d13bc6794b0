"""How long a measurement may take yet: from runs of a machine that has finished the section with the same profile."""

from datetime import datetime

import pytest
from tables_for_tests import request, requests, samples

from kvlab import claims, overview, profile, sections, store, time_left
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.measure import Lab
from kvlab.run import notebook_of

TINY = profile.load_profile("cpu-tiny")
STARTED = "2026-11-29T10:00:00.000Z"


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))


def measured(machine, section="load", *, of="cpu-tiny", finished=True, seconds=(60.0, 90.0), gpus=()):
    """A section of one run a duration, on two servers started at once, in 30 s; its claims, where it is finished."""
    server, runs = ServerConfig(model="tiny", engine="cpu"), []
    for n, duration_s in enumerate(seconds):
        load = LoadConfig(requests=1, input_tokens=8, output_tokens=3)
        about = {"key": f"{n:08d}{machine}", "valid": True, "problems": [], "profile": of, "duration_s": duration_s}
        about |= {"cell": Cell(name=f"c{n}", server=server, load=load).model_dump(mode="json")}
        about |= {"created_utc": f"2026-11-29T10:{10 * n + 1:02d}:00.000Z"}
        about |= {"provenance": {"gpus": [{"name": "GPU", "id": name} for name in gpus]}}
        about |= {"server": {"started_utc": STARTED, "ready_s": 30.0 - n}}
        runs.append(store.save_run(machine, section, about, requests(request()), samples()).id)
    made = [claims.claim(section, "q", unit="s", measured=1.0, runs=runs)] if finished else []
    claims.write_section(store.machine_dir(machine), section, made)


def of(section="load", machine="mine", chosen=TINY):
    return time_left.of_sections([section], chosen, machine)[section]


def test_what_ran_at_once_counts_once():
    measured("mine")
    assert of()[:3] == (180.0, "mine", None)  # 30 s of two starts, and the loads


def test_the_machine_itself_comes_first_and_else_one_that_has_finished():
    measured("an-other", seconds=(400.0,))
    assert of()[:3] == (430.0, "an-other", None)
    measured("mine", finished=False, seconds=(5.0,))
    assert of()[:3] == (430.0, "an-other", None)  # half of it says nothing of the whole
    measured("mine")
    assert of().machine == "mine" and of(machine="third").machine == "an-other"


def test_where_nobody_finished_it_there_is_no_estimate():
    assert of()[:3] == (None, None, time_left.NEVER)
    measured("mine", of="h200")
    assert of().why == time_left.NEVER  # another profile
    measured("mine", finished=False)
    assert of().why == time_left.UNFINISHED
    assert of("start_here").why == time_left.NO_RUNS and of("several_gpus").why == time_left.NO_GRID


def told(capsys, *todo):
    """What the command line says as the first of these sections begins."""
    lab, paths = Lab("load", TINY, "mine", "auto"), [notebook_of(name) for name in todo]
    progress = sections._Progress(lab, "auto", paths, paths)
    progress.begun(todo[0], True)
    first = capsys.readouterr().out.strip()
    progress.told(todo[0], 1.0, False)
    capsys.readouterr()
    progress.begun(todo[-1], True)
    return first, capsys.readouterr().out.strip()


def test_a_measurement_says_how_much_is_left_as_each_section_begins(capsys):
    measured("mine")
    measured("an-other", "preemption", seconds=(90.0,))
    both, rest = told(capsys, "load", "preemption")
    assert "load: measures what is missing; about 5.0 minutes left at most, going by runs" in both
    assert both.endswith("of this profile on mine, an-other")
    assert "about 2.0 minutes left at most, going by runs of this profile on an-other" in rest
    assert "about 3.0 minutes left at most, without startup, going" in told(capsys, "load", "startup")[0]


def test_a_first_measurement_and_a_half_finished_one_promise_nothing(capsys):
    assert told(capsys, "load", "preemption")[0].endswith("load: measures what is missing")
    measured("mine", finished=False)
    assert told(capsys, "load", "preemption")[0].endswith("load: measures what is missing")


def test_check_says_in_words_what_was_never_measured_and_that_the_sum_leaves_it_out():
    measured("mine")
    shown = overview.text("cpu-tiny", "mine")[0]
    lines = {line.split()[0]: line for line in shown.splitlines() if line}
    assert lines["load"].split()[-2:] == ["180", "mine"]
    assert lines["startup"].endswith("-  not measured before") and lines["hit_and_miss"].endswith(time_left.NO_RUNS)
    about = next(line for line in shown.splitlines() if line.startswith("Measuring everything anew"))
    assert "about 3 minutes" in about and "startup (not measured before)" in about and "hit_and_miss" not in about


def measuring(capsys, engine="cuda", *, again=None, mode="auto", base_url="", todo=("load",)):
    """What a command says before its first section and after its last one; `again` measures between the two."""
    chosen = TINY.model_copy(update={"server": TINY.server.model_copy(update={"engine": engine})})
    paths = [notebook_of(name) for name in todo]
    progress = sections._Progress(Lab("load", chosen, "mine", mode, base_url), mode, paths, paths)
    progress.start()
    before = capsys.readouterr().out
    if again:
        progress.began_utc = datetime.fromisoformat(STARTED)
        again()
    progress.used()
    return before, capsys.readouterr().out


def test_gpu_minutes_are_told_before_a_measurement_and_those_used_after_it(capsys):
    before, after = measuring(capsys, again=lambda: measured("mine", gpus=("a", "b")))
    assert before.endswith("GPU minutes: not measured before\n")
    assert after.startswith("GPU minutes used: 6.0, by the runs stored now")  # 180 s on both
    before, after = measuring(capsys, todo=("load", "startup"))
    assert "GPU minutes: about 6.0 at most, going by runs of this profile on mine; not in it: startup\n" in before
    assert after == ""  # nothing was stored since


def test_where_no_gpu_is_ours_none_is_counted(capsys):
    measured("mine", gpus=("a",))
    assert "GPU" not in measuring(capsys, base_url="http://127.0.0.1:1")[0]
    assert "GPU" not in measuring(capsys, mode="replay")[0] + measuring(capsys, "cpu")[0]
    measured("mine")
    assert measuring(capsys, again=lambda: measured("mine"))[1] == ""


def test_check_states_the_gpu_minutes_of_a_gpu_profile():
    assert "GPU minutes" not in overview.text("cpu-tiny", "mine")[0]
    assert "GPU minutes: not measured before" in overview.text("h200", "mine")[0]
    measured("mine", of="h200", gpus=("a",))
    assert "GPU minutes: about 3.0 at most, going by runs of this profile on mine" in overview.text("h200", "mine")[0]


def test_a_command_tells_both(capsys, monkeypatch):
    monkeypatch.setattr("kvlab.provenance.gpus", lambda: [{"name": "GPU", "memory_bytes": 141 * 2**30}])
    monkeypatch.setattr(sections, "_require_engine", lambda *_: None)
    monkeypatch.setattr(sections.batch, "execute", lambda *_, **__: ({}, {}))
    monkeypatch.setattr(sections._Progress, "used", lambda self: print("used"))
    sections.execute(["load"], sections.Asked("h200", "mine", "auto"))
    assert capsys.readouterr().out.splitlines()[-2:] == ["GPU minutes: not measured before", "used"]
