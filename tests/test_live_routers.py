"""Real vLLM behind real routers: prompts of exact length as tokens and as words, hits, and Dynamo's own workers."""

import pytest

from kvlab import engine, load, router_packages
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.dynamo import DynamoDeployment
from kvlab.errors import EngineMissing
from kvlab.fleet import Fleet
from kvlab.router import Router
from kvlab.service import Service

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

BLOCK = 32
SERVER = ServerConfig(
    model="tiny",
    engine="cpu",
    dtype="float32",
    max_model_len=1024,
    block_size=BLOCK,
    kv_cache_memory_bytes=200 * BLOCK * 6144,
    max_num_seqs=16,
    enforce_eager=True,
)
LOAD = LoadConfig(
    workload="shared_prefix",
    concurrency=2,
    requests=24,
    prefixes=3,
    warmup_requests=3,
    prefix_tokens=8 * BLOCK,
    input_tokens=10 * BLOCK,
    output_tokens=1,
)


def needs(product):
    missing = router_packages.version(product) is None
    return pytest.mark.skipif(missing, reason=f"not installed: kvlab router install {product}")


@pytest.fixture(scope="module", autouse=True)
def _engine():
    try:
        build, _ = engine.installed_build()
    except EngineMissing:
        pytest.skip("vLLM is not installed")
    if build != "cpu":
        pytest.skip("needs the CPU build of vLLM")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with Fleet(SERVER, workers=2, log_dir=tmp_path_factory.mktemp("logs")) as fleet:
        yield fleet


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("vllm-cache-aware", marks=needs("vllm-router")),
        pytest.param("smg-cache-aware", marks=needs("smg")),
    ],
)
def test_a_cache_aware_router_finds_every_prefix_again(kind, fleet, tmp_path):
    with Router(kind, fleet.endpoints, log_dir=tmp_path) as router:
        service = Service(fleet.endpoints, f"router:{kind}", entrance=router.endpoint)
        result = load.run_load(service, LOAD, nonce=hash(kind) % 2**40, progress=False)
        router.check()
    rows = result.requests[result.requests["phase"] == "measure"]
    assert rows["ok"].all() and (rows["prompt_tokens"] == LOAD.input_tokens).all(), rows["error"].dropna().unique()
    # A prefix stays where the warm-up put it, but for the few that a busy worker passes on.
    assert (rows["cached_tokens"] == LOAD.prefix_tokens).mean() > 0.8


@needs("dynamo")
def test_dynamo_routes_to_real_engines(tmp_path):
    there = DynamoDeployment(SERVER, 2, tmp_path)
    cell = Cell(name="route", server=SERVER, load=LOAD, workers=2, service="router:dynamo-kv")
    try:
        there.start().use(cell)
        result = load.run_load(there.endpoint, LOAD, nonce=7, progress=False)
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
