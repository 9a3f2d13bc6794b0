from collections import Counter
from itertools import chain

import numpy as np
import pytest

from kvlab import workload
from kvlab.config import LoadConfig
from kvlab.errors import ConfigError
from kvlab.workload import arrival_times, head, plan, probe_prompt

VOCAB = (100, 4000)


def load(**changes):
    return LoadConfig(**({"requests": 40, "input_tokens": 48, "output_tokens": 4} | changes))


def shared(**changes):
    return load(**({"workload": "shared_prefix", "prefix_tokens": 32, "prefixes": 4} | changes))


def heads(requests, n=8):
    return [tuple(r.prompt[:n]) for r in requests]


@pytest.mark.parametrize("config", [load(warmup_requests=7), shared(warmup_requests=9)])
def test_lengths_are_exact_and_ids_within_the_vocabulary(config):
    for request in chain(*plan(config, VOCAB, 1)):
        assert len(request.prompt) == 48 and request.output_tokens == 4
        assert all(VOCAB[0] <= token < VOCAB[1] for token in request.prompt)
        assert all(type(token) is int for token in request.prompt[:12])


def test_the_same_arguments_give_the_same_plan():
    config = shared(warmup_requests=9, arrival="poisson", rate_per_s=3.0)
    assert plan(config, VOCAB, 5) == plan(config, VOCAB, 5)
    assert plan(config, VOCAB, 5) != plan(config.model_copy(update={"seed": 1}), VOCAB, 5)


@pytest.mark.parametrize("config", [load(warmup_requests=20), shared(warmup_requests=20)])
def test_no_two_runs_share_their_first_8_tokens(config):  # pitfall 13
    runs = [set(heads(chain(*plan(config, VOCAB, nonce)))) for nonce in (0, 1, 2, 2**48 - 1, 2**64 - 1)]
    assert len(set().union(*runs)) == sum(len(run) for run in runs)


def test_unique_prompts_differ_within_8_tokens_warm_up_included():  # pitfall 13
    warmup, measured = plan(load(warmup_requests=40), VOCAB, 3)
    assert len(set(heads(warmup + measured))) == 80
    assert tuple(probe_prompt(VOCAB, 3)[:8]) not in heads(warmup + measured)


def test_heads_are_injective_not_just_unlikely_to_collide():  # pitfall 13
    cases = [(n, role, i) for n in range(40) for role in ("warmup", "measure", "prefix", "probe") for i in range(40)]
    assert len({tuple(head(VOCAB, *case)) for case in cases}) == len(cases)
    small = {tuple(head((0, 64), *case)) for case in cases}
    assert len(small) == len(cases) and len(next(iter(small))) <= 16


def test_cells_with_one_seed_still_send_other_prompts():  # pitfall 13
    a, b = plan(load(), VOCAB, 1)[1], plan(load(concurrency=4), VOCAB, 2)[1]
    assert not set(heads(a)) & set(heads(b))


def test_shared_prefixes_are_shared_and_tails_are_not():
    _, measured = plan(shared(requests=100), VOCAB, 1)
    prefixes = {r.prefix: tuple(r.prompt[:32]) for r in measured}
    assert len(set(prefixes.values())) == 4
    assert all(tuple(r.prompt[:32]) == prefixes[r.prefix] for r in measured)
    assert len({r.prompt[32] for r in measured}) == 100


def test_first_and_again_follow_the_order_of_the_plan():
    _, measured = plan(shared(), VOCAB, 1)
    seen = set()
    for request in measured:
        assert request.kind == ("prefix_again" if request.prefix in seen else "prefix_first")
        seen.add(request.prefix)


def test_a_warm_up_as_long_as_the_prefixes_sends_each_once_first():
    warmup, measured = plan(shared(warmup_requests=6), VOCAB, 1)
    assert [r.prefix for r in warmup[:4]] == [0, 1, 2, 3]
    assert [r.kind for r in warmup] == ["prefix_first"] * 4 + ["prefix_again"] * 2
    assert {r.kind for r in measured} == {"prefix_again"}
    assert len({tuple(r.prompt) for r in warmup + measured}) == 46
    assert [r.index for r in measured] == list(range(40))


def test_a_shorter_warm_up_touches_no_prefix():
    warmup, measured = plan(shared(warmup_requests=3), VOCAB, 1)
    assert {(r.kind, r.prefix) for r in warmup} == {("unique", None)}
    assert not set(heads(warmup)) & set(heads(measured))
    assert [r.kind for r in measured].count("prefix_first") == len({r.prefix for r in measured})


def test_uniform_order_is_independent_draws_and_zipf_follows_its_weights():
    order = [r.prefix for r in plan(shared(requests=4000, prefixes=4), VOCAB, 1)[1]]
    assert all(abs(n - 1000) < 150 for n in Counter(order).values())
    repeats = np.mean(np.array(order[1:]) == np.array(order[:-1]))
    assert 0.2 < repeats < 0.3  # cyclic order gives 0, shuffled epochs less than 1/4
    zipf = Counter(r.prefix for r in plan(shared(requests=4000, zipf=1.0), VOCAB, 1)[1])
    weights = np.array([1, 1 / 2, 1 / 3, 1 / 4]) / (1 + 1 / 2 + 1 / 3 + 1 / 4)
    assert all(abs(zipf[k] - 4000 * weights[k]) < 150 for k in range(4))


def test_arrivals():
    assert arrival_times(load()) == [None] * 40
    assert arrival_times(load(arrival="constant", rate_per_s=4.0))[:3] == [0.0, 0.25, 0.5]
    times = arrival_times(load(requests=4000, arrival="poisson", rate_per_s=4.0))
    gaps = np.diff(times)
    assert gaps.min() > 0 and abs(gaps.mean() - 0.25) < 0.02 and abs(gaps.std() / gaps.mean() - 1) < 0.08
    assert [r.at_s for r in plan(load(arrival="constant", rate_per_s=4.0), VOCAB, 1)[1]][:2] == [0.0, 0.25]


def test_warm_up_requests_have_the_measured_shape():  # pitfall 18
    warmup, measured = plan(load(warmup_requests=5), VOCAB, 1)
    assert {(len(r.prompt), r.output_tokens) for r in warmup} == {(len(r.prompt), r.output_tokens) for r in measured}


@pytest.mark.parametrize(
    ("config", "vocab", "nonce"),
    [
        (load(input_tokens=7), VOCAB, 1),
        (load(), (0, 63), 1),
        (load(), VOCAB, -1),
        (load(), VOCAB, 2**64),
        (shared(prefix_tokens=7), VOCAB, 1),
        (shared(requests=5000, prefix_tokens=47), VOCAB, 1),
    ],
)
def test_what_cannot_be_told_apart_is_refused(config, vocab, nonce):
    with pytest.raises(ConfigError):
        plan(config, vocab, nonce)


# -- orders and lengths of shared prefixes ------------------------------------------------------------------------


def ordered(**changes):
    lengths = {"prefix_tokens": 64, "input_tokens": 80, "output_tokens": 1}
    return LoadConfig(
        **({"workload": "shared_prefix", "requests": 40, "prefixes": 4, "warmup_requests": 4} | lengths | changes)
    )


def test_prefixes_can_come_in_a_cycle_or_in_runs():  # pitfall 33
    assert workload.prefix_sequence(ordered(prefix_order="cycle"))[1][:6] == [0, 1, 2, 3, 0, 1]
    runs = workload.prefix_sequence(ordered(prefix_order="runs"))[1]
    assert len(runs) == 40 and all(len(set(runs[i : i + 10])) == 1 for i in range(0, 40, 10)) and len(set(runs)) > 1


def test_prefixes_can_have_two_lengths():
    warmup, measured = workload.plan(ordered(prefix_step_tokens=16), (100, 4000), 7)
    assert {len(r.prompt) for r in measured if r.prefix % 2} == {96} and len(warmup[0].prompt) == 64
    assert warmup[1].prompt[:80] == next(r.prompt for r in measured if r.prefix == 1)[:80]
    with pytest.raises(ConfigError, match="too short"):
        workload.plan(ordered(prefix_step_tokens=60), (100, 4000), 7)
