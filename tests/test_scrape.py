import asyncio
from pathlib import Path

import pandas as pd
import pytest

from kvlab.client import clock
from kvlab.errors import ScrapeError
from kvlab.fake_server import Behaviour, FakeServer
from kvlab.records import SAMPLE_COLUMNS
from kvlab.scrape import (
    COLUMNS,
    Poller,
    capacity_info,
    counter_delta,
    fetch,
    parse_metrics,
    sample_frame,
    wanted_lines,
)

FIXTURES = Path(__file__).parent / "fixtures"
CPU = (FIXTURES / "metrics-cpu-0.31-prefix.prom").read_text()
GPU = (FIXTURES / "metrics-gpu-0.26-preemptions.prom").read_text()


def test_a_recorded_text_of_0_31():
    values = parse_metrics(CPU)
    assert tuple(values) == COLUMNS and None not in values.values()
    assert (values["prefix_queries"], values["prefix_hits"]) == (20273, 14720)
    assert (values["prompt_tokens"], values["prompt_tokens_computed"]) == (22273, 7553)
    assert (values["generation_tokens"], values["requests_finished"]) == (424, 34)
    assert values["ttft_sum_s"] == pytest.approx(2.869998) and values["itl_count"] == 390


def test_a_recorded_text_of_a_gpu():
    values = parse_metrics(GPU)
    assert values["preemptions"] == 60 and values["requests_finished"] == 516
    assert values["queue_sum_s"] == pytest.approx(486.65, abs=0.01) and values["kv_usage"] == 0


def test_the_capacity_the_server_reports():
    assert capacity_info(CPU) == {
        "num_gpu_blocks": 256,
        "block_size": 32,
        "kv_cache_size_tokens": 8192,
        "cache_dtype": "auto",
        "enable_prefix_caching": True,
    }
    assert capacity_info(GPU)["kv_cache_size_tokens"] == 22048
    assert set(capacity_info("up 1\n").values()) == {None}


OLD = """vllm:num_requests_running{model_name="m"} 3
vllm:gpu_cache_usage_perc{model_name="m"} 0.5
vllm:gpu_prefix_cache_queries{model_name="m"} 100
vllm:gpu_prefix_cache_hits{model_name="m"} 40
vllm:num_preemptions{model_name="m"} 2
vllm:prompt_tokens{model_name="m"} 500
vllm:request_success{model_name="m",finished_reason="stop"} 1
vllm:request_success{model_name="m",finished_reason="length"} 4
vllm:time_per_output_token_seconds_sum{model_name="m"} 1.5
vllm:time_per_output_token_seconds_count{model_name="m"} 30
"""


def test_old_names_are_understood():  # pitfall 22
    values = parse_metrics(OLD)
    assert (values["running"], values["kv_usage"], values["preemptions"]) == (3, 0.5, 2)
    assert (values["prefix_queries"], values["prefix_hits"]) == (100, 40)
    assert (values["itl_sum_s"], values["itl_count"]) == (1.5, 30)
    assert values["requests_finished"] == 5
    assert values["waiting"] is None and values["prompt_tokens_computed"] is None  # absent is null, not 0


def test_old_and_new_names_side_by_side_are_not_added_up():  # pitfall 22
    both = "vllm:gpu_prefix_cache_hits_total 7\nvllm:prefix_cache_hits_total 7\nvllm:prefix_cache_hits_created 1.7e9\n"
    assert parse_metrics(both)["prefix_hits"] == 7


def test_similar_names_are_not_taken_for_each_other():  # pitfall 22
    other = "vllm:request_time_per_output_token_seconds_sum 9\nvllm:num_requests_running 1\n"
    assert parse_metrics(other)["itl_sum_s"] is None


def test_none_of_the_names_is_an_error_that_lists_what_is_there():  # pitfall 22
    with pytest.raises(ScrapeError, match=r"sglang:num_running_reqs, up"):
        parse_metrics('# TYPE up gauge\nup 1\nsglang:num_running_reqs{a="b"} 3\n')


def test_engines_are_summed_and_shares_averaged():
    text = "".join(
        f'vllm:num_requests_running{{engine="{i}"}} {i + 1}\nvllm:kv_cache_usage_perc{{engine="{i}"}} {0.2 * i}\n'
        for i in range(3)
    )
    values = parse_metrics(text)
    assert values["running"] == 6 and values["kv_usage"] == pytest.approx(0.2)


def test_computed_prompt_tokens_without_sources():
    text = "vllm:prompt_tokens_total 10\nvllm:prompt_tokens_cached_total 4\n"
    assert parse_metrics(text)["prompt_tokens_computed"] == 6


def test_little_is_kept_of_a_text():
    assert len(wanted_lines(CPU.encode())) < 3000 and "_bucket" not in wanted_lines(CPU.encode()).decode()


def samples(values, worker=None, column="preemptions"):
    return [{"t_s": float(i), "worker": worker, column: value} for i, value in enumerate(values)]


def test_a_counter_delta_is_last_minus_first_of_each_worker():
    frame = sample_frame(samples([5, 6, 9], "a") + samples([100, 100, 101], "b"))
    assert counter_delta(frame, "preemptions") == 5
    assert counter_delta(frame, "prefix_hits") is None
    assert counter_delta(frame.iloc[::-1], "preemptions") == 5


def test_a_counter_that_falls_is_an_error():
    with pytest.raises(ScrapeError, match="restarted"):
        counter_delta(sample_frame(samples([5, 9, 2, 20])), "preemptions")


def test_frames_have_the_columns_and_types():
    frame = sample_frame(samples([1]))
    assert list(frame.columns) == list(SAMPLE_COLUMNS)
    assert frame["running"].dtype == pd.Float64Dtype() and frame["running"].isna().all()


def poll(fake, seconds, interval_s=0.05, **behaviour):
    async def go():
        poller = Poller([fake.endpoint], interval_s, clock())
        await poller.sample()
        poller.start()
        await asyncio.sleep(seconds)
        await poller.stop()
        await poller.close()
        return poller

    fake.behaviour = Behaviour(**behaviour)
    return asyncio.run(go())


def test_the_poller_samples_at_its_interval():  # pitfall 23
    with FakeServer() as fake:
        t_s = poll(fake, 0.6).frame()["t_s"]
    assert 2 < len(t_s) <= (t_s.iloc[-1] - t_s.iloc[0]) / 0.05 + 2  # the first one comes before the interval begins


def test_polled_texts_of_a_real_server_are_parsed_in_the_end():
    with FakeServer() as fake:
        frame = poll(fake, 0.1, metrics_text=CPU).frame()
        assert fetch(fake.endpoint)["prefix_hits"] == 14720
    assert set(frame["prefix_hits"]) == {14720.0}


def test_a_server_with_other_metrics_is_named_by_them():
    with FakeServer() as fake, pytest.raises(ScrapeError, match="go_goroutines"):
        poll(fake, 0.05, metrics_text="go_goroutines 3\n").frame()


def test_settling_waits_for_the_last_request_to_be_counted():
    async def go(fake):
        poller = Poller([fake.endpoint], 0.5, clock())
        fake.counts["finished"] = 5
        await poller.sample()
        fake.counts["finished"] = 7
        asyncio.get_running_loop().call_later(0.2, fake.counts.update, {"finished": 1})
        await poller.settle(3)
        await poller.close()
        return poller.frame()

    with FakeServer() as fake:
        frame = asyncio.run(go(fake))
    assert counter_delta(frame, "requests_finished") == 3
    assert len(frame) == 2  # what was looked at while waiting is no sample


def test_a_gone_server_is_an_error_of_fetch_and_a_count_of_the_poller():
    with FakeServer() as fake:
        endpoint = fake.endpoint
    with pytest.raises(ScrapeError, match="could not be read"):
        fetch(endpoint)

    async def go():
        poller = Poller([endpoint], 0.1, clock())
        await poller.sample()
        await poller.close()
        return poller.failures, poller.texts

    assert asyncio.run(go()) == (1, [])
