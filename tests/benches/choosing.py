"""How long devices take to choose a center: all losses, and `least`, on real samples and trained centers.

    python -m tests.benches.choosing [--data FOLDER] [--centers 10] [--devices 40] [--rounds 1 5 20]

IFCA trains centers on the first devices of a fleet of 200, Fashion-MNIST with two classes a device, as in WeCFL's
Table 5. After each number of rounds the devices evaluate all centers on their training samples in both ways, which take
turns. The table has CPU milliseconds of a device, the share of the evaluations that `least` makes, and how many devices
choose the same center. One thread.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

import fedcenters as fc
from coordinator.models.registry import build_model
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.task import F64, Array, Flat, Probe
from edge_client.training.fit_probe import run_probe
from edge_client.training.learner import Learner
from emulator.engines.cpu.cpu_engine import cpu_recipe
from tests.benches.turns import interleaved, timed


class CountingLearner:
    """A learner that counts the samples that it evaluates."""

    def __init__(self, learner: Learner) -> None:
        self.program, self.fixed_batch = learner.program, learner.fixed_batch
        self.train, self.gradient = learner.train, learner.gradient
        self._learner, self.samples = learner, 0

    def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[F64, Array]:
        self.samples += len(models) * len(data)
        return self._learner.evaluate(models, data, batch=batch)


def main() -> None:
    """Print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default=os.environ.get("FEDCENTERS_DATA"))
    parser.add_argument("--centers", type=int, default=10)
    parser.add_argument("--devices", type=int, default=40)
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 5, 20])
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    everyone = fc.fleets.fashion_mnist(200, partition="n-class:classes=2", data=asked.data)
    fleet = everyone.only(list(everyone.keys())[: asked.devices])
    learner = cpu_recipe(build_model("wecfl-cnn", seed=0)).open()
    print("| rounds | all, ms | least, ms | evaluations | same center |\n|--:|--:|--:|--:|--:|")
    for rounds in asked.rounds:
        print(f"{rounds} rounds of training", file=sys.stderr, flush=True)
        method = fc.IFCA(clusters=asked.centers, local_steps=10, batch_size=32, learning_rate=0.001)
        found = fc.simulate(method, fleet=fleet, model="wecfl-cnn", rounds=rounds)
        print(row(rounds, learner, list(found.run.state.centers), list(fleet.values()), asked.repeats), flush=True)


def row(rounds: int, learner: Learner, centers: Sequence[Flat], local: Sequence[DeviceData], repeats: int) -> str:
    """A line of the table."""
    whole = Probe(models=centers, want=frozenset({"loss"}), batch=32, seed=0)
    probes = {"all": whole, "least": replace(whole, least=True)}
    counted, chosen = {}, {}
    for name, probe in probes.items():
        counting = CountingLearner(learner)
        losses = [np.asarray(run_probe(counting, probe, data).losses) for data in local]
        counted[name], chosen[name] = counting.samples, [int(row.argmin()) for row in losses]
    took = interleaved({name: timed(partial(_each, learner, probe, local)) for name, probe in probes.items()}, repeats)
    same = sum(a == b for a, b in zip(chosen["all"], chosen["least"], strict=True))
    each = {name: 1e3 * turn.cpu_s / len(local) for name, turn in took.items()}
    share = counted["least"] / counted["all"]
    return f"| {rounds} | {each['all']:.0f} | {each['least']:.0f} | {share:.0%} | {same} of {len(local)} |"


def _each(learner: Learner, probe: Probe, local: Sequence[DeviceData]) -> None:
    for data in local:
        run_probe(learner, probe, data)


if __name__ == "__main__":
    main()
