"""What a section's notebook takes from its profile: its grid, and the block account's view of a server."""

from __future__ import annotations

from typing import Any

from kvlab import blocks, predict, profile
from kvlab.config import ServerConfig
from kvlab.errors import ConfigError


def grid(lab) -> Any:
    """The profile's parameters for the lab's section.

    A profile without them gets those of a built-in one for its engine, so that everything can still be computed; the
    lab then only replays, and its claims say that nothing was measured.
    """
    found = getattr(lab.profile, lab.section)
    if found is not None:
        return found
    print(f"Profile {lab.profile.name} has no [{lab.section}]: computed with built-in parameters, not measured.")
    lab.mode = "replay"
    built_in = "cpu-tiny" if lab.profile.server.engine == "cpu" else "gpu-8gb"
    return getattr(profile.load_profile(built_in), lab.section)


def engine(lab, server: ServerConfig) -> blocks.Engine:
    """Usable blocks and limits of a server. ConfigError where its pool is not pinned."""
    if server.kv_cache_memory_bytes is None:
        raise ConfigError(
            "The pool of this server is not pinned, so its blocks are not known before it starts.",
            next_step="set kv_cache_memory_bytes in the profile's [server]",
        )
    per_element = predict.kv_dtype_bytes(lab.geometry, server.kv_cache_dtype, server.dtype)
    per_token = predict.kv_bytes_per_token(lab.geometry, per_element)
    found = predict.num_blocks(server.kv_cache_memory_bytes, per_token, server.block_size or 16)
    return blocks.engine_of(server, predict.usable_blocks(found))
