from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import same_color

from edge_client.protocol.task import Array
from emulator.reports import plots
from emulator.reports.pictures import share_plots

VALUES: Array = np.array(
    [
        [[0.2, 0.8], [0.4, 0.6], [np.nan, np.nan]],
        [[np.nan, np.nan]] * 3,
        [[0.0, 1.0], [0.5, 0.5], [1.0, 0.0]],
    ]
)


def over_rounds() -> Axes:
    return plots.make_figure(4, 3, lambda ax: share_plots.draw_shares(ax, (1, 3, 5), VALUES, title="t")).axes[0]


def test_each_center_has_the_line_of_its_mean_over_the_devices_that_are_known() -> None:
    lines = {str(line.get_label()): line for line in over_rounds().get_lines()}
    assert sorted(lines) == ["center 0", "center 1"]
    for k, means in ((0, [0.3, 0.5]), (1, [0.7, 0.5])):
        line = lines[f"center {k}"]
        assert np.asarray(line.get_xdata()).tolist() == [1, 5]  # nobody is known in round 3
        np.testing.assert_allclose(np.asarray(line.get_ydata(), np.float64), means)
        assert same_color(line.get_color(), plots.center_colour(k))


def test_the_band_holds_the_middle_four_fifths_of_the_devices() -> None:
    band = over_rounds().collections[0].get_paths()[0].vertices
    at_last = [y for x, y in np.asarray(band).tolist() if x == 5]
    np.testing.assert_allclose([min(at_last), max(at_last)], [0.1, 0.9])  # of 0, 0.5, 1


def test_a_device_has_one_point_per_center_and_stands_with_its_group() -> None:
    values = np.array([[0.1, 0.9], [0.7, 0.3], [0.2, 0.8], [np.nan, np.nan]])
    groups = np.array([1, 0, 1, 0])
    axes = plots.make_figure(4, 3, lambda ax: share_plots.draw_devices_shares(ax, values, groups, title="t")).axes[0]
    for k, expected in ((0, {(0.0, 0.7), (2.0, 0.1), (3.0, 0.2)}), (1, {(0.0, 0.3), (2.0, 0.9), (3.0, 0.8)})):
        places: Array = np.ma.filled(np.ma.asarray(axes.collections[k].get_offsets()), np.nan)
        assert {(x, y) for x, y in places.tolist() if y == y} == expected  # noqa: PLR0124 - NaN is not drawn
        assert same_color(np.asarray(axes.collections[k].get_facecolor())[0], plots.center_colour(k))
    assert [float(np.asarray(line.get_xdata())[0]) for line in axes.get_lines()] == [1.5]
    assert axes.get_xlabel() == "device, by true group"


def test_the_legend_stands_beside_the_lines() -> None:
    def paint(axes: Axes) -> None:
        share_plots.draw_shares(axes, (1, 3, 5), VALUES, title="t")
        share_plots.name_centers(axes)

    axes = plots.make_figure(4, 3, paint).axes[0]
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["center 0", "center 1"]
    assert legend.get_bbox_to_anchor().x0 > axes.bbox.x1
