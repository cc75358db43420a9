"""How cost grows, as a picture: one panel for devices, centers and parameters, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benches.results import BenchFigure, BenchResults

PANELS = {
    "growth-devices": ("devices, 100 sampled", "a round"),
    "growth-centers": ("centers", "a probe"),
    "growth-parameters": ("parameters", "an update"),
}
FEW = 100  # below it every size is named
INK, PALE = "#1f5a8a", "#b0b0b0"
INKS = {"fedavg": INK, "fesem": "#b5542c"}
STYLE: dict[Any, Any] = {
    "svg.hashsalt": "fedcenters",
    "svg.fonttype": "none",
    "font.size": 8,
    "axes.spines.top": False,
}
MILLION_PANELS = (  # of the rows of million.py: which, against what, which quantity
    ("devices", "n", "cpu_s", "devices, 1,000 sampled", "CPU s of a round"),
    ("devices", "n", "mb", "devices, 1,000 sampled", "MB above idle"),
    ("parameters", "parameters", "cpu_s", "parameters, 10⁵ devices", "CPU s of a round"),
    ("parameters", "parameters", "mb", "parameters, 10⁵ devices", "MB above idle"),
)


def drawn(results: BenchResults, path: Path) -> None:
    """Write the SVG; the same results give the same bytes."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    by_row = {f.row: f for f in results.figures if f.points}
    shown = [row for row in PANELS if row in by_row]
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, len(shown), figsize=(2.7 * len(shown), 2.3), squeeze=False)
        for ax, row in zip(axes[0], shown, strict=True):
            _panel(ax, by_row[row])
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _panel(ax: object, figure: BenchFigure) -> None:
    size, what = PANELS[figure.row]
    x, seconds = zip(*figure.points, strict=True)
    ax.loglog(x, [1e3 * s for s in seconds], "o-", color=INK, markersize=3)  # type: ignore[attr-defined]  # matplotlib's
    linear = [1e3 * seconds[-1] * value / x[-1] for value in x]
    ax.loglog(x, linear, ":", color=PALE)  # type: ignore[attr-defined]
    for axis in (ax.xaxis, ax.yaxis):  # type: ignore[attr-defined]
        axis.set_minor_formatter("")  # labels between powers of ten run into each other
    if x[-1] < FEW:
        ax.set_xticks(x, [f"{value:.0f}" for value in x])  # type: ignore[attr-defined]
    ax.set_xlabel(size)  # type: ignore[attr-defined]
    ax.set_ylabel(f"CPU ms of {what}")  # type: ignore[attr-defined]
    ax.set_title(f"exponent at the end {figure.score:.2f} (dotted: 1)", fontsize=8)  # type: ignore[attr-defined]


def draw_million(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write the SVG of million.py: seconds and memory against devices and against parameters."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    with mpl.rc_context(STYLE):
        shown = [panel for panel in MILLION_PANELS if any(row["what"] == panel[0] for row in rows)]
        figure, axes = plt.subplots(1, len(shown), figsize=(2.5 * len(shown), 2.3), squeeze=False)
        for ax, (what, size, quantity, below, beside) in zip(axes[0], shown, strict=True):
            for method, ink in INKS.items():
                mine = [row for row in rows if (row["what"], row["method"], row["data"]) == (what, method, "synthetic")]
                points = sorted((row[size], row[quantity]) for row in mine)
                if points:
                    ax.loglog(*zip(*points, strict=True), "o-", color=ink, markersize=3, label=method)
            ax.set_ylim(*((0.1, 100) if quantity == "cpu_s" else (10, 1_000)))
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_formatter("")
            ax.set_xlabel(below)
            ax.set_ylabel(beside)
        axes[0, 0].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
