"""Nothing of a picture is cut off or spills over, and each panel says by itself what it shows."""

import numpy as np
import pandas as pd
import pytest

from kvlab import claims, plot, plot_fleet, plot_preemption, plot_small, plot_start, store


@pytest.fixture(autouse=True)
def data(monkeypatch, tmp_path):
    monkeypatch.setenv("KVLAB_DATA", str(tmp_path / "data"))


def state(machine, section, *rows):
    made = [claims.claim(section, quantity, where, unit="x", **values) for quantity, where, values in rows]
    claims.write_section(store.machine_dir(machine), section, made)


def inside(axis):
    """Whether every bar and every word of an axis lies within its frame."""
    axis.figure.canvas.draw()
    frame, dpi = axis.get_window_extent(), axis.figure.dpi
    for line in axis.lines:
        half = line.get_markersize() / 2 * dpi / 72 if line.get_marker() == "|" else 0
        y = axis.transData.transform(np.column_stack(line.get_data()))[:, 1]
        if y.min() - half < frame.y0 or y.max() + half > frame.y1:
            return False
    boxes = [text.get_window_extent() for text in axis.texts]
    return all(frame.x0 <= box.x0 and box.x1 <= frame.x1 + 1 for box in boxes)


@pytest.mark.parametrize("log", [False, True])
def test_the_outermost_bars_and_the_words_beside_them_are_whole(log):
    _, (axis,) = plot.panels(1, width=4.9)
    for y, value in enumerate((22048, 44096, 6816, 27360, 6800, 21000, 30000, 44000)):
        plot.dumbbell(axis, y, value, value)
    plot.named_rows(axis, [f"machine {y}" for y in range(8)])
    if log:
        plot.plain_log_x(axis)
    assert inside(axis)


def test_the_small_picture_of_capacity_is_whole():
    for machine, sizes in (("h200", (22048, 44096)), ("article", (22048, 42000)), ("mine", (6816, 27360))):
        rows = [
            ("capacity_tokens", {"server": f"float{n}", "block": 16}, {"computed": size, "measured": size})
            for n, size in enumerate(sizes)
        ]
        state(machine, "kv_capacity", *rows)
    _, (axis,) = plot.panels(1, width=plot_small.SIZE[0], height=plot_small.SIZE[1])
    plot_small._capacity(axis, "h200", ["h200", "article", "mine"])
    assert inside(axis)


def graphs(machine, on):
    where = {"model": "m", "c": 1}
    rows = [("throughput_tok_s", where | {"graphs": arm}, {"measured": v}) for arm, v in (("on", on), ("off", 100.0))]
    state(machine, "cuda_graphs", *rows)


def test_a_gain_of_hundreds_of_percent_leaves_the_small_ones_visible():
    graphs("h200", 798.0)
    graphs("mine", 104.0)
    figure, axes = plot.panels(2, width=3.2)
    plot_start.draw_gains(axes[0], ["h200", "mine"])
    plot_small._graphs(axes[1], "mine", ["h200", "mine"])
    assert [text.get_text() for text in axes[0].texts] == ["+698%", "+4%"] and inside(axes[0])
    for axis in axes:
        assert axis.get_xscale() == "log" and "eager" in axis.get_xlabel()
    assert list(axes[1].lines[0].get_xdata()) == pytest.approx([7.98, 1.04])


def test_a_mean_stands_beside_its_dots_and_says_that_it_is_one():
    _, (axis,) = plot.panels(1, width=4.9)
    plot_preemption.paired_bars(axis, {"on": (29.0, [13.0, 15.0]), "off": (59.0, [40.0, 56.0])}, "ms")
    assert [(text.get_text(), text.get_position()[1]) for text in axis.texts] == [("mean 14", 14), ("mean 48", 48)]
    dots = {line.get_color() for line in axis.lines if line.get_marker() == "o"}
    assert dots == {plot.MEASURED} and inside(axis)


def test_the_border_of_the_map_runs_along_the_cells():
    """28 clients fit: the cell of 16 lies below the line, the cell of 32 above it."""
    _, (axis,) = plot.panels(1)
    table = np.array([[-1.0, 9.0], [12.0, 15.0], [30.0, 15.0]])
    plot_preemption.map_panel(axis, [512, 1500], [16, 32, 64], table, [28.7, 12.4])
    (line,) = axis.lines
    assert list(line.get_ydata()) == [1, 1, 0] and "all fit" in line.get_label()


def test_a_cap_above_its_largest_graph_says_so():
    rows = [("largest_full_graph", {"max_num_seqs": cap}, {"measured": n}) for cap, n in ((34, 32), (40, 40))]
    state("mine", "max_num_seqs", *rows)
    _, (axis,) = plot.panels(1)
    plot_preemption.cap_notes(axis, "mine", [(1.0, 0.5, 34), (1.2, 1.0, 40), (1.9, 1.0, 64)])
    (note,) = axis.texts
    assert "cap 34" in note.get_text() and "holds 32" in note.get_text()


def test_each_panel_has_its_own_legend_with_every_name_once():
    figure, axes = plot.panels(3)
    found = pd.DataFrame({"x": [2, 7], "measured": [0.1, 0.2]})
    for label in ("hit", "miss"):
        plot_fleet.median_and_tail(axes[0], found, found, label=label, color=plot.HIT)
        plot.article_points(axes[0], found["x"], found["measured"])
    for axis, label in zip(axes[1:], ("4 clients", "6 workers"), strict=True):
        plot.measured_points(axis, found["x"], found["measured"], label=label)
    plot_fleet.finish_times(axes, [2, 7])
    told = [[text.get_text() for text in axis.get_legend().get_texts()] for axis in axes]
    assert told == [["hit, p50 to p90", "article", "miss, p50 to p90"], ["4 clients"], ["6 workers"]]
    assert not figure.legends


def test_a_curve_that_falls_beyond_a_point_is_told_from_one_that_only_rises():
    assert plot.falls_beyond([0.5, 1.0, 1.1, 2.0], [2, 7, 3, 40])
    assert not plot.falls_beyond([0.5, 1.0, 1.1, 2.0], [2, 7, 8, 40]) and not plot.falls_beyond([0.5], [1])
