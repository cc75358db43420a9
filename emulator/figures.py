"""The pictures of one run, drawn from plain numbers. Colour says the center, marker shape says the true group.

`draw_*` paint one Axes each, so that a report shows them apart and a README side by side; `paint` makes a figure.
Opens no file and no window. Colours are those of Okabe and Ito, told apart by most eyes; words and shapes repeat them.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator, PercentFormatter

from edge_client.protocol.task import Array

COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#F0E442", "#000000")
MARKERS = "osD^vP*X"
GLOBAL_COLOUR = "#6b7280"
MAX_NAMED_ROWS = 40  # more devices than that leave no room for words
STYLE: Any = {  # matplotlib types every single key
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.labelcolor": "#374151",
    "xtick.color": "#374151",
    "ytick.color": "#374151",
    "legend.frameon": False,
    "svg.fonttype": "path",  # looks the same where the font is not installed
    "svg.hashsalt": "fedcenters",  # the same numbers give the same bytes
}

Assignment = Mapping[str, int]


def colour(center: int) -> str:
    """The colour of a center, the same in every picture."""
    return COLOURS[center % len(COLOURS)]


def draw_accuracy(
    axes: Axes, centers: Sequence[Mapping[int, float]], overall: Sequence[float], baseline: Sequence[float]
) -> None:
    """Held-out accuracy (0..1) per round: one line per center, all devices together, and one global model."""
    for k in sorted({k for row in centers for k in row}):
        seen = [(t, row[k]) for t, row in enumerate(centers, 1) if k in row]
        axes.plot(*zip(*seen, strict=True), color=colour(k), lw=1.4, marker="o", ms=3.5, label=f"center {k}")
    steps = range(1, len(overall) + 1)
    axes.plot(steps, overall, color="#111827", lw=2.4, label="own center, all devices")
    axes.plot(
        range(1, len(baseline) + 1), baseline, color=GLOBAL_COLOUR, lw=2.4, ls=(0, (4, 2)), label="one global model"
    )
    axes.set(title="Accuracy on held-out samples", xlabel="round", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)
    axes.legend(loc="best", fontsize=8.5)


def draw_fleet(
    axes: Axes, points: Mapping[str, tuple[float, float]], assignment: Assignment, groups: Assignment
) -> None:
    """Devices where their first update lies (two principal components), coloured by the center they ended with."""
    ends = {d: k for d, k in assignment.items() if d in points}
    for k, group in sorted({(k, groups.get(d, 0)) for d, k in ends.items()}):
        here = np.array([points[d] for d, c in sorted(ends.items()) if (c, groups.get(d, 0)) == (k, group)])
        look: dict[str, Any] = {
            "color": colour(k),
            "marker": MARKERS[group % len(MARKERS)],
            "label": f"group {group} → center {k}",
        }
        axes.scatter(here[:, 0], here[:, 1], s=70, edgecolor="white", lw=0.8, **look)
    axes.set(title="Where each device's first update points", xlabel="first component", ylabel="second component")
    axes.set(xticks=[], yticks=[])
    axes.margins(0.15)
    axes.legend(loc="best", fontsize=8.5)


def draw_assignment(axes: Axes, history: Sequence[Assignment], groups: Assignment) -> None:
    """One row per device, sorted by true group, one column per round; the cell's colour and number are its center."""
    devices = sorted({d for row in history for d in row}, key=lambda d: (groups.get(d, 0), d))
    few = len(devices) <= MAX_NAMED_ROWS
    for y, device in enumerate(devices):
        for t, row in enumerate(history, 1):
            if device in row:
                k = row[device]
                axes.add_patch(Rectangle((t - 0.47, y - 0.44), 0.94, 0.88, color=colour(k), lw=0))
                if few:
                    axes.text(t, y, str(k), ha="center", va="center", color="white", fontsize=7.5, fontweight="bold")
    names = [f"{d}  (group {groups[d]})" if d in groups else d for d in devices] if few else []
    axes.set(title="Center of each device, round by round", xlabel="round", yticks=range(len(names)))
    axes.set_yticklabels(names, fontsize=8)
    axes.set(xlim=(0.4, len(history) + 0.6), ylim=(len(devices) - 0.4, -0.6))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=10))
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)


def principal_plane(rows: Array) -> Array:
    """[n, d] rows -> [n, 2]: their first two principal components, from the n x n Gram matrix, so d may be large."""
    centred = rows.astype(np.float64) - rows.mean(axis=0, dtype=np.float64)
    values, vectors = np.linalg.eigh(centred @ centred.T)  # ascending
    plane = vectors[:, ::-1][:, :2] * np.sqrt(np.maximum(values[::-1][:2], 0.0))
    plane = np.pad(plane, ((0, 0), (0, 2 - plane.shape[1])))  # a single device has one component
    tallest = plane[np.abs(plane).argmax(axis=0), [0, 1]]
    flipped: Array = plane * np.where(tallest < 0, -1.0, 1.0)  # an eigenvector's sign is free; fix it
    return flipped


def paint(width: float, height: float, *drawings: Callable[[Axes], None]) -> Figure:
    """A figure of `width` x `height` inches with the drawings side by side."""
    with rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        for axes, draw in zip(figure.subplots(1, len(drawings), squeeze=False)[0], drawings, strict=True):
            draw(axes)
    return figure


def svg(figure: Figure) -> str:
    """The figure as an <svg> element for a page; the same numbers give the same text."""
    out = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(out, format="svg", bbox_inches="tight", metadata={"Date": None, "Creator": None})
    text = out.getvalue()
    element = text[text.index("<svg") :]
    return re.sub(
        r'(<svg[^>]*?) (?:width|height)="[\d.]+pt"([^>]*?) (?:width|height)="[\d.]+pt"', r"\1\2", element, count=1
    )
