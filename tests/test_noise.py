"""Spread, repeats needed and the noise floor, on numbers that can be checked by hand or by simulation."""

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from kvlab import claims, explain, measure, noise, store
from kvlab.errors import KvlabError


def test_the_relative_sd_carries_the_chi_square_interval_of_its_few_repeats():
    found = noise.relative_sd([831, 833, 831, 832, 831, None])
    assert found.n == 5
    assert found.value == pytest.approx(0.8944 / 831.6, rel=1e-3)
    assert found.high / found.value == pytest.approx(2.8736, rel=1e-3)  # the table's factor for 4 degrees of freedom
    assert found.low / found.value == pytest.approx(0.5991, rel=1e-3)


@pytest.mark.parametrize("values", [[], [5.0], [None, 5.0], [-1.0, 1.0]])
def test_no_spread_without_two_values_or_around_zero(values):
    assert noise.relative_sd(values) is None


@pytest.mark.parametrize(("spread", "wanted"), [(0.01, 0.01), (0.05, 0.01), (0.002, 0.01), (0.2, 0.003)])
def test_repeats_needed_is_the_smallest_number_that_reaches_the_half_width(spread, wanted):
    n = noise.repeats_needed(spread, wanted)
    assert noise.half_width(spread, n) <= wanted
    assert n == 2 or noise.half_width(spread, n - 1) > wanted


def test_repeats_needed_knows_that_few_repeats_pay_with_a_wide_t():
    assert noise.repeats_needed(0.01, 0.01) == 7  # 1.96² = 3.8 would say 4
    with pytest.raises(KvlabError):
        noise.repeats_needed(0.01, 0.0)
    with pytest.raises(KvlabError, match="more than"):
        noise.repeats_needed(0.5, 1e-9)


def test_two_measurements_of_one_configuration_exceed_the_floor_in_one_of_twenty_cases():
    rng = np.random.default_rng(1)
    beyond = 0
    for _ in range(4000):
        known = rng.normal(100, 2, 5)
        a, b = rng.normal(100, 2, 2)
        beyond += abs(a - b) / 100 > noise.floor(known.std(ddof=1) / 100, 5)
    assert beyond / 4000 == pytest.approx(0.05, abs=0.012)


def test_the_part_of_the_start_is_told_apart_from_the_repeats():
    rng = np.random.default_rng(2)
    starts = [rng.normal(0, 3) + rng.normal(100, 1, 20) for _ in range(400)]
    assert noise.between_starts_sd(starts) == pytest.approx(0.03, rel=0.1)
    same = [rng.normal(100, 1, 20) for _ in range(400)]
    assert noise.between_starts_sd(same) < 0.003
    assert noise.between_starts_sd([[99.0, 101.0], [99.0, 101.0]]) == 0
    assert noise.between_starts_sd([[1.0], [2.0]]) is None
    assert noise.between_starts_sd([[1.0, 2.0]]) is None


def test_the_floor_of_a_machine_is_the_largest_over_loads_and_falls_with_pairs(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path))
    stored = [
        claims.claim("repeatability", "noise_floor", f"of=ttft_p50_s;between={b};c={c}", measured=v, unit="ratio")
        for b, c, v in [("starts", 1, 0.01), ("starts", 8, 0.04), ("repeats", 8, 0.02)]
    ]
    missing = claims.claim("repeatability", "noise_floor", "of=itl_p50_s;between=starts;c=8", unit="ratio", reason="x")
    claims.write_section(store.machine_dir("here"), "repeatability", [*stored, missing])
    assert noise.floor_of("here", "ttft_p50_s") == pytest.approx(0.04)
    assert noise.floor_of("here", "ttft_p50_s", pairs=4) == pytest.approx(0.02)
    assert noise.floor_of("here", "ttft_p50_s", between="repeats") == pytest.approx(0.02)
    assert noise.floor_of("here", "itl_p50_s") is None
    assert noise.floor_of("elsewhere", "ttft_p50_s") is None


def test_the_floor_uses_the_t_of_the_known_repeats():
    assert noise.floor(0.01, 5) == pytest.approx(scipy_stats.t.ppf(0.975, 4) * math.sqrt(2) * 0.01)


def test_a_difference_below_the_noise_floor_is_not_called_real():
    def say(value, low, high, **floors):
        c = claims.claim("x", "changes_ttft_p50_s", "c=8", measured=value, ci=(low, high), computed=0, unit="ratio")
        return explain.difference([c], "changes_", floors)

    assert "a real difference" in say(0.05, 0.04, 0.06)
    assert "a real difference" in say(0.05, 0.04, 0.06, ttft_p50_s=0.03)
    assert "below the noise floor of 8.0%" in say(-0.05, -0.06, -0.04, ttft_p50_s=0.08)
    assert "no difference can be told" in say(0.05, -0.01, 0.11, ttft_p50_s=0.01)


def test_the_arms_take_turns_and_the_first_one_changes():
    order = measure.turns({"on": 1, "off": 2}, 3)
    assert order == [("on", 0), ("off", 0), ("off", 1), ("on", 1), ("on", 2), ("off", 2)]


def stored(quantity, of, between, value, ci=(None, None), **more):
    where = {"of": of, "between": between, "c": 8} | more
    return claims.claim("repeatability", quantity, where, measured=value, ci=ci, unit="ratio")


def test_the_sentences_name_floors_starts_and_repeats():
    floors = [stored("noise_floor", q, "starts", v) for q, v in [("ttft_p50_s", 0.2), ("throughput_tok_s", 0.01)]]
    assert "from 1.0% (throughput_tok_s at 8 clients) to 20.0% (ttft_p50_s" in noise.largest(floors, "starts")
    assert noise.largest(floors, "repeats") is None
    clear = [stored("spread", "ttft_p50_s", b, v, (v * 0.6, v * 2.9)) for b, v in [("repeats", 0.01), ("starts", 0.1)]]
    even = [stored("spread", "itl_p50_s", b, v, (v * 0.6, v * 2.9)) for b, v in [("repeats", 0.01), ("starts", 0.02)]]
    assert "2 of 2 cases, beyond chance for ttft_p50_s at 8 clients." in noise.starts_against_repeats(clear + even)
    assert "beyond chance for none of them" in noise.starts_against_repeats(even)
    counts = [stored("repeats_for_half_width", "ttft_p50_s", "starts", n, half_width=0.01, load=n) for n in (7, 30)]
    assert noise.repeats_wanted(counts, "starts") == "± 1.00% of a mean takes this many starts: 30 of ttft_p50_s."
