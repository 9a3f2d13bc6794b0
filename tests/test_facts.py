"""What prose may quote: the right claim, and what runs say of their machine."""

from kvlab import claims, facts


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


def test_the_ceilings_of_the_hardware_are_no_model_and_have_no_weights(monkeypatch):
    runs = [run for run in facts.store.list_runs("h200-x2") if run.manifest["cell"]["server"]["model"] == "hardware"]
    assert runs
    monkeypatch.setattr(facts.store, "list_runs", lambda machine: runs)
    told = facts.about("h200-x2")
    assert told["runs"] == len(runs) and told["hardware"] and told["model"] is None and told["weights"] is None
