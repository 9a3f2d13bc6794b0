"""Capacity, blocks and prefill formulas against what vLLM printed and what was published."""

import re
from pathlib import Path

import pytest

from kvlab import geometry, predict
from kvlab.errors import ConfigError, FormulaDoesNotApply

LINES = (Path(__file__).parent / "fixtures" / "kv_capacity_lines.txt").read_text()
SERVERS = dict(part.split("\n", 1) for part in LINES.split("== ")[1:])
QWEN_1_7B = 2 * 28 * 8 * 128 * 2
SMALL = 2 * 4 * 2 * 32 * 2  # the model of the recorded CPU logs: 1,024 bytes a token


def number(pattern, text):
    return float(re.search(pattern, text).group(1).replace(",", ""))


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_kv_bytes_per_token_of_the_article():
    assert predict.kv_bytes_per_token(geometry.load("Qwen3-1.7B")) == 114_688
    assert predict.kv_bytes_per_token(geometry.load("Qwen3-1.7B"), dtype_bytes=1) == 57_344


def test_tensor_parallel_up_to_and_above_the_kv_heads():  # pitfall 21
    llama = geometry.load("Llama-3.1-8B")
    assert predict.kv_bytes_per_token(llama, tp=8) == 131_072 // 8
    with pytest.raises(FormulaDoesNotApply, match="8 KV heads for 16 .*\n.*replicated.* 16,384 bytes"):
        predict.kv_bytes_per_token(llama, tp=16)
    assert predict.kv_bytes_per_rank(llama, tp=16) == 16_384  # one whole head, as at tp 8
    with pytest.raises(ConfigError, match="tensor parallel 3"):
        predict.kv_bytes_per_token(llama, tp=3)
    with pytest.raises(ConfigError, match="tensor parallel 5"):
        predict.kv_bytes_per_token(geometry.load("Qwen3-14B"), tp=5)  # 40 query heads divide by 5, 8 KV heads do not


def test_kv_dtype_names():
    qwen = geometry.load("Qwen3-1.7B")
    assert [predict.kv_dtype_bytes(qwen, d) for d in (None, "auto", "fp8", "fp8_e5m2", "float32")] == [2, 2, 1, 1, 4]
    with pytest.raises(ConfigError, match="fp8_per_token_head"):
        predict.kv_dtype_bytes(qwen, "fp8_per_token_head")


# -- what the servers printed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("server", "block_size", "bytes_per_token"),
    [
        ("cpu-vllm-0.31-normal_start_cold.log", 128, SMALL),
        ("cpu-vllm-0.31-q_eager_noMP.log", 128, SMALL),
        ("cpu-vllm-0.31-kv_fp8.log", 128, SMALL // 2),
        ("gpu-vllm-0.26-kv-pinned.log", 16, QWEN_1_7B),
        ("gpu-vllm-0.26-fp8-kv.log", 16, QWEN_1_7B // 2),
    ],
)
def test_capacity_lines_of_startup_logs(server, bytes_per_token, block_size):
    text = SERVERS[server]
    max_model_len = int(number(r"'max_model_len': (\d+)", text))
    blocks = predict.num_blocks(int(number(r"'kv_cache_memory_bytes': (\d+)", text)), bytes_per_token, block_size)
    logged = int(number(r"KV cache size: ([\d,]+) tokens", text))
    assert predict.log_capacity_tokens(blocks, max_model_len, block_size) == logged
    concurrency = predict.log_max_concurrency(blocks, max_model_len, block_size)
    assert f"{concurrency:.2f}" == re.search(r"tokens per request: ([\d.]+)x", text).group(1)


@pytest.mark.parametrize(
    ("server", "max_model_len", "bytes_per_token"),
    [
        ("cpu-vllm-0.31-normal.prom", 8192, SMALL),
        ("cpu-vllm-0.31-preempt_after.prom", 512, SMALL),
        ("cpu-vllm-0.31-prefix.prom", 2048, SMALL),
        ("gpu-vllm-0.26-after-preemptions.prom", 4096, QWEN_1_7B),
    ],
)
def test_capacity_of_the_metrics(server, max_model_len, bytes_per_token):
    text = SERVERS[server]
    block_size = int(number(r'[,{]block_size="(\d+)"', text))
    blocks = predict.num_blocks(int(number(r'kv_cache_memory_bytes="(\d+)"', text)), bytes_per_token, block_size)
    assert blocks == number(r'num_gpu_blocks="(\d+)"', text)
    assert predict.log_capacity_tokens(blocks, max_model_len, block_size) == number(r'size_tokens="(\d+)"', text)
    assert predict.log_max_concurrency(blocks, max_model_len, block_size) == number(r'concurrency="([\d.]+)"', text)


def test_longest_model_len_is_the_one_that_vllm_proposes():
    text = SERVERS["cpu-vllm-0.31-err_maxlen_gt_kv.log"]
    blocks = predict.num_blocks(int(number(r"'kv_cache_memory_bytes': (\d+)", text)), SMALL, 128)
    assert (blocks, predict.longest_model_len(blocks, 128)) == (32, number(r"model length is (\d+)", text))
    assert predict.longest_model_len(predict.num_blocks(512 * 1024, SMALL, 128), 128) == 384


def test_pool_of_the_article_and_of_one_gib():
    blocks = predict.num_blocks(2_528_641_024, QWEN_1_7B, 16)
    assert (blocks, predict.log_capacity_tokens(blocks, 4096, 16)) == (1378, 22_048)
    assert predict.capacity_tokens(blocks, 16) == 22_032  # the log counts vLLM's null block
    blocks = predict.num_blocks(2**30, QWEN_1_7B, 16)
    assert (blocks, predict.usable_blocks(blocks)) == (585, 584)
    assert predict.log_capacity_tokens(blocks, 4096, 16) == 9_360


def test_logged_capacity_where_the_length_is_no_block_multiple():
    assert predict.log_capacity_tokens(64, 1000, 64) == 4_000  # not the 4,096 slots
    assert predict.log_capacity_tokens(80, 1024, 32) == 2_560


def test_logged_capacity_has_vllms_float_rounding():
    # At block 1 exact arithmetic gives the blocks back; int() of the float product is one less for some.
    cut = [(b, n) for b in range(1, 400) for n in range(1, 60) if predict.log_capacity_tokens(b, n, 1) != b]
    assert cut and all(predict.log_capacity_tokens(b, n, 1) == b - 1 for b, n in cut)


def test_formula_against_a_profiled_pool():
    text = SERVERS["gpu-vllm-0.26-cold-start.log"]
    pool = number(r"Available KV cache memory: ([\d.]+) GiB", text) * 2**30
    logged = number(r"KV cache size: ([\d,]+) tokens", text)
    assert pool / logged == pytest.approx(QWEN_1_7B, rel=0.003)  # published: 0.2 to 0.3 %


def test_an_empty_pool():
    assert predict.usable_blocks(0) == 0
    assert predict.longest_model_len(1, 128) == 0


def test_fp8_doubles_a_pinned_pool():
    assert predict.num_blocks(4 * 2**20, SMALL / 2, 128) == 64 == 2 * predict.num_blocks(4 * 2**20, SMALL, 128)


# -- requests --------------------------------------------------------------------------------------------------------


def test_the_last_output_token_has_no_kv():
    assert predict.kv_tokens_per_request(512, 128) == 639
    assert predict.kv_tokens_per_request(512, 0) == 512
    assert predict.blocks_per_request(15, 2, 16) == 1
    assert predict.blocks_per_request(16, 2, 16) == 2


def test_blocks_of_one_request():
    assert predict.blocks_per_request(2300, 64, 16) == 148
    assert predict.blocks_per_request(128, 256, 32) == 12  # 12 of 31 usable blocks: the metric said 0.387
    assert 12 / predict.usable_blocks(32) == pytest.approx(0.387, abs=0.0005)


def test_requests_that_fit_is_an_interval():  # pitfall 30
    low, high = predict.requests_that_fit(1378, 512, 128, 16)
    assert (low, high) == (pytest.approx(34.4, abs=0.05), pytest.approx(37.8, abs=0.05))
    assert predict.requests_that_fit(585, 2300, 64, 16).low == pytest.approx(3.95, abs=0.005)


def test_more_requests_are_admitted_than_fit_to_their_end():
    # 1,378 blocks of 16, one of them reserved; a prompt of 512 holds 32 of them: 43, where 34.4 to 37.8 fit grown.
    assert predict.prompts_that_fit(1378, 512, 16) == 43
    assert predict.prompts_that_fit(1378, 513, 16) == 41
    assert predict.prompts_that_fit(1, 512, 16) == 0


def test_twice_the_clients_beyond_a_limit():
    assert predict.doubled_beyond([8, 12, 24, 48], 11.5) == (12, 24)
    assert predict.doubled_beyond([32, 38, 48, 64, 96], 37.8) == (48, 96)
    assert predict.doubled_beyond([16, 40], 11.5) == (16, 40)
    assert predict.doubled_beyond([32, 48, 64], 37.8) is None and predict.doubled_beyond([1, 4], 9) is None


def test_interval_without_blocks_is_half_the_output_wide():  # pitfall 30
    low, high = predict.requests_that_fit(10_001, 160, 321, 1)
    assert low == pytest.approx(10_000 / (160 + 320))
    assert high == pytest.approx(10_000 / (160 + 320 / 2))


def test_one_output_token_leaves_no_interval():
    low, high = predict.requests_that_fit(1001, 160, 1, 16)
    assert low == high == 100


# -- prefix cache and prefill ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shared", "prompt", "cached"),
    [(0, 1000, 0), (1000, 1000, 992), (500, 1000, 480), (992, 992, 960), (993, 993, 992), (1, 1, 0), (31, 64, 0)],
)
def test_cached_tokens_as_vllm_counted_them(shared, prompt, cached):
    assert predict.cached_tokens(shared, prompt, 32) == cached


def test_time_saved_by_the_articles_prefix():
    cached = predict.cached_tokens(3000, 3032, 16)
    assert cached == 2992
    assert predict.ttft_saved_s(cached, 8200) == pytest.approx(0.394 - 0.028, rel=0.01)


@pytest.mark.parametrize(
    ("chunk", "stall_s"), [(512, 0.062), (1024, 0.125), (2048, 0.250), (4096, 0.427), (8192, 0.427)]
)
def test_chunk_stall_of_the_article(chunk, stall_s):
    assert predict.chunk_stall_s(chunk, 3500, 8200) == pytest.approx(stall_s, abs=0.0006)


def test_preemption_repeats_a_prefill():
    assert predict.preemption_cost_s(1500 + 140, 8200) == pytest.approx(0.2)


def test_queue_wait_follows_littles_law():
    running, service_s, clients = 34.4, 5.2, 64
    wait = predict.queue_wait_s(clients, running, service_s)
    assert (wait + service_s) * running / service_s == pytest.approx(clients)
    assert predict.queue_wait_at_rate_s(clients, running, running / service_s) == pytest.approx(wait)
    assert predict.queue_wait_s(8, running, service_s) == 0
