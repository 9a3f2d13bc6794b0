"""Each picture names the notebook and, machine by machine, the runs that it is made of."""

import json
from pathlib import Path

import pandas as pd
import pytest
from committed_for_tests import FIGURES

from kvlab import behind, claims, facts, findings, store

ROOT = Path(__file__).parent.parent


def told(**tables):
    """Facts of the report about h200: machine -> (quantity, conditions, measured, runs) of the section on load."""
    rows = {
        name.replace("_", "-"): pd.DataFrame(
            [
                {"section": "load", "quantity": q, "conditions": c, "measured": m, "runs": r, "computed": 1.0}
                for q, c, m, r in listed
            ]
        )
        for name, listed in tables.items()
    }
    return facts.facts("h200", rows)


def svg(*words):
    return "".join(f"<g><!-- {word} --></g>" for word in words).encode()


@pytest.fixture(autouse=True)
def nothing_is_stored(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))


def test_a_machine_is_found_by_its_whole_name():
    names = ("article", "cpu-tiny", "h200", "h200-x2")
    assert behind.machines_in(svg("h200-x2", "article bf16", "cpu-tiny, c=1"), names) == [
        "article",
        "cpu-tiny",
        "h200-x2",
    ]
    assert behind.machines_in(svg("h200", "of cpu-tiny"), names) == ["h200"]


def test_the_runs_of_every_machine_drawn_are_named():
    shape = "c=8;in=512;out=128"
    known = told(
        h200=[("ttft_p50_s", shape, 0.1, "x")],
        cpu_tiny=[
            ("ttft_p50_s", shape, 0.1, "a;b"),
            ("throughput_tok_s", shape, None, "not-drawn"),  # it has no measured value
            ("itl_p50_s", shape, 0.1, "another-quantity"),
            ("ttft_p50_s", "c=8;in=2048;out=128", 0.1, "another-length"),
        ],
        article=[("ttft_p50_s", shape, 0.1, None)],
        office=[("ttft_p50_s", shape, 0.1, "o")],
    )
    found = behind.of_figure("load_machines", "load", ["x", "y"], svg("h200", "article", "cpu-tiny"), known)
    assert [(one.machine, one.runs, one.published) for one in found] == [
        ("h200", ("x", "y"), False),
        ("cpu-tiny", ("a", "b"), False),
        ("article", (), True),
    ]
    unlisted = behind.of_figure("new", "load", [], svg("cpu-tiny"), known)
    assert unlisted[0].runs == ("a", "another-length", "another-quantity", "b") and not unlisted[0].folders
    assert unlisted[0].long is False and behind.Behind("m", tuple("abcde"), ()).long is True


def test_a_run_lies_where_it_was_measured_whatever_section_reads_it(tmp_path):
    folder = tmp_path / "data" / "mine" / "service_hit_rate" / "a"
    folder.mkdir(parents=True)
    about = {"schema_version": 1, "cell": {"server": {}}, "key": "a", "created_utc": "2026-11-01T00:00:00+00:00"}
    (folder / "run.json").write_text(json.dumps(about))
    known = told(mine=[("ttft_p50_s", "c=8", 0.1, "a;gone")])
    (found,) = behind.of_figure("new", "load", [], svg("mine"), known)
    assert found.runs == ("a", "gone") and found.folders == ("data/mine/service_hit_rate",)


@pytest.mark.parametrize("file", FIGURES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_stored_figure_of_several_machines_names_the_runs_of_each(file, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    info, picture = json.loads(file.read_text()), file.with_suffix(".svg").read_bytes()
    tables = {name: claims.read(store.machine_dir(name)) for name in store.machines()}
    known = facts.facts(info["machine"], tables)
    found = behind.of_figure(file.stem, info["notebook"], info["runs"], picture, known)
    drawn = set(behind.machines_in(picture, known.claims)) - {info["machine"]}
    assert drawn <= {one.machine for one in found}
    assert all(one.published or one.runs and one.folders for one in found)


def test_what_a_picture_is_said_to_draw_exists(monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(ROOT / "data"))
    tables = [claims.read(store.machine_dir(name)) for name in store.machines()]
    known = {(row.section, row.quantity) for table in tables for row in table.itertuples()}
    figures = {file.stem for file in FIGURES}
    assert set(behind.listed()) <= figures
    lines = [
        line for spec in (*behind.listed().values(), *findings.listed().values()) for line in spec.get("drawn", ())
    ]
    assert lines and all(tuple(line.split()[:2]) in known for line in lines)
