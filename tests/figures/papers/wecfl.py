"""WeCFL's figures 1 to 8: fleets, curves of the kept cells, and the models of the first five rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import adjusted_rand_score

from coordinator.strategies.common.representation import represent
from edge_client.protocol.task import I64, Array
from emulator.data import registry
from emulator.data.partition_schemes import parse_scheme
from emulator.reports import plots
from emulator.reports.pictures import device_map
from emulator.reports.pictures.records import RoundPoints
from emulator.run.execute import live_result, run_rounds
from tests.figures.papers.runs import SEED, Drawn, cut, kept_curves, opened, table_cell

FASHION, CIFAR = ("F-MNIST (0.1, 10)", "F-MNIST (3, 2)"), "CIFAR-10 (3, 2)"
DEVICES, KEPT_ROUNDS, ROUNDS = 200, 100, 5
TRAINED = 100  # devices of the run; the paper has 200
PARTITIONS = {
    "labels-groups": {
        "(0.1, 10): Dirichlet in groups": "cluster-dirichlet:groups=10,alpha-group=0.1,alpha=10",
        "(3, 2): classes in groups": "cluster-n-class:groups=10,classes-group=3,classes=2",
    },
    "labels-no-groups": {
        "Dirichlet(0.1) over devices": "dirichlet:alpha=0.1",
        "two classes a device": "n-class:classes=2",
    },
}
OF_ONE_CENTER = 20  # devices of the second heat map in the paper; here at most


def draw(data: Path | None) -> Drawn:
    """All of them."""
    return fleets(data) | curves() | models(data)


def fleets(data: Path | None) -> Drawn:
    """Figures 1 and 6: how many samples of each class a device has, in four partitions."""
    whole = registry.load_data_set("fashion-mnist", data, seed=SEED)
    pictures: dict[str, Figure] = {}
    held: dict[str, str] = {}
    for name, schemes in PARTITIONS.items():
        panels = []
        for title, scheme in schemes.items():
            split = parse_scheme(scheme).split(whole, devices=DEVICES, seed=SEED)
            labels = {c: np.bincount(local.train.y, minlength=10).tolist() for c, local in split.devices.items()}
            classes = [sum(count > 0 for count in row) for row in labels.values()]
            sizes = [sum(row) for row in labels.values()]
            held[title] = f"{min(sizes)} to {max(sizes)} samples, {min(classes)} to {max(classes)} classes a device"
            panels.append(partial(_labels, title=title, labels=labels, groups=split.groups))
        pictures[f"wecfl-{name}"] = plots.make_figure(13, 3.4, *panels)
    return Drawn(pictures=pictures, facts=held)


def _labels(axes: Axes, *, title: str, labels: Mapping[str, Sequence[int]], groups: Mapping[str, int | None]) -> None:
    plots.draw_labels(axes, labels, groups)
    axes.set(title=title)


def curves() -> Drawn:
    """Figures 2 and 3: methods on CIFAR-10, and numbers of centers on Fashion-MNIST."""
    rows = ["FedAvg", "IFCA, K = 10", "FeSEM, K = 10", "WeCFL, K = 10"]
    methods = {
        title: kept_curves("wecfl-table2", KEPT_ROUNDS, [(CIFAR, row) for row in rows], quantity)
        for title, quantity in (("Accuracy", "accuracy"), ("F1 of devices", "f1-of-devices"))
    }
    counts = {
        column: kept_curves(
            "wecfl-table2",
            KEPT_ROUNDS,
            [(column, row) for row in ("FedAvg", "WeCFL, K = 5", "WeCFL, K = 10")],
            "accuracy",
        )
        for column in FASHION
    }
    two = plots.make_figure(
        11, 3.8, *(partial(plots.draw_curves, curves=c, title=f"{t}, {CIFAR}, one seed") for t, c in methods.items())
    )
    three = plots.make_figure(
        11, 3.8, *(partial(_from_half, curves=c, title=f"{t}, seed 0") for t, c in counts.items())
    )
    facts = {
        f"{title}, {CIFAR}, {row}": f"round 20 {100 * line[19]:.1f} %, round 100 {100 * line[-1]:.1f} %"
        for title, lines in methods.items()
        for row, line in lines.items()
    }
    return Drawn(pictures={"wecfl-methods": two, "wecfl-counts": three}, facts=facts)


def _from_half(axes: Axes, *, curves: Mapping[str, Sequence[float | None]], title: str) -> None:
    plots.draw_curves(axes, curves, title=title)
    axes.set_ylim(bottom=0.4)


def models(data: Path | None) -> Drawn:
    """Figures 4, 5, 7 and 8: five rounds of the table's run on half of its devices, K = 10 and K = 3."""
    pictures: dict[str, Figure] = {}
    facts: dict[str, str] = {}
    split = cut(table_cell("wecfl-table2", FASHION[0], "WeCFL, K = 10"), data, devices=TRAINED)
    for k in (10, 3):
        cell = table_cell("wecfl-table2", FASHION[0], "WeCFL, K = 10", clusters=k)
        with opened(cell, split, rounds=ROUNDS, moments=ROUNDS) as (live, settings):
            centers = {number: dict(live.state.assignment) for number in run_rounds(live, settings)}
            found = live_result(live)
        moments = found.kept.moments
        held = [np.array([centers[m.round][c] for c in m.who], np.int64) for m in moments]
        groups = np.array([split.groups[c] for c in moments[0].who], np.int64)
        pictures[f"wecfl-rounds-k{k}"] = maps(moments, held, groups)
        facts[f"adjusted Rand index, K = {k}, rounds 1 to {ROUNDS}"] = ", ".join(
            f"{adjusted_rand_score(groups, one):.2f}" for one in held
        )
        if k == 10:  # the true number of groups
            middles = represent(found.state.centers, found.schema, "classifier")
            largest = int(np.bincount(held[-1]).argmax())
            members = moments[-1].points[held[-1] == largest][:OF_ONE_CENTER]
            pictures["wecfl-cosines"] = cosines(middles, members, largest)
            whole = plots.cosines(represent(found.state.centers, found.schema, "all"))
            facts["cosine of two centers, last layer: mean, least, greatest"] = _pairs(plots.cosines(middles))
            facts["cosine of two centers, all parameters: mean, least, greatest"] = _pairs(whole)
            facts["cosine of two devices of one center, last layer"] = _pairs(plots.cosines(members))
    return Drawn(pictures=pictures, facts=facts)


def maps(moments: Sequence[RoundPoints], centers: Sequence[I64], groups: I64) -> Figure:
    """t-SNE of the models that devices sent, one panel a round: colour is the center, shape the true group."""

    def panel(i: int, axes: Axes) -> None:
        plane = device_map.tsne(moments[i].points)
        device_map.draw_devices(axes, plane, centers[i], groups, title=f"Round {moments[i].round}")
        if i == len(moments) - 1:
            device_map.name_looks(axes, centers[i], groups)

    return plots.make_figure(17, 3.6, *(partial(panel, i) for i in range(len(moments))))


def cosines(centers: Array, members: Array, k: int) -> Figure:
    """Figure 4: the cosine of every pair of centers, and of devices of one of them."""

    def devices(axes: Axes) -> None:
        cos = plots.cosines(members)
        plots.draw_heat(axes, np.where(np.tri(len(cos), dtype=bool), cos, np.nan), low=float(cos.min()))
        axes.set(title=f"{len(cos)} devices of center {k}", xlabel="device", ylabel="device", xticks=[], yticks=[])

    pair = partial(plots.draw_cosines, vectors=centers, title="Ten centers")
    return plots.make_figure(10.5, 4.4, pair, devices)


def _pairs(cos: Array) -> str:
    """Of the pairs of two different rows."""
    values = cos[np.tril_indices(len(cos), -1)]
    return f"{values.mean():.4f}, {values.min():.4f}, {values.max():.4f}"
