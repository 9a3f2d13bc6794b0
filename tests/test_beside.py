import math
from types import SimpleNamespace

import pytest

from kvlab import beside, claims, store
from kvlab.claims import claim


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    article = [
        claim("load", "tok_s", {"c": 16, "in": 512}, measured=160.0, unit="tok/s"),
        claim("load", "tok_s", {"c": 2, "in": 512}, measured=20.0, computed=22.0, ci=(18.0, 23.0), unit="tok/s"),
        claim("load", "tok_s", {"c": 2, "in": 2048}, measured=5.0, unit="tok/s"),
        claim("load", "tok_s", {"c": 4, "in": 512}, unit="tok/s", reason="not published"),
        claim("load", "tok_s", {"in": 512}, measured=1.0, unit="tok/s"),
        claim("load", "tok_s", {"c": "all", "in": 512}, measured=2.0, unit="tok/s"),
        claim("load", "requests_that_fit", {"in": 512}, computed=34.0, unit="requests"),
        claim("load", "plain", "", measured=7.0, unit="s"),
    ]
    claims.write_section(store.machine_dir("article"), "load", article)
    claims.write_section(
        store.machine_dir("h200"), "load", [claim("load", "tok_s", {"c": 1}, measured=9.0, unit="tok/s")]
    )
    claims.write_section(store.machine_dir("other"), "caching", [claim("caching", "x", "", measured=9.0, unit="s")])


def lab(machine, section="load"):
    return SimpleNamespace(machine=machine, section=section)


def test_other_machines_have_claims_of_the_section_and_the_article_is_first():
    assert beside.others(lab("mine")) == ["article", "h200"]
    assert beside.others(lab("h200")) == ["article"]
    assert beside.others(lab("mine", "caching")) == ["other"]
    assert beside.others(lab("mine", "nothing")) == []


def test_points_are_sorted_numbers_of_the_asked_conditions():
    points = beside.points("article", "load", "tok_s", "c", **{"in": 512})
    assert points["x"].tolist() == [2, 4, 16]
    assert points["measured"].tolist()[::2] == [20.0, 160.0] and math.isnan(points["measured"][1])  # never 0
    assert points.loc[0, ["computed", "ci_low", "ci_high"]].tolist() == [22.0, 18.0, 23.0]
    assert set(points.dtypes[["x", "measured", "ci_low"]]) == {points["x"].dtype}


def test_points_of_what_is_not_there_are_an_empty_table_to_draw():
    for points in (
        beside.points("nobody", "load", "tok_s", "c"),
        beside.points("article", "load", "tok_s", "c", out=1),
    ):
        assert len(points) == 0 and points["measured"].dtype == "float64"
        assert (points["measured"] * 1e3).tolist() == []


def test_a_value_has_all_its_conditions_or_is_none():
    assert beside.value("article", "load", "tok_s", c=2) == 20.0
    assert beside.value("article", "load", "tok_s", c=2, **{"in": 2048}) == 5.0
    assert beside.value("article", "load", "tok_s", "computed", c=2) == 22.0
    assert beside.value("article", "load", "plain") == 7.0
    assert beside.value("article", "load", "tok_s", c=4) is None
    assert beside.value("article", "load", "tok_s", c=2, out=1) is None
    assert beside.value("nobody", "load", "tok_s") is None
    assert beside.article_fit("article", **{"in": 512}) == 34.0 and beside.article_fit("h200") is None
