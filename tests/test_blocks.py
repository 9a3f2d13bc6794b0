"""The block account against cases worked by hand, against recorded servers, and against the article's counts."""

import pytest

from kvlab.blocks import Engine, Eviction, Job, closed_loop, engine_of, variants
from kvlab.config import ServerConfig
from kvlab.errors import ConfigError


def computed(account):
    return sum(step.decoding + step.prefill_tokens for step in account.steps)


def test_a_preemption_worked_by_hand():
    # 4 blocks of 4 tokens. Both requests hold 2 blocks when request 0 needs its third, in step 5: request 1 goes, with
    # 7 tokens computed. Its last block, half full, is taken first; the first one is full and is found again.
    account = closed_loop(Engine(4, 4), 2, [Job(4, 6)] * 2)
    assert account.evictions == (Eviction(5, 1, 7, 6, 4),)
    assert account.recomputed_tokens == 3 and account.lost_tokens == 7
    assert [step.used_blocks for step in account.steps] == [1, 3, 4, 4, 4, 0, 2, 0]
    assert [step.running for step in account.steps] == [1, 2, 2, 2, 2, 0, 1, 0]
    assert [step.evicted for step in account.steps] == [0, 0, 0, 0, 0, 1, 0, 0]
    assert [life.last_token for life in account.lives] == [5, 7]


def test_one_block_more_and_nobody_is_evicted():
    account = closed_loop(Engine(5, 4), 2, [Job(4, 6)] * 2)
    assert account.verdict == "free" and account.recomputed_tokens == 0


def test_without_prefix_caching_everything_is_computed_again():
    account = closed_loop(Engine(4, 4, prefix_caching=False), 2, [Job(4, 6)] * 2)
    assert account.evictions == (Eviction(5, 1, 7, 6, 0),)


def test_blocks_that_others_took_are_not_found():
    # Request 1 is evicted with 3 full blocks when request 0 has taken its fifth. Ending with 20, 22, 26 or 30 tokens
    # request 0 takes 0 to 3 blocks more, the last ones of request 1 first.
    cached = {}
    for output in (6, 8, 12, 16):
        account = closed_loop(Engine(8, 4), 2, [Job(15, output), Job(12, 10)])
        cached[output] = account.evictions[0].cached_tokens
    assert cached == {6: 12, 8: 8, 12: 4, 16: 0}


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("chunk", [64, 2048])
@pytest.mark.parametrize(
    ("clients", "job"), [(1, Job(128, 256)), (7, Job(100, 200)), (32, Job(500, 90)), (9, Job(33, 1))]
)
def test_every_token_is_accounted_for(caching, chunk, clients, job):
    account = closed_loop(Engine(31, 32, 32, chunk, caching), clients, [job] * 40)
    once = 40 * (job.input_tokens + job.output_tokens - 1)
    assert computed(account) == once + account.recomputed_tokens
    assert sum(step.output_tokens for step in account.steps) == 40 * job.output_tokens
    assert max(step.used_blocks for step in account.steps) <= 31
    assert (account.steps[-1].running, account.steps[-1].waiting, account.steps[-1].used_blocks) == (0, 0, 0)


@pytest.mark.parametrize(
    ("blocks", "clients", "requests", "preemptions"), [(31, 1, 2, 0), (31, 4, 8, 6), (31, 8, 16, 20), (23, 4, 8, 7)]
)
def test_the_preemptions_of_recorded_servers(blocks, clients, requests, preemptions):
    account = closed_loop(Engine(blocks, 32, 32), clients, [Job(128, 256)] * requests)
    assert account.preemptions == preemptions


def test_the_gauges_of_a_recorded_server():
    alone = closed_loop(Engine(31, 32, 32), 1, [Job(128, 256)] * 2)
    assert max(step.used_blocks for step in alone.steps) / 31 == pytest.approx(0.387, abs=5e-4)
    four = closed_loop(Engine(31, 32, 32), 4, [Job(128, 256)] * 8)
    assert (four.max_running, four.max_waiting) == (4, 2)
    assert max(step.used_blocks for step in four.steps) == 31


def test_many_preemptions_within_a_sixth_of_a_recorded_server():
    account = closed_loop(Engine(31, 32, 32), 32, [Job(128, 256)] * 64)
    assert account.preemptions == pytest.approx(86, rel=1 / 6)
    assert account.max_waiting == 30


def test_the_articles_counts_come_out_at_one_of_its_capacities():
    published = {(32, 512, 128, 160): 0, (32, 2048, 128, 64): 7, (64, 1500, 256, 128): 22}
    for (clients, n_in, n_out, requests), count in published.items():
        account = closed_loop(Engine(27504 // 16 - 1, 16, 64), clients, [Job(n_in, n_out)] * requests)
        assert abs(account.preemptions - count) <= 2
    # At the capacity of its first server the middle load only queues: the count is another server's.
    assert closed_loop(Engine(22048 // 16 - 1, 16, 64), 32, [Job(2048, 128)] * 64).verdict == "queue"


def test_requests_whose_output_fits_into_their_last_block_only_queue():
    account = closed_loop(Engine(31, 32), 20, [Job(97, 32)] * 40)
    assert account.verdict == "queue" and account.max_running == 7


def test_what_keeps_requests_waiting_is_named():
    def held(engine, clients=12):
        return {step.held_by for step in closed_loop(engine, clients, [Job(128, 30)] * 24).steps}

    assert held(Engine(100, 32, max_num_seqs=4)) == {"max_num_seqs", None}
    assert held(Engine(31, 32)) == {"kv", None}
    # Prompts that wait for their share of a step's tokens wait neither for blocks nor for the cap.
    chunked = closed_loop(Engine(200, 32, max_num_batched_tokens=128), 12, [Job(128, 30)] * 24)
    assert chunked.max_waiting > 0 and chunked.verdict == "free"


@pytest.mark.parametrize("job", [Job(128, 256), Job(500, 90), Job(250, 250)])
def test_a_cap_at_the_requests_that_fit_prevents_every_preemption(job):
    at_end = -(-(job.input_tokens + job.output_tokens - 1) // 32)
    capped = closed_loop(Engine(100, 32, max_num_seqs=100 // at_end), 40, [job] * 80)
    free = closed_loop(Engine(100, 32, max_num_seqs=64), 40, [job] * 80)
    assert capped.preemptions == 0 and capped.max_running == 100 // at_end
    assert free.preemptions > 0 and free.max_running > 100 // at_end


def test_a_long_prompt_waits_until_all_of_it_fits():
    # Older releases admit it when its first chunk fits, and then evict it in the middle of its prompt.
    jobs = [Job(64, 200), Job(600, 10)]
    engine = Engine(20, 32, max_num_batched_tokens=128)
    waits = closed_loop(engine, 2, jobs)
    early = closed_loop(engine._replace(reserve_input=False), 2, jobs)
    assert waits.preemptions == 0 and waits.lives[1].admitted == waits.lives[0].last_token + 1
    assert early.preemptions > 0 and early.lives[1].admitted == 1


def test_the_timing_of_the_clients_moves_the_count():
    engine, jobs = Engine(31, 32, 32), [Job(128, 256)] * 64
    nominal, *others = variants(engine, 32, jobs)
    assert nominal == closed_loop(engine, 32, jobs)
    assert len({account.preemptions for account in others}) > 1
    assert all(computed(account) == 64 * 383 + account.recomputed_tokens for account in others)


@pytest.mark.parametrize("job", [Job(1000, 100), Job(10, 0)])
def test_an_impossible_request_is_refused(job):
    with pytest.raises(ConfigError, match="cannot run"):
        closed_loop(Engine(31, 32), 2, [job] * 4)


def test_a_server_whose_limits_are_unknown_is_refused():
    server = ServerConfig(model="tiny", block_size=32, max_num_seqs=8, max_num_batched_tokens=512)
    assert engine_of(server, 31) == Engine(31, 32, 8, 512, True)
    assert not engine_of(server.model_copy(update={"enable_prefix_caching": False}), 31).prefix_caching
    with pytest.raises(ConfigError, match="max_num_seqs"):
        engine_of(server.model_copy(update={"max_num_seqs": None}), 31)
