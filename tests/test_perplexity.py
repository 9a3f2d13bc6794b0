"""Perplexity from prompt log-probabilities: windows, failures, pairs, and formats that do not do what they say."""

import http.server
import json
import math
import threading

import pytest

from kvlab import model_files, perplexity, stats, tables
from kvlab.client import Endpoint
from kvlab.config import Cell, LoadConfig, ServerConfig, key
from kvlab.errors import ConfigError, LoadError

LOAD = LoadConfig(workload="perplexity", requests=3, input_tokens=4, output_tokens=1)
TEXT = list(range(100, 120))


class Answers(http.server.BaseHTTPRequestHandler):
    """Each token costs its id / 1000 nats; `cached` and `broken` (index of a window) are set by the test."""

    cached, broken, seen = 0, None, []

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            assert body["add_special_tokens"] is False
            return self.answer({"tokens": TEXT})
        type(self).seen.append(body)
        prompt = body["prompt"]
        listed = [None, *({str(t): {"logprob": -t / 1000}} for t in prompt[1:])]
        if len(self.seen) - 1 == self.broken:
            listed = listed[:-1]
        usage = {"prompt_tokens": len(prompt), "prompt_tokens_details": {"cached_tokens": self.cached}}
        self.answer({"choices": [{"prompt_logprobs": listed}], "usage": usage | {"completion_tokens": 1}})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    Answers.cached, Answers.broken, Answers.seen = 0, None, []
    running = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=running.serve_forever, daemon=True).start()
    yield Endpoint(f"http://127.0.0.1:{running.server_port}", "m")
    running.shutdown()
    running.server_close()


def test_every_window_is_one_request_whose_tokens_but_the_first_are_summed(server):
    result = perplexity.run_windows(server, LOAD, progress=False)
    sent = [body["prompt"] for body in Answers.seen]
    assert sent == [[100, 101, 102, 103], [106, 107, 108, 109], [112, 113, 114, 115]]
    assert {(body["max_tokens"], body["prompt_logprobs"]) for body in Answers.seen} == {(1, 0)}
    assert result.summary["window_nll_sum"] == pytest.approx([0.306, 0.324, 0.342])
    assert result.summary["window_tokens"] == [3, 3, 3]
    assert perplexity.unpack(result.summary["token_nll_packed"][1]) == pytest.approx([0.107, 0.108, 0.109], abs=0.005)
    assert result.certificate["failures"] == []
    assert stats.summarise(result.requests, result.samples, None, LOAD)["n"] == 3
    assert len(tables.from_bytes(tables.to_bytes(result.requests, "requests"), "requests")) == 3


def test_tokens_from_the_prefix_cache_make_the_run_invalid(server):  # pitfall 25
    Answers.cached = 2
    result = perplexity.run_windows(server, LOAD, progress=False)
    assert "prefix cache" in result.certificate["failures"][0]


def test_a_window_without_all_its_tokens_has_no_number(server):  # pitfall 5
    Answers.broken = 1
    result = perplexity.run_windows(server, LOAD, progress=False)
    assert result.summary["window_nll_sum"][1] is None
    assert result.requests["ok"].tolist() == [True, False, True]
    assert "1 of 3 windows failed" in result.certificate["failures"][0]


def test_the_windows_do_not_overlap_and_span_the_text():
    assert perplexity.windows(range(10), 2, 3) == [[0, 1, 2], [5, 6, 7]]
    with pytest.raises(ConfigError, match="does not hold 4 windows of 3"):
        perplexity.windows(range(11), 4, 3)


def test_a_text_is_the_held_out_one_or_a_file(tmp_path):
    (tmp_path / "wiki.txt").write_text("naïve", "utf-8")
    assert perplexity.read_text(str(tmp_path / "wiki.txt")) == "naïve"
    assert len(perplexity.read_text("heldout")) > 100_000
    with pytest.raises(ConfigError, match="cannot be read"):
        perplexity.read_text(str(tmp_path / "missing.txt"))


def test_perplexity_loads_are_strict():
    for wrong in ({"concurrency": 2}, {"output_tokens": 2}, {"workload": "unique", "text": "heldout"}):
        with pytest.raises(ConfigError, match="perplexity"):
            LoadConfig(**({"workload": "perplexity", "requests": 1, "input_tokens": 4, "output_tokens": 1} | wrong))


def test_loads_without_a_text_keep_the_key_they_had_before_there_was_one():
    cell = Cell(
        name="x", server=ServerConfig(model="tiny"), load=LoadConfig(requests=1, input_tokens=9, output_tokens=1)
    )
    assert key(cell) == "ba59b22f52c0"
    load = {"workload": "perplexity", "requests": 1, "input_tokens": 9, "output_tokens": 1}
    texts = [LoadConfig(**load, text=text) for text in (None, "heldout", "other.txt")]
    assert len({key(cell.model_copy(update={"load": load})) for load in texts}) == 3


def summary(*nll, sha="a"):
    return {"window_nll_sum": [100 * v for v in nll], "window_tokens": [100] * len(nll), "windows_sha256": sha}


def test_the_change_is_paired_so_that_the_difference_between_texts_cancels():  # pitfall 25
    base, other = summary(2.0, 3.0, 4.0), summary(2.011, 3.010, 4.009)
    found = perplexity.change(base, other)
    assert found.value == pytest.approx(math.expm1(0.01))
    assert 0.007 < found.low < found.high < 0.013
    own = perplexity.perplexity(base)
    assert own.value == pytest.approx(math.exp(3.0))
    assert own.high / own.low > 10  # unpaired, nothing could be told
    assert perplexity.change(base, None) is None


def test_single_tokens_may_move_where_the_mean_does_not():
    base, other = [[2.0, 4.0], [1.0, 3.0]], [[2.1, 3.9], [1.1, 2.9]]
    packed = [{"token_nll_packed": [perplexity.pack(nll) for nll in side]} for side in (base, other)]
    assert perplexity.token_change(*packed).value == pytest.approx(0.1)
    assert perplexity.token_change(packed[0], {"token_nll_packed": [None, None]}) is None
    assert perplexity.token_change(packed[0], None) is None


def test_other_windows_are_no_pairs():
    with pytest.raises(LoadError, match="same windows"):
        perplexity.change(summary(2.0, 3.0), summary(2.0, 3.0, sha="b"))
    with pytest.raises(LoadError, match="weights"):
        perplexity.change(summary(2.0, 3.0), summary(2.0, 3.0) | {"weights": "other"})


def test_the_fingerprint_follows_the_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"a")
    config = ServerConfig(model=str(tmp_path))
    before = model_files.fingerprint(config)
    (tmp_path / "config.json").write_text("{ }")
    assert model_files.fingerprint(config) == before
    (tmp_path / "model.safetensors").write_bytes(b"b")
    assert model_files.fingerprint(config) not in (before, None)
    assert model_files.fingerprint(config.model_copy(update={"load_format": "dummy"})) is None
    assert model_files.fingerprint(ServerConfig(model="Qwen/Qwen3-1.7B")) is None


BASE = summary(2.0, 3.0)


@pytest.mark.parametrize(
    ("runs", "state"),
    [
        ([summary(2.001, 3.001), summary(2.001, 3.001)], "ok"),
        ([summary(2.0, 3.0), summary(2.0, 3.0)], "ignored"),
        ([summary(2.01, 3.01), summary(2.03, 3.01)], "wrong"),  # not repeatable
        ([summary(2.5, 3.5), summary(2.5, 3.5)], "wrong"),  # another model
        ([summary(2.0, 3.0), None], "not measured"),
    ],
)
def test_a_format_is_judged_by_its_numbers_not_by_its_name(runs, state):  # pitfall 24
    verdict = perplexity.judge(BASE, runs)
    assert verdict.state == state
    assert (verdict.why is None) == (state == "ok")
