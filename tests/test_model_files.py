"""Which folder vLLM is started with."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvlab import geometry, model_files, tiny
from kvlab.config import ServerConfig
from kvlab.engine import write_folder_once
from kvlab.errors import ConfigError
from kvlab.model_files import resolve_model, safe_token_ids, word_tokenizer


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def resolve(model, **fields):
    return resolve_model(ServerConfig(model=str(model), **fields))


def folder(tmp_path, *files):
    made = tmp_path / "model"
    made.mkdir()
    for name in files:
        (made / name).write_text("{}")
    return made


def test_tiny_holds_config_and_tokenizer():
    path, _ = resolve("tiny")
    assert {"config.json", "tokenizer.json"} <= {file.name for file in Path(path).iterdir()}


def test_the_embedded_model_is_measured_with_its_own_weights_or_not_at_all(tmp_path, monkeypatch):
    monkeypatch.setattr(model_files, "TINY", tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="no model folder"):
        resolve("tiny")
    tiny = folder(tmp_path, "config.json", "tokenizer.json")
    monkeypatch.setattr(model_files, "TINY", tiny)
    with pytest.raises(ConfigError, match="The card of the embedded model cannot be read"):
        resolve("tiny")
    (tiny / "MODEL_CARD.md").write_text(
        f"---\nweights_sha256: {hashlib.sha256(b'w').hexdigest()}\nweights_bytes: 1\n---\n"
    )
    with pytest.raises(ConfigError, match="has no weights"):
        resolve("tiny")
    assert resolve("tiny", load_format="dummy")[1] == ()  # the configuration's own flag says it already
    (tiny / "model.safetensors").write_text("w")
    assert resolve("tiny")[1] == ()


@pytest.mark.parametrize("weights", [b"", b"wei", b"other!!"])
@pytest.mark.parametrize("card", ["", "no front matter", "---\nno pair\n---\n", "---\nweights_bytes: 7\n---\n", None])
def test_an_embedded_model_that_is_damaged_is_one_error(tmp_path, weights, card):
    right = f"---\nweights_sha256: {hashlib.sha256(b'weights').hexdigest()}\nweights_bytes: 7\n---\n"
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "MODEL_CARD.md").write_text(right if card is None else card)
    with pytest.raises(
        ConfigError, match="7 are due" if card in (None, "---\nweights_bytes: 7\n---\n") else "card"
    ) as error:
        tiny.check_weights(tmp_path)
    assert "git checkout kvlab/tiny" in str(error.value)


def test_the_embedded_model_is_the_one_of_its_card():
    tiny.check_weights()


def test_a_held_out_text_that_was_cut_off_is_one_error(tmp_path, monkeypatch):
    (tmp_path / "heldout.txt.xz").write_bytes((tiny.HERE / "heldout.txt.xz").read_bytes()[:5000])
    monkeypatch.setattr(tiny, "HERE", tmp_path)
    with pytest.raises(ConfigError, match="The held-out text .* cannot be read"):
        tiny.heldout_text()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["", '{"vocab_size": 5', "[]"])
def test_a_file_of_a_model_that_was_cut_off_is_one_error(tmp_path, name, text):
    made = folder(tmp_path, "config.json", "tokenizer.json")
    (made / "config.json").write_text('{"vocab_size": 50}')
    (made / name).write_text(text)
    with pytest.raises(ConfigError, match=f"{name} cannot be read"):
        safe_token_ids(str(made))


def test_a_geometry_becomes_a_folder_with_its_whole_vocabulary(monkeypatch, cache):
    config = {"vocab_size": 50, "architectures": ["Qwen3ForCausalLM"]}
    monkeypatch.setattr(geometry, "model_config", lambda name: config | {"asked": name})
    path, extra = resolve("geometry:Some Model/8B")
    assert extra == ("--load-format", "dummy")
    assert json.loads((Path(path) / "config.json").read_text())["asked"] == "Some Model/8B"
    assert safe_token_ids(path) == (0, 50)
    assert "messages" in json.loads((Path(path) / "tokenizer_config.json").read_text())["chat_template"]  # for Dynamo
    config["vocab_size"] = 60
    assert resolve("geometry:Some Model/8B")[0] != path  # a changed geometry is another folder


def test_every_token_of_a_generated_tokenizer_is_visible_text():
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(word_tokenizer(50)))
    assert tokenizer.get_vocab_size() == 50
    assert tokenizer.decode([3, 0, 49]) == "t3 t0 t49"
    assert tokenizer.encode("t3 t0 t49").ids == [3, 0, 49]
    stream = tokenizers.decoders.DecodeStream()
    assert [stream.step(tokenizer, i) for i in (3, 0, 49)] == ["t3", " t0", " t49"]


def test_a_missing_folder_is_said_to_be_missing():
    with pytest.raises(ConfigError, match="There is no model folder"):
        resolve("does_not_exist")
    with pytest.raises(ConfigError, match="There is no model folder"):
        resolve("./does/not/exist")


def test_a_folder_without_config_or_weights_is_refused(tmp_path):
    made = folder(tmp_path)
    with pytest.raises(ConfigError, match="no config.json"):
        resolve(made)
    (made / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no weights"):
        resolve(made)
    assert resolve(made, load_format="dummy") == (str(made), ())
    (made / "model-00001-of-00002.safetensors").write_text("")
    assert resolve(made) == (str(made), ())


def test_a_hub_name_is_passed_on():
    assert resolve("Qwen/Qwen3-0.6B") == ("Qwen/Qwen3-0.6B", ())
    assert not model_files.is_local("Qwen/Qwen3-0.6B")
    assert safe_token_ids("Qwen/Qwen3-0.6B") is None


@pytest.mark.parametrize(
    ("vocab", "special", "expected"),
    [
        ({"a": 0, "b": 1, "c": 2}, [], (0, 3)),  # rows of padding above the tokenizer are not sent
        ({f"t{i}": i for i in range(10)}, [8, 9], (0, 8)),  # specials last
        ({f"t{i}": i for i in range(10)}, [0, 1, 2], (3, 10)),  # specials first
        ({f"t{i}": i for i in range(10)}, [0, 7, 9], (1, 7)),
    ],
)
def test_special_tokens_and_padding_rows_are_not_safe_to_send(tmp_path, vocab, special, expected):
    made = folder(tmp_path)
    (made / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 12}}))
    added = [{"id": i, "content": f"t{i}"} for i in special]
    (made / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": vocab}}))
    assert safe_token_ids(str(made)) == expected


def test_two_processes_may_generate_the_same_folder_at_once(cache):
    code = (
        "from kvlab import model_files; from kvlab.config import ServerConfig;"
        "print(model_files.resolve_model(ServerConfig(model='geometry:Qwen3-0.6B'))[0])"
    )
    both = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    paths = {process.communicate()[0] for process in both}
    assert len(paths) == 1 and all(process.returncode == 0 for process in both)
    assert len(list((cache / "models").iterdir())) == 1  # no draft is left


def test_a_folder_is_written_whole_or_not_at_all(tmp_path):
    made = write_folder_once(tmp_path / "x", {"a": "1", "sub/b": "2"})
    assert (made / "sub" / "b").read_text() == "2"
    write_folder_once(made, {"a": "other"})
    assert (made / "a").read_text() == "1"
    with pytest.raises(TypeError):
        write_folder_once(tmp_path / "y", {"a": None})
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
