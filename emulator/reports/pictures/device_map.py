"""Pictures of devices' models: two-dimensional maps of a round, and the cosine of every pair.

WeCFL (Ma 2022) figures 4, 5, 7 and 8, FeSEM's map of local models. Each function draws arrays on an Axes. Dots that
would cover each other are moved apart, and many dots are smaller than few.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from edge_client.protocol.task import I64, Array
from emulator.reports.plots import (
    MARKERS,
    MAX_NAMED_CLASSES,
    SMALL_TEXT,
    center_colour,
    cosines,
    draw_heat,
    least_distance,
    move_apart,
)

NO_GROUP = -1  # no center yet, or no true group
UNASSIGNED_COLOUR = "#9ca3af"
DOT_WIDTH, LEAST_DOT_WIDTH = 7.4, 1.5  # points
MAX_LEGEND_ROWS = 14
MARGIN = 0.1  # of the extent, at each side
SAME_PLACE = 1e-9  # of the extent: rounding
SMALL_MARKERS = "*."  # shapes that look smaller than the others
MIN_PERPLEXITY, DEFAULT_PERPLEXITY = 5, 30  # of the range that van der Maaten and Hinton (2008) recommend
MAX_ROWS = 60  # devices in a heat map; each pair is a vector square


def principal_components(points: Array) -> tuple[Array, tuple[float, float]]:
    """[n, d] -> [n, 2] and the shares of the variance that the two principal components hold; n and d at least 2.

    The numbers are scikit-learn's, whose import takes longer than the drawing of most reports.
    """
    x = points.astype(np.float64)
    if not np.ptp(x, axis=0).any():  # all in one place: no variance to divide
        return np.zeros((len(x), 2)), (0.0, 0.0)
    left, lengths, right = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    tallest = right[[0, 1], np.abs(right[:2]).argmax(axis=1)]
    plane: Array = left[:, :2] * lengths[:2] * np.sign(tallest)  # a component's sign is free; fix it
    first, second = (lengths[:2] ** 2 / (lengths @ lengths)).tolist()
    return plane, (first, second)


def perplexity(n: int) -> int | None:
    """What t-SNE of n points uses: at most a third of the other points, as its authors' code demands; None: too few."""
    fits = min(DEFAULT_PERPLEXITY, (n - 1) // 3)
    return fits if fits >= MIN_PERPLEXITY else None


def tsne(points: Array) -> Array:
    """[n, d] -> [n, 2] by t-SNE, begun from the principal components; distances between far points mean nothing.

    Raises ValueError for fewer points than MIN_PERPLEXITY needs.
    """
    from sklearn.manifold import TSNE

    chosen = perplexity(len(points))
    if chosen is None:
        raise ValueError(f"{len(points)} points are too few for t-SNE")
    x = points.astype(np.float64)
    begins = principal_components(x)[0]
    spread = begins[:, 0].std()
    init = begins / (spread if spread > 0 else 1.0) * 1e-4  # scikit-learn's scale for init="pca"
    plane: Array = TSNE(perplexity=chosen, init=init, random_state=0).fit_transform(x)
    return plane


def draw_devices(axes: Axes, plane: Array, centers: I64, groups: I64, *, title: str) -> bool:
    """[n, 2] places: colour shows the center, shape the true group; NO_GROUP is gray, or a dot.

    -> whether dots were moved apart, so that distances between near ones are not those of the plane.
    """
    nearest = least_distance(len(plane))
    places = move_apart(plane, nearest)
    width = _dot_width(axes, plane, places, nearest)
    for k, group in sorted(set(zip(centers.tolist(), groups.tolist(), strict=True))):
        here = places[(centers == k) & (groups == group)]
        look: dict[str, Any] = {"color": _colour(k), "marker": _marker(group), "edgecolor": "white", "lw": width / 10}
        wide = width * (1.5 if look["marker"] in SMALL_MARKERS else 1.0)
        axes.scatter(here[:, 0], here[:, 1], s=wide**2, alpha=0.9, **look)
    axes.set(title=title, xticks=[], yticks=[])
    axes.margins(MARGIN)
    return bool((np.abs(places - plane) > SAME_PLACE * np.ptp(plane, axis=0)).any())


def _dot_width(axes: Axes, plane: Array, places: Array, nearest: float) -> float:
    """How wide dots at `places` are, in points: as near ones are apart there, and no wider than DOT_WIDTH."""
    before, after = np.ptp(plane, axis=0), np.ptp(places, axis=0)
    grown = float(np.max(np.where(before > 0, after / np.where(before > 0, before, 1.0), 1.0)))
    inside = axes.get_window_extent()
    side = min(inside.width, inside.height) / axes.figure.dpi * 72
    return float(np.clip(0.9 * nearest / grown / (1 + 2 * MARGIN) * side, LEAST_DOT_WIDTH, DOT_WIDTH))


def name_looks(axes: Axes, centers: I64, groups: I64) -> None:
    """A legend beside the Axes: a stroke of colour per center, a shape per true group, ten of each at most.

    More than MAX_LEGEND_ROWS stand in two columns: a legend that is taller than the Axes would make them lower.
    """
    handles = [
        Line2D([], [], color=_colour(k), lw=7, label=_center_name(k))
        for k in sorted(set(centers.tolist()))[:MAX_NAMED_CLASSES]
    ]
    shape: dict[str, Any] = {"ls": "", "ms": 7, "color": "#374151"}
    known = sorted(set(groups.tolist()) - {NO_GROUP})[:MAX_NAMED_CLASSES]
    handles += [Line2D([], [], marker=_marker(g), label=f"true group {g}", **shape) for g in known]
    look: dict[str, Any] = {"ncols": 1 + (len(handles) > MAX_LEGEND_ROWS), "handlelength": 1.3, "fontsize": SMALL_TEXT}
    axes.legend(handles=handles, loc="upper left", bbox_to_anchor=(1.01, 1.0), **look)


def order_by_center(centers: I64, groups: I64) -> I64:
    """The numbers of at most MAX_ROWS devices, sorted by center, then by group; a crowd is thinned out evenly."""
    order = np.lexsort((groups, centers))
    if len(order) <= MAX_ROWS:
        return order
    return order[np.linspace(0, len(order) - 1, MAX_ROWS).round().astype(np.int64)]


def mean_within_cosine(cos: Array, centers: I64, k: int) -> float | None:
    """The mean cosine [n, n] of two different devices of center k; None where there are no two."""
    here = np.flatnonzero(centers == k)
    if len(here) < 2:  # noqa: PLR2004 - a pair
        return None
    block = cos[np.ix_(here, here)]
    return float((block.sum() - np.trace(block)) / (len(here) * (len(here) - 1)))


def draw_within(axes: Axes, points: Array, centers: I64, groups: I64, *, title: str) -> None:
    """The cosine of every pair of devices, sorted by center; beside each center the mean of its own pairs.

    Within a center devices stand by their true group, so that a center of two groups shows them. The means are those of
    all pairs, also where a crowd is thinned out.
    """
    rows, every = order_by_center(centers, groups), cosines(points)
    cos, sorted_centers = every[np.ix_(rows, rows)], centers[rows]
    draw_heat(axes, cos, low=float(cos.min()))
    edges = [0, *(np.flatnonzero(np.diff(sorted_centers)) + 1).tolist(), len(rows)]
    for edge in edges[1:-1]:
        axes.axhline(edge - 0.5, color="#D55E00", lw=1.1)
        axes.axvline(edge - 0.5, color="#D55E00", lw=1.1)
    middles = [(a + b - 1) / 2 for a, b in pairwise(edges)]
    held = [int(sorted_centers[a]) for a in edges[:-1]]
    means = [mean_within_cosine(every, centers, k) for k in held]
    told = [
        _center_name(k) + ("" if mean is None else f"\nmean {mean:.3f}") for k, mean in zip(held, means, strict=True)
    ]
    axes.set(title=title, xticks=[], yticks=middles)
    axes.set_yticklabels(told, fontsize=SMALL_TEXT)
    axes.tick_params(length=0)


def _center_name(k: int) -> str:
    return "no center" if k == NO_GROUP else f"center {k}"


def _colour(k: int) -> str:
    return UNASSIGNED_COLOUR if k == NO_GROUP else center_colour(k)


def _marker(group: int) -> str:
    return "." if group == NO_GROUP else MARKERS[group % len(MARKERS)]
