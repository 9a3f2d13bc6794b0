"""Dynamo's router and its own workers, with real vLLM."""

import live_for_tests
from live_for_tests import BLOCK, ROUTED, needs, tiny_server

from kvlab import load
from kvlab.config import Cell
from kvlab.dynamo import DynamoDeployment

pytestmark = live_for_tests.MARKS

SERVER = tiny_server(
    dtype="float32",
    max_model_len=1024,
    kv_cache_memory_bytes=200 * BLOCK * 6144,
    max_num_seqs=16,
)


@needs("dynamo")
def test_dynamo_routes_to_real_engines(tmp_path):
    there = DynamoDeployment(SERVER, 2, tmp_path)
    cell = Cell(name="route", server=SERVER, load=ROUTED, workers=2, service="router:dynamo-kv")
    try:
        there.start().use(cell)
        result = load.run_load(there.endpoint, ROUTED, nonce=7, progress=False)
        there.check_alive()
        told = there.describe()
    finally:
        there.stop()
    rows = result.requests[result.requests["phase"] == "measure"]
    assert rows["ok"].all(), rows["error"].dropna().unique()
    assert (rows["cached_tokens"] > 0).mean() > 0.8
    counted = result.samples.groupby("worker")["prefix_hits"].agg(lambda values: values.iloc[-1] - values.iloc[0])
    assert counted.sum() == result.requests["cached_tokens"].sum()
    assert told["capacity"]["metric_blocks"] and told["service"]["product"] == "dynamo"
