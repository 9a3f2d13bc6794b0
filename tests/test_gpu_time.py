"""GPU minutes: each GPU's starts and loads united, and the GPUs told apart as far as the runs say."""

from datetime import UTC, datetime, timedelta

import pytest

from kvlab import facts, gpu_time, store

START = datetime(2026, 1, 2, 10, tzinfo=UTC)
FIRST, SECOND = ("aaaaaaaa",), ("bbbbbbbb",)


def manifest(began_s, duration_s, section="load", *, gpus=1, ids=(), started_s=None, ready_s=None):
    server = {} if started_s is None else {"started_utc": at(started_s), "ready_s": ready_s}
    seen = [{"name": "GPU", "id": gpu} for gpu in ids] or [{"name": "GPU"}] * gpus
    about = {"section": section, "created_utc": at(began_s), "duration_s": duration_s, "server": server}
    return about | {"provenance": {"gpus": seen}}


def at(seconds):
    return (START + timedelta(seconds=seconds)).isoformat()


@pytest.mark.parametrize(
    ("runs", "minutes"),
    [
        ([], None),
        ([manifest(0, 60, gpus=0)], None),
        ([manifest(0, 60)], 1),
        ([manifest(0, 60), manifest(30, 60)], 1.5),  # a section stays on its GPU
        ([manifest(100, 60, started_s=0, ready_s=60)], 2),
        ([manifest(0, 60, gpus=2), manifest(600, 60)], 3),
        ([manifest(0, None)], 0),
    ],
)
def test_gpu_minutes_are_the_union_of_starts_and_loads(runs, minutes):
    assert gpu_time.minutes(runs) == minutes


def test_sections_whose_loads_overlap_were_on_different_gpus():
    first = manifest(100, 60, "load", started_s=0, ready_s=60)
    second = manifest(130, 60, "routing", started_s=0, ready_s=60)
    assert gpu_time.minutes([first, second]) == 4
    in_turn = manifest(160, 60, "routing", started_s=0, ready_s=60)
    assert gpu_time.minutes([first, in_turn]) == 3  # side by side on one GPU as far as anybody can say
    touching = manifest(159.99, 60.01, "routing", started_s=0, ready_s=60)
    assert gpu_time.minutes([first, touching]) == 3
    third = manifest(190, 60, "fp8_kv", started_s=0, ready_s=60)
    assert gpu_time.minutes([first, second, third]) == 5  # it took turns with the first


def test_after_a_long_pause_a_section_may_be_on_another_gpu():
    apart = [manifest(0, 60, "load"), manifest(30, 60, "routing")]
    later = [manifest(3600, 60, "load"), manifest(3600, 60, "preemption")]
    later += [manifest(3700, 60, "routing"), manifest(3700, 60, "preemption")]
    assert gpu_time.minutes([*apart, *later]) == 2 + 4  # there load and routing took turns beside preemption


def test_named_gpus_are_counted_each():
    one, other = manifest(0, 60, ids=FIRST), manifest(0, 60, ids=SECOND)
    assert gpu_time.minutes([one, other]) == 2  # one section on two GPUs
    assert gpu_time.minutes([one, manifest(0, 60, "routing", ids=FIRST)]) == 1
    assert gpu_time.minutes([manifest(0, 60, ids=FIRST + SECOND), one]) == 2
    assert gpu_time.minutes([one, manifest(3600, 60)]) == 2  # beside older runs that do not name theirs


def test_the_committed_runs_of_two_gpus_count_on_both():
    runs = [run.manifest for run in store.list_runs("h200")]
    united = gpu_time.union_s(span for manifest in runs for span in gpu_time.spans(manifest)) / 60
    assert facts.about("h200")["gpu_minutes"] == gpu_time.minutes(runs) > 1.3 * united
