"""The picture of a result: accuracy by round, and the devices."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any

from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.colors import same_color, to_rgba
from matplotlib.figure import Figure

from coordinator.rounds.round_record import RoundRecord
from coordinator.strategies.base import Strategy
from coordinator.strategies.registry import method_name
from edge_client.protocol.task import ClientId
from emulator.reports import display_names, plots
from emulator.run.execute import SimulationResult

HALF = 0.5  # of the way from black to white
PALE, DIM = "#e5e7eb", "#4b5563"  # words and lines on a dark ground, and its grid
FACES: Any = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
INKS = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def draw_result(method: Strategy, run: SimulationResult, groups: Mapping[ClientId, int]) -> Figure:
    """Accuracy by round; beside it each device by its first update, if the run's method gives devices centers."""
    records = list(run.records)
    label = display_names.METHOD_NAMES.get(method_name(method), type(method).__name__)
    title = f"{label} on held-out samples"
    curves = {
        "accuracy, all samples": [r["accuracy"]["micro"] for r in records],
        "accuracy, mean of devices": [r["accuracy"]["macro"] for r in records],
    }
    curves = {name: values for name, values in curves.items() if any(value is not None for value in values)}
    panels: list[Callable[[Axes], None]] = [partial(plots.draw_curves, curves=curves, title=title)]
    if not curves:
        panels = [partial(_draw_metrics, records=records)]
    moment = next((m for m in run.kept.moments if len(m.who) > 1), None)
    if moment is not None and run.state.assignment:
        plane = plots.principal_plane(moment.points)
        points = {who: (float(a), float(b)) for who, (a, b) in zip(moment.who, plane, strict=True)}
        ends = run.state.assignment
        panels.append(partial(plots.draw_fleet, points=points, assignment=ends, groups=groups))
    figure = _figure(6.0 * len(panels), 3.8, *panels)
    show_in_notebooks(figure)
    return figure


def draw_comparison(found: Mapping[str, Sequence[Sequence[float | None]]], measure: str) -> Figure:
    """Accuracy, or another measure, by round of each method's runs: their mean as a line, and all of them in a band."""

    def draw(axes: Axes) -> None:
        means: dict[str, list[float | None]] = {}
        for i, (name, runs) in enumerate(found.items()):
            rounds = [[value for value in values if value is not None] for values in zip_longest(*runs)]
            means[name] = [sum(values) / len(values) if values else None for values in rounds]
            seen = [(t, min(values), max(values)) for t, values in enumerate(rounds, 1) if values]
            if len(runs) > 1:
                look: dict[str, Any] = {"color": plots.curve_colour(i), "alpha": 0.15, "lw": 0}
                axes.fill_between([t for t, _, _ in seen], [v for _, v, _ in seen], [v for _, _, v in seen], **look)
        title = f"{measure.capitalize().replace('_', ' ')} on held-out samples, mean of the seeds"
        plots.draw_curves(axes, means, title=title, shares=measure == "accuracy")

    figure = _figure(7.0, 3.8, draw)
    show_in_notebooks(figure)
    return figure


def _draw_metrics(axes: Axes, records: Sequence[RoundRecord]) -> None:
    """The metrics per round, where the targets are no classes."""
    for i, name in enumerate(dict.fromkeys(name for record in records for name in record.get("metrics", {}))):
        found = [(r["round"], r["metrics"][name]["micro"]) for r in records if name in r.get("metrics", {})]
        seen = [(t, v) for t, v in found if v is not None]
        look: dict[str, Any] = {"color": plots.center_colour(i), "lw": 2, "marker": "o", "ms": 4}
        axes.plot([t for t, _ in seen], [v for _, v in seen], label=name, **look)
        axes.legend(loc="best", fontsize=8.5)
    axes.set(title="On held-out samples")
    plots.name_rounds(axes, max(len(records), 1))
    axes.grid(axis="y", color="#e5e7eb", lw=0.8)


def _figure(width: float, height: float, *drawings: Callable[[Axes], object]) -> Figure:
    """A figure in our look; where the user's style has a dark ground, on that ground and with pale words."""
    red, green, blue, opaque = to_rgba(rcParams["figure.facecolor"])
    if not opaque or (red + green + blue) / 3 > HALF:
        return plots.make_figure(width, height, *drawings)
    style = {**plots.STYLE, **{name: rcParams[name] for name in FACES}, **dict.fromkeys(INKS, PALE)}
    figure = plots.make_figure(width, height, *drawings, style=style)
    for axes in figure.axes:
        axes.tick_params(grid_color=DIM)
        for line in axes.get_lines():
            if same_color(line.get_color(), "black"):
                line.set_color(PALE)
        if axes.get_legend():
            axes.legend(loc="best", fontsize=plots.SMALL_TEXT, labelcolor=PALE, frameon=False)
    return figure


def show_in_notebooks(figure: Figure) -> None:
    """A figure that was made without pyplot says itself how a notebook shows it."""

    def png() -> bytes:
        picture = io.BytesIO()
        figure.savefig(picture, format="png")
        return picture.getvalue()

    figure._repr_png_ = png  # type: ignore[attr-defined]  # IPython's name
