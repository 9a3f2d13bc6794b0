"""Loads of tests on hits: few prefixes that many requests share."""

from kvlab.config import LoadConfig


def shared_prefixes(prefixes, prefix_tokens, tail_tokens, **more):
    """Each prefix is sent once before the requests that count; an answer is one token."""
    return LoadConfig(
        workload="shared_prefix",
        prefixes=prefixes,
        warmup_requests=prefixes,
        prefix_tokens=prefix_tokens,
        input_tokens=prefix_tokens + tail_tokens,
        output_tokens=1,
        **more,
    )
