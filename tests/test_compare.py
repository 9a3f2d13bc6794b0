"""Two machines or two runs: what moved beyond the noise, and what cannot be told."""

import json
import shutil

import pandas as pd
import pytest
from tables_for_tests import request, requests, samples
from typer.testing import CliRunner

from kvlab import claims, cli, compare, store
from kvlab.errors import ConfigError, StoreError


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)


def machine(name, throughput, *, ci=None, blocks=213, floor=None, unit="tok/s"):
    """A machine with a throughput, a counted capacity and, where asked, a noise floor."""
    made = [claims.claim("load", "throughput_tok_s", {"c": 8}, unit=unit, measured=throughput, ci=ci)]
    made += [claims.claim("load", "itl_p50_s", {"c": 8}, unit="s", measured=throughput / 1e5)]
    claims.write_section(store.machine_dir(name), "load", made)
    both = {"computed": blocks, "measured": blocks}
    counted = [claims.claim("kv_capacity", "num_blocks", {"block": 32}, unit="blocks", **both)]
    claims.write_section(store.machine_dir(name), "kv_capacity", counted)
    if floor is not None:
        where = {"of": "throughput_tok_s", "between": "starts", "c": 8}
        stated = [claims.claim("repeatability", "noise_floor", where, unit="ratio", measured=floor)]
        claims.write_section(store.machine_dir(name), "repeatability", stated)


def verdicts(a, b):
    return compare.compare(a, b).set_index("id")["verdict"].to_dict()


THROUGHPUT, CAPACITY, GAP = "load/throughput_tok_s/c=8", "kv_capacity/num_blocks/block=32", "load/itl_p50_s/c=8"


@pytest.mark.parametrize(("b", "verdict"), [(104, "within noise"), (106, "moved")])
def test_intervals_join_like_independent_errors(b, verdict):
    """± 4 and ± 3 join to ± 5: neither touching intervals nor one interval alone decides."""
    machine("a", 100, ci=(96, 104))
    machine("b", b, ci=(b - 3, b + 3))
    assert verdicts("a", "b")[THROUGHPUT] == verdict


def test_a_noise_floor_wider_than_the_intervals_decides():
    machine("a", 100, ci=(99, 101), floor=0.3)
    machine("b", 120, ci=(119, 121), floor=0.3)
    found = compare.compare("a", "b").set_index("id")
    assert found.loc[THROUGHPUT, "verdict"] == "within noise" and "noise floor" in found.loc[THROUGHPUT, "why"]
    assert found.loc[THROUGHPUT, "noise"] == pytest.approx(0.3 * 1.1)
    machine("c", 150, ci=(149, 151), floor=0.3)
    assert verdicts("a", "c")[THROUGHPUT] == "moved"


def test_the_floor_of_one_machine_stands_in_and_is_named():
    machine("a", 100, floor=0.2)
    machine("b", 200)
    found = compare.compare("a", "b").set_index("id")
    assert found.loc[THROUGHPUT, "verdict"] == "moved" and "of a" in found.loc[THROUGHPUT, "why"]


def test_two_floors_are_averaged_as_variances():
    machine("a", 100, floor=0.3)
    machine("b", 100, floor=0.4)
    row = compare.compare("a", "b").set_index("id").loc[THROUGHPUT]
    assert row["noise"] == pytest.approx(((0.09 + 0.16) / 2) ** 0.5)


def test_single_measurements_without_noise_tell_nothing():
    machine("a", 100)
    machine("b", 900)
    assert verdicts("a", "b")[GAP] == "cannot be told"
    assert verdicts("a", "a")[GAP] == "within noise"  # equal is equal


def test_a_count_that_both_sides_meet_exactly_was_computed_differently():
    """A number that matches its formula to the digit on both sides has no noise: not the measurement moved."""
    machine("a", 100)
    machine("b", 100, blocks=214)
    assert verdicts("a", "b")[CAPACITY] == "computed differently" and verdicts("a", "a")[CAPACITY] == "within noise"
    told = command("a", "b")
    assert told.exit_code == 0 and "1 were computed differently and met exactly" in told.stdout
    assert CAPACITY not in told.stdout and CAPACITY in command("a", "b", "--all").stdout


def test_a_side_may_be_a_folder_with_claims(tmp_path):
    machine("a", 100)
    machine("b", 100, blocks=214)
    old = tmp_path / "old"
    (tmp_path / "data" / "b").rename(old)
    assert verdicts("a", old)[CAPACITY] == "computed differently" == verdicts(old / "claims.csv", "a")[CAPACITY]


def run(name, throughput, seqs, *, machine="a"):
    manifest = {
        "cell": {"name": name, "repeat": 0, "server": {"max_num_seqs": seqs}, "load": {"concurrency": 8}},
        "key": name.ljust(12, "0"),
        "profile": "p",
        "created_utc": "2026-01-01T00:00:00+00:00",
        "summary": {"throughput_tok_s": throughput, "ttft_p50_s": 0.5, "ttft_p50_s_low": 0.4, "ttft_p50_s_high": 0.6},
        "valid": True,
    }
    return store.save_run(machine, "load", manifest, requests(request()), samples({"t_s": 0.0}))


def test_two_runs_are_compared_and_say_what_was_asked_differently():
    machine("a", 100, floor=0.1)
    first, second = run("one", 100, 16), run("two", 150, 64)
    for name in (f"a/load/{second.id}", second.id, second.path):
        a, b = compare.open_side(first.path), compare.open_side(name)
        found = compare.table(a, b).set_index("id")
        assert found.loc["load/throughput_tok_s", "verdict"] == "moved"
        assert found.loc["load/ttft_p50_s", "verdict"] == "within noise"
        assert compare.differing_fields(a, b) == ["server.max_num_seqs: 16 -> 64"]
        assert "max_num_seqs: 16 -> 64" in compare.text(a, b, compare.table(a, b))


def test_a_copied_run_belongs_to_the_folder_in_which_it_lies(tmp_path):
    machine("a", 100, floor=0.1)
    machine("b", 100, floor=0.4)
    first, second = run("one", 100, 16), run("two", 130, 64)
    shutil.copytree(second.path.parent, tmp_path / "data" / "b" / "load")  # its manifest still says a
    a, b = compare.open_side(first.path), compare.open_side(f"b/load/{second.id}")
    assert (a.name, b.name) == (f"a/load/{first.id}", f"b/load/{second.id}")
    assert a.floors["throughput_tok_s"] == 0.1 and b.floors["throughput_tok_s"] == 0.4
    shutil.move(tmp_path / "data" / "b", tmp_path / "elsewhere")  # not under the data folder at all
    moved = compare.open_side(tmp_path / "elsewhere" / "load" / second.id)
    assert moved.name == f"elsewhere/load/{second.id}" and moved.floors["throughput_tok_s"] == 0.4


def test_a_machine_and_a_run_share_nothing_and_are_told_so():
    machine("a", 100)
    only = run("one", 100, 16)
    with pytest.raises(ConfigError, match=f"a and a/load/{only.id} share no measured number") as caught:
        compare.table(compare.open_side("a"), compare.open_side(only.path))
    assert "conditions" in str(caught.value) and "two runs" in str(caught.value)


@pytest.mark.parametrize("width", [60, 80, 110, 140, 240])
def test_what_is_shown_fits_the_terminal(width):
    machine("a", 100, ci=(99, 101))
    machine("b", 300, ci=(299, 301), blocks=214)
    a, b = compare.open_side("a"), compare.open_side("b")
    said = compare.text(a, b, compare.table(a, b), everything=True, width=width)
    assert max(map(len, said.splitlines())) <= width
    assert THROUGHPUT in said and "+200.0%" in said and "moved" in said and "100 tok/s" in said
    assert ("against the intervals" in said) != ("--out FILE" in said)
    assert said.splitlines()[0].startswith("a is a, b is b:")


def test_a_file_gets_the_full_width_whatever_the_terminal_has(tmp_path):
    machine("a", 100, ci=(99, 101))
    machine("b", 300, ci=(299, 301), blocks=214)
    words = ["compare", "a", "b", "--out", str(tmp_path / "out.txt")]
    told = CliRunner().invoke(cli.app, words, env={"COLUMNS": "40"})
    assert f"Written to {tmp_path / 'out.txt'}" in told.stdout
    said = (tmp_path / "out.txt").read_text()
    assert "against the intervals" in said and "--out" not in said
    assert "2 numbers that did not move, were computed differently or cannot be told are left out; --all" in said
    narrow = CliRunner().invoke(cli.app, ["compare", "a", "b"], env={"COLUMNS": "40"})
    assert max(map(len, narrow.stdout.splitlines())) <= 40


def test_a_section_is_an_option_and_outside_of_the_project_that_is_said(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="KVLAB_DATA points elsewhere"):
        compare.open_side("h200")
    monkeypatch.delenv("KVLAB_DATA")
    with pytest.raises(ConfigError, match="Next: cd into the folder of kvlab") as caught:
        compare.open_side("h200")
    assert f"nothing is stored under {tmp_path / 'data'}" in str(caught.value)
    machine("h200", 100)
    with pytest.raises(ConfigError, match="kvlab compare h200 OTHER --section load") as caught:
        compare.open_side("h200/load")
    assert "did you mean" not in str(caught.value)


def test_bad_sides_are_explained():
    machine("cpu-tiny", 100)
    with pytest.raises(ConfigError, match="did you mean cpu-tiny"):
        compare.open_side("cpu-tini")
    claims.write_section(store.machine_dir("other"), "startup", [claims.claim("startup", "x", unit="s", measured=1)])
    with pytest.raises(ConfigError, match="share no measured number"):
        compare.compare("cpu-tiny", "other")
    with pytest.raises(ConfigError, match="of the section startup"):
        compare.compare("cpu-tiny", "cpu-tiny", "startup")
    machine("inches", 100, unit="req/s")
    with pytest.raises(StoreError, match="unit"):
        compare.compare("cpu-tiny", "inches")


# -- the command --------------------------------------------------------------------------------------------------


def command(*words):
    return CliRunner().invoke(cli.app, ["compare", *map(str, words)], env={"COLUMNS": "200"})


def test_the_exit_code_says_whether_something_moved():
    machine("a", 100, ci=(99, 101))
    machine("b", 150, ci=(149, 151))
    assert command("a", "a").exit_code == 0
    assert command("a", "b").exit_code == 1
    assert command("a", "nobody").exit_code == 2 and command("a", "b", "--format", "xml").exit_code == 2
    machine("c", 300)
    told = command("a", "c", "--section", "load")
    assert told.exit_code == 3 and "2 cannot be told" in told.stdout


def test_all_rows_are_shown_only_where_asked():
    machine("a", 100, ci=(99, 101))
    machine("b", 300, ci=(299, 301))
    assert THROUGHPUT in command("a", "b").stdout and GAP not in command("a", "b").stdout
    assert GAP in command("a", "b", "--all").stdout


def test_json_and_csv_hold_every_row(tmp_path):
    machine("a", 100, ci=(99, 101))
    machine("b", 300, ci=(299, 301), blocks=214)
    said = json.loads(command("a", "b", "--format", "json").stdout)
    assert said["counts"] == {"moved": 1, "within noise": 0, "computed differently": 1, "cannot be told": 1}
    assert {row["id"] for row in said["rows"]} == {THROUGHPUT, CAPACITY, GAP}
    assert next(row for row in said["rows"] if row["id"] == GAP)["noise"] is None
    assert command("a", "b", "--format", "csv", "--out", tmp_path / "out.csv").exit_code == 1
    table = pd.read_csv(tmp_path / "out.csv")
    assert list(table.columns) == list(compare.COLUMNS) and len(table) == 3
