import itertools
import json
import re
from types import SimpleNamespace

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from tables_for_tests import samples

from kvlab import plot, stored_figures

LAB = SimpleNamespace(machine="mine", section="load")
MISSING = [None, float("nan"), pd.NA]


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))
    return tmp_path


def curve(values=(1, 10, 3)):
    figure, (axis,) = plot.panels(1, titles=["A title"])
    plot.measured_points(axis, range(1, len(values) + 1), values, values, values)
    axis.legend()
    return figure


def ticks(axis, which):
    axis.figure.canvas.draw()
    labels = getattr(axis, f"get_{which}ticklabels")()
    return [label.get_text() for label in labels if label.get_text()]


def test_a_figure_is_stored_with_what_is_behind_it(data):
    run = SimpleNamespace(id="c1-r0-abc")
    results = [SimpleNamespace(run=run), SimpleNamespace(run=None), SimpleNamespace(run=run)]
    figure = curve()
    assert plot.save(figure, LAB, "curve", results, alt="A curve.") is figure
    folder = data / "figures" / "mine"
    assert sorted(path.name for path in folder.iterdir()) == ["curve.json", "curve.png", "curve.svg"]
    about = json.loads((folder / "curve.json").read_text())
    assert about == {"alt": "A curve.", "machine": "mine", "notebook": "load", "runs": ["c1-r0-abc"]}
    assert stored_figures.of_section("mine", "load") == [folder / "curve.json"]
    assert stored_figures.of_section("mine", "caching") == stored_figures.of_section("nobody", "load") == []
    assert not plot.plt.fignum_exists(figure.number)  # else the notebook would show it twice


def test_equal_data_gives_equal_files(data):
    folder = data / "figures" / "mine"
    pictures = []
    for _ in range(2):
        plot.save(curve(), LAB, "curve", alt="A curve.")
        pictures.append([(folder / f"curve.{kind}").read_bytes() for kind in ("svg", "png", "json")])
    assert pictures[0] == pictures[1]
    plot.save(curve((1, 10, 4)), LAB, "curve", alt="A curve.")
    assert (folder / "curve.svg").read_bytes() != pictures[0][0]
    text = pictures[0][0].decode()
    assert not re.search(r"(?:href|src)=\"http", text) and "@import" not in text and "dc:date" not in text


def test_missing_points_are_left_out_and_never_drawn_at_zero():
    _, (axis,) = plot.panels(1)
    (line,) = plot.measured_points(axis, range(1, 5), [5.0, *MISSING], [4.0, *MISSING], [6.0, *MISSING])
    assert line.get_xydata().tolist() == [[1, 5.0]]
    assert [list(interval.get_ydata()) for interval in axis.lines[:-1]] == [[4.0, 6.0]]
    (published,) = plot.article_points(axis, range(1, 5), [7.0, *MISSING])
    assert published.get_xydata().tolist() == [[1, 7.0]]


def test_an_axis_without_points_says_so_and_can_be_stored():
    figure, axes = plot.panels(4)
    plot.measured_points(axes[0], [1, 2, 3], MISSING)
    plot.article_points(axes[0], [1, 2, 3], MISSING)
    plot.plain_log_y(axes[1])
    plot.plain_log_x(axes[1])
    plot.running_over_time(axes[2], None)
    plot.dumbbell(axes[3], 0, None, 5.0)
    plot.shared_legend(figure, axes[0])
    assert axes[0].get_legend_handles_labels() == ([], [])
    for axis in axes[1:3]:
        assert [text.get_text() for text in axis.texts] == ["not measured"] and axis.get_yscale() == "linear"
    plot.save(figure, LAB, "empty", alt="Nothing.")


def test_axes_carry_plain_numbers():
    _, (axis,) = plot.panels(1)
    axis.plot([1, 100], [2, 2000])
    plot.log2_axis(axis, [1, 2, 64, 96])
    plot.plain_log_y(axis)
    assert ticks(axis, "x") == ["1", "2", "64", "96"]
    assert {"10", "100"} <= set(ticks(axis, "y")) and not any("10^" in text for text in ticks(axis, "y"))
    plot.plain_log_x(axis)
    assert {"10", "100"} <= set(ticks(axis, "x")) and not any("10^" in text for text in ticks(axis, "x"))


def test_within_a_decade_the_one_that_a_line_stands_at_is_named():
    _, (axis,) = plot.panels(1)
    axis.plot([0.92, 5.05], [0, 17])
    plot.plain_log_x(axis)
    assert {"1", "2", "5"} <= set(ticks(axis, "x"))


def test_a_dumbbell_tells_the_residual():
    _, (axis,) = plot.panels(1)
    plot.dumbbell(axis, 0, 100.0, 100.0)
    plot.dumbbell(axis, 1, 100.0, 103.0)
    assert [text.get_text() for text in axis.texts] == ["exact", "+3.0%"]
    plot.hit_and_miss(axis, 0, 60.0, 5.0)
    assert axis.texts[-1].get_text() == "12.0×"


@pytest.mark.parametrize(("computed", "measured"), [(20.0, 18.0), (18.0, 20.0)])
def test_a_residual_stands_right_of_bar_and_dot_clear_of_the_names_of_the_rows(computed, measured):
    _, (axis,) = plot.panels(1)
    plot.dumbbell(axis, 0, computed, measured)
    (text,) = axis.texts
    assert text.xy[0] == max(computed, measured) and text.get_ha() == "left"


# What the usual deficiencies of colour vision see of linear RGB, at full strength: Machado, Oliveira, Fernandes 2009.
SEEN = {
    "all": np.eye(3),
    "no red cones": [[0.1523, 1.0526, -0.2049], [0.1145, 0.7863, 0.0992], [-0.0039, -0.0481, 1.0520]],
    "no green cones": [[0.3673, 0.8606, -0.2280], [0.2801, 0.6725, 0.0474], [-0.0118, 0.0429, 0.9689]],
    "no blue cones": [[1.2555, -0.0767, -0.1788], [-0.0784, 0.9308, 0.1476], [0.0047, 0.6914, 0.3039]],
}
COLOURS = (plot.COMPUTED, plot.MEASURED, plot.ARTICLE, plot.HIT, plot.MISS, plot.LIMIT, plot.OTHER)


def seen_as(colour, matrix):
    """The place of a colour in CIELAB, as somebody with that vision sees it."""
    rgb = np.array(mpl.colors.to_rgb(colour))
    linear = np.clip(matrix @ np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ linear
    x, y, z = np.cbrt(np.maximum(xyz / (0.9505, 1, 1.089), 1e-4))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def nearest(colours, matrix):
    """The distance of the two colours that are hardest to tell."""
    pairs = itertools.combinations([seen_as(c, np.array(matrix)) for c in colours], 2)
    return min(np.linalg.norm(a - b) for a, b in pairs)


@pytest.mark.parametrize("vision", SEEN)
def test_colours_are_told_apart_with_any_vision(vision):
    assert nearest(COLOURS, SEEN[vision]) > 15  # of what a white page spans, 100
    assert nearest(("#ff0000", "#7f7f00"), SEEN["no green cones"]) < 15  # what such a test has to find


def test_the_readers_machine_is_told_from_the_others():
    _, (axis,) = plot.panels(1)
    names = ("mine", "article", "h200", "cpu-tiny", "h200-x2")
    lines = [plot.machine_points(axis, [1, 2], [1, 2], name, own="mine")[0] for name in names]
    own, article, other = lines[:3]
    assert own.get_linewidth() > other.get_linewidth() and own.get_zorder() > article.get_zorder()
    assert len({line.get_color() for line in lines}) == len({line.get_marker() for line in lines}) == len(names)
    assert article.get_markerfacecolor() == "white"


def test_ticks_from_a_thousand_on_are_written_as_in_the_text():
    figure, (axis,) = plot.panels(1)
    axis.plot([1, 2], [0, 7000])
    plot.separate_thousands(figure)
    figure.canvas.draw()
    words = [label.get_text() for label in axis.get_yticklabels()]
    assert "6,000" in words and "6000" not in words
    plot.log2_axis(axis, [512, 2048])
    assert [label.get_text() for label in axis.get_xticklabels()] == ["512", "2,048"]


def test_a_machine_looks_the_same_on_every_page(monkeypatch):
    _, (axis,) = plot.panels(1)
    first, second = (plot.machine_points(axis, [1], [1], "cpu-tiny", own=own)[0] for own in ("cpu-tiny", "h200"))
    assert (first.get_color(), first.get_marker()) == (second.get_color(), second.get_marker())
    monkeypatch.setattr(plot.store, "machines", lambda: ["article", "mine", "office"])
    assert plot.machine_style("mine")["marker"] != plot.machine_style("office")["marker"]


def test_running_and_waiting_over_time():
    rows = samples({"t_s": 5.0, "running": 1, "waiting": 0}, {"t_s": 6.0, "running": 8, "waiting": 4})
    _, (axis,) = plot.panels(1)
    plot.running_over_time(axis, SimpleNamespace(samples=lambda: rows))
    running, waiting = axis.lines
    assert [float(t) for t in running.get_xdata()] == [0, 1] and [float(n) for n in waiting.get_ydata()] == [0, 4]


def test_drawing_changes_no_backend():  # pitfall 38
    before = mpl.get_backend()
    plot.panels(1)
    assert mpl.get_backend() == before
