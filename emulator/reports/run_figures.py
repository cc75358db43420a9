"""Write the pictures of one simulated run as files, from the folder that `simulate` wrote.

plots.py and pictures/ draw; pictures/records.py is the file of the data that a run keeps for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes

from edge_client.errors import ConfigError
from edge_client.printable import printable_line
from edge_client.protocol.task import I64, Array, ClientId
from emulator.config import FLEET_FILE
from emulator.reports import display_names, plots
from emulator.reports.demo_page import no_run, read_events, round_events
from emulator.reports.output_files import save_figure
from emulator.reports.pictures import device_map, image_grid, records, share_plots

DPI = 110
MAX_PANELS = 4  # true groups with a panel of their own
NOT_KEPT_MESSAGE = f"the run keeps no {records.PICTURES_FILE}: simulate it again"
DrawPanel = Callable[[Axes], None]


@dataclass(frozen=True, kw_only=True)
class PanelRow:
    """Panels side by side, in inches."""

    width: float
    height: float
    panels: Sequence[DrawPanel]


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """What a folder says: its rounds, each device's true group and labels, the centers [K, d], and what was kept.

    `classes` are the names of the classes, where the data have some.
    """

    method: str
    rounds: Sequence[Mapping[str, Any]]
    fleet: Mapping[ClientId, Mapping[str, Any]]
    centers: Array
    kept: records.PictureData
    has_kept: bool
    classes: Sequence[str] = ()

    def group(self, who: Sequence[ClientId]) -> I64:
        """True groups; NO_GROUP where there is none."""
        held = [self.fleet.get(c, {}).get("group") for c in who]
        return np.array([device_map.NO_GROUP if group is None else group for group in held], np.int64)

    def center(self, who: Sequence[ClientId], number: int) -> I64:
        of: Mapping[ClientId, int] = next((e["assignment"] for e in self.rounds if e["round"] == number), {})
        return np.array([of.get(c, device_map.NO_GROUP) for c in who], np.int64)


def draw_run(
    run: Path, out: Path, *, say: Callable[[str], None] = lambda _: None, busy: Callable[[str], None] = lambda _: None
) -> list[Path]:
    """Write every picture that the run has data for, as .png. -> the files.

    `say` gets a line per missing picture, `busy` is told which one is drawn.
    """
    found = read_run_folder(run)
    out.mkdir(parents=True, exist_ok=True)
    written = []
    for name, picture in run_pictures(found).items():
        if isinstance(picture, str):
            say(f"{name}.png is left out: {picture}")
            continue
        busy(f"drawing {name}.png")
        written.append(out / f"{name}.png")
        figure = plots.make_figure(picture.width, picture.height, *picture.panels)
        save_figure(figure, written[-1], dpi=DPI, bbox_inches="tight")
    return written


def run_pictures(run: RunFolder) -> dict[str, PanelRow | str]:
    """Every picture by name, or why there is none."""
    return {
        **_shares_pictures(run),
        "cosines": _centers_cosines(run),
        "devices-pca": _planes(run, "principal components", _pca, least=2),
        "devices-tsne": _planes(run, "t-SNE", _tsne, least=3 * device_map.MIN_PERPLEXITY + 1),
        "cosines-within": _within(run),
        "weights": _weights(run),
        "weights-devices": _weights_of_devices(run),
        "images": _images(run),
    }


def _shares_pictures(run: RunFolder) -> dict[str, PanelRow | str]:
    groups = {who: held["group"] for who, held in run.fleet.items()}
    known = {who: group for who, group in groups.items() if group is not None}
    curves = {
        **{f"accuracy, {kind}": [event["accuracy"][kind] for event in run.rounds] for kind in ("micro", "macro")},
        **{
            f"F1 of devices, {kind}": [event["f1_of_devices"][kind] for event in run.rounds]
            for kind in ("weighted", "unweighted")
        },
        "F1, pooled": [event["f1_pooled"] for event in run.rounds],
    }
    curves = {name: values for name, values in curves.items() if any(value is not None for value in values)}
    history = [event["assignment"] for event in run.rounds]
    title = f"{display_names.method_label(run.method)} on held-out samples"
    tall = max(4.0, 0.17 * min(len(run.fleet), 120))
    return {
        "labels": PanelRow(width=11, height=3.8, panels=[partial(_draw_labels, run)]),
        "curves": PanelRow(width=7, height=4, panels=[lambda axes: plots.draw_curves(axes, curves, title=title)])
        if curves
        else "no round has an accuracy; targets that are no classes have none",
        "assignment": PanelRow(width=7, height=tall, panels=[lambda axes: plots.draw_assignment(axes, history, known)])
        if any(history)
        else f"{display_names.method_label(run.method)} gives no device a center",
    }


def _draw_labels(run: RunFolder, axes: Axes) -> None:
    labels, groups = ({who: held[key] for who, held in run.fleet.items()} for key in ("labels", "group"))
    plots.draw_labels(axes, labels, groups, run.classes)
    if any(sum(held["labels"]) != held.get("samples", sum(held["labels"])) for held in run.fleet.values()):
        axes.set(title="Training labels of each device", ylabel="labels")  # a sample has several, as of tokens


def _centers_cosines(run: RunFolder) -> PanelRow | str:
    if len(run.centers) < 2:  # noqa: PLR2004 - a pair
        return "the run has one center"
    paint = partial(plots.draw_cosines, vectors=run.centers, title="Cosine of the centers' last layers")
    return PanelRow(width=5.6, height=4.8, panels=[paint])


def _planes(run: RunFolder, how: str, place: Callable[[Array], tuple[Array, str]], *, least: int) -> PanelRow | str:
    moments = [moment for moment in run.kept.moments if len(moment.who) >= least and moment.points.shape[1] > 1]
    if not moments:
        most = max((len(moment.who) for moment in run.kept.moments), default=0)
        return f"it needs the models of {least} devices, and {_models(run, most)}"
    centers = [run.center(moment.who, moment.round) for moment in moments]
    groups = [run.group(moment.who) for moment in moments]

    def panel(i: int, axes: Axes) -> None:
        plane, note = place(moments[i].points)
        moved = device_map.draw_devices(axes, plane, centers[i], groups[i], title=f"Round {moments[i].round}")
        told = f"{how} of models ({run.kept.representation}){note}"
        axes.set(xlabel=told + ("\nnear dots are moved apart" if moved else ""))
        if i == len(moments) - 1:
            device_map.name_looks(axes, np.concatenate(centers), np.concatenate(groups))

    panels = [partial(panel, i) for i in range(len(moments))]
    return PanelRow(width=4.2 * len(moments) + 1.3, height=4.2, panels=panels)


def _pca(points: Array) -> tuple[Array, str]:
    plane, (first, second) = device_map.principal_components(points)
    return plane, f"\n{first:.0%} and {second:.0%} of the variance"


def _tsne(points: Array) -> tuple[Array, str]:
    return device_map.tsne(points), f"\nperplexity {device_map.perplexity(len(points))}"


def _within(run: RunFolder) -> PanelRow | str:
    moments = [moment for moment in run.kept.moments if len(moment.who) > 1]
    if not moments:
        return f"it needs the models of two devices, and {_models(run, 0)}"
    last = moments[-1]
    paint = partial(
        device_map.draw_within,
        points=last.points,
        centers=run.center(last.who, last.round),
        groups=run.group(last.who),
        title=f"Cosine of devices' models ({run.kept.representation}), round {last.round}",
    )
    return PanelRow(width=6.4, height=5.2, panels=[paint])


def _weights(run: RunFolder) -> PanelRow | str:
    told = run.kept.shares
    if told is None:
        return _no_shares(run)
    group = run.group(told.who)
    known = sorted(set(group.tolist()) - {device_map.NO_GROUP})
    several = 1 < len(known) <= MAX_PANELS
    panels: list[tuple[str, Array]] = [(f"true group {g}", told.values[:, group == g]) for g in known if several]
    panels = panels or [("all devices", told.values)]

    def panel(i: int, axes: Axes) -> None:
        title, values = panels[i]
        share_plots.draw_shares(axes, told.rounds, values, title=title.capitalize())
        if i == 0:
            axes.set(ylabel=f"{told.name}\nmean, and 80% of devices")
        if i == len(panels) - 1:
            share_plots.name_centers(axes)

    paints = [partial(panel, i) for i in range(len(panels))]
    return PanelRow(width=3.4 * len(panels) + 2, height=3.8, panels=paints)


def _weights_of_devices(run: RunFolder) -> PanelRow | str:
    told = run.kept.shares
    if told is None:
        return _no_shares(run)

    def paint(axes: Axes) -> None:
        title = f"What each center counts for each device, round {told.rounds[-1]}"
        share_plots.draw_devices_shares(axes, told.values[-1], run.group(told.who), title=title)
        axes.set(ylabel=told.name)
        share_plots.name_centers(axes)

    return PanelRow(width=9, height=3.8, panels=[paint])


def _images(run: RunFolder) -> PanelRow | str:
    held = run.kept.images
    if held is None:
        return "the devices hold no square images, or none has a center" if run.has_kept else NOT_KEPT_MESSAGE
    rows, columns = len(set(held.center.tolist())), int(np.bincount(held.center).max())
    return PanelRow(
        width=max(6.0, 0.75 * columns + 1.4),  # the title has room
        height=max(2.0, 0.95 * rows + 0.6),
        panels=[lambda axes: image_grid.draw_images(axes, held)],
    )


def _models(run: RunFolder, most: int) -> str:
    if not run.has_kept:
        return NOT_KEPT_MESSAGE
    return f"the run kept those of {most}" if most else "no device sent one in the rounds that were kept"


def _no_shares(run: RunFolder) -> str:
    return (
        f"{display_names.method_label(run.method)} gives devices no shares of centers"
        if run.has_kept
        else NOT_KEPT_MESSAGE
    )


def read_run_folder(run: Path) -> RunFolder:
    """What a simulated run's folder says. Raises ConfigError where it is none."""
    try:
        events = read_events(run / "metrics.jsonl")
        told = json.loads((run / FLEET_FILE).read_text(encoding="utf-8"))
        method = str(events[0]["method"])
        return RunFolder(
            method=method,
            rounds=round_events(events, method),
            fleet=told["devices"],
            centers=_centers(run, told["classifier"]),
            kept=records.read_picture_data(run / records.PICTURES_FILE),
            has_kept=(run / records.PICTURES_FILE).is_file(),
            classes=[printable_line(str(name)) for name in told.get("classes", ())],
        )
    except (OSError, ValueError, IndexError, KeyError) as wrong:
        raise ConfigError(
            no_run(run, wrong, "simulated run"),
            hint="pass a folder that `fedcenters-emulator simulate` wrote",
        ) from wrong


def _centers(run: Path, classifier: list[str]) -> Array:
    """[K, d]: the last layer of every center, which tells label skew best; all parameters where none is named."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    rows = []
    for path in sorted(run.glob("centers/*/center-*.safetensors"), key=lambda p: int(p.stem.rpartition("-")[2])):
        try:
            tensors = load(path.read_bytes())
        except SafetensorError as wrong:
            raise ValueError(f"{path.relative_to(run)} is damaged ({wrong})") from wrong
        rows.append(np.concatenate([np.ravel(tensors[name]) for name in classifier or sorted(tensors)]))
    if not rows:
        raise ValueError("no centers")
    return np.stack(rows)
