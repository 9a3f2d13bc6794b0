from types import SimpleNamespace

import numpy as np
import pytest

from kvlab import claims, plot, plot_empty, store

LAB = SimpleNamespace(machine="mine", section="load")
NOTHING = SimpleNamespace(run=None, reason="no run is stored for this machine")


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))


def words(axis):
    return " ".join(" ".join(text.get_text().split()) for text in axis.texts)


def test_a_panel_without_data_says_so_and_why_and_the_others_stay():  # pitfall 6
    figure, (full, empty) = plot.panels(2)
    plot.measured_points(full, [1, 2], [3, 4])
    plot.measured_points(empty, [1, 2], [None, None], label="nothing")
    plot.computed_band(empty, 1, 2, "fits")
    empty.axvline(1)
    empty.legend()
    plot.save(figure, LAB, "two", [NOTHING], alt="Two panels.")
    assert words(empty) == "not measured no run is stored for this machine"
    assert not empty.lines and not empty.patches and empty.get_legend() is None and not len(empty.get_xticks())
    assert words(full) == "" and len(full.lines) == 1 and len(full.get_xticks())


@pytest.mark.parametrize(
    "draw",
    [
        lambda axis: plot.computed_line(axis, [1, 2], [1, 2]),
        lambda axis: axis.barh([0], [1]),
        lambda axis: axis.pcolormesh(np.ones((2, 2))),
        lambda axis: axis.vlines([1], 0, 1),
        lambda axis: axis.text(0.5, 0.5, "wrong: reads as another text"),
    ],
)
def test_what_shows_something_is_left_alone(draw):
    figure, (axis,) = plot.panels(1)
    draw(axis)
    plot_empty.say(figure, "a reason")
    assert "not measured" not in words(axis)


def test_a_plain_not_measured_gets_its_reason():
    figure, (axis,) = plot.panels(1)
    plot.say_where_empty(axis)
    plot_empty.say(figure, "no GPU")
    assert words(axis) == "not measured no GPU"


def test_the_reason_comes_from_the_runs_and_else_from_the_claims():
    stated = [
        claims.claim("load", name, unit="s", reason=reason)
        for name, reason in (("a", "rare"), ("b", "often"), ("c", "often"))
    ]
    claims.write_section(store.machine_dir("mine"), "load", stated)
    assert plot_empty.why("mine", "load", [NOTHING]) == NOTHING.reason
    assert plot_empty.why("mine", "load", [SimpleNamespace(run=object())]) == "often"
    assert plot_empty.why("mine", "startup", []) is None


def test_a_keyed_legend_names_colours_once_and_styles_once():
    figure, (axis,) = plot.panels(1)
    plot.keyed_legend(figure, {"512 in": plot.HIT, "2,048 in": plot.MISS}, {"computed": {"ls": "-"}})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["512 in", "2,048 in", "computed"]
    figure, (axis,) = plot.panels(1)
    plot.keyed_legend(figure, {"512 in": plot.HIT}, {"computed": {"ls": "-"}})
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["computed"]
