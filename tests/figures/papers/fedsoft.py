"""FedSoft's figures 1 and 2 on its synthetic regressions: errors and weights by round, and weights of each device."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from edge_client.protocol.task import I64, Array
from emulator.data.fleet_split import FleetData
from emulator.experiments.plan import TableCell
from emulator.reports import plots
from emulator.reports.pictures import share_plots
from emulator.reports.pictures.records import CenterShares
from emulator.run.execute import run_rounds
from emulator.run.live_run import LiveRun
from tests.figures.papers.runs import Drawn, cut, opened, table_cell

TABLE, ROUNDS, PARTED = "fedsoft-table1", 20, 5  # "after some five rounds" the paper's centers have parted
ROUNDS_OF_SHARES = 10  # those of the kept table
METHODS = ("FedSoft", "IFCA", "FedEM")
HOLDOUT_BATCH = 256


def draw(data: Path | None) -> Drawn:
    """Both figures."""
    return by_round(data) | by_device(data)


def by_round(data: Path | None, *, rounds: int = ROUNDS, devices: int = 0) -> Drawn:
    """Figure 1: on 10:90, each center's error on each regression, and the mean importance weight of a group."""
    cell = table_cell(TABLE, "10:90", "FedSoft, K = 2")
    split = cut(cell, data, devices=devices)
    with opened(cell, split, rounds=rounds, moments=1) as (live, settings):
        errors = [holdout_errors(live, split) for _ in run_rounds(live, settings)]
        shares = live.recorder.picture_data().shares
    assert shares is not None
    table = np.stack(errors)
    facts = {}
    for number in sorted({1, min(PARTED, rounds), rounds}):
        found = table[number - 1]
        facts[f"10:90, round {number}: mean squared error"] = "; ".join(
            f"center {k}: {row[0]:.1f} on regression 0, {row[1]:.1f} on regression 1" for k, row in enumerate(found)
        )
    group = np.array([split.groups[c] for c in shares.who], np.int64)
    for g in (0, 1):
        first, last = (np.nanmean(shares.values[t, group == g], axis=0) for t in (0, -1))
        facts[f"10:90, devices with 90 % of regression {g}: mean weights of centers 0 and 1"] = (
            f"round {shares.rounds[0]}: {first[0]:.2f}, {first[1]:.2f}; "
            f"round {shares.rounds[-1]}: {last[0]:.2f}, {last[1]:.2f}"
        )
    return Drawn(pictures={"fedsoft-rounds": rounds_figure(table, shares, group)}, facts=facts)


def holdout_errors(live: LiveRun, split: FleetData) -> Array:
    """[centers, regressions]: the mean squared error of each center on samples of one regression alone."""
    learner, centers = live.devices.learner, list(live.state.centers)
    losses = [learner.evaluate(centers, held, batch=HOLDOUT_BATCH)[0].mean(axis=1) for held in split.holdouts.values()]
    found: Array = np.stack(losses, axis=1)
    return found


def rounds_figure(errors: Array, shares: CenterShares, group: I64) -> Figure:
    """[rounds, centers, regressions] errors; beside them the weights of the devices of either group."""

    def panel(axes: Axes) -> None:
        steps = range(1, len(errors) + 1)
        for k in range(errors.shape[1]):
            for s in range(errors.shape[2]):
                (line,) = axes.plot(steps, errors[:, k, s], label=f"center {k} on regression {s}", lw=2)
                line.set(color=plots.center_colour(k), linestyle=plots.LINES[s])
        axes.set(title="Mean squared error", ylim=(0, None))
        plots.name_rounds(axes, len(errors))
        axes.grid(axis="y", color="#e5e7eb", lw=0.8)
        axes.legend(loc="best", fontsize=8.5)

    def weights(g: int, axes: Axes) -> None:
        title = f"Devices with 90 % of regression {g}"
        share_plots.draw_shares(axes, shares.rounds, shares.values[:, group == g], title=title)
        axes.set(ylabel="importance weight: mean, and 80 % of devices")
        share_plots.name_centers(axes)

    return plots.make_figure(15, 4, panel, partial(weights, 0), partial(weights, 1))


def by_device(data: Path | None, *, rounds: int = ROUNDS_OF_SHARES, devices: int = 0) -> Drawn:
    """Figure 2: on "linear", how much of each device the center of regression 0 stands for, by three methods."""
    found: dict[str, tuple[Array, Array]] = {}
    for row in METHODS:
        cell: TableCell = table_cell(TABLE, "linear", f"{row}, K = 2")
        split = cut(cell, data, devices=devices)
        with opened(cell, split, rounds=rounds, moments=1) as (live, settings):
            for _ in run_rounds(live, settings):
                pass
            nearest = int(holdout_errors(live, split)[:, 0].argmin())
            kept = live.recorder.picture_data().shares
        who = sorted(split.devices)
        true = (np.arange(len(who)) + 0.5) / len(who)
        if kept is None:  # IFCA: one center for each device
            share = np.array([float(live.state.assignment[c] == nearest) for c in who])
        else:
            share = kept.values[-1, [kept.who.index(c) for c in who], nearest].astype(np.float64)
        found[row] = (true, share)
    facts = {
        f"linear, {row}: weight of the center of regression 0 against the true share": (
            f"correlation {np.corrcoef(true, share)[0, 1]:.2f}, mean difference {np.abs(share - true).mean():.2f}, "
            f"from {share.min():.2f} to {share.max():.2f}"
        )
        for row, (true, share) in found.items()
    }
    panels = [partial(_scatter, row=row, true=true, share=share) for row, (true, share) in found.items()]
    return Drawn(pictures={"fedsoft-devices": plots.make_figure(13, 3.8, *panels)}, facts=facts)


def _scatter(axes: Axes, *, row: str, true: Array, share: Array) -> None:
    axes.plot(np.arange(len(true)), true, color=plots.GLOBAL_COLOUR, lw=1.5, ls="--", label="its true share")
    axes.scatter(np.arange(len(share)), share, s=16, color=plots.center_colour(0), lw=0, label="weight of the center")
    axes.set(title=row, xlabel="device", ylim=(-0.03, 1.03))
    axes.legend(loc="best", fontsize=8.5)
