"""The boards: a slider that moves changes the picture, and the points on it are what machines measured."""

import json
import shutil
from pathlib import Path

import nbformat
import pytest
from committed_for_tests import MACHINES
from matplotlib.lines import Line2D

from kvlab import beside, claims, display, geometry, play, play_values, predict, sliders, store
from kvlab.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """The published values, and the claims of the committed machines without their runs."""
    for folder in (ROOT / "data" / name for name in MACHINES):
        if folder.name in ("article", "cpu-tiny", "h200"):
            (tmp_path / "data" / folder.name).mkdir(parents=True)
            shutil.copy(folder / "claims.csv", tmp_path / "data" / folder.name)
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))


def points(figure, label, axis=0):
    """(x, y) of everything drawn for a machine."""
    lines = [line for line in figure.axes[axis].lines if line.get_label() == label]
    return [(x, y) for line in lines for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)]


def drawn(figure):
    """Everything that the values decide: lines, bands and titles."""
    said = [axis.get_title("left") for axis in figure.axes]
    for axis in figure.axes:
        said += [line.get_xydata().tolist() for line in axis.lines]
        said += [path.vertices.tolist() for band in axis.collections for path in band.get_paths()]
    return said


@pytest.mark.parametrize("name", sliders.BOARDS)
def test_every_slider_moves_its_picture(name):
    before, values = drawn(sliders.static(name, "article")), sliders.start(name, "article")
    assert drawn(sliders.static(name, "article")) == before
    for control in sliders.BOARDS[name][1]:
        ends = [end for end in (control.low, control.high) if end != values[control.name]]
        assert any(drawn(sliders.static(name, "article", **{control.name: end})) != before for end in ends), control


@pytest.mark.parametrize("name", sliders.BOARDS)
def test_a_board_of_widgets_shows_the_static_picture_and_follows_its_sliders(name):
    made = sliders.board(name, "article")
    image, knobs = widgets_of(made)
    assert image.value[:4] == b"\x89PNG"
    before, first = image.value, next(k for k in knobs if hasattr(k, "max"))
    first.value = first.max
    assert image.value != before


def widgets_of(box):
    """The image and the sliders below a box."""
    images, knobs = [], []
    todo = [box]
    while todo:
        widget = todo.pop()
        todo += getattr(widget, "children", ())
        images += [widget] if type(widget).__name__ == "Image" else []
        knobs += [widget] if type(widget).__name__.endswith(("Slider", "Dropdown", "Textarea", "HTML")) else []
    return images[0], knobs


def test_starting_from_another_machine_sets_the_sliders_to_what_it_measured():
    _, knobs = widgets_of(made := sliders.board("stall", "article"))
    prefill = next(k for k in knobs if k.description.startswith("prefill"))
    assert prefill.value == pytest.approx(beside.value("article", "chunked_prefill", "prefill_tok_s"))
    image, before = widgets_of(made)[0], widgets_of(made)[0].value
    next(k for k in knobs if k.description == "start from").value = "cpu-tiny"
    assert prefill.value == pytest.approx(play_values.prefill_speed("cpu-tiny")) and image.value != before


def test_a_machine_that_did_not_measure_the_sliders_says_so():
    """Its pictures keep their own values, in words; "start from" offers whoever measured one of the sliders."""
    made = [claims.claim("prefix_cache", "prefill_tok_s", unit="tok/s", measured=5000.0)]
    claims.write_section(store.machine_dir("half"), "prefix_cache", made)
    claims.write_section(store.machine_dir("other"), "x", [claims.claim("x", "y", unit="s", measured=1.0)])
    title = sliders.static("knee", "half").get_suptitle()
    assert title.startswith("Not measured on half: decode step, ms;") and "prefill" not in title
    assert "prefill, tok/s" in sliders.static("knee", "other").get_suptitle().replace("\n", " ")
    assert "decode step" not in sliders.static("stall", "half", step_ms=2).get_suptitle()
    assert not sliders.static("knee", "article").get_suptitle() and not sliders.static("knee").get_suptitle()
    assert "half" in sliders.origins("knee") and "other" not in sliders.origins("knee")
    assert "half" not in sliders.origins("capacity") and sliders.origins("hit_ratio") == []
    _, knobs = widgets_of(sliders.board("knee", "article"))
    origin = next(k for k in knobs if k.description == "start from")
    assert "other" not in origin.options and not any("Not measured" in str(k.value) for k in knobs)
    origin.value = "half"
    assert any(str(k.value).startswith("Not measured on half: decode step") for k in knobs)
    assert not [k for k in widgets_of(sliders.board("hit_ratio", "article"))[1] if k.description == "start from"]


@pytest.mark.parametrize("call", [play_values.values_of, lambda name: sliders.static("knee", name), sliders.start])
def test_an_unknown_machine_names_the_known_ones(call):
    words = ("knee", "nope") if call is sliders.start else ("nope",)
    with pytest.raises(ConfigError, match="no machine 'nope' with measurements") as caught:
        call(*words)
    assert "article, cpu-tiny, h200" in str(caught.value)


def test_the_values_are_plain_numbers():
    for machine in play_values.machines():
        assert {type(value) for value in play_values.values_of(machine).values()} <= {int, float, str}


def look(handle):
    """What tells one entry of a legend from another."""
    if isinstance(handle, Line2D):
        style = handle.get_linestyle() if handle.get_linestyle() != "None" else ""
        marker = (handle.get_marker(), handle.get_fillstyle(), str(handle.get_markerfacecolor()))
        return handle.get_color(), style, marker if marker[0] != "None" else ""
    return str(handle.get_facecolor())


@pytest.mark.parametrize("name", sliders.BOARDS)
def test_no_two_entries_of_a_legend_look_alike(name):
    (legend,) = sliders.static(name, "article").legends
    looks = dict(zip([text.get_text() for text in legend.texts], map(look, legend.legend_handles), strict=True))
    assert len(set(looks.values())) == len(looks), looks


def test_points_off_the_line_say_why():
    labels = sliders.static("capacity", "article").axes[0].get_legend_handles_labels()[1]
    assert {"article", "article, fp8 KV", "h200, fp8 KV"} <= set(labels)


@pytest.mark.parametrize(
    ("low", "high", "said"), [(35.1, 38.5, "35.1 to 38.5"), (21, 21.04, "21.0"), (0.1, 0.11, "none to its end (0.1)")]
)
def test_an_interval_is_one_number_where_its_ends_read_alike(low, high, said):
    assert display.fit(low, high) == said


def test_points_are_the_claims_and_only_of_the_lengths_shown():
    found = dict(points(play.knee(), "article"))
    assert found[32] == beside.value("article", "load", "throughput_tok_s", c=32, **{"in": 512, "out": 128})
    assert not points(play.knee(input_tokens=600), "article")
    stall = dict(points(play.stall(), "article"))
    measured = beside.points("article", "chunked_prefill", "itl_max_s", "chunk")
    assert stall == pytest.approx(dict(zip(measured["x"], measured["measured"] * 1e3, strict=True)))


def test_the_capacity_star_is_the_formula():
    figure = play.capacity("Qwen3-1.7B", pool_gib=1, block_size=16)
    (x, y) = points(figure, "your values")[0]
    assert (x, y) == (1, predict.capacity_tokens(predict.num_blocks(2**30, 114_688, 16), 16))
    pool = predict.num_blocks(int(2.4 * 2**30), 114_688, 16) * 16
    title = play.capacity("Qwen3-1.7B", pool_gib=2.4).axes[0].get_title("left").replace("\n", " ")
    assert f"usable: {pool - 16:,} of {pool:,} tokens; one block is vLLM's null block" in title
    assert "35.1" in play.capacity("Qwen3-1.7B", pool_gib=2.4).axes[1].get_title("left")


def test_the_points_of_the_capacity_are_usable_tokens_as_its_line_is():
    (measured,) = [p for p in play.capacity_points() if p[0] == "h200" and p[2] == 22_048 - 16]
    assert measured[1] == pytest.approx(2528641024 / 2**30, rel=1e-3)
    text = play_values.what_if("Qwen3-1.7B", pool_gib=1).loc["usable", "value"]
    assert text == "9,344 of 9,360 tokens; one block is vLLM's null block"


def test_the_pool_of_every_board_counts_the_null_block():
    """One slider, one meaning: all blocks, as in vLLM's log."""
    assert sliders.start("hit_ratio")["pool_tokens"] == 585 * 16
    one, fewer = (sliders.static("hit_ratio", pool_tokens=n * 16).axes[0].get_title("left") for n in (585, 584))
    assert "3.95" in one and one != fewer
    assert any("all blocks" in control.label for control in sliders.BOARDS["hit_ratio"][1])


def test_without_any_machine_the_lines_stand_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "nothing"))
    for name in sliders.BOARDS:
        assert sliders.static(name).axes


def test_the_article_step_model_predicts_what_it_was_not_fitted_to():
    model = play_values.step_model("article")
    assert model is not None and model.a_s == pytest.approx(0.015, rel=0.1)
    assert play_values.step_model("nobody") is None


# -- the reader's own model ---------------------------------------------------------------------------------------

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "torch_dtype": "bfloat16",
}


def test_a_pasted_config_a_path_and_a_name_give_the_same(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    texts = (json.dumps(CONFIG), tmp_path, tmp_path / "config.json", CONFIG, "Qwen3-1.7B")
    assert {play_values.what_if(text).loc["KV bytes per token", "value"] for text in texts} == {"114,688"}


def test_tensor_parallel_and_fp8_change_the_bytes():
    assert play_values.what_if(CONFIG, kv_bytes=1).loc["KV bytes per token", "value"] == "57,344"
    assert play_values.what_if(CONFIG, tensor_parallel=2).loc["KV bytes per token and rank", "value"] == "57,344"


def test_a_model_without_the_formula_says_so_and_gives_no_number():
    table = play_values.what_if("DeepSeek-V3")
    assert list(table.index) == ["the formula does not apply"] and "latent" in table.iloc[0, 0]
    figure = play.capacity(geometry.load("DeepSeek-V3"))
    assert "does not apply" in figure.axes[0].get_title("left") and not figure.axes[0].lines


@pytest.mark.parametrize(
    ("text", "said"), [("", "No model"), ('{"a": 1', "not valid JSON"), ("[1]", "one JSON object")]
)
def test_bad_models_are_explained(text, said):
    with pytest.raises(ConfigError, match=said):
        play_values.read_model(text)


def test_the_own_model_box_says_an_error_and_recovers():
    box = sliders.own_model("")
    image, knobs = widgets_of(box)
    area = next(k for k in knobs if type(k).__name__ == "Textarea")
    texts = [k for k in knobs if type(k).__name__ == "HTML"]
    assert any("No model was given" in k.value for k in texts) and not image.value
    area.value = json.dumps(CONFIG)
    assert image.value[:4] == b"\x89PNG" and any("114,688" in k.value for k in texts)
    assert not any("No model" in k.value for k in texts)
    area.value = "Mistral-7B-v0.1"
    assert any("sliding window" in k.value for k in texts)


def test_an_unknown_board_names_the_known_ones():
    with pytest.raises(ConfigError, match="no board"):
        sliders.static("speed")


# -- the notebooks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["formulas", "live"])
def test_the_notebooks_run_where_nothing_can_be_started(name, monkeypatch):
    monkeypatch.delenv("KVLAB_DATA")
    monkeypatch.chdir(ROOT / "notebooks" / "play")
    names = {}
    for cell in nbformat.read(f"{name}.ipynb", as_version=4).cells:
        if cell.cell_type == "code":
            exec(compile(cell.source, "cell", "exec"), names)
            if "parameters" in cell.metadata.get("tags", []) and "MODE" in names:
                names["MODE"] = "replay"
    assert names.get("session") is None
    if name == "formulas":
        assert (names["compared"]["verdict"] == "moved").any()


def test_fleets_of_different_size_can_be_told_apart():
    axis = sliders.static("hit_ratio", "article").axes[0]
    looks = {line.get_label(): (line.get_markerfacecolor(), line.get_color()) for line in axis.lines}
    fleets = {
        label: look for label, look in looks.items() if "workers" in label and "," in label and "at best" not in label
    }
    assert len(fleets) >= 4 and len(set(fleets.values())) == len(fleets)
