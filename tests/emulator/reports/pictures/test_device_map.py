"""Maps of devices and heat maps show the points that they are given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PathCollection
from matplotlib.colors import to_hex
from scipy.spatial import cKDTree
from sklearn.decomposition import PCA

from edge_client.protocol.task import Array
from emulator.reports import plots
from emulator.reports.pictures import device_map

RNG = np.random.default_rng(0)


def drawn(draw: Callable[[Axes], object]) -> Axes:
    return plots.make_figure(4, 3, draw).axes[0]


def test_the_principal_components_show_a_plane_as_it_is_and_its_share_of_the_variance() -> None:
    flat = np.array([[0.0, 0.0], [4.0, 0.0], [4.0, 1.0], [0.0, 1.0]])
    turn = np.linalg.qr(RNG.standard_normal((6, 6)))[0][:2]
    plane, shares = device_map.principal_components(flat @ turn + 5.0)
    near, far = (np.linalg.norm(x[:, None] - x, axis=2) for x in (plane, flat))
    np.testing.assert_allclose(near, far, atol=1e-9)
    assert shares == pytest.approx((16 / 17, 1 / 17))


@pytest.mark.parametrize("shape", [(2, 2), (3, 40), (40, 3)])
def test_the_principal_components_and_their_signs_are_those_of_scikit_learn(shape: tuple[int, int]) -> None:
    points = np.random.default_rng(1).standard_normal(shape)
    model = PCA(n_components=2, svd_solver="full")
    plane, shares = device_map.principal_components(points)
    np.testing.assert_allclose(plane, model.fit_transform(points), atol=1e-12)
    np.testing.assert_allclose(shares, model.explained_variance_ratio_, atol=1e-12)


def test_devices_in_one_place_are_one_point_without_variance() -> None:
    plane, shares = device_map.principal_components(np.full((3, 4), 2.5))
    assert not plane.any()
    assert shares == (0.0, 0.0)


def test_t_sne_keeps_neighbours_together_and_repeats() -> None:
    points = np.concatenate([RNG.normal(10 * k, 0.1, size=(15, 5)) for k in range(2)])
    plane, truth = device_map.tsne(points), np.repeat(np.arange(2), 15)
    np.testing.assert_array_equal(plane, device_map.tsne(points))
    apart = np.linalg.norm(plane[:, None] - plane, axis=2)
    np.fill_diagonal(apart, np.inf)
    np.testing.assert_array_equal(truth[apart.argmin(axis=1)], truth)


def test_t_sne_of_devices_in_one_place_is_drawn_too() -> None:
    assert np.isfinite(device_map.tsne(np.ones((20, 4)))).all()


def test_the_perplexity_is_at_most_a_third_of_the_other_points() -> None:
    assert [device_map.perplexity(n) for n in (2, 15, 16, 31, 400)] == [None, None, 5, 10, 30]
    with pytest.raises(ValueError, match="too few"):
        device_map.tsne(np.zeros((15, 3)))


PLANE = np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])
CENTERS, GROUPS = np.array([0, 1, 0, device_map.NO_GROUP]), np.array([1, 0, 0, device_map.NO_GROUP])


def test_every_device_lies_in_its_place_in_the_colour_of_its_center() -> None:
    axes = drawn(lambda ax: device_map.draw_devices(ax, PLANE, CENTERS, GROUPS, title="t"))
    seen = {
        tuple(place): to_hex(np.asarray(cloud.get_facecolor())[0][:3].tolist())
        for cloud in axes.collections
        for place in np.asarray(cloud.get_offsets()).tolist()
    }
    expected = (plots.center_colour(0), plots.center_colour(1), plots.center_colour(0), device_map.UNASSIGNED_COLOUR)
    assert seen == {tuple(place): ink.lower() for place, ink in zip(PLANE.tolist(), expected, strict=True)}


@pytest.mark.parametrize("n", [5, 12, 100, 1000])
@pytest.mark.parametrize("wide", [0.0, 0.05, 1.0])  # of a group whose middle is about eight from the others'
def test_each_of_the_devices_is_seen(n: int, wide: float) -> None:
    groups = np.arange(n) % 4
    plane = np.array([[0.0, 0.0], [9.0, 1.0], [4.0, 8.0], [9.0, 7.0]])[groups] + wide * RNG.standard_normal((n, 2))
    axes = drawn(lambda ax: device_map.draw_devices(ax, plane, groups, np.zeros(n, np.int64), title="t"))
    axes.figure.canvas.draw()
    places = np.concatenate([axes.transData.transform(cloud.get_offsets()) for cloud in axes.collections])
    (first, *_) = axes.collections
    assert isinstance(first, PathCollection)
    width = np.sqrt(first.get_sizes()[0]) * axes.figure.dpi / 72
    nearest = np.asarray(cKDTree(places).query(places, k=2)[0])[:, 1]
    assert len(places) == n
    assert nearest.min() >= 0.9 * width
    assert width >= 2.0  # pixels


def test_the_shape_of_a_point_is_its_true_group() -> None:
    axes = drawn(lambda ax: device_map.draw_devices(ax, PLANE, CENTERS, GROUPS, title="t"))
    shapes: dict[tuple[float, ...], bytes] = {}
    for cloud in axes.collections:
        for place in np.asarray(cloud.get_offsets()).tolist():
            shapes[tuple(place)] = np.asarray(cloud.get_paths()[0].vertices).tobytes()
    assert shapes[2.0, 3.0] == shapes[4.0, 5.0]
    assert len(set(shapes.values())) == 3


def test_the_legend_names_every_center_and_every_known_group_beside_the_points() -> None:
    axes = drawn(lambda ax: device_map.name_looks(ax, CENTERS, GROUPS))
    legend = axes.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == [
        "no center", "center 0", "center 1", "true group 0", "true group 1",
    ]  # fmt: skip
    assert legend.get_bbox_to_anchor().x0 > axes.bbox.x1


@pytest.mark.parametrize("n", [3, 6, 10, 40])
def test_a_legend_of_many_leaves_the_map_its_height(n: int) -> None:
    which = np.arange(n)

    def map_and_legend(axes: Axes) -> None:
        device_map.draw_devices(axes, RNG.random((n, 2)), which, which, title="t")
        device_map.name_looks(axes, which, which)

    figure = plots.make_figure(5.5, 4.2, map_and_legend)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    assert len(legend.get_texts()) == 2 * min(n, 10)
    assert axes.get_window_extent().height > 0.85 * figure.bbox.height


def test_the_heat_map_is_sorted_by_center_and_tells_the_mean_of_each_ones_pairs() -> None:
    points = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])
    centers, groups = np.array([0, 1, 0, 1, 2]), np.array([4, 1, 4, 0, 0])
    axes = drawn(lambda ax: device_map.draw_within(ax, points, centers, groups, title="t"))
    shown: np.ndarray[Any, Any] = np.asarray(axes.collections[0].get_array())
    np.testing.assert_allclose(shown, plots.cosines(points[[0, 2, 3, 1, 4]]))
    assert [t.get_text() for t in axes.get_yticklabels()] == [
        "center 0\nmean 1.000", "center 1\nmean 0.707", "center 2",
    ]  # fmt: skip
    assert [float(y) for y in axes.get_yticks()] == [0.5, 2.5, 4.0]
    edges = sorted({float(np.asarray(line.get_ydata())[0]) for line in axes.get_lines()} - {0.0})
    assert edges == [1.5, 3.5]


def test_the_mean_of_a_crowd_is_that_of_all_its_pairs_and_not_of_those_that_are_drawn() -> None:
    points = np.tile([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [1.0, 2.0], [-1.0, 1.0]], (40, 1)) + RNG.random((200, 2))
    centers = np.repeat([0, 1], [150, 50])
    axes = drawn(lambda ax: device_map.draw_within(ax, points, centers, np.zeros(200, np.int64), title="t"))
    cos = plots.cosines(points)
    told = [f"center {k}\nmean {device_map.mean_within_cosine(cos, centers, k):.3f}" for k in (0, 1)]
    assert [t.get_text() for t in axes.get_yticklabels()] == told


def test_the_mean_within_a_center_leaves_out_a_device_and_itself() -> None:
    cos: Array = np.array([[1.0, 0.2, 0.4], [0.2, 1.0, 0.6], [0.4, 0.6, 1.0]])
    assert device_map.mean_within_cosine(cos, np.array([0, 0, 0]), 0) == pytest.approx(0.4)
    assert device_map.mean_within_cosine(cos, np.array([0, 1, 1]), 0) is None


def test_of_a_crowd_each_center_keeps_its_share_of_the_heat_map() -> None:
    centers = RNG.permutation(np.repeat([0, 1, 2], [500, 300, 200]))
    rows = device_map.order_by_center(centers, np.zeros(1_000, np.int64))
    assert len(rows) == len(set(rows.tolist())) == device_map.MAX_ROWS
    assert np.all(np.diff(centers[rows]) >= 0)
    np.testing.assert_allclose(np.bincount(centers[rows]), device_map.MAX_ROWS * np.array([0.5, 0.3, 0.2]), atol=1)
