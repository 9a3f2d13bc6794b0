from dataclasses import asdict, replace

import pytest

from kvlab import display, explain
from kvlab.claims import claim
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.results import Result


def said(quantity, conditions="", **values):
    return claim("load", quantity, conditions, unit="s", **values)


def test_predictions_that_hold_are_counted_and_the_others_named():
    claims = [
        said("blocks", computed=10, measured=10),
        said("blocks", {"server": "b"}, computed=10, measured=11),
        said("ttft_s", {"c": 1}, computed=1.0, measured=1.1),
        said("ttft_s", {"c": 2}, computed=1.0, measured=1.4),
        said("ttft_s", {"c": 3}, computed=1.0, measured=1.4, ci=(0.9, 1.9)),  # the interval holds the prediction
        said("ttft_s", {"c": 4}, computed=1.0),
        said("ttft_s", {"c": 5}, measured=1.0),
    ]
    text = explain.residuals(claims, exact=("blocks",), tolerance=0.15)
    rule = "counts exactly and the rest within 15%; 1 of them are farther off and inside the measured interval"
    assert text.startswith(f"3 of 5 predictions hold ({rule}).")
    assert text.endswith("Outside: time to the first token: +40% (2 clients); blocks: +10% (server b).")


def test_exact_quantities_are_exact_to_the_last_digit():
    claims = [said("hits", computed=0, measured=1), said("other_s", computed=1, measured=9)]
    text = explain.residuals(claims, exact=("hits",))
    assert text == "0 of 1 predictions hold (counts exactly). Outside: requests that hit: 1 instead of 0."


def test_a_prediction_farther_off_that_holds_by_its_interval_is_said_to():
    wide = replace(said("ttft_p50_s", computed=1.0, measured=1.5), ci_low=0.9, ci_high=2.1)
    near = said("itl_p50_s", computed=1.0, measured=1.1)
    text = explain.residuals([wide, near], tolerance=0.15)
    assert text == "2 of 2 predictions hold (within 15%; 1 of them are farther off and inside the measured interval)."
    assert "inside" not in explain.residuals([near], tolerance=0.15)


def test_relative_changes_are_compared_by_their_difference_in_points():
    def change(c, quantity="ttft_change", **values):
        return claim("chunked_prefill", quantity, {"c": c}, unit="ratio", **values)

    near = change(1, computed=0.01, measured=0.05)  # five times as much, and four points
    far = change(2, "fp8_changes_ttft_p50_s", computed=0.0, measured=-0.4)
    share = claim("load", "hit_ratio", unit="ratio", computed=0.01, measured=0.05)  # no change: its residual counts
    text = explain.residuals([near, far, share], tolerance=0.15)
    assert text.startswith("1 of 3 predictions hold (within 15% and changes within 15 points).")
    assert "by fp8: -40.0 points (2 clients)" in text and "share of requests that hit: +400%" in text
    row = {"quantity": "ttft_change", "unit": "ratio", "computed": 0.01, "measured": 0.05, "residual": 4.0}
    assert explain.holds(row | {"ci_low": None, "ci_high": None}, 0.15)
    assert display.cells(asdict(near))["residual"] == "" != display.cells(asdict(share))["residual"]


def test_only_the_worst_eight_are_listed():
    claims = [said("ttft_s", {"c": c}, computed=1.0, measured=1.0 + c) for c in range(1, 12)]
    text = explain.residuals(claims, tolerance=0.1)
    assert "time to the first token: +1,100% (11 clients), +1,000% (10 clients), " in text
    assert "+400% (4 clients); and 3 more." in text and "(3 clients)" not in text


def test_nothing_to_compare_is_said():
    assert "nothing was measured" in explain.residuals([said("ttft_s", computed=1.0)], tolerance=0.1)
    assert "nothing was measured" in explain.residuals([], exact=("hits",))


def test_the_unused_rest_of_the_pool_is_explained_where_there_is_one():
    assert explain.rounding([said("kv_bytes_per_token", computed=100, measured=100)]) is None
    text = explain.rounding([said("kv_bytes_per_token", {"server": "a"}, computed=1000, measured=1001)])
    assert "0.100%" in text and "server=a" in text


def test_a_gain_needs_three_points_of_the_same_shape():
    points = [said("tok_s", {"c": c, "in": 512}, measured=v) for c, v in ((1, 10.0), (4, 30.0), (16, 33.0))]
    other = said("tok_s", {"c": 64, "in": 2048}, measured=1.0)
    text = explain.gain([*points, other], "tok_s", {"in": 512})
    assert text == "tok_s grows 3.0-fold from c=1;in=512 to c=4;in=512, and 1.10-fold from there to c=16;in=512."
    assert explain.gain(points[:2], "tok_s", {"in": 512}) is None


@pytest.mark.parametrize(
    ("ci", "ending"),
    [
        ((-0.02, 0.06), "no difference can be told."),
        ((0.01, 0.03), "a real difference."),
        ((None, None), "too few repeats for an interval."),
    ],
)
def test_a_difference_is_real_only_outside_of_its_interval(ci, ending):
    text = explain.difference([said("changes_tok_s", measured=0.02, ci=ci)], "changes_")
    assert text.startswith("tok_s: +2.0%") and text.endswith(ending)


def test_a_difference_below_the_noise_floor_is_none():
    found = [said("changes_tok_s", measured=0.02, ci=(0.01, 0.03))]
    assert "below the noise floor of 5.0%" in explain.difference(found, "changes_", {"tok_s": 0.05})
    assert "a real difference" in explain.difference(found, "changes_", {"tok_s": 0.01})
    assert explain.difference([said("changes_tok_s", computed=0.0)], "changes_") is None


def test_a_gain_that_two_starts_could_show_as_well_is_named():  # pitfall 16
    found = [
        said("gain", "c=1", measured=0.56),
        said("gain", "c=32", measured=-0.17),
        said("gain", "c=64", computed=0.1),
    ]
    told = explain.within_noise(found, "gain", 0.216)
    assert told == "Below the noise floor of 21.6% between two starts of one configuration: -17.0% at c=32."
    assert explain.within_noise(found, "gain", 0.1) is None and explain.within_noise(found, "gain", None) is None


def test_what_is_missing_is_counted_with_each_reason_once():
    claims = [said("a", reason="no run"), said("b", reason="no run"), said("c", reason="it died", failed=True)]
    assert explain.not_measured(claims) == "2 claims are not measured: a, b: no run. 1 claim failed: c: it died."
    assert explain.not_measured(claims[:1]) == "1 claim is not measured: a: no run."
    assert explain.not_measured([said("a", measured=1.0), said("b", computed=1.0)]) is None


def test_reasons_that_differ_in_one_number_are_told_once():
    few = [said("p95", {"c": n}, reason=f"n too small ({n}, needs 72)") for n in (16, 64, 8)]
    told = "3 claims are not measured: p95: n too small (8–64, needs 72)."
    assert explain.not_measured(few) == told
    apart = [
        said("p95", reason="n too small (16, needs 72)"),
        said("p95", {"c": 2}, reason="n too small (24, needs 368)"),
    ]
    assert "(16, needs 72), n too small (24, needs 368)" in explain.not_measured(apart)


class FakeRun:
    def __init__(self, name, *problems):
        self.id, self.manifest = name, {"certificate": {"problems": list(problems)}}


def test_marked_certificates_are_told():  # pitfall 10
    cell = Cell(name="c1", server=ServerConfig(model="m"), load=LoadConfig(requests=1, input_tokens=9, output_tokens=3))
    good, late = Result(cell, FakeRun("good")), Result(cell, FakeRun("late", "was late", "was busy"))
    assert explain.honest([Result(cell, None, "no run")]) is None
    assert explain.honest([good, good]) == "The client kept up in all 2 runs: no certificate is marked."
    text = explain.honest([good, late])
    assert text.startswith("1 of 2 runs are marked") and "late: was late; late: was busy" in text


def test_sentences_without_anything_to_say_are_left_out(monkeypatch):
    shown = []
    monkeypatch.setattr("kvlab.explain.display", shown.append)
    explain.show("One.", None, "Two.")
    assert shown[0].data == "- One.\n- Two."


def test_a_prediction_of_nothing_holds_where_nothing_is_measured():
    nothing = claim("preemption", "preemptions", {"c": 8}, computed=0, measured=0, unit="count")
    something = claim("preemption", "preemptions", {"c": 9}, computed=0, measured=3, unit="count")
    assert explain.residuals([nothing], tolerance=0.1).startswith("1 of 1 predictions hold")
    assert "0 of 1" in explain.residuals([something], tolerance=0.1)
