import json
import os
import signal
import subprocess
import sys
import threading
import time

import fakes
import pytest
from fakes import EVENTS, FAILS_TO_START, cell, install, open_lab
from waiting_for_tests import until

from kvlab import claims, log_folder, measure, quiet, store
from kvlab.errors import ConfigError, KvlabError, LoadError, ServerDied, ServerError, StoreError
from kvlab.fake_server import Behaviour, FakeServer


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch, tmp_path):
    install(monkeypatch, tmp_path)


def stored(section="load"):
    return store.list_runs("fake", section)


# -- what is measured, and when -----------------------------------------------------------------------------------


def test_cells_of_one_server_share_it_and_come_back_in_order():
    lab = open_lab()
    results = lab.measure([cell(lab, c) for c in (4, 1, 2)])
    lab.close()
    assert EVENTS == ["start", "stop"]
    assert [r.cell.load.concurrency for r in results] == [4, 1, 2]
    assert all(r.run.valid and r.value("failures") == 0 and r.value("n") == 4 for r in results)


def test_a_second_measurement_starts_nothing():
    lab = open_lab()
    first = lab.measure([cell(lab, 1)])
    lab.close()
    EVENTS.clear()
    again = open_lab()
    assert again.measure([cell(again, 1)])[0].run.id == first[0].run.id
    again.measure([cell(again, 1), cell(again, 2)])  # only what is missing
    again.close()
    assert EVENTS == ["start", "stop"] and len(stored()) == 2


def test_mode_measure_repeats_what_is_there():
    lab = open_lab()
    before = lab.measure([cell(lab)])[0].run.manifest
    lab.close()
    lab = open_lab(mode="measure")
    after = lab.measure([cell(lab)])[0].run.manifest
    lab.close()
    assert EVENTS == ["start", "stop"] * 2
    assert after["created_utc"] > before["created_utc"] and after["nonce"] != before["nonce"]  # pitfall 13
    assert len(stored()) == 1


def test_replay_starts_nothing_and_says_how_to_measure():
    lab = open_lab(mode="replay")
    (result,) = lab.measure([cell(lab)])
    assert EVENTS == [] and result.run is None and not result.failed
    assert "kvlab measure load" in result.reason
    claim = lab.claim(
        "throughput_tok_s", {"c": 1}, computed=5.0, measured=result.value("x"), unit="s", results=[result]
    )
    assert claim.state == "not measured" and claim.reason == result.reason and claim.measured is None


def test_a_missing_point_of_a_measured_section_is_told_from_a_section_that_nobody_measured():
    lab = open_lab()
    lab.measure([cell(lab, 1)])
    lab.close()
    measured, missing = open_lab(mode="replay").measure([cell(lab, 1), cell(lab, 2)])
    assert measured.run and missing.reason.startswith("no run of this point is stored; measure it with: kvlab measure")


def test_fresh_cells_get_a_server_of_their_own():  # pitfall 16
    lab = open_lab()
    lab.measure([cell(lab, 1), *(cell(lab, 2, repeat=r, fresh=True) for r in range(2)), cell(lab, 3)])
    lab.close()
    assert EVENTS == ["start", "stop"] * 4


def test_a_profile_without_a_section_computes_with_a_borrowed_grid_and_measures_nothing():
    lab = open_lab(section="fp8_kv")
    own = lab.section_grid()
    assert own == lab.profile.fp8_kv
    lab.profile = lab.profile.model_copy(update={"name": "mine", "fp8_kv": None})
    assert lab.section_grid() == own
    (result,) = lab.measure([cell(lab)])
    assert (result.run, result.reason) == (None, "the profile mine has no [fp8_kv]")
    assert EVENTS == []


def test_servers_side_by_side_take_turns_without_restarts():
    lab = open_lab()
    a, b = lab.server(), lab.server({"block_size": 64})
    turns = [cell(lab, 1, server=server, repeat=r) for r in range(3) for server in ((a, b) if r % 2 else (b, a))]
    results = lab.measure(turns, side_by_side=True)
    assert EVENTS == ["start", "start"]
    sizes = [r.run.manifest["cell"]["server"]["block_size"] for r in results]
    assert sizes == [64, a.block_size, a.block_size, 64, 64, a.block_size]
    lab.measure([cell(lab, 1, server=lab.server({"block_size": 128}))])  # alone again
    assert EVENTS == ["start", "start", "stop", "stop", "start"]
    lab.close()
    assert EVENTS.count("stop") == 3


def test_servers_of_later_cells_start_with_the_first_ones():
    lab = open_lab()
    later = cell(lab, 1, server=lab.server({"block_size": 64}))
    lab.measure([cell(lab, 1)], side_by_side=True, ahead=[later])
    assert EVENTS == ["start", "start"]
    lab.measure([later], side_by_side=True)
    assert EVENTS == ["start", "start"]
    lab.close()
    EVENTS.clear()
    lab.measure([cell(lab, 2)], side_by_side=True, ahead=[later])  # measured already: no server for it
    lab.close()
    assert EVENTS == ["start", "stop"]


def test_a_waiting_server_is_taken_up_again_where_the_others_end():
    lab = open_lab()
    lab.measure([cell(lab, 1), cell(lab, 1, server=lab.server({"block_size": 64}))], side_by_side=True)
    (result,) = lab.measure([cell(lab, 2)])
    assert EVENTS == ["start", "start", "stop"] and result.run.log()
    lab.close()


def test_fresh_cells_are_alone_also_between_servers_side_by_side():
    lab = open_lab()
    lab.measure([cell(lab, 1), cell(lab, 2, server=lab.server({"block_size": 64}))], side_by_side=True)
    lab.measure([cell(lab, 3, fresh=True)], side_by_side=True)
    assert EVENTS == ["start", "start", "stop", "stop", "start", "stop"]
    lab.close()


def test_a_server_that_cannot_start_is_a_failed_result_where_each_is_tried():
    FAILS_TO_START.extend([False, True, False])
    lab = open_lab()
    servers = [lab.server(change) for change in ({}, {"kv_cache_dtype": "fp8"}, {"block_size": 64})]
    good, bad, other = lab.measure([cell(lab, 1, server=s) for s in servers], skip_refused=True)
    lab.close()
    assert good.run.valid and other.run.valid
    assert bad.run is None and bad.failed
    assert bad.reason == "no server with these flags: The server ended during its start-up."
    again = open_lab(mode="replay").measure([cell(lab, 1, server=servers[1])])[0]
    assert again.reason == bad.reason  # a replay knows it too


@pytest.mark.parametrize("side_by_side", [False, True])
@pytest.mark.parametrize(("error", "tries"), [(fakes.OUT_OF_MEMORY, 3), (ServerDied("Value error, unknown method"), 1)])
def test_flags_that_vllm_refuses_are_not_tried_again(error, tries, side_by_side):
    FAILS_TO_START.extend([True] * 9)
    fakes.SAYS[:] = [error]
    lab = open_lab()
    bad = lab.server({"kv_cache_dtype": "fp8"})
    results = lab.measure(
        [cell(lab, 1, server=bad, repeat=r) for r in range(3)], skip_refused=True, side_by_side=side_by_side
    )
    lab.close()
    assert all(r.failed for r in results)
    assert EVENTS.count("fails") == tries + (side_by_side and tries > 1)


def test_the_decisive_line_of_the_log_is_the_reason_of_a_refusal():
    error = ServerDied(
        "The vLLM server ended (exit code 1).\nIts log says: ValueError: no fp4\nLast lines of the log:\n  x"
    )
    assert measure.refusal(error)["problems"] == ["no server with these flags: ValueError: no fp4"]


def test_another_server_configuration_starts_another_server():
    lab = open_lab()
    lab.measure([cell(lab, 1), cell(lab, 1, server=lab.server({"enable_prefix_caching": False})), cell(lab, 2)])
    lab.close()
    assert EVENTS == ["start", "stop"] * 3


def test_the_same_cell_twice_is_refused_before_anything_starts():
    lab = open_lab()
    with pytest.raises(KvlabError, match="twice: c1"):
        lab.measure([cell(lab), cell(lab)])
    assert EVENTS == []


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_cell_whose_load_fails_is_stored_and_the_next_goes_on(monkeypatch):  # pitfall 6
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(fault="http_429", fault_every=1))
    lab = open_lab()
    results = lab.measure([cell(lab, 1)])
    fakes.BEHAVIOUR.fault = None
    results += lab.measure([cell(lab, 2)])
    lab.close()
    failed, good = results
    assert failed.run is None and failed.failed and good.run.valid
    (run,) = [run for run in stored() if not run.valid]
    assert len(run.requests()) == 4 and not run.requests()["ok"].any()
    claim = lab.claim("ttft_p50_s", {"c": 1}, measured=failed.value("ttft_p50_s"), unit="s", results=[failed])
    assert claim.state == "failed" and claim.reason == failed.reason and claim.measured is None


def test_an_unexplained_prefix_hit_makes_the_run_invalid(monkeypatch):  # pitfall 13
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(cached_tokens=16))
    lab = open_lab()
    (result,) = lab.measure([cell(lab)])
    lab.close()
    assert result.failed and "prefix cache served" in result.reason


def test_a_failed_cell_is_measured_again(monkeypatch):
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(cached_tokens=16))
    lab = open_lab()
    lab.measure([cell(lab)])
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour())
    lab.close()
    lab = open_lab()
    assert lab.measure([cell(lab)])[0].run.valid
    lab.close()
    assert EVENTS == ["start", "stop"] * 2


def test_a_server_that_dies_keeps_the_earlier_runs_and_the_rows_until_then(monkeypatch):  # pitfall 28
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(die_after=12))
    lab = open_lab()
    cells = [cell(lab, 1), cell(lab, 2, requests=40), cell(lab, 3)]
    with pytest.raises(ServerDied, match="it was told to"):
        lab.measure(cells)
    assert EVENTS == ["start", "stop"]
    whole, partial = stored()
    assert whole.valid and not partial.valid
    assert 0 < partial.requests()["ok"].sum() < 40 and len(partial.requests()) == 40
    assert any("ended while it was in use" in problem for problem in partial.manifest["problems"])
    replayed = open_lab(mode="replay").measure(cells)
    assert [(r.run is not None, r.failed) for r in replayed] == [(True, False), (False, True), (False, False)]


def test_a_load_that_cannot_be_sent_is_explained_by_the_dead_server_where_it_is_dead(monkeypatch):  # pitfall 28
    def no_answer(*_, **__):
        raise LoadError("Nothing answers")

    monkeypatch.setattr("kvlab.load.run_load", no_answer)
    lab = open_lab()
    with pytest.raises(LoadError, match="Nothing answers"):
        lab.measure([cell(lab)])
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(die_after=-1))
    with pytest.raises(ServerDied, match="it was told to"):
        lab.measure([cell(lab)])
    assert EVENTS == ["start", "stop"] * 2


def test_a_server_that_cannot_start_keeps_what_was_measured():
    fakes.FAILS_TO_START.extend([False, True])
    lab = open_lab()
    other = lab.server({"kv_cache_dtype": "fp8"})
    with pytest.raises(ServerDied, match="no memory was left"):
        lab.measure([cell(lab, 1), cell(lab, 2, server=other)])
    assert EVENTS == ["start", "stop", "fails"]
    assert [run.valid for run in stored()] == [True, False]  # the second one only says why it is missing
    quiet.take_machine().close()  # others may measure now


def interrupt_the_second_cell(lab):
    until(stored)
    bodies = lab._servers._current.fake.bodies
    before = len(bodies)
    until(lambda: len(bodies) > before + 5)  # the probe, and more than its two clients have under way
    os.kill(os.getpid(), signal.SIGINT)


def test_ctrl_c_keeps_the_finished_cells_and_the_rows_until_then(monkeypatch):
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(ttft_s=0.1))
    lab = open_lab()
    cells = [cell(lab, 1, requests=2), cell(lab, 2, requests=200)]
    threading.Thread(target=interrupt_the_second_cell, args=(lab,)).start()
    with pytest.raises(KeyboardInterrupt):
        lab.measure(cells)
    assert EVENTS == ["start", "stop"]
    whole, partial = stored()
    assert whole.valid and not partial.valid and "interrupted" in partial.manifest["problems"]
    assert 0 < partial.requests()["ok"].sum() < 200


def test_rows_of_the_fake_server_are_refused_for_a_real_machine():
    lab = open_lab(machine="my-machine")
    with pytest.raises(StoreError, match="fake server"):
        lab.measure([cell(lab)])
    assert EVENTS == ["start", "stop"] and store.list_runs("my-machine") == []


# -- predictions come first ---------------------------------------------------------------------------------------


def predictions(lab):
    return json.loads((lab.folder / "computed.json").read_text())["stored"]


def test_predictions_stand_before_the_server_starts(monkeypatch):
    lab = open_lab()
    seen = []
    start = fakes.FakeVllm.start
    monkeypatch.setattr(fakes.FakeVllm, "start", lambda self: (seen.append(predictions(lab)), start(self))[1])
    lab.predict([lab.claim("knee_low", {"in": 16}, computed=10.5, unit="requests")])
    (result,) = lab.measure([cell(lab)])
    lab.close()
    (entry,) = seen[0]
    assert entry["rows"] == [{"id": "load/knee_low/in=16", "computed": 10.5, "unit": "requests"}]
    assert result.run.manifest["predictions"] == {"stored_utc": entry["utc"], "numbers": 1}
    assert entry["utc"] <= result.run.manifest["created_utc"]


def test_a_replay_never_rewrites_predictions_and_equal_ones_are_stored_once():
    def told(mode, value):
        lab = open_lab(mode=mode)
        lab.predict([lab.claim("knee_low", {}, computed=value, unit="requests")])
        return lab

    lab = told("auto", 10.0)
    before = (lab.folder / "computed.json").read_bytes()
    told("replay", 99.0), told("auto", 10.0)
    assert (lab.folder / "computed.json").read_bytes() == before
    told("auto", 11.0)
    assert [entry["rows"][0]["computed"] for entry in predictions(lab)] == [10.0, 11.0]


def test_a_replay_of_an_empty_machine_stores_no_prediction():
    lab = open_lab(mode="replay")
    lab.predict([lab.claim("knee_low", {}, computed=1.0, unit="requests")])
    assert not lab.folder.exists()


def test_damaged_predictions_are_named():
    lab = open_lab()
    lab.folder.mkdir(parents=True)
    (lab.folder / "computed.json").write_text("{")
    with pytest.raises(StoreError, match="computed.json cannot be read"):
        lab.predict([lab.claim("knee_low", {}, computed=1.0, unit="requests")])


# -- one at a time ------------------------------------------------------------------------------------------------

HOLDER = "from kvlab import quiet; lock = quiet.take_machine(); print('held', flush=True); input()"


def test_two_measurements_at_once_are_refused_and_a_replay_is_not():  # pitfall 10
    with subprocess.Popen([sys.executable, "-c", HOLDER], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout.readline() == "held\n"
        lab = open_lab()
        with pytest.raises(KvlabError, match=f"process {other.pid}"):
            lab.measure([cell(lab)])
        assert EVENTS == []
        replay = open_lab(mode="replay")
        assert replay.measure([cell(replay)])[0].run is None
        other.kill()
    lab.measure([cell(lab)])  # free again, though nobody released it
    lab.close()


def test_opening_the_laboratory_again_in_one_notebook_does_not_wait_for_itself():
    first = open_lab()
    first.measure([cell(first, 1)])
    second = open_lab()  # its first cell was run a second time; the old one is still held by a variable
    second.measure([cell(second, 2)])
    second.close()
    assert EVENTS == ["start", "stop"] * 2


# -- an existing server -------------------------------------------------------------------------------------------


@pytest.fixture
def existing():
    with FakeServer() as fake:
        yield fake


def test_an_existing_server_is_measured_and_never_stopped(existing, monkeypatch):
    lab = open_lab(base_url=existing.endpoint.base_url)
    variant = cell(lab, 1, server=lab.server({"kv_cache_dtype": "fp8"}))
    own, other, fresh = lab.measure([cell(lab, 1), variant, cell(lab, 2, fresh=True)])
    lab.close()
    assert EVENTS == [] and own.run.valid
    # The variant has the same load: it must not be taken for the run of the other flags.
    assert other.run is None and "cannot be restarted" in other.reason
    assert fresh.run is None and "cannot be restarted" in fresh.reason
    assert existing.endpoint.base_url not in (own.run.path / "run.json").read_text()
    assert own.run.manifest["cell"]["server"]["model"].startswith(measure.EXISTING)
    again = open_lab(base_url=existing.endpoint.base_url)
    asked = len(existing.bodies)
    assert again.measure([cell(again, 1)])[0].run.id == own.run.id and len(existing.bodies) == asked


def test_an_existing_server_that_went_away_raises(existing):
    with pytest.raises(ServerError, match="No server answers"):
        measure.open_lab("load", profile_name="cpu-tiny", base_url="http://127.0.0.1:9")
    assert not list(store.root().glob("server-*"))


def test_an_existing_server_needs_a_profile_that_describes_it(existing):
    with pytest.raises(ConfigError, match="--profile"):
        measure.open_lab("load", base_url=existing.endpoint.base_url)


# -- opening ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "reply"}, "auto, measure, replay"),
        ({"profile_name": "cpu-tyni"}, "cpu-tiny"),
        ({"machine": "My Machine"}, "lower-case"),
        ({"machine": "article"}, "published"),
    ],
)
def test_wrong_choices_are_one_error_each(given, message):
    with pytest.raises(ConfigError, match=message):
        measure.open_lab("load", **({"profile_name": "cpu-tiny"} | given))


def test_a_machine_keeps_the_profile_with_which_it_was_measured(monkeypatch):
    lab = measure.open_lab("load", profile_name="cpu-tiny", machine="fake")
    lab.measure([cell(lab)])
    lab.close()
    monkeypatch.setattr("kvlab.profile.choose", lambda hardware: "h200")
    assert measure.open_lab("load", machine="fake").profile.name == "cpu-tiny"
    assert measure.open_lab("load", machine="other", mode="replay").profile.name == "h200"


def test_a_replay_that_names_no_machine_takes_the_one_of_the_command_line(monkeypatch, capsys):
    """A computer that measured nothing shows a committed machine, one that did its own; measuring is always here."""
    monkeypatch.setattr("kvlab.provenance.machine_name", lambda: "fake")
    assert measure.open_lab("load", profile_name="cpu-tiny", mode="replay").machine == "fake"  # nothing is stored
    manifest = store.root() / "cpu-tiny" / "load" / "run" / "run.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text('{"schema_version": 1, "profile": "cpu-tiny", "created_utc": "", "key": ""}')
    assert measure.open_lab("load", mode="replay").machine == "cpu-tiny" == store.default_replay_machine()
    assert "(fake): cpu-tiny is replayed" in capsys.readouterr().out
    assert measure.open_lab("load", profile_name="cpu-tiny").machine == "fake"
    lab = measure.open_lab("load", profile_name="cpu-tiny")
    lab.measure([cell(lab)])
    lab.close()
    assert measure.open_lab("load", mode="replay").machine == "fake" and not capsys.readouterr().out


def test_writing_claims_stops_the_server_and_replaces_the_section():
    lab = open_lab()
    (result,) = lab.measure([cell(lab)])
    for value in (1.0, 2.0):
        lab.write([lab.claim("running_max", {"c": 1}, measured=value, unit="requests", results=[result])])
    assert EVENTS == ["start", "stop"]
    table = claims.read(store.machine_dir("fake"))
    assert table["measured"].tolist() == [2.0] and table["runs"].tolist() == [result.run.id]


def test_no_temporary_folder_is_made_where_nothing_is_started(logs):
    lab = open_lab(mode="replay")
    lab.measure([cell(lab)])
    assert logs() == []


@pytest.fixture
def logs(tmp_path):
    """Lists the logs of the servers that were started."""
    return lambda: sorted(path.name for path in (tmp_path / "cache" / "logs").glob("*/*.log"))


@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_servers_logs_go_with_them_where_all_went_well(logs, tmp_path, side_by_side):
    lab = open_lab()
    (result,) = lab.measure([cell(lab)], side_by_side=side_by_side)
    assert logs() == ["server.log"]
    lab.close()
    assert not list((tmp_path / "cache" / "logs").iterdir()) and "a log" in result.run.log()  # the run has kept it


def test_the_logs_of_one_that_could_not_start_are_kept(logs):
    FAILS_TO_START.extend([False, True])
    lab = open_lab()
    with pytest.raises(ServerDied):
        lab.measure([cell(lab, 1), cell(lab, 2, server=lab.server({"block_size": 64}))])
    assert logs() == ["server.log"]


@pytest.mark.parametrize("side_by_side", [False, True])
def test_the_logs_of_one_that_may_fail_are_kept_too(logs, side_by_side):
    FAILS_TO_START.extend([False, True, True])
    lab = open_lab()
    cells = [cell(lab, 1), cell(lab, 2, server=lab.server({"block_size": 64}))]
    results = lab.measure(cells, side_by_side=side_by_side, skip_refused=True)
    assert sorted(result.failed for result in results) == [False, True]
    lab.close()
    assert logs() == ["server.log"]


def test_the_logs_of_one_that_dies_in_use_are_kept(logs, monkeypatch):
    monkeypatch.setattr("fakes.BEHAVIOUR", Behaviour(die_after=2))
    lab = open_lab()
    with pytest.raises(ServerDied):
        lab.measure([cell(lab)])
    assert logs() == ["server.log"]


def test_no_logs_are_kept_where_no_error_names_them(logs, monkeypatch, tmp_path):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvlab.measure.send", interrupted)
    lab = open_lab()
    with pytest.raises(KeyboardInterrupt):
        lab.measure([cell(lab)])
    assert logs() == [] and EVENTS == ["start", "stop"] and not list((tmp_path / "cache" / "logs").iterdir())


def test_logs_of_programs_that_have_ended_do_not_pile_up(tmp_path):
    place = tmp_path / "cache" / "logs"
    for n in range(20):
        (place / f"999999999-{n:02}").mkdir(parents=True)
        os.utime(place / f"999999999-{n:02}", (n, n))
    mine = [log_folder.make(), log_folder.make()]
    left = sorted(path.name for path in place.iterdir() if path not in mine)
    assert left == [f"999999999-{n:02}" for n in range(10, 20)] and all(path.is_dir() for path in mine)


# -- numbers of several results -----------------------------------------------------------------------------------


def test_numbers_across_repeats():
    lab = open_lab()
    results = lab.measure([cell(lab, 2, repeat=r, requests=8) for r in range(3)])
    lab.close()
    mean = measure.across(results, "throughput_whole_tok_s")
    values = [r.value("throughput_whole_tok_s") for r in results]
    assert mean.value == pytest.approx(sum(values) / 3) and mean.low < mean.value < mean.high and mean.n == 3
    one = measure.across(results[:1], "ttft_p50_s")
    assert (one.value, one.low) == (results[0].value("ttft_p50_s"), results[0].value("ttft_p50_s_low"))
    assert measure.across(results, "no such number") is None
    table = measure.frame(results, "n")
    assert table[["c", "in", "out", "repeat", "n"]].values.tolist() == [[2, 16, 3, r, 8] for r in range(3)]
    assert len(measure.rows(results[0])) == 8


class Told:
    """A run that holds one number."""

    def __init__(self, value):
        self.id, self.manifest = "told", {"summary": {"q": value}}


def told(*values):
    cells = [cell(open_lab(mode="replay"), 2, repeat=r) for r in range(len(values))]
    return [measure.Result(c, None if v is None else Told(v)) for c, v in zip(cells, values, strict=True)]


def test_a_single_run_without_an_interval_says_that_it_is_one_value():
    assert measure.single_or_mean(told(3.0, None, None), "q").note == "one value (needs 2)"
    assert measure.single_or_mean(told(3.0, 4.0), "q").note.startswith("two repeats")
    mean = measure.single_or_mean(told(3.0, 4.0, 5.0), "q")
    assert mean.value == 4 and mean.low < 3 and mean.high > 5 and not mean.note
    assert measure.single_or_mean(told(None), "q") is None


def test_results_without_a_run_give_nothing_and_not_zero():
    lab = open_lab(mode="replay")
    results = lab.measure([cell(lab)])
    assert measure.across(results, "ttft_p50_s") is None
    assert measure.frame(results, "ttft_p50_s")["ttft_p50_s"].isna().all()
    assert len(measure.rows(results[0])) == 0 and "ttft_s" in measure.rows(results[0])
    assert measure.running_while_waiting(results[0]) is None
    assert measure.relative_difference(results, results, "ttft_p50_s") is None
    assert measure.fit_step_model(results) == (None, {})


def test_ctrl_c_while_several_servers_start_ends_them_all(monkeypatch):  # pitfall 26
    monkeypatch.setenv(quiet.TURNS, "1")
    start = fakes.FakeVllm.start

    def slow_start(self):
        start(self)
        if len(EVENTS) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(1.0)
        return self

    monkeypatch.setattr(fakes.FakeVllm, "start", slow_start)
    lab = open_lab()
    with pytest.raises(KeyboardInterrupt):
        lab.measure([cell(lab, 1), cell(lab, 2, server=lab.server({"kv_cache_dtype": "fp8"}))])
    assert sorted(EVENTS) == ["start", "start", "stop", "stop"]


def test_a_replay_never_unsays_what_was_measured_because_files_are_damaged():
    lab = open_lab()
    (result,) = lab.measure([cell(lab, 1)])
    lab.write([lab.claim("throughput_tok_s", {"c": 1}, measured=5.0, unit="tok/s", results=[result])])
    before = (store.machine_dir(lab.machine) / "claims.csv").read_text()
    (result.run.path / "requests.parquet").write_text("x")
    again = open_lab(mode="replay")
    with pytest.warns(UserWarning, match="damaged"):
        (missing,) = again.measure([cell(again, 1)])
    with pytest.raises(StoreError, match=result.run.id):
        again.write([again.claim("throughput_tok_s", {"c": 1}, unit="tok/s", results=[missing])])
    assert (store.machine_dir(lab.machine) / "claims.csv").read_text() == before


@pytest.mark.parametrize("address", ["http://[bad", "http://127.0.0.1:notaport", "ftp://x", "127.0.0.1:8000"])
def test_what_is_no_address_is_refused(address):
    with pytest.raises(ConfigError, match="address"):
        measure.open_lab("load", profile_name="cpu-tiny", base_url=address)


def test_a_word_that_takes_no_turns_is_refused(monkeypatch):
    monkeypatch.setenv(quiet.TURNS, "yes")
    with pytest.raises(ConfigError, match="KVLAB_TAKE_TURNS is 'yes'"):
        quiet.take_machine()
    with pytest.raises(ConfigError):
        quiet.refuse_second()


def test_a_replay_does_not_unsay_damaged_runs_where_the_claims_are_lost_too():
    lab = open_lab()
    lab.write(
        [lab.claim("throughput_tok_s", {"c": 1}, measured=5.0, unit="tok/s", results=lab.measure([cell(lab, 1)]))]
    )
    folder = store.machine_dir("fake")
    (folder / "claims.csv").write_text("not, a, table of claims\n")
    next(folder.glob("load/*/requests.parquet")).write_bytes(b"cut")
    again = open_lab(mode="replay")
    with pytest.warns(UserWarning, match="set aside"), pytest.raises(StoreError, match="cannot be read"):
        again.write([again.claim("throughput_tok_s", {"c": 1}, unit="tok/s", results=again.measure([cell(lab, 1)]))])


@pytest.mark.parametrize("address", ["http://ex\u00e4mple..com", "http://host?x=1", "http://host#y"])
def test_what_cannot_be_asked_is_no_address(address):
    with pytest.raises(ConfigError, match="not an address"):
        measure.existing.check_address(address)


@pytest.mark.parametrize("key", ["bad\nkey", "schl\u00fcssel", "sesame "])
def test_a_key_that_no_header_carries_is_refused_and_not_told(monkeypatch, key):
    monkeypatch.setenv("KVLAB_API_KEY", key)
    with pytest.raises(ConfigError, match="KVLAB_API_KEY holds characters") as refused:
        measure.existing.check_address("http://127.0.0.1:8000")
    assert key.strip() not in str(refused.value)
