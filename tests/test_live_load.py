"""The load generator against real vLLM: both sides must count the same."""

import live_for_tests
import pytest
from live_for_tests import tiny_server

from kvlab.config import LoadConfig
from kvlab.load import run_load
from kvlab.scrape import capacity_info, fetch, fetch_text
from kvlab.workload import Request

pytestmark = live_for_tests.MARKS

SERVER = tiny_server(
    dtype="float32",
    max_model_len=2048,
    kv_cache_memory_bytes=64 * 2**20,
    extra_args=("--enable-prompt-tokens-details",),
)


SERVERS = [SERVER]


@pytest.fixture
def server(live_servers):
    return live_servers(SERVER)


def load(**changes):
    base = {"concurrency": 4, "requests": 24, "warmup_requests": 4, "input_tokens": 128, "output_tokens": 16}
    return LoadConfig(**(base | changes))


def test_a_unique_load_is_counted_alike_on_both_sides_and_hits_nothing(server):  # pitfall 12, pitfall 13
    result = run_load(server.endpoint, load(), nonce=1, progress=False)
    assert result.requests["ok"].all(), result.requests["error"].dropna().unique()
    certificate = result.certificate
    assert certificate["failures"] == [] and certificate["fake"] is False
    assert certificate["prompt_tokens_rows"] == certificate["prompt_tokens_counter"] == 28 * 128
    assert certificate["output_tokens_rows"] == certificate["output_tokens_counter"] == 28 * 16
    assert certificate["unexplained_prefix_hits"] == 0 and certificate["tokens_per_event"] == "exact"
    assert result.requests["event_tokens"].map(sum).eq(16).all()  # pitfall 2
    assert result.window is not None and abs(certificate["littles_law_residual"]) < 0.3
    assert -0.005 < certificate["ttft_client_minus_server_s"] < result.requests["ttft_s"].mean()
    again = run_load(server.endpoint, load(), nonce=2, progress=False)
    assert again.certificate["unexplained_prefix_hits"] == 0


def test_the_audit_sees_a_nonce_that_is_used_twice(server):  # pitfall 13
    first = run_load(server.endpoint, load(), nonce=3, progress=False)
    second = run_load(server.endpoint, load(), nonce=3, progress=False)
    assert first.certificate["failures"] == []
    assert second.certificate["unexplained_prefix_hits"] == 28 * 96  # whole blocks, the last one computed anew
    assert second.certificate["failures"]


def test_shared_prefixes_hit_in_whole_blocks(server):
    shared = load(workload="shared_prefix", prefix_tokens=80, prefixes=2)
    result = run_load(server.endpoint, shared, nonce=4, progress=False)
    measured = result.requests[result.requests["phase"] == "measure"]
    assert measured["ok"].all() and set(measured["kind"]) == {"prefix_again"}
    assert (measured["cached_tokens"] == 64).all()
    certificate = result.certificate
    assert certificate["cached_tokens_rows"] == certificate["prefix_hits_counter"] == 26 * 64
    assert certificate["failures"] == []


def test_long_inputs_into_one_decoding_request(server):
    lo, hi = server.endpoint.vocab
    decode = Request(0, [lo + i % (hi - lo) for i in range(64)], 200, "decode", at_s=0.0)
    long = [[lo + (7 * k + i) % (hi - lo) for i in range(1000)] for k in (1, 2)]
    inserts = [Request(k + 1, prompt, 4, "insert", at_s=0.1 + 0.1 * k) for k, prompt in enumerate(long)]
    result = run_load(server.endpoint, load(warmup_requests=0), nonce=5, requests=[decode, *inserts], progress=False)
    assert result.requests["ok"].all() and result.requests["kind"].tolist() == ["decode", "insert", "insert"]
    assert sum(result.requests["event_tokens"].iloc[0]) == 200


def test_an_open_loop_and_two_processes(server):
    result = run_load(server.endpoint, load(processes=2), nonce=6, progress=False)
    assert result.requests["ok"].all() and result.certificate["failures"] == []
    open_loop = load(arrival="poisson", rate_per_s=20.0)
    result = run_load(server.endpoint, open_loop, nonce=7, progress=False)
    assert result.requests["ok"].all() and result.certificate["failures"] == []


def test_a_prompt_that_is_too_long_is_a_failed_row(server):  # pitfall 6
    result = run_load(server.endpoint, load(input_tokens=2048, requests=3, warmup_requests=0), nonce=8, progress=False)
    assert not result.requests["ok"].any()
    assert result.requests["error"].str.contains("maximum context length").all()


def test_capacity_and_counters_can_be_read(server):
    info = capacity_info(fetch_text(server.endpoint))
    assert info["block_size"] == 32 and info["num_gpu_blocks"] * 32 == info["kv_cache_size_tokens"]
    assert fetch(server.endpoint)["requests_finished"] > 0
