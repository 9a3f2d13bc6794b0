"""The block account against real vLLM: a pair of requests that fills the pool, with prefix caching and without."""

import live_for_tests
import pytest
from live_for_tests import BLOCK, tiny_server

from kvlab import blocks, geometry, iterations, predict
from kvlab.config import LoadConfig
from kvlab.load import run_load
from kvlab.scrape import counter_delta

pytestmark = live_for_tests.MARKS

BLOCKS, INPUT, OUTPUT = 24, 320, 64
PER_TOKEN = predict.kv_bytes_per_token(geometry.load("tiny"), 4)


SERVERS = [
    tiny_server(
        dtype="float32",
        max_model_len=512,
        kv_cache_memory_bytes=int(BLOCKS * BLOCK * PER_TOKEN),
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enable_prefix_caching=caching,
        extra_args=(iterations.FLAG,),
    )
    for caching in (True, False)
]


@pytest.mark.parametrize("config", SERVERS, ids=["caching", "no caching"])
def test_a_pair_is_evicted_and_recomputed_as_the_account_says(config, live_servers):
    load = LoadConfig(concurrency=2, requests=2, input_tokens=INPUT, output_tokens=OUTPUT, sample_interval_s=0.05)
    server = live_servers(config)
    result = run_load(server.endpoint, load, nonce=1, progress=False)
    log = server.log_path.read_text()
    jobs = [blocks.Job(INPUT, OUTPUT)] * 2
    account = blocks.closed_loop(blocks.engine_of(config, BLOCKS - 1), 2, jobs)
    sent = 2 * INPUT, 2 * OUTPUT, 2
    steps = iterations.last_load(iterations.parse_iterations(log), iterations.once(*sent))
    again = iterations.recomputed_tokens(steps, *sent)
    assert result.requests["ok"].all()
    assert account.preemptions == counter_delta(result.samples, "preemptions") == 1
    assert again == pytest.approx(account.recomputed_tokens, abs=4)  # the second request may start a step later
    assert again < BLOCK * 4 if config.enable_prefix_caching else again > INPUT
    assert counter_delta(result.samples, "prefix_hits") == 0  # the counters leave a resumed request out
