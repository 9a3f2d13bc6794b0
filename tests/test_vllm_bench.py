"""The cross-check's other side, with a stand-in for vLLM's own program; the real one is in test_live_load."""

import gzip
import json
import sys
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

    def ask(command, endpoint, folder):
        seen["command"] = command
        prompts = Path(command[command.index("--dataset-path") + 1]).read_text()
        seen["prompts"] = [json.loads(line)["prompt"] for line in prompts.splitlines()]
        (Path(folder) / "result.json").write_bytes(gzip.decompress(FILE.read_bytes()))
        return ""

    monkeypatch.setattr(vllm_bench, "_ask", ask)
    return seen


def test_token_ids_count_as_they_are_and_text_is_not_guessed():
    assert len(vllm_bench.TokenIds()([5, 6, 7], add_special_tokens=False).input_ids) == 3
    with pytest.raises(ValueError, match="no usage"):
        vllm_bench.TokenIds()("three words here")


def test_the_same_load_is_asked_of_it(started):
    result = vllm_bench.run(Endpoint("http://127.0.0.1:1/v1", "m"), LoadConfig(**LOAD), nonce=3)
    assert "--skip-tokenizer-init" not in started["command"]  # vLLM 0.26 refuses prompts then
    asked = dict(zip(started["command"][::2], started["command"][1::2], strict=False))
    assert asked["--base-url"] == "http://127.0.0.1:1" and "--ignore-eos" in started["command"]
    assert (
        json.loads(started["command"][started["command"].index("--extra-body") + 1])["max_tokens"] == 20
    )  # pitfall 15
    assert [len(prompt) for prompt in started["prompts"]] == [32] * 12  # pitfall 12: token ids, not text
    assert len({tuple(prompt[:16]) for prompt in started["prompts"]}) == 12  # pitfall 13
    assert result.window is not None and len(result.requests) == 12
    assert (result.requests["input_tokens_asked"] == 32).all()


def test_where_it_does_not_run_the_reason_is_kept(monkeypatch):
    monkeypatch.setattr(vllm_bench, "_ask", lambda *_: "ModuleNotFoundError: No module named 'datasets'")
    result = vllm_bench.run(Endpoint("http://127.0.0.1:1", "m"), LoadConfig(**LOAD), nonce=3)
    assert result.requests.empty and "No module named 'datasets'" in result.certificate["failures"][0]


STAND_IN = """
import sys
from kvlab import vllm_bench
loads = []
def main(arguments):
    loads.append(arguments)
    if arguments == ["fail"]:
        sys.exit("no such thing")
    print(len(loads), "Skipped by a library: leaked", file=sys.stderr, sep="\\n")
vllm_bench.main, vllm_bench.IDLE_S = main, float(sys.argv[1])
vllm_bench.wait()
"""


@pytest.fixture
def ask(tmp_path):
    """Asks a program that answers with the number of loads it has had; it is started once."""
    yield lambda *asked, idle_s=60.0: vllm_bench._ask(
        asked, Endpoint("http://x", "m"), str(tmp_path), [sys.executable, "-c", STAND_IN, str(idle_s)]
    )
    vllm_bench._end()


def test_one_process_sends_one_load_after_another_and_a_failure_says_its_last_line(ask):
    assert [ask("a"), ask("fail"), ask("b")] == ["1", "no such thing", "3"]


def test_one_that_has_waited_for_too_long_or_was_killed_is_started_anew(ask):
    assert ask("a", idle_s=0.01) == "1"
    assert vllm_bench._running[0].wait(10) == 0
    assert ask("a") == "1"
    vllm_bench._running[0].kill()
    assert ask("a") == "1" and ask("b") == "2"


def test_it_does_not_outlive_whoever_asked(ask):
    ask("a")
    vllm_bench._running[0].stdin.close()
    assert vllm_bench._running[0].wait(10) == 0


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
