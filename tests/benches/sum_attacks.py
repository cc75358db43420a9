"""Bench: what the coordinator learns of single devices from right sums, by what docs/privacy.md does not promise.

    python -m tests.benches.sum_attacks

Digits in virtual time, whose sums are those of masked runs. "k-means": points of single devices among the sums of
FeSEM's first round; nothing drops out. "loss": the same with the default start; of the differences of two sums that
differ by one in their devices, the one that is the nearest to any device's model, over how far the released mean of
that device's center is from it. "rounds": FedAvg, of which one device misses the next round; the cosine of its
update and the difference of both sums, and how often that is the nearest to this of all devices' updates.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np

import fedcenters as fc
from coordinator.clustering import summed_kmeans
from edge_client.protocol.task import F64
from edge_client.training.summed import compared, contribution
from emulator.simulation import summed_devices
from tests.support.sum_attacks import Step, single_points

SERVER = fc.ServerOptions(secure="updates+membership", secure_start="k-means")


@contextmanager
def told(parts: list[tuple[str, Any, F64]]) -> Iterator[None]:
    """Keep what each device adds in the clear: the stage, its task and its model."""

    def watched(task: Any, mine: Any, drawn: Any) -> Any:  # noqa: ANN401 - those of `contribution`
        parts.append((task.stage, task, mine.models[0].astype(np.float64)))
        return contribution(task, mine, drawn)

    with patch.object(summed_devices, "contribution", watched):
        yield


def kmeans(devices: int, clusters: int, seed: int) -> str:
    """A row: devices whose point was found, of how many."""
    steps, parts = list[Step](), list[tuple[str, Any, F64]]()
    settled = summed_kmeans.settled

    def watched(points: F64, sums: summed_kmeans.ClusterSums) -> summed_kmeans.SummedRuns:
        steps.append((points.copy(), sums))
        return settled(points, sums)

    with told(parts), patch.object(summed_kmeans, "settled", watched):
        fc.simulate(fc.FeSEM(clusters, server=SERVER), fleet=fc.fleets.digits(devices=devices), rounds=1, seed=seed)
    true = np.unique([compared(task, model[None])[0] for stage, task, model in parts if stage == "points"], axis=0)
    true = true - steps[0][0][0, 0]
    found = single_points(steps, repeat=True)
    apart = ((found[:, None] - true[None]) ** 2).sum(axis=2) / (true**2).sum(axis=1)
    right = int((apart.min(axis=1) < 1e-4).sum()) if len(found) else 0
    return (
        f"k-means  {devices:>4} devices {clusters:>3} clusters seed {seed}: {right} found, {len(found) - right} wrong"
    )


def loss(devices: int, clusters: int, seed: int) -> str:
    """A row: the nearest difference of two sums of the first round."""
    parts, sums, models = list[tuple[str, Any, F64]](), list[tuple[int, F64]](), list[F64]()
    server = fc.ServerOptions(secure="updates")
    with told(parts):
        fc.simulate(fc.FeSEM(clusters, server=server), fleet=fc.fleets.digits(devices=devices), rounds=1, seed=seed)
    by_center: dict[tuple[str, int], list[F64]] = {}
    for stage, task, model in parts:
        if stage == "add":
            by_center.setdefault((task.slot, task.open[0]), []).append(model)
    sums.append((0, np.zeros(len(parts[0][2]))))
    apart = np.zeros(0)
    for found in by_center.values():
        mine = np.array(found)
        sums.append((len(mine), mine.sum(axis=0)))
        models += found
        apart = np.append(apart, np.linalg.norm(mine - mine.mean(axis=0), axis=1))
    every = np.array(models)
    pairs = [more - fewer for n, more in sums for m, fewer in sums if n - m == 1]
    nearest = min(float((np.linalg.norm(every - guessed, axis=1) / apart).min()) for guessed in pairs)
    return (
        f"loss     {devices:>4} devices {clusters:>3} clusters seed {seed}: {nearest:.2f}, the nearest of {len(pairs)}"
    )


def rounds(devices: int, count: int) -> list[str]:
    """A row for each pair of rounds."""
    parts, rows = list[tuple[str, Any, F64]](), []
    with told(parts):
        fc.simulate(
            fc.FedAvg(server=SERVER), fleet=fc.fleets.digits(devices=devices), rounds=count, evaluate_every=count
        )
    updates = np.array([model - task.centers[0] for stage, task, model in parts if stage == "add"])
    of_rounds = updates.reshape(count, devices, -1)
    for number, (one, other) in enumerate(pairwise(of_rounds), 1):
        guessed = one.sum(axis=0) - (other.sum(axis=0) - other)
        cosines = guessed @ one.T / np.outer(np.linalg.norm(guessed, axis=1), np.linalg.norm(one, axis=1))
        named = (cosines.argmax(axis=1) == np.arange(devices)).mean()
        rows.append(f"rounds {number} and {number + 1}: cosine {cosines.diagonal().mean():.2f}, named {named:.0%}")
    return rows


def main() -> None:
    """Print a row for each attack."""
    for devices, clusters, seed in ((30, 3, 0), (50, 5, 0), (100, 10, 0)):
        sys.stdout.write(kmeans(devices, clusters, seed) + "\n")
        sys.stdout.flush()
    for devices, clusters, seed in ((50, 5, 0), (100, 10, 0), (100, 10, 1)):
        sys.stdout.write(loss(devices, clusters, seed) + "\n")
        sys.stdout.flush()
    sys.stdout.write("\n".join(rounds(30, 8)) + "\n")


if __name__ == "__main__":
    main()
