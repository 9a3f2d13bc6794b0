"""Long inputs inserted beside a decoding request: the plan, the gaps, and what a chunk costs."""

from types import SimpleNamespace

import pandas as pd
import pytest

from kvlab import claims, config, explain, insertion, predict, workload
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import ConfigError
from kvlab.load import request_frame

VOCAB = (0, 4096)
INSERTION = {
    "workload": "insertion",
    "arrival": "constant",
    "rate_per_s": 2.0,
    "requests": 4,
    "input_tokens": 500,
    "output_tokens": 300,
}


def test_the_plan_is_one_decoding_request_and_long_inputs_at_their_times():
    warmup, measured = workload.plan(LoadConfig(**INSERTION, warmup_requests=1), VOCAB, nonce=7)
    assert [r.kind for r in measured] == ["decode", "insert", "insert", "insert"]
    assert [r.at_s for r in measured] == [0.0, 0.5, 1.0, 1.5]
    assert [len(r.prompt) for r in measured] == [64, 500, 500, 500]
    assert [r.output_tokens for r in measured] == [300, 1, 1, 1]
    assert [(len(r.prompt), r.output_tokens) for r in warmup] == [(500, 8)]


def test_no_prompt_of_the_plan_begins_like_another():  # pitfall 13
    warmup, measured = workload.plan(LoadConfig(**INSERTION, warmup_requests=1), VOCAB, nonce=7)
    heads = {tuple(r.prompt[: workload.head_length(VOCAB)]) for r in [*warmup, *measured]}
    assert len(heads) == 5


@pytest.mark.parametrize(
    "wrong",
    [
        {"arrival": "closed", "rate_per_s": None},
        {"requests": 1},
        {"decode_input_tokens": 501},
    ],
)
def test_an_insertion_that_cannot_be_one_is_refused(wrong):
    with pytest.raises(ConfigError):
        config.build(LoadConfig, INSERTION | wrong, "a test")


def test_fields_that_came_later_leave_the_keys_of_other_cells_alone():
    server = ServerConfig(model="m", kv_cache_memory_bytes=2**26)
    load = LoadConfig(requests=4, input_tokens=512, output_tokens=8)
    cell = Cell(name="c1", server=server, load=load)
    assert config.key(cell) == "3d57328df878"  # as it was before they existed
    cold = cell.model_copy(update={"server": server.model_copy(update={"caches": "cold"})})
    longer = cell.model_copy(update={"load": load.model_copy(update={"decode_input_tokens": 65})})
    assert len({config.key(cell), config.key(cold), config.key(longer)}) == 3


def row(kind, index, start, events, ok=True):
    return {
        "request": index,
        "phase": "measure",
        "kind": kind,
        "start_s": start,
        "first_content_s": events[0] if events else None,
        "last_content_s": events[-1] if events else None,
        "ttft_s": events[0] - start if ok else None,
        "event_times_s": list(events),
        "event_tokens": [1] * len(events),
        "ok": ok,
    }


def run(*inserts, decode=(0.01, 0.02, 0.03, 0.13, 0.23, 0.24, 0.25, 0.26, 0.46, 0.47)) -> pd.DataFrame:
    return request_frame([row("decode", 0, 0.0, decode), *inserts])


def test_gaps_belong_to_the_insertion_that_made_them():
    first, second = row("insert", 1, 0.027, [0.2301]), row("insert", 2, 0.2595, [0.4599])
    found, why = insertion.insertions(run(second, first))  # rows come in any order
    assert why is None
    assert [i.start_s for i in found] == [0.027, 0.2595]
    assert found[0].gaps_s == pytest.approx((0.1, 0.1))
    assert found[1].gaps_s == pytest.approx((0.2,))
    assert [i.longest_s for i in found] == pytest.approx([0.1, 0.2])
    assert insertion.quiet_gaps_s(run(first, second)) == pytest.approx([0.01] * 3)


@pytest.mark.parametrize(
    ("inserts", "why"),
    [
        ([], "failed"),
        ([row("insert", 1, 0.03, [], ok=False)], "failed"),
        ([row("insert", 1, 0.005, [0.2])], "before the decoding request's first token"),
        ([row("insert", 1, 0.4, [0.5])], "ended before"),
        ([row("insert", 1, 0.03, [0.2]), row("insert", 2, 0.1, [0.3])], "2 of 2 insertions: two of them overlapped"),
    ],
)
def test_a_run_that_shows_no_insertion_says_why(inserts, why):
    found, reason = insertion.insertions(run(*inserts))
    assert found == []
    assert why in reason


def test_one_bad_insertion_does_not_take_the_others_with_it():
    found, why = insertion.insertions(run(row("insert", 1, 0.027, [0.2301]), row("insert", 2, 0.4, [0.6])))
    assert [i.start_s for i in found] == [0.027]
    assert why.startswith("1 of 2 insertions: the decoding request ended")


def test_a_failed_decoding_request_gives_no_gaps():  # pitfall 5
    frame = request_frame([row("decode", 0, 0.0, [0.01, 0.02], ok=False), row("insert", 1, 0.012, [0.019])])
    assert insertion.insertions(frame)[0] == []


MODEL = predict.PrefillModel(fixed_s=0.01, per_token_s=1e-4, per_pair_s=1e-8)


def test_chunks_add_up_to_the_whole_prefill_and_grow():
    costs = predict.chunk_costs_s(MODEL, 513, 3500)
    assert len(costs) == 7  # 6 x 512 + 428: the decoding request takes one token of each step
    assert sum(costs) == pytest.approx(MODEL.ttft_s(3500) - MODEL.fixed_s)
    assert costs[:6] == sorted(costs[:6])
    assert costs[5] - costs[0] == pytest.approx(1e-8 * 512 * 5 * 512)


def test_the_fixed_part_of_a_step_is_found_where_prompts_take_several():
    step_s, token_s = 0.02, 6e-6
    points = [(n, -(-n // 2048) * step_s + n * token_s) for n in (875, 1750, 2625, 3500, 8192, 16384)]
    found = predict.prefill_model(points, 2048)
    assert (found.fixed_s, found.per_token_s) == (pytest.approx(step_s, rel=1e-3), pytest.approx(token_s, rel=1e-3))
    assert predict.prefill_model(points).per_token_s > 2 * token_s  # one step would explain it by the tokens


def test_a_chunk_that_slows_the_input_gets_more_room():
    usual = insertion.schedule(0.06, 0.0025, 3)
    assert insertion.schedule(0.06, 0.0025, 3, 0.07) == usual
    assert insertion.schedule(0.06, 0.0025, 3, 0.15).every_s > 0.2 > usual.every_s


def test_an_input_below_the_chunk_is_one_piece():
    assert predict.chunk_costs_s(MODEL, 8192, 3500) == pytest.approx([MODEL.ttft_s(3500) - MODEL.fixed_s])


def test_without_room_for_prefill_there_is_no_prediction():
    with pytest.raises(ConfigError):
        predict.chunk_costs_s(MODEL, 32, 3500, decoding=32)


@pytest.mark.parametrize(("ttft_s", "step_s"), [(0.65, 0.009), (0.035, 0.0027), (0.8, 0.0027), (0.37, 0.0024)])
def test_a_schedule_fits_fast_and_slow_machines(ttft_s, step_s):
    plan = insertion.schedule(ttft_s, step_s, 3)
    assert plan.every_s > 1.3 * ttft_s  # the long inputs do not meet, even where small chunks slow them down
    decoding_until_s = plan.output_tokens * step_s + 3 * ttft_s
    assert 3 * plan.every_s + ttft_s < decoding_until_s < 3 * 3 * plan.every_s


def claim(quantity, computed, measured, conditions="chunk=512"):
    return claims.claim("s", quantity, conditions, computed=computed, measured=measured, unit="s")


def test_two_models_are_compared_by_their_residuals_and_not_by_what_is_missing():
    plain, refined = [claim("a", 1.0, 1.5), claim("a", 1.0, 0.9)], [claim("b", 1.0, 1.04)]
    said = explain.two_models(plain, refined, "chunk ÷ speed", "attention")
    assert said == "With chunk ÷ speed the predictions are off by -10% to +50%; with attention by +4% to +4%."
    assert explain.two_models(plain, [claim("b", 1.0, None)], "x", "y") is None


def test_changes_are_said_with_what_was_computed():
    said = explain.change([claim("ttft_change", 0.05, 0.13), claim("ttft_change", 0.05, None)], "ttft_change", "TTFT")
    assert said == "Change of the TTFT: +13.0% (computed +5.0%) at chunk=512."
    assert explain.change([], "ttft_change", "TTFT") is None


def test_runs_that_are_left_out_are_named():
    run = SimpleNamespace(run=SimpleNamespace(id="chunk512-r0"))
    assert explain.refused([(run, None)]) is None
    assert explain.refused([(run, None), (run, "overlapped")]) == (
        "1 of 2 runs are not read in full: chunk512-r0: overlapped."
    )
