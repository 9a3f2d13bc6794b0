"""The block account against real vLLM: a pair of requests that fills the pool, with prefix caching and without."""

import pytest

from kvlab import blocks, engine, geometry, iterations, predict
from kvlab.config import LoadConfig, ServerConfig
from kvlab.errors import EngineMissing
from kvlab.load import run_load
from kvlab.scrape import counter_delta
from kvlab.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK, BLOCKS, INPUT, OUTPUT = 32, 24, 320, 64
PER_TOKEN = predict.kv_bytes_per_token(geometry.load("tiny"), 4)


@pytest.mark.parametrize("caching", [True, False])
def test_a_pair_is_evicted_and_recomputed_as_the_account_says(caching, tmp_path):
    try:
        build, _ = engine.installed_build()
    except EngineMissing:
        build = None
    if build != "cpu":
        pytest.skip("the CPU build of vLLM is not installed")
    config = ServerConfig(
        model="tiny",
        engine="cpu",
        dtype="float32",
        max_model_len=512,
        block_size=BLOCK,
        kv_cache_memory_bytes=int(BLOCKS * BLOCK * PER_TOKEN),
        max_num_seqs=8,
        max_num_batched_tokens=2048,
        enable_prefix_caching=caching,
        enforce_eager=True,
        extra_args=(iterations.FLAG,),
    )
    load = LoadConfig(concurrency=2, requests=2, input_tokens=INPUT, output_tokens=OUTPUT, sample_interval_s=0.05)
    with VllmServer(config, log_dir=tmp_path) as server:
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
    assert again < BLOCK * 4 if caching else again > INPUT
    assert counter_delta(result.samples, "prefix_hits") == 0  # the counters leave a resumed request out
