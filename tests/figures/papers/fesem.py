"""FeSEM's pictures on MNIST by writer: accuracy for K = 2, 3, 4, local models in two dimensions, images of a center."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes

from edge_client.protocol.task import F64, I64
from emulator.data.fleet_split import FleetData
from emulator.reports import plots
from emulator.reports.pictures import device_map, image_grid
from emulator.reports.pictures.records import RoundPoints
from emulator.run.execute import live_result, run_rounds
from emulator.run.live_run import LiveRun
from tests.figures.papers.runs import SEED, Drawn, cut, kept_curves, opened, table_cell

COLUMN, KEPT_ROUNDS = "MNIST by writer", 30
ROUNDS, DRAWN_ROUNDS = 10, (1, 10)  # "converges within ten iterations"
SHUFFLES = 2_000


def draw(data: Path | None) -> Drawn:
    """The accuracy from kept cells, the rest from one run of FeSEM with four centers."""
    return accuracy() | local_models(data)


def accuracy() -> Drawn:
    """FeSEM's accuracy by round for three numbers of centers."""
    rows = ["FeSEM, K = 2", "FeSEM, K = 3", "FeSEM, K = 4"]
    curves = kept_curves("fesem-table2", KEPT_ROUNDS, [(COLUMN, row) for row in rows], "accuracy")

    def panel(axes: Axes) -> None:
        plots.draw_curves(axes, curves, title=f"Accuracy, {COLUMN}, one seed")
        axes.set_ylim(bottom=0.3)

    facts = {
        f"accuracy, {row}": f"round 10 {100 * line[9]:.1f} %, round {KEPT_ROUNDS} {100 * line[-1]:.1f} %"
        for row, line in curves.items()
    }
    return Drawn(pictures={"fesem-accuracy": plots.make_figure(6, 3.6, panel)}, facts=facts)


def local_models(data: Path | None) -> Drawn:
    """Local models of the writers by their two principal components, and images of each center's writers."""
    cell = table_cell("fesem-table2", COLUMN, "FeSEM, K = 4")
    split = cut(cell, data)
    with opened(cell, split, rounds=ROUNDS, moments=ROUNDS) as (live, settings):
        centers = {number: dict(live.state.assignment) for number in run_rounds(live, settings)}
        found = live_result(live)
    moments = [one for one in found.kept.moments if one.round in DRAWN_ROUNDS]
    middles = [np.array([centers[m.round][c] for c in m.who], np.int64) for m in moments]
    groups = [np.array([split.groups.get(c, device_map.NO_GROUP) for c in m.who], np.int64) for m in moments]
    shares: list[str] = []

    def panel(i: int, axes: Axes) -> None:
        plane, (first, second) = device_map.principal_components(moments[i].points)
        title = f"FeSEM(4), round {moments[i].round}"
        device_map.draw_devices(axes, plane, middles[i], groups[i], title=title)
        axes.set(xlabel=f"first component, {first:.0%}", ylabel=f"second, {second:.0%} of the variance")
        shares.append(f"round {moments[i].round}: {first + second:.0%}")
        if i == len(moments) - 1:
            device_map.name_looks(axes, middles[i], groups[i])

    plane = plots.make_figure(10.5, 4.4, *(partial(panel, i) for i in range(len(moments))))
    images = image_grid.pick_images({c: split.devices[c] for c in split.devices}, found.state.assignment)
    assert images is not None
    grid = plots.make_figure(9.8, 4.2, lambda axes: image_grid.draw_images(axes, images))
    moved = [
        sum(centers[t][c] != centers[t - 1][c] for c in centers[t] if c in centers[t - 1]) for t in range(2, ROUNDS + 1)
    ]
    facts = {
        "variance in the plane": ", ".join(shares),
        "variance between centers": ", ".join(
            f"round {m.round}: {between(m, k):.0%}" for m, k in zip(moments, middles, strict=True)
        ),
        "devices that change their center, rounds 2 to 10": ", ".join(map(str, moved)),
        **contents(live, split),
    }
    return Drawn(pictures={"fesem-local-models": plane, "fesem-images": grid}, facts=facts)


def between(moment: RoundPoints, centers: I64) -> float:
    """The share of the points' variance that lies between centers."""
    x = moment.points.astype(np.float64)
    total = ((x - x.mean(axis=0)) ** 2).sum()
    within = sum(((x[centers == k] - x[centers == k].mean(axis=0)) ** 2).sum() for k in set(centers.tolist()))
    return float(1 - within / total)


def contents(live: LiveRun, split: FleetData) -> dict[str, str]:
    """What the writers of each center have in common: their number, ink, and true group; with a test by shuffles."""
    who = sorted(live.state.assignment)
    center = np.array([live.state.assignment[c] for c in who])
    ink = np.array([_ink(split.devices[c].train.x) for c in who])
    group = np.array([split.groups.get(c, 0) for c in who])
    rng = np.random.Generator(np.random.PCG64(SEED))
    seen = _spread(ink, center)
    chance = np.mean([_spread(ink, rng.permutation(center)) >= seen for _ in range(SHUFFLES)])
    record = live.records[-1]["accuracy"]["micro"]
    used = sorted(set(center.tolist()))
    return {
        "accuracy after round 10": "-" if record is None else f"{100 * record:.1f} %",
        "writers per center": ", ".join(f"center {k}: {(center == k).sum()}" for k in used),
        "share of each center's writers in true group 0": ", ".join(
            f"center {k}: {(group[center == k] == 0).mean():.0%}" for k in used
        ),
        "mean ink of an image, of its range": ", ".join(f"center {k}: {ink[center == k].mean():.3f}" for k in used)
        + f"; shuffled centers differ as much in {100 * chance:.1f} % of {SHUFFLES} draws",
    }


def _ink(x: F64) -> float:
    """The mean pixel [0, 1] of a device's images, from the darkest to the lightest that it has."""
    low, high = float(x.min()), float(x.max())
    return float((x.mean() - low) / (high - low))


def _spread(values: F64, center: I64) -> float:
    """The variance between the means of centers, weighted by their devices."""
    means = np.bincount(center, weights=values)[center] / np.bincount(center)[center]
    return float(means.var())
