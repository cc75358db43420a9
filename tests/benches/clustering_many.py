"""Clusters of a thousand to a hundred thousand devices: a sample's k-means and the nearest centers, or MiniBatchKMeans.

    python -m tests.benches.clustering_many                  650 numbers a device (the last layer of a small network)

Ours is what rounds with `fraction-train` do: the updates of a sample of 1,000 devices are clustered on their Gram
matrix, and each other device gets the nearest of these centers. Theirs is scikit-learn's MiniBatchKMeans over all
devices. Both take turns in one process on one thread; figures are medians of CPU seconds. Points are noise about k
centers. Nothing is asserted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from coordinator.clustering.backend import select_backend
from coordinator.clustering.gram import GramMatrix
from coordinator.clustering.kmeans import kmeans
from coordinator.rounds.metrics import ari
from tests.benches.clustering_scaling import Labels, Points, draw_points, machine

SAMPLE, BLOCK = 1_000, 4_096
SIZES = (1_000, 3_162, 10_000, 31_623, 100_000)
RESTARTS = 10  # of both
HEAD = "| devices | noise | ours, CPU s | theirs, CPU s | ratio | objective, ours above theirs | ARI, ours and theirs |"
RULE = "|--:|--:|--:|--:|--:|--:|--:|"
NOISE = (3.0, 8.0)  # clear clusters and weak ones


def ours(points: Points, k: int) -> Labels:
    """The labels of all devices, of which the first ones are the sample."""
    host, some = select_backend("cpu"), points[:SAMPLE]
    grown = GramMatrix(np.zeros(points.shape[1], np.float32), len(some), where=host)
    for place, point in enumerate(some):
        grown.add(point, at=place)
    matrix = grown.submatrix(np.arange(len(some)))
    labels = kmeans(matrix, k, np.random.default_rng(0), restarts=RESTARTS, where=host).labels
    centers = np.stack([some[labels == c].mean(0) for c in range(k)])
    return _nearest(points, centers)


def theirs(points: Points, k: int) -> Labels:
    """MiniBatchKMeans with a batch of the sample's size."""
    from sklearn.cluster import MiniBatchKMeans

    found = MiniBatchKMeans(k, n_init=RESTARTS, batch_size=SAMPLE, random_state=0).fit(points)
    return found.labels_.astype(np.int64)  # type: ignore[no-any-return]


def objective(points: Points, labels: Labels, k: int) -> float:
    """The sum of squared distances to the means of the labels."""
    means = np.stack([points[labels == c].mean(0) if (labels == c).any() else points[0] for c in range(k)])
    total = 0.0
    for i in range(0, len(points), BLOCK):
        off = points[i : i + BLOCK] - means[labels[i : i + BLOCK]]
        total += float((off**2).sum(dtype=np.float64))
    return total


def main() -> None:
    """The command line."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]  # comes with scikit-learn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("d", 650), ("k", 10), ("repeats", 3)):
        parser.add_argument(f"--{name}", type=int, default=default)
    asked = parser.parse_args()
    _print(machine(), "", HEAD, RULE)
    seconds: dict[float, list[float]] = {noise: [] for noise in NOISE}
    with threadpool_limits(1):
        for noise in NOISE:
            for n in SIZES:
                drawn, truth = draw_points(n, asked.d, asked.k, noise)
                points = np.stack(list(drawn))[np.random.default_rng(1).permutation(n)]
                truth = truth[np.random.default_rng(1).permutation(n)]
                mine, yours = [], []
                for _ in range(asked.repeats):
                    mine.append(_timed(ours, points, asked.k))
                    yours.append(_timed(theirs, points, asked.k))
                seconds[noise].append(statistics.median(s for s, _ in mine))
                other = statistics.median(s for s, _ in yours)
                found = [mine[0][1], yours[0][1]]
                off = objective(points, found[0], asked.k) / objective(points, found[1], asked.k) - 1
                scores = " and ".join(f"{ari(truth.tolist(), labels.tolist()):.2f}" for labels in found)
                last = seconds[noise][-1]
                _print(f"| {n:,} | {noise:g} | {last:.3f} | {other:.3f} | {other / last:.1f} | {off:+.1e} | {scores} |")
    for noise, told in seconds.items():
        slope = float(np.polyfit(np.log(SIZES[1:]), np.log(told[1:]), 1)[0])
        _print(f"growth with devices, noise {noise:g}: exponent {slope:.2f} from {SIZES[1]:,} on")


def _nearest(points: Points, centers: NDArray[np.float32]) -> Labels:
    norms = (centers**2).sum(1)
    found = [(norms - 2 * points[i : i + BLOCK] @ centers.T).argmin(1) for i in range(0, len(points), BLOCK)]
    return np.concatenate(found).astype(np.int64)


def _timed(run: Callable[[Points, int], Labels], points: Points, k: int) -> tuple[float, Labels]:
    began = time.process_time()
    labels = run(points, k)
    return time.process_time() - began, labels


def _print(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
