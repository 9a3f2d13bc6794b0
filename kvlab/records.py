"""The columns of what is measured: one row a request, one row a scrape. Missing is null, never 0."""

from __future__ import annotations

SCHEMA_VERSION = 1

# name -> (pandas dtype, meaning). Times in seconds on the run's clock: 0 is the start of the load, monotonic.
REQUEST_COLUMNS: dict[str, tuple[str, str]] = {
    "request": ("Int64", "index within its phase"),
    "phase": ("string", "warmup or measure"),
    "kind": ("string", "what the workload says of it, such as unique, prefix_first, prefix_again, decode, insert"),
    "prefix": ("Int64", "which shared prefix; null where there is none"),
    "worker": ("string", "which server answered, where that is known"),
    "scheduled_s": ("Float64", "when it should start (open loop); null in a closed loop"),
    "start_s": ("Float64", "just before the request is written, after every client-side wait"),
    "wait_s": ("Float64", "client-side wait before start_s (schedule delay, connection slot)"),
    "connect_s": ("Float64", "time to open a connection; 0 where a warm one is reused; not part of TTFT"),
    "first_content_s": ("Float64", "receipt of the first event with non-empty content"),
    "last_content_s": ("Float64", "receipt of the last event with non-empty content"),
    "end_s": ("Float64", "end of the response"),
    "ttft_s": ("Float64", "first_content_s - start_s"),
    "latency_s": ("Float64", "last_content_s - start_s"),
    "tpot_s": ("Float64", "(last - first content) / (output_tokens - 1); null below 2 tokens"),
    "input_tokens_asked": ("Int64", "prompt tokens sent"),
    "output_tokens_asked": ("Int64", "output tokens asked for"),
    "prompt_tokens": ("Int64", "usage.prompt_tokens"),
    "output_tokens": ("Int64", "usage.completion_tokens"),
    "cached_tokens": ("Int64", "usage.prompt_tokens_details.cached_tokens; null where not reported"),
    "finish_reason": ("string", "as reported"),
    "http_status": ("Int64", "null where no response came"),
    "ok": ("boolean", "success by the strict definition"),
    "error": ("string", "why not; null on success"),
    "event_times_s": ("object", "list of float: receipt of each content event"),
    "event_tokens": ("object", "list of int: tokens in each content event"),
}

# One row a scrape. Counters are cumulative since the server's start.
SAMPLE_COLUMNS: dict[str, tuple[str, str]] = {
    "t_s": ("Float64", "run clock, receipt of the answer"),
    "worker": ("string", "which server"),
    "running": ("Float64", "requests running"),
    "waiting": ("Float64", "requests waiting"),
    "kv_usage": ("Float64", "share of usable KV blocks in use, 0..1"),
    "preemptions": ("Float64", "counter"),
    "prefix_queries": ("Float64", "counter, tokens"),
    "prefix_hits": ("Float64", "counter, tokens"),
    "prompt_tokens": ("Float64", "counter, cached ones included"),
    "prompt_tokens_computed": ("Float64", "counter, cached ones excluded"),
    "generation_tokens": ("Float64", "counter"),
    "requests_finished": ("Float64", "counter, all reasons"),
    "ttft_sum_s": ("Float64", "histogram sum"),
    "ttft_count": ("Float64", "histogram count"),
    "itl_sum_s": ("Float64", "histogram sum"),
    "itl_count": ("Float64", "histogram count"),
    "queue_sum_s": ("Float64", "histogram sum"),
    "queue_count": ("Float64", "histogram count"),
    "prefill_sum_s": ("Float64", "histogram sum"),
    "prefill_count": ("Float64", "histogram count"),
}
