"""What many certificates say together: which runs are over their limits, and every number at its worst."""

import pytest

from kvlab import facts, pages
from kvlab.certificate import WORST, over_limits, worst

GOOD = {"late": False, "client_cpu_share": 0.1, "added_ttft_p99_s": 0.001, "added_itl_p99_s": None, "problems": []}


@pytest.mark.parametrize(
    ("change", "over"),
    [
        ({}, False),
        ({"late": True}, True),
        ({"client_cpu_share": 0.81}, True),
        ({"client_cpu_share": None}, False),
        ({"added_ttft_p99_s": 0.011}, True),
        ({"added_itl_p99_s": 0.011}, True),
    ],
)
def test_a_client_is_over_its_limits_by_delay_work_or_what_it_adds(change, over):
    assert over_limits(GOOD | change) is over
    assert over_limits({"tool": "another"}) is False


def test_every_number_is_told_at_its_worst_and_missing_ones_are_null():
    unequal = ["The rows hold 10 output tokens, the server counted 12: somebody else uses it, or a count is wrong."]
    told = worst(
        [
            GOOD | {"littles_law_residual": -0.2, "loop_lag_p99_s": 0.003},
            GOOD
            | {
                "littles_law_residual": 0.1,
                "loop_lag_p50_s": 0.001,
                "loop_lag_p99_s": 0.02,
                "late": True,
                "problems": unequal,
            },
            GOOD | {"added_ttft_p99_s": None, "unexplained_prefix_hits": 16.0},
            {"tool": "another", "failures": []},
            {},
        ]
    )
    assert (told["runs"], told["over"], told["unequal"], told["unexplained_prefix_hits"]) == (3, 1, 1, 16.0)
    assert (told["littles_law_residual"], told["loop_lag_p99_s"], told["added_ttft_p99_s"]) == (0.2, 0.02, 0.001)
    assert told["loop_lag_p50_s"] == 0.001 and told["added_itl_p99_s"] is None and told["schedule_delay_p99_s"] is None
    assert worst([]) == dict.fromkeys(WORST) | {"runs": 0, "over": 0, "unequal": 0, "unexplained_prefix_hits": 0}


@pytest.mark.parametrize("language", pages.LANGUAGES)
def test_the_report_has_a_column_for_each(language):
    assert set(pages.words(language)["certificate"]) == set(worst([])) - {"runs"}


def test_a_machine_tells_its_certificates():
    told = facts.about("cpu-tiny")["certificates"]
    assert told["runs"] > 100 and told["unexplained_prefix_hits"] == 0 and told["loop_lag_p99_s"] > 0
