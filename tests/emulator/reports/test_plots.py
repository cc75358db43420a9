"""What a picture shows is what the numbers say."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from matplotlib.axes import Axes
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle, StepPatch

from emulator.reports import plots
from emulator.reports.output_files import save_figure
from tests.support import finished_run
from tests.support.browser import MIN_CONTRAST
from tests.support.size_limit import files_of_at_most


def drawn(*arguments: object, draw: Callable[..., None]) -> Axes:
    return plots.make_figure(4, 3, lambda axes: draw(axes, *arguments)).axes[0]


def test_every_center_and_the_global_model_have_a_line() -> None:
    axes = drawn([{0: 0.1, 1: 0.2}, {0: 0.3, 1: 0.4}], [0.15, 0.35], [0.1, 0.1], draw=plots.draw_accuracy)
    lines = {line.get_label(): list(np.asarray(line.get_ydata())) for line in axes.get_lines()}
    assert lines == {
        "center 0": [0.1, 0.3],
        "center 1": [0.2, 0.4],
        "own center, all devices": [0.15, 0.35],
        "one global model": [0.1, 0.1],
    }


def test_a_center_without_devices_in_a_round_has_a_gap_there() -> None:
    axes = drawn([{0: 0.1, 1: 0.2}, {0: 0.3}, {0: 0.3, 1: 0.5}], [], [], draw=plots.draw_accuracy)
    line = next(line for line in axes.get_lines() if line.get_label() == "center 1")
    assert list(np.asarray(line.get_xdata())) == [1, 3]


def test_each_cell_has_the_colour_of_its_center() -> None:
    axes = drawn(finished_run.ASSIGNMENTS, finished_run.GROUPS, draw=plots.draw_assignment)
    cells = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    rows = [label.get_text().split()[0] for label in axes.get_yticklabels()]
    assert rows == ["device-00", "device-02", "device-01", "device-03"]  # by group
    for cell in cells:
        device, number = rows[round(cell.get_y() + 0.44)], round(cell.get_x() + 0.47)
        assert to_hex(cell.get_facecolor()).upper() == plots.center_colour(finished_run.ASSIGNMENTS[number - 1][device])


def test_the_cells_of_many_devices_are_one_image_with_the_same_colours() -> None:
    history = [{f"d{i:04d}": (i + t) % 3 for i in range(t, 3_000)} for t in range(2)]  # the first one leaves
    axes = drawn(history, {}, draw=plots.draw_assignment)
    assert (len(axes.patches), len(axes.texts), len(axes.images)) == (0, 0, 1)
    shown = np.asarray(axes.images[0].get_array())
    for y, t in ((0, 0), (1, 0), (1, 1), (2_999, 1)):
        assert to_hex(shown[y, t]).upper() == plots.center_colour((y + t) % 3)
    assert to_hex(shown[0, 1]) == "#ffffff"
    assert axes.get_ylim() == (2_999.6, -0.6)


def test_every_device_is_a_point_of_the_fleet_picture() -> None:
    points = {d: tuple(p) for d, p in finished_run.summary()["points"].items()}
    axes = drawn(points, finished_run.GROUPS, finished_run.GROUPS, draw=plots.draw_fleet)
    seen = np.concatenate([np.asarray(c.get_offsets()) for c in axes.collections])
    assert sorted(map(tuple, seen.tolist())) == sorted(points.values())


def test_no_two_of_32_centers_look_alike_and_their_names_cover_no_dot() -> None:
    points = {f"d{k}": (float(k), float(k % 5)) for k in range(32)}
    axes = drawn(points, {d: k for k, d in enumerate(points)}, {}, draw=plots.draw_fleet)
    looks = [(np.asarray(c.get_facecolor())[0], np.asarray(c.get_edgecolor())[0]) for c in axes.collections]
    assert len({(*face, *edge) for face, edge in looks}) == len(points)
    assert all((face != edge).any() for face, edge in looks)  # an edge that is not seen is none
    legend = axes.get_legend()
    assert legend is not None
    assert legend.get_window_extent().x0 >= axes.get_window_extent().x1


def heights(axes: Axes) -> list[list[float]]:
    """Of each class, the heights of its bars."""
    outlines = [patch.get_data() for patch in axes.patches if isinstance(patch, StepPatch)]
    return [(np.asarray(tops) - np.asarray(feet)).tolist() for tops, _, feet in outlines]


def test_the_bars_of_a_device_are_its_samples_of_each_class_in_the_order_of_its_group() -> None:
    labels, groups = {"a": [3, 0, 2], "b": [1, 1], "c": [0, 4, 4]}, {"a": 1, "b": 0, "c": 1}
    axes = drawn(labels, groups, draw=plots.draw_labels)
    assert heights(axes) == [[1, 3, 0], [1, 0, 4], [0, 2, 4]]  # b first, then a and c
    assert [line.get_xdata()[0] for line in axes.get_lines()] == [0.5]  # type: ignore[index]


def test_the_legend_of_the_bars_has_the_users_names_of_the_classes() -> None:
    """A column of texts became classes 0, 1, ... of which the report did not say which is which."""
    names = ["rest", "_run", "$x^"]
    axes = drawn({"a": [3, 0, 2, 1]}, {"a": 0}, draw=partial(plots.draw_labels, names=names))
    legend = axes.get_legend()
    assert legend is not None
    told = ["class 0: rest", "class 1: _run", r"class 2: \$x^", "class 3"]
    assert [text.get_text() for text in legend.get_texts()] == told
    axes.figure.canvas.draw()


def test_bars_of_targets_name_no_class() -> None:
    axes = drawn({"a": [3], "b": [5]}, {"a": 0, "b": 1}, draw=plots.draw_labels)
    assert axes.get_legend() is None
    assert heights(axes) == [[3, 5]]


def test_the_words_of_a_language_are_few_bars_that_hold_all_samples() -> None:
    """A bar for each of 50,000 words took minutes."""
    counts = np.arange(3_001) % 7
    found = np.array(heights(drawn({"a": counts.tolist(), "b": [2]}, {"a": 0, "b": 0}, draw=plots.draw_labels)))
    assert found.shape == (plots.MAX_BARS, 2)
    assert found.sum(axis=0).tolist() == [counts.sum(), 2]


def test_ten_groups_have_ten_shapes() -> None:
    assert len(set(plots.MARKERS)) == plots.MAX_NAMED_CLASSES


def curves(**values: list[float | None]) -> Axes:
    return drawn(values, draw=lambda ax, c: plots.draw_curves(ax, c, title="t"))


def test_a_curve_passes_over_a_round_without_a_value_and_marks_the_others() -> None:
    line, whole = curves(accuracy=[0.1, None, 0.3], f1=[0.2, 0.2, 0.4]).get_lines()
    assert np.asarray(line.get_xdata()).tolist() == [1, 3]
    assert np.asarray(line.get_ydata()).tolist() == [0.1, 0.3]
    assert (line.get_marker(), whole.get_marker()) == ("o", "")


@pytest.mark.parametrize(("highest", "top"), [(0.2, 0.25), (0.96, 1.02), (0.0, 1.02), (None, 1.02)])
def test_low_shares_fill_the_picture_from_zero_on(highest: float | None, top: float) -> None:
    """Accuracies of 10 to 20 % lay in the lowest fifth of the picture, one on another."""
    assert curves(a=[highest, None]).get_ylim() == pytest.approx((0, top))


def test_five_curves_have_no_two_oranges_and_none_hides_another() -> None:
    same: list[float | None] = [0.1, 0.2]
    lines = curves(**dict.fromkeys("abcde", same)).get_lines()
    assert [line.get_linestyle() for line in lines] == ["-", "--", "-.", ":", "--"]
    assert {str(line.get_color()) for line in lines} == {plots.COLOURS[k] for k in (0, 1, 2, 3, 7)}


def test_the_curve_of_one_round_is_a_point_over_a_whole_number() -> None:
    axes = curves(accuracy=[0.7])
    (line,) = axes.get_lines()
    assert (np.asarray(line.get_xdata()).tolist(), line.get_marker()) == ([1], "o")
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [1.0]


def test_the_heat_map_shows_the_lower_triangle_of_cosines() -> None:
    vectors = np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0], [0.0, 0.0]])
    expected = np.array([[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])
    np.testing.assert_allclose(plots.cosines(vectors), expected)
    axes = drawn(vectors, draw=lambda ax, v: plots.draw_cosines(ax, v, title="t"))
    shown: np.ndarray[Any, Any] = np.ma.filled(np.ma.asarray(axes.collections[0].get_array()), np.nan)
    np.testing.assert_array_equal(np.isnan(shown), np.triu(np.ones((4, 4), bool), 1))


ROWS = hnp.arrays(np.float64, st.tuples(st.integers(1, 8), st.integers(1, 6)), elements=st.floats(-100, 100))


@given(ROWS)
def test_the_plane_never_holds_devices_further_apart_than_they_are(rows: np.ndarray[Any, Any]) -> None:
    plane = plots.principal_plane(rows)
    assert plane.shape == (len(rows), 2)
    near = np.linalg.norm(plane[:, None] - plane, axis=2)
    far = np.linalg.norm(rows[:, None] - rows, axis=2)
    assert (
        near <= far + 1e-5 * (1 + np.abs(rows).max())
    ).all()  # an orthogonal projection; eigh of the squared numbers


def test_two_dimensions_are_shown_as_they_are() -> None:
    rows = np.array([[0.0, 0.0], [3.0, 0.0], [3.0, 1.0]])
    plane = plots.principal_plane(rows)
    assert np.linalg.norm(plane[0] - plane[2]) == pytest.approx(np.sqrt(10))


def test_the_svg_scales_and_names_no_date() -> None:
    text = plots.to_svg(Figure(figsize=(2, 1)))
    head = text[: text.index(">")]
    assert "viewBox" in head
    assert "width=" not in head
    assert "dc:date" not in text


def test_the_spread_has_a_dot_per_device_at_its_accuracy_and_none_covers_another() -> None:
    told = {"first": [0.5, 0.5, 0.5, 0.9], "second": [0.1]}
    axes = drawn(told, draw=lambda axes, values: plots.draw_spread(axes, values, title="t"))
    dots = [np.asarray(c.get_offsets()) for c in axes.collections]
    assert [sorted(row[:, 0].tolist()) for row in dots] == [sorted(values) for values in told.values()]
    assert len({tuple(dot) for dot in dots[0].tolist()}) == len(told["first"])
    medians = [float(np.asarray(line.get_xdata())[0]) for line in axes.get_lines()]
    assert medians == [0.5, 0.1]


def test_in_the_spread_near_dots_stand_above_each_other_and_no_dot_hides_the_median() -> None:
    values = [0.509, 0.511, 0.5, 0.52, 0.9, 0.905, 0.91]
    axes = drawn({"a": values}, draw=lambda axes, told: plots.draw_spread(axes, told, title="t"))
    (dots,) = (np.asarray(c.get_offsets()) for c in axes.collections)
    for i, (x, y) in enumerate(dots):
        assert all(abs(x - u) >= plots.DOT_WIDTH for u, v in dots[i + 1 :] if v == y)
    (line,), (drawn_dots,) = axes.get_lines(), axes.collections
    reach = np.asarray(line.get_ydata(), np.float64)
    assert line.get_zorder() < drawn_dots.get_zorder()
    assert reach.min() < dots[:, 1].min() - 0.1
    assert reach.max() > dots[:, 1].max() + 0.1


@given(
    hnp.arrays(
        np.float64, st.tuples(st.integers(0, 30), st.just(2)), elements=st.integers(-4, 4).map(lambda n: n / 100)
    )
)
def test_dots_of_a_fleet_do_not_cover_each_other_and_far_ones_stay(near: np.ndarray) -> None:
    far = np.array([[9.0, 9.0], [-9.0, -9.0]])  # so that all others lie within a hundredth of the picture
    placed = plots.move_apart(np.concatenate([far, near])) / 18
    distances = np.linalg.norm(placed[:, None] - placed[None], axis=2) + np.eye(len(placed))
    assert distances.min() > 0.8 * plots.NEAREST_DOTS
    assert placed[:2] * 18 == pytest.approx(far, abs=1e-9)


def test_marks_that_lie_on_one_another_are_drawn_smaller_and_smaller() -> None:
    same = [0.5, 0.6]
    curves = drawn(dict.fromkeys("abc", same), draw=lambda axes, told: plots.draw_curves(axes, told, title="t"))
    centers = drawn([{0: 0.5, 1: 0.5, 2: 0.5}] * 2, same, [], draw=plots.draw_accuracy)
    for axes, first in ((curves, 0), (centers, 2)):  # before the centers stand all devices and the global model
        widths = [line.get_linewidth() for line in axes.get_lines()[first:]]
        assert widths == sorted(set(widths), reverse=True)
    assert centers.get_lines()[0].get_linewidth() > centers.get_lines()[2].get_linewidth()


def test_a_figure_in_a_page_is_vectors_and_text_with_the_pages_colours() -> None:
    vectors = np.eye(3, dtype=np.float32)
    svg = plots.to_svg(
        plots.make_figure(4, 3, lambda axes: plots.draw_cosines(axes, vectors, title="Cosine of centers"))
    )
    assert "<image" not in svg
    assert re.search(r"<text[^>]*>Cosine of centers</text>", svg)
    curve = plots.to_svg(plots.make_figure(4, 3, lambda axes: plots.draw_curves(axes, {"a": [0.5, 0.6]}, title="t")))
    assert "var(--c0)" in curve
    assert "var(--card)" in curve
    assert plots.COLOURS[0].lower() not in curve


def test_text_on_a_center_has_contrast() -> None:
    for k, colour in enumerate(plots.COLOURS):
        light, dark = sorted((luminance(colour), luminance(plots.ink_on(k))), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= MIN_CONTRAST


def luminance(colour: str) -> float:
    """The relative luminance of WCAG 2.2."""
    r, g, b = (v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in to_rgb(colour))
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_a_picture_keeps_its_rights_and_one_that_does_not_fit_on_the_disk_leaves_it(tmp_path: Path) -> None:
    link, place = tmp_path / "link.svg", tmp_path / "x.svg"
    link.symlink_to(place)
    for rights in (0o644, 0o640):
        save_figure(Figure((1, 1)), link)
        before = place.read_bytes()
        with files_of_at_most(9), pytest.raises(OSError, match="File too large"):
            save_figure(Figure((1, 1)), link)
        assert (link.is_symlink(), place.read_bytes() == before) == (True, True)
        place.chmod(rights)
    save_figure(Figure((2, 1)), link)
    assert place.stat().st_mode & 0o777 == rights
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.svg", "x.svg"]
