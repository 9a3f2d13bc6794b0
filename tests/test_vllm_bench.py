"""The cross-check's other side, with a stand-in for vLLM's own program; the real one is in test_live_load."""

import gzip
import json
from pathlib import Path

import pytest

from kvlab import config, vllm_bench
from kvlab.client import Endpoint
from kvlab.config import Cell, LoadConfig, ServerConfig
from kvlab.errors import ConfigError

FILE = Path(__file__).parent / "fixtures" / "results" / "vllm-bench-0.31.0.json.gz"
LOAD = {"concurrency": 4, "requests": 12, "input_tokens": 32, "output_tokens": 20, "client": "vllm-bench"}


@pytest.fixture
def started(monkeypatch):
    """The command and the prompts with which the program was started; it leaves the file of a real run."""
    seen = {}

    def start(command, endpoint, folder):
        seen["command"] = command
        prompts = Path(command[command.index("--dataset-path") + 1]).read_text()
        seen["prompts"] = [json.loads(line)["prompt"] for line in prompts.splitlines()]
        (Path(folder) / "result.json").write_bytes(gzip.decompress(FILE.read_bytes()))
        return ""

    monkeypatch.setattr(vllm_bench, "_start", start)
    return seen


def test_token_ids_count_as_they_are_and_text_is_not_guessed():
    assert len(vllm_bench.TokenIds()([5, 6, 7], add_special_tokens=False).input_ids) == 3
    with pytest.raises(ValueError, match="no usage"):
        vllm_bench.TokenIds()("three words here")


def test_the_same_load_is_asked_of_it(started):
    result = vllm_bench.run(Endpoint("http://127.0.0.1:1/v1", "m"), LoadConfig(**LOAD), nonce=3)
    assert "--skip-tokenizer-init" not in started["command"]  # vLLM 0.26 refuses prompts then
    asked = dict(zip(started["command"][3::2], started["command"][4::2], strict=False))
    assert asked["--base-url"] == "http://127.0.0.1:1" and "--ignore-eos" in started["command"]
    assert (
        json.loads(started["command"][started["command"].index("--extra-body") + 1])["max_tokens"] == 20
    )  # pitfall 15
    assert [len(prompt) for prompt in started["prompts"]] == [32] * 12  # pitfall 12: token ids, not text
    assert len({tuple(prompt[:16]) for prompt in started["prompts"]}) == 12  # pitfall 13
    assert result.window is not None and len(result.requests) == 12
    assert (result.requests["input_tokens_asked"] == 32).all()


def test_where_it_does_not_run_the_reason_is_kept(monkeypatch):
    monkeypatch.setattr(vllm_bench, "_start", lambda *_: "ModuleNotFoundError: No module named 'datasets'")
    result = vllm_bench.run(Endpoint("http://127.0.0.1:1", "m"), LoadConfig(**LOAD), nonce=3)
    assert result.requests.empty and "No module named 'datasets'" in result.certificate["failures"][0]


def test_the_reason_is_its_last_line():
    said = vllm_bench._start(["python3", "-c", "import sys; sys.exit('no such thing')"], Endpoint("http://x", "m"), ".")
    assert said == "no such thing"


def test_it_sends_unique_prompts_in_a_closed_loop_only():
    with pytest.raises(ConfigError, match="closed loop only"):
        config.build(LoadConfig, LOAD | {"arrival": "poisson", "rate_per_s": 1.0}, "load")


def test_the_client_is_part_of_the_key_and_the_usual_one_is_not():
    server = ServerConfig(model="tiny")
    cells = [
        Cell(name="a", server=server, load=LoadConfig(**LOAD | {"client": name})) for name in ("kvlab", "vllm-bench")
    ]
    assert config.key(cells[0]) != config.key(cells[1])
    plain = Cell(name="a", server=server, load=LoadConfig(**{k: v for k, v in LOAD.items() if k != "client"}))
    assert config.key(plain) == config.key(cells[0])
