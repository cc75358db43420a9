"""Pictures of the weights of centers for devices: FedSoft's importance weights, FedEM's mixture weights.

FedSoft (Ruan 2022) figures 1 and 2. Each function draws arrays on an Axes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from edge_client.protocol.task import I64, Array
from emulator.reports.plots import MAX_NAMED_CLASSES, SMALL_TEXT, center_colour, name_rounds, nested

BAND_PERCENTILES = (10, 90)  # percentiles of devices
MAX_MARKED_ROUNDS = 30


def draw_shares(axes: Axes, rounds: Sequence[int], values: Array, *, title: str) -> None:
    """[rounds, devices, centers], NaN unknown: each center's mean, and the middle 80% of devices as a band."""
    for s in range(values.shape[2]):
        known = [t for t in range(len(rounds)) if np.isfinite(values[t, :, s]).any()]
        at = [rounds[t] for t in known]
        rows = [values[t, np.isfinite(values[t, :, s]), s] for t in known]
        low, high = ([float(np.percentile(row, share)) for row in rows] for share in BAND_PERCENTILES)
        axes.fill_between(at, low, high, color=center_colour(s), alpha=0.15, lw=0)
        marker = "o" if len(at) <= MAX_MARKED_ROUNDS else ""
        means = [float(row.mean()) for row in rows]
        width, size = nested(s, values.shape[2], 3.2, 1.4), nested(s, values.shape[2], 7, 3.5)
        axes.plot(at, means, color=center_colour(s), marker=marker, label=f"center {s}", lw=width, ms=size)
    axes.set(title=title, ylim=(-0.02, 1.02))
    name_rounds(axes, max(rounds))
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)


def draw_devices_shares(axes: Axes, values: Array, groups: I64, *, title: str) -> None:
    """[devices, centers] of one round: a point per device and center, devices sorted by true group; NaN has none."""
    order = np.argsort(groups, kind="stable")
    for s in range(values.shape[1]):
        size = nested(s, values.shape[1], 90, 12)
        axes.scatter(np.arange(len(order)), values[order, s], s=size, color=center_colour(s), lw=0, label=f"center {s}")
    edges = np.flatnonzero(np.diff(groups[order])) + 1
    for edge in edges.tolist():
        axes.axvline(edge - 0.5, color="#111827", lw=0.7)
    by = ", by true group" if len(edges) else ""
    axes.set(title=title, xlabel=f"device{by}", xticks=[], ylim=(-0.03, 1.03))
    axes.set(xlim=(-0.6, len(order) - 0.4))


def name_centers(axes: Axes) -> None:
    """A legend beside the Axes, of ten centers at most."""
    handles, labels = axes.get_legend_handles_labels()
    named = slice(MAX_NAMED_CLASSES)
    axes.legend(handles[named], labels[named], loc="upper left", bbox_to_anchor=(1.01, 1.0), fontsize=SMALL_TEXT)
