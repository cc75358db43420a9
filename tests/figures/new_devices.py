"""`python -m tests.figures.new_devices --data DIR`: what a device gets that never trained (docs/nearest-center.md).

WISDM: 27 of 36 users train (WeCFL, three centers), the other nine come afterwards with 20 labelled samples, or with all
of their training part (four fifths). `nearest` is the center with the least loss on these. `personalised` goes on from
there as `fedcenters-edge nearest --personalise STEPS` does, with the run's rate and momentum; `alone` does so from
the run's common start. Accuracy is that on the devices' test parts, all samples as one set. Prints a
table with Student's 95 % intervals over seeds.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch

from edge_client.data.dataset import Dataset
from edge_client.nearest.choose_center import CenterSource
from edge_client.nearest.personalise import evaluate_model, personalise
from edge_client.protocol.task import Flat
from emulator.experiments.table import paired_difference
from tests.figures.nearest_fleets import FinishedFleet, fleet

FLEET = "WISDM by user"
STEPS = (20, 100)
SAMPLES = (20, 0)  # labelled samples of a new device; 0: its whole training part
NEAREST = "nearest"


def of_one(run: FinishedFleet, samples: int, seed: int) -> dict[str, float]:
    """The accuracy [%] of each way, over the samples of all held-out devices."""
    learner, method = run.devices.learner, run.setting.method
    about = SimpleNamespace(lr=method.learning_rate, momentum=method.momentum)
    source = cast(
        "CenterSource",
        SimpleNamespace(router=SimpleNamespace(round=about), learner=lambda training: learner),
    )
    rng = np.random.Generator(np.random.PCG64(20_000 + seed))
    right: dict[str, float] = {}
    total = 0
    for _, local in sorted(run.held_out.items()):
        assert local.test is not None
        rows = rng.permutation(len(local.train))[: samples or None]
        few, test = Dataset(local.train.x[rows], local.train.y[rows]), local.test
        total += len(test)
        losses, _ = learner.evaluate(list(run.centers), few, batch=128)
        center: Flat = run.centers[int(losses.mean(axis=1).argmin())]
        ways = {NEAREST: center}
        for steps in STEPS:
            ways[f"personalised, {steps} steps"] = personalise(source, center, few, steps)
            ways[f"alone, {steps} steps"] = personalise(source, run.start, few, steps)
        for way, model in ways.items():
            accuracy, _ = evaluate_model(learner, model, test)
            right[way] = right.get(way, 0.0) + (accuracy or 0.0) * len(test)
    return {way: 100 * correct / total for way, correct in right.items()}


def table(found: Mapping[int, Mapping[int, Mapping[str, float]]]) -> str:
    """Markdown, of samples -> seed -> way -> accuracy."""
    lines = [
        "| samples | model | accuracy % | more than the nearest center | seeds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for samples, by_seed in found.items():
        near = {seed: ways[NEAREST] for seed, ways in by_seed.items()}
        for way in next(iter(by_seed.values())):
            mine = {seed: ways[way] for seed, ways in by_seed.items()}
            mean, half, n = paired_difference(mine, near)
            spread = f" ± {np.std(list(mine.values()), ddof=1):.1f}" if n > 1 else ""
            gain = "" if way == NEAREST else f"{mean:+.1f}" + (f" ± {half:.1f}" if half is not None else "")
            lines.append(f"| {samples or 'all'} | {way} | {np.mean(list(mine.values())):.1f}{spread} | {gain} | {n} |")
    return "\n".join(lines)


def main() -> None:
    """Read the options, train the fleets, print the table."""
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--data", type=Path, default=os.environ.get("FEDCENTERS_DATA"))
    options.add_argument("--seeds", type=int, default=3)
    options.add_argument("--keep", type=Path, help="trained centers, read again by a later call")
    asked = options.parse_args()
    torch.set_num_threads(1)
    found: dict[int, dict[int, dict[str, float]]] = {samples: {} for samples in SAMPLES}
    for seed in range(asked.seeds):
        with fleet(FLEET, seed=seed, data=asked.data and Path(asked.data), keep=asked.keep) as run:
            for samples in SAMPLES:
                found[samples][seed] = of_one(run, samples, seed)
    sys.stdout.write(table(found) + "\n")


if __name__ == "__main__":
    main()
