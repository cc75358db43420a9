"""CFL, FL+HC (also with FedClust's settings) and FedGroup against their formulas, by loops over every partition."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass

import numpy as np
import pytest

from edge_client.protocol.task import F64, I64, Flat
from tests.support.methods import build, world
from tests.support.plain_loops import best_partition, fit, mean, seeds
from tests.support.plain_trees import PlainTree, cosines
from tests.support.softmax_program import CLASSES
from tests.support.uneven_fleets import away, uneven_fleet

every_seed = pytest.mark.parametrize("seed", [0, 1])


@dataclass(frozen=True)
class Bounds:
    """When a leaf of CFL splits."""

    eps_1: float = 0.9
    eps_2: float = 0.05
    gamma: float = 0.5
    warm_up: int = 1
    coverage: float = 0.5
    smallest: int = 3
    absolute: bool = False

    def stalled(self, moves: list[Flat], n: list[float], scale: float) -> bool:
        """|| sum_i alpha_i dw_i || < eps_1 and max_i || dw_i || > eps_2."""
        largest, middle = max(float(np.linalg.norm(m)) for m in moves), float(np.linalg.norm(mean(moves, n)))
        one, other = (1.0, 1.0) if self.absolute else (largest, scale)
        return middle < self.eps_1 * one and largest > self.eps_2 * other

    def sides(self, moves: list[Flat]) -> I64 | None:
        """Of all bipartitions the one whose sides have the least greatest cosine, if they point apart enough."""
        cosine = cosines(moves)
        ways = [np.array([0, *rest]) for rest in itertools.product([0, 1], repeat=len(moves) - 1) if any(rest)]
        cross = [float(cosine[np.ix_(way == 0, way == 1)].max()) for way in ways]
        best = int(np.argmin(cross))
        assert sum(abs(c - cross[best]) < 1e-12 for c in cross) == 1
        return ways[best] if self.gamma < np.sqrt((1 - cross[best]) / 2) else None


@every_seed
@pytest.mark.parametrize(
    ("bounds", "more"),
    [
        (Bounds(warm_up=0, coverage=1.0), {}),
        (Bounds(coverage=0.6), {"fraction-train": 0.8}),
        (Bounds(absolute=True, eps_2=0.3, gamma=0.4), {}),
        (Bounds(warm_up=2, smallest=2), {"server-momentum": 0.5}),
    ],
)
def test_cfl_splits_a_stalled_leaf_into_the_sides_of_least_similar_updates(
    bounds: Bounds, more: dict[str, float], seed: int
) -> None:
    told = {name.replace("_", "-"): value for name, value in asdict(bounds).items() if name != "absolute"}
    told["criterion"] = "absolute" if bounds.absolute else "relative"
    fleet = world(build("cfl", {**told, **more}), uneven_fleet(3, seed), seed=seed)
    tree, scale, counted = PlainTree(fleet, beta=more.get("server-momentum", 0.0)), 0.0, 0
    n = {c: float(len(data)) for c, data in tree.data.items()}
    for number in range(1, 9):
        gone = away(number, tree.data, seed)
        fleet.round(silent=gone)
        fits, leaf = tree.train(gone)
        if fits:
            counted += 1
            moves = {c: fits[c] - tree.centers[leaf[c]] for c in fits}
            scale = scale or max(float(np.linalg.norm(m)) for m in moves.values())
            members = Counter(tree.own.values())
            for k in range(len(tree.centers) if counted > bounds.warm_up else 0):
                mine = [c for c in moves if leaf[c] == k]
                if len(mine) >= max(bounds.smallest, bounds.coverage * members[k]):
                    theirs = [moves[c] for c in mine]
                    sides = bounds.sides(theirs) if bounds.stalled(theirs, [n[c] for c in mine], scale) else None
                    if sides is not None:
                        tree.split(k, dict(zip(mine, sides.tolist(), strict=True)), moves)
            tree.average(fits)
        tree.check()
    assert len(tree.centers) > 1


LAST_LAYER = {"classifier": slice(None), "all": slice(None), "*weight": slice(0, -CLASSES)}


@every_seed
@pytest.mark.parametrize(
    "settings",
    [
        {"warm-up": 1, "threshold": 0.8},
        {"warm-up": 1, "linkage": "single", "threshold": 0.5, "fraction-train": 0.6},
        {"warm-up": 2, "linkage": "complete", "metric": "l1", "threshold": 2.5, "server-momentum": 0.5},
        {"warm-up": 0, "linkage": "ward", "metric": "l2", "threshold": 1.2},
        {"warm-up": 0, "representation": "classifier", "metric": "l2", "linkage": "complete", "threshold": 0.9},
        {"warm-up": 0, "representation": "*weight", "metric": "l2", "linkage": "average", "threshold": 0.8},
    ],
)
def test_flhc_joins_the_nearest_clusters_while_they_are_no_further_apart_than_the_threshold(
    settings: dict[str, float | str], seed: int
) -> None:
    fleet = world(build("flhc", settings), uneven_fleet(3, seed), seed=seed)
    only = LAST_LAYER[str(settings.get("representation", "all"))]
    tree = PlainTree(fleet, beta=float(settings.get("server-momentum", 0)), only=only)
    counted = 0
    for number in range(1, 8):
        gone = away(number, tree.data, seed)
        fleet.round(silent=gone)
        fits, _ = tree.train(gone)
        if fits:
            if counted == settings["warm-up"]:
                assert sorted(fleet.exchanges[0]) == sorted(tree.data)
                moves = {c: fits[c] - tree.centers[0] for c in fits}
                how = str(settings.get("metric", "cosine")), str(settings.get("linkage", "average"))
                labels = _joined(np.stack([moves[c][only] for c in fits]), *how, float(settings["threshold"]))
                assert labels.max() > 0
                tree.split(0, dict(zip(fits, labels.tolist(), strict=True)), moves)
            counted += 1
            tree.average(fits)
        tree.check()


def _joined(points: F64, metric: str, linkage: str, threshold: float) -> I64:
    """Clusters joined bottom-up, the two nearest first; labels in the order of first appearance."""
    if metric == "cosine":
        apart = 1 - cosines([*points])
    else:
        gaps = points[:, None] - points[None]
        apart = np.abs(gaps).sum(axis=2) if metric == "l1" else np.sqrt((gaps**2).sum(axis=2))

    def distance(a: list[int], b: list[int]) -> float:
        if linkage == "ward":
            between = np.linalg.norm(points[a].mean(axis=0) - points[b].mean(axis=0))
            return float(np.sqrt(2 * len(a) * len(b) / (len(a) + len(b))) * between)
        between_all = apart[np.ix_(a, b)]
        found = {"single": between_all.min(), "complete": between_all.max(), "average": between_all.mean()}
        return float(found[linkage])

    clusters = [[i] for i in range(len(points))]
    while len(clusters) > 1:
        nearest, i, j = min((distance(clusters[i], clusters[j]), i, j) for i, j in _pairs(len(clusters)))
        if nearest > threshold:
            break
        clusters[i] += clusters.pop(j)
    labels = np.empty(len(points), dtype=np.int64)
    for number, cluster in enumerate(sorted(clusters, key=min)):
        labels[cluster] = number
    return labels


def _pairs(n: int) -> list[tuple[int, int]]:
    return [(i, j) for i in range(n) for j in range(i + 1, n)]


@every_seed
@pytest.mark.parametrize(
    ("k", "settings"),
    [(3, {}), (3, {"per-group": 2, "fraction-train": 0.7}), (2, {"server-momentum": 0.5}), (12, {"per-group": 1})],
)
def test_fedgroup_clusters_the_cosines_of_first_updates_to_their_principal_directions(
    k: int, settings: dict[str, float], seed: int
) -> None:
    first = 10  # steps of a device's first update
    fleet = world(build("fedgroup", settings, k=k), uneven_fleet(3, seed), seed=seed)
    tree = PlainTree(fleet, beta=settings.get("server-momentum", 0.0))
    start, count = tree.centers[0].copy(), min(len(tree.data), k * int(settings.get("per-group", 20)))
    for number in range(1, 7):
        gone = away(number, tree.data, seed) if number > 1 else {"d05"}
        fleet.round(silent=gone)
        at = 0
        if number == 1:
            cold = seeds(fleet, 0)
            assert len(cold) == count
            moves = {c: fit(start, tree.data[c], cold[c], steps=first) - start for c in cold if c not in gone}
            X = np.stack([*moves.values()])
            directions = np.linalg.svd(X, full_matrices=False)[2][:k]
            edc = X @ directions.T / np.linalg.norm(X, axis=1)[:, None]
            labels = best_partition(edc, np.ones(len(edc)), k)
            tree.split(0, dict(zip(moves, labels.tolist(), strict=True)), moves)
            at = 1
        fits, _ = tree.train(gone, exchange=at, steps=first)
        tree.average(fits)
        tree.check()
