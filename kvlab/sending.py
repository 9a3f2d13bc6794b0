"""Sends the load of a cell, of whatever kind it is."""

from __future__ import annotations

from kvlab import model_files
from kvlab.config import Cell


def send(endpoint, cell: Cell, nonce: int):
    """Its result: requests, samples, window, certificate; another client than kvlab's only where the load says so."""
    from kvlab import load, perplexity, vllm_bench  # not needed, and slow to import, in a replay

    if cell.load.client == "vllm-bench":
        return vllm_bench.run(endpoint, cell.load, nonce)
    if cell.load.workload == "perplexity":
        return perplexity.run_windows(endpoint, cell.load, weights=model_files.fingerprint(cell.server))
    return load.run_load(endpoint, cell.load, nonce=nonce, progress=True)
