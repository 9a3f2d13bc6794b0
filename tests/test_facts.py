"""What prose may quote: the right claim, and what runs say of their machine."""

from datetime import UTC, datetime, timedelta

import pytest

from kvlab import claims, facts

START = datetime(2026, 1, 2, 10, tzinfo=UTC)


def table(tmp_path, *rows):
    claims.write_section(tmp_path, "load", rows)
    return claims.read(tmp_path)


def test_the_claim_that_says_least_beyond_the_conditions_is_found(tmp_path):
    def row(where, **more):
        return claims.claim("load", "x", where, unit="s", **more)

    rows = [row({"c": 8, "in": 512, "out": 1}, measured=1), row({"c": 8, "in": 512}, measured=2)]
    rows += [row({"c": 8}, reason="not yet"), row({"c": 9}, computed=3)]
    known = facts.facts("mine", {"mine": table(tmp_path, *rows)})
    assert known.find("mine", "load", "x", "c=8")["measured"] == 2  # one with a number comes before one without
    assert known.find("here", "load", "x", "c=9")["computed"] == 3
    assert known.find("mine", "load", "x", "c=10") is None and known.find("other", "load", "x") is None


def test_slips_are_told_only_where_the_committed_machines_are_here(tmp_path):
    one = table(tmp_path, claims.claim("load", "x", {"among": "5-10"}, measured=1, unit="s"))
    alone = facts.facts("mine", {"mine": one})
    assert not alone.complete() and alone.known("load", "y")
    every = facts.facts("h200", {name: one for name in facts.COMMITTED})
    assert every.complete() and not every.known("load", "y") and every.known("load", "x")
    assert every.known("fleet", "anything")  # nobody has measured that section
    only_published = facts.facts("h200", {"article": one} | {name: one.iloc[:0] for name in ("h200", "cpu-tiny")})
    assert only_published.known("load", "y")
    assert {"5-10", "5", "10"} <= every.settings


def manifest(began_s, duration_s, *, gpus=1, started_s=None, ready_s=None):
    server = {} if started_s is None else {"started_utc": at(started_s), "ready_s": ready_s}
    return {
        "created_utc": at(began_s),
        "duration_s": duration_s,
        "server": server,
        "provenance": {"gpus": [{"name": "GPU"}] * gpus},
    }


def at(seconds):
    return (START + timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize(
    ("runs", "minutes"),
    [
        ([], None),
        ([manifest(0, 60, gpus=0)], None),
        ([manifest(0, 60)], 1),
        ([manifest(0, 60), manifest(30, 60)], 1.5),  # side by side is not twice
        ([manifest(100, 60, started_s=0, ready_s=60)], 2),
        ([manifest(0, 60, gpus=2), manifest(600, 60)], 3),
        ([manifest(0, None)], 0),
    ],
)
def test_gpu_minutes_are_the_union_of_starts_and_loads(runs, minutes):
    assert facts.gpu_minutes(runs) == minutes
