"""Geometry from config.json: published facts, refusals in words, errors that name the field."""

import json
from itertools import pairwise

import pytest

from kvlab import geometry, kv_structure, overview, predict
from kvlab.errors import ConfigError, FormulaDoesNotApply

DENSE = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def read(**changes):
    """The geometry of DENSE with changes; a change to null takes the field out."""
    config = {k: v for k, v in {**DENSE, **changes}.items() if v is not None}
    return geometry.from_config(config, "model")


# -- what a config.json says -----------------------------------------------------------------------------------------


def test_head_dim_is_taken_or_derived():
    assert read().head_dim == 128
    assert read().params == 8_030_261_248
    assert read(head_dim=64).head_dim == 64
    # Published Qwen3 geometry whose head_dim is not hidden / heads.
    assert geometry.load("Qwen3-0.6B").head_dim == 128


def test_missing_kv_heads_mean_multi_head_attention():
    assert read(num_key_value_heads=None).kv_heads == 32


@pytest.mark.parametrize(
    ("changes", "kv_heads"),
    [
        ({"num_key_value_heads": 71, "num_attention_heads": 71, "hidden_size": 4544, "multi_query": True}, 1),
        ({"num_key_value_heads": None, "num_kv_heads": 8, "multi_query": True, "new_decoder_architecture": True}, 8),
        ({"num_key_value_heads": None, "multi_query_group_num": 2}, 2),
    ],
)
def test_older_names_of_kv_heads(changes, kv_heads):
    assert read(**changes).kv_heads == kv_heads


def test_nested_text_config_and_its_outer_dtype():
    inner = {k: v for k, v in DENSE.items() if k != "torch_dtype"}
    nested = geometry.from_config({"text_config": inner, "vision_config": {"hidden_size": 8}, "dtype": "float16"}, "vl")
    assert (nested.layers, nested.kv_heads, nested.head_dim, nested.dtype_bytes) == (32, 8, 128, 2)
    assert nested.params is None  # the vision tower is not counted, so no number is better than a wrong one
    deep = geometry.from_config({"thinker_config": {"text_config": inner}}, "omni")
    assert deep.layers == 32


@pytest.mark.parametrize(("key", "dtype"), [("torch_dtype", "bfloat16"), ("dtype", "float16"), ("dtype", "torch.half")])
def test_dtype_under_both_names(key, dtype):
    assert read(**{"torch_dtype": None, key: dtype}).dtype_bytes == 2


def test_float32_checkpoints_run_in_16_bits():
    assert read(torch_dtype="float32").dtype_bytes == 2


def test_kv_format_of_the_checkpoint():
    assert read(quantization_config={"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}).dtype_bytes == 1
    # A weight format alone leaves the KV in 16 bits, as in Qwen3-4B-FP8.
    assert read(quantization_config={"quant_method": "fp8"}).dtype_bytes == 2


# -- where the formula is refused ------------------------------------------------------------------------------------


REFUSED = [  # pitfall 21
    ({"sliding_window": 4096}, "all layers keep only the last 4096"),
    ({"model_type": "gemma2", "sliding_window": 4096}, "one in 2"),
    ({"layer_types": ["sliding_attention"] * 24 + ["full_attention"] * 8, "sliding_window": 128}, "24 of 32 layers"),
    ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20}, "last 12"),
    ({"attention_chunk_size": 8192}, "chunked"),
    ({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, "latent"),
    ({"layer_types": ["linear_attention", "full_attention"] * 16}, "16 linear attention"),
    ({"layer_types": ["mamba"] * 28 + ["attention"] * 4}, "28 mamba"),
    ({"full_attention_interval": 4}, "one layer in 4"),
    ({"attn_layer_period": 8}, "one layer in 8"),
    ({"model_type": "falcon_h1", "mamba_d_ssm": 1024}, "Mamba"),
    ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "Mamba"),
    ({"model_type": "mamba2", "num_attention_heads": None, "num_key_value_heads": None}, "Mamba"),
    ({"num_kv_shared_layers": 15}, "last 15 layers"),
    ({"use_cla": True, "cla_share_factor": 2}, "cross-layer"),
    ({"is_encoder_decoder": True}, "encoder-decoder"),
    ({"cross_attention_layers": [3, 8]}, "cross-attention"),
    ({"num_key_value_heads": [4, 4, 8]}, "differ in KV heads"),
]


@pytest.mark.parametrize(("changes", "words"), REFUSED)
def test_refused_in_words(changes, words):
    found = read(**changes)
    assert not found.applies
    assert words in found.why_not
    with pytest.raises(FormulaDoesNotApply, match="does not apply to model"):
        predict.kv_bytes_per_token(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 131072},  # never shorter than a sequence
        {"model_type": "qwen2", "use_sliding_window": False, "sliding_window": 32768},
        {"model_type": "qwen2", "sliding_window": 32768},  # the class default of use_sliding_window is false
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 32},
        {"layer_types": ["full_attention"] * 32, "sliding_window": 4096},
        {"num_kv_shared_layers": 0},
        {"is_encoder_decoder": False},
    ],
)
def test_windows_and_sharing_that_are_off_do_not_refuse(changes):
    assert read(**changes).why_not is None
    assert predict.kv_bytes_per_token(read(**changes)) == 131_072


def test_several_reasons_are_all_named():
    gemma = geometry.load("Gemma-3n-E4B")
    assert "15 layers" in gemma.why_not
    assert "one in 5 layers keep only the last 512" in gemma.why_not


def test_mla_models_give_their_latent_bytes():
    # 61 layers x (512 + 64) x 2 bytes.
    assert geometry.load("DeepSeek-V3").mla_bytes_per_token == 70_272
    assert geometry.load("DeepSeek-V2-Lite").mla_bytes_per_token == 31_104
    assert geometry.load("Qwen3-8B").mla_bytes_per_token is None
    with pytest.raises(FormulaDoesNotApply, match="70,272 bytes a token"):
        predict.kv_bytes_per_token(geometry.load("DeepSeek-V3"))


def test_unknown_facts_of_refused_models_are_null():
    mamba = read(model_type="mamba2", num_attention_heads=None, num_key_value_heads=None)
    assert (mamba.query_heads, mamba.kv_heads, mamba.head_dim, mamba.params) == (None, None, None, None)


# -- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be a positive whole number, not 0"),
        ({"num_hidden_layers": "32"}, "num_hidden_layers must be .* not '32'"),
        ({"num_key_value_heads": True}, "num_key_value_heads must be"),
        ({"num_key_value_heads": 7}, "not a multiple of num_key_value_heads 7"),
        ({"hidden_size": 4100}, "hidden_size 4100"),
        ({"torch_dtype": "int3"}, "torch_dtype 'int3'"),
        ({"num_hidden_layers": 10**400}, r"num_hidden_layers must be .* not 10+\.\.\., which is beyond 2\^40"),
        ({"kv_lora_rank": "512", "qk_rope_head_dim": 64}, "kv_lora_rank must be null or a whole number, not '512'"),
        ({"num_kv_shared_layers": "20"}, "num_kv_shared_layers must be"),
        ({"full_attention_interval": 4.0}, "full_attention_interval must be .* not 4.0"),
        ({"cla_share_factor": "2"}, "cla_share_factor must be"),
        ({"sliding_window": "4096", "max_position_embeddings": 8192}, "sliding_window must be"),
        ({"sliding_window": -1}, "sliding_window must be .* not -1"),
        ({"layer_types": "full_attention"}, "layer_types must be a list"),
    ],
)
def test_malformed_config_names_the_field(changes, words):
    with pytest.raises(ConfigError, match=words):
        read(**changes)


def test_config_that_is_no_object():
    with pytest.raises(ConfigError, match="one JSON object"):
        geometry.from_config([1], "model")


def test_unknown_name_lists_what_is_known_and_guesses():
    with pytest.raises(ConfigError) as caught:
        geometry.load("qwen3-1.7")
    assert "did you mean Qwen3-1.7B?" in str(caught.value)
    assert "Llama-3.1-8B" in caught.value.next_step
    assert "config.json" in caught.value.next_step


def test_load_of_folder_file_and_broken_files(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    with pytest.raises(ConfigError, match="cannot read config.json"):
        geometry.load(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        geometry.load(folder)
    (folder / "config.json").write_text(json.dumps(DENSE))
    assert geometry.load(folder) == geometry.load(folder / "config.json")
    assert geometry.load(folder).name == "my-model"


# -- the built-in table ----------------------------------------------------------------------------------------------


def test_names_with_organisation_case_and_prefix():
    for name in ("Qwen/Qwen3-1.7B", "qwen3-1.7b", "geometry:Qwen3-1.7B", "Qwen3-1.7B"):
        assert geometry.load(name).name == "Qwen3-1.7B"


@pytest.mark.parametrize(
    ("name", "kv_bytes"),
    [
        ("Qwen3-0.6B", 114_688),
        ("Qwen3-1.7B", 114_688),
        ("Qwen3-4B", 147_456),
        ("Qwen3-30B-A3B", 98_304),
        ("Qwen2.5-7B", 57_344),
        ("Llama-3.1-8B", 131_072),
        ("Llama-3.1-70B", 327_680),
        ("Llama-3.2-1B", 32_768),
        ("Llama-2-13B", 819_200),
        ("Mistral-7B-v0.3", 131_072),
        ("Mixtral-8x7B-v0.1", 131_072),
        ("Phi-4", 204_800),
        ("OPT-1.3B", 196_608),
    ],
)
def test_kv_bytes_of_published_models(name, kv_bytes):
    assert predict.kv_bytes_per_token(geometry.load(name)) == kv_bytes


def test_which_published_models_are_refused():
    refused = {g.name for g in geometry.published() if not g.applies}
    assert refused == {
        *("Qwen3-Next-80B-A3B", "Mistral-7B-v0.1", "Phi-3-mini-4k", "Gemma-2-2B", "Gemma-2-9B", "Gemma-3-4B"),
        *("Gemma-3-27B", "Gemma-3n-E4B", "gpt-oss-20b", "gpt-oss-120b", "DeepSeek-V2-Lite", "DeepSeek-V3"),
        "Jamba-v0.1",
    }


def test_heads_that_published_files_leave_to_their_class():
    gemma = geometry.load("Gemma-3-4B")
    assert (gemma.query_heads, gemma.kv_heads, gemma.head_dim) == (8, 4, 256)


def test_parameter_estimates_equal_the_published_counts():
    stated = {name: entry["params"] for name, entry in geometry._table()["models"].items() if "params" in entry}
    assert len(stated) >= 17
    assert {g.name: g.params for g in geometry.published() if g.name in stated} == stated


def test_parameters_are_null_where_the_architecture_is_not_modelled():
    assert geometry.load("DeepSeek-V3").params is None
    assert predict.weight_bytes(geometry.load("DeepSeek-V3")) is None
    assert predict.weight_bytes(geometry.load("Qwen3-1.7B")) == 2 * 1_720_574_976


@pytest.mark.parametrize(
    "changes",
    [
        {"intermediate_size": float("nan")},
        {"intermediate_size": -11008},
        {"intermediate_size": 10**400},
        {"num_local_experts": "8"},
        {"vocab_size": None},
        {"model_type": ["llama"]},
    ],
)
def test_parameters_are_null_where_a_field_of_them_is_no_number(changes):
    """A config that says so much nonsense elsewhere still has its KV size, and no weights that it does not state."""
    assert kv_structure.parameters(DENSE | changes) is None


def test_every_entry_names_its_model_card():
    assert all(g.source.startswith("https://huggingface.co/") for g in geometry.published())


def test_tiny_is_the_embedded_model():
    tiny = geometry.load("tiny")
    assert (tiny.layers, tiny.kv_heads, tiny.head_dim, tiny.vocab, tiny.max_len) == (6, 2, 64, 4096, 8192)
    assert predict.kv_bytes_per_token(tiny) == 3072
    assert 6.5e6 < tiny.params < 7.5e6
    assert geometry.model_config("tiny")["num_hidden_layers"] == 6


def test_model_config_is_complete_for_dense_qwen3():
    config = geometry.model_config("geometry:Qwen3-1.7B")
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert (config["vocab_size"], config["rope_theta"], config["max_position_embeddings"]) == (151936, 1e6, 40960)
    assert (config["intermediate_size"], config["tie_word_embeddings"], config["head_dim"]) == (6144, True, 128)
    assert geometry.from_config(json.loads(json.dumps(config)), "x").params == 1_720_574_976


def test_model_config_refuses_what_it_cannot_start():
    with pytest.raises(ConfigError, match="geometry only") as caught:
        geometry.model_config("Llama-3.1-8B")
    assert "Qwen3-8B" in caught.value.next_step


def test_table_for_notebooks():
    rows = {row["name"]: row for row in geometry.table()}
    assert rows["Qwen3-1.7B"]["kv_bytes_at_context"] == 114_688 * 32768
    refused = rows["gpt-oss-20b"]
    assert refused["kv_bytes_per_token"] is None and refused["kv_bytes_at_context"] is None
    assert "12 of 24 layers" in refused["why_not"]
    assert all(set(a) == set(b) for a, b in pairwise(rows.values()))


def test_a_config_may_begin_with_the_mark_of_its_encoding(tmp_path):
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(DENSE).encode())
    assert geometry.load(tmp_path).layers == DENSE["num_hidden_layers"]


def test_a_file_without_end_is_no_config():
    with pytest.raises(ConfigError, match="holds more than 16 MiB"):
        geometry.load("/dev/zero")


@pytest.mark.parametrize("name", ["~nobody-of-that-name", "~nobody-of-that-name/model", "a" * 5000])
def test_what_can_be_no_path_is_no_model(name):
    with pytest.raises(ConfigError, match="no model named"):
        geometry.load(name)


def test_a_file_of_brackets_is_no_config(tmp_path):
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ConfigError):
        geometry.load(str(tmp_path / "config.json"))


@pytest.mark.parametrize(("pool", "element"), [(2.5, None), (2e9, float("inf")), (2e9, float("nan"))])
def test_a_pool_without_a_block_and_an_element_without_a_size_are_refused(pool, element):
    with pytest.raises(ConfigError):
        overview.prediction("Qwen3-1.7B", pool, 16, element, 512, 128, 1)
