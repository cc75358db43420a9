"""Methods with hard clusters against their formulas: CLoVE, TKM, WeCFL with a part of the devices, a label prior."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from edge_client.protocol.task import F64, ClientId, Flat, Probe
from tests.support.methods import build, world
from tests.support.plain_loops import (
    SAME,
    PlainMomentum,
    best_partition,
    fit,
    losses,
    matched,
    mean,
    seeds,
    squared,
)
from tests.support.softmax_program import CLASSES, grouped_fleet

LOCAL = grouped_fleet(7, 3)
WHO = sorted(LOCAL)
DATA = {c: LOCAL[c].train for c in WHO}
N = {c: float(len(DATA[c])) for c in WHO}
BETA = 0.5


@pytest.mark.parametrize(("k", "cap"), [(3, 1.0), (3, 0.9), (4, 0.6)])
def test_clove_gives_each_group_of_alike_losses_the_center_that_suits_it(k: int, cap: float) -> None:
    fleet = world(build("clove", {"cap": cap}, k=k), LOCAL)
    centers = fleet.state.centers.copy()
    for _ in range(4):
        fleet.round()
        told = np.array([[losses(center, DATA[c]).mean() for center in centers] for c in WHO])
        if cap < 1:
            at = int(cap * (len(WHO) - 1))
            gaps = np.maximum(np.sort(told.max(axis=1))[at] - told, 0)
            length = np.linalg.norm(gaps, axis=1)
            shrink = np.minimum(1, np.sort(length)[at] / np.where(length > 0, length, 1))
            told = np.sort(told.max(axis=1))[at] - gaps * shrink[:, None]
        labels = best_partition(told, np.ones(len(WHO)), k)
        totals = np.stack([told[labels == g].sum(axis=0) for g in range(labels.max() + 1)], axis=1)
        own = {c: int(matched(totals)[g]) for c, g in zip(WHO, labels, strict=True)}
        seed = seeds(fleet, 1)
        for number in set(own.values()):
            mine = [c for c in WHO if own[c] == number]
            fits = [fit(centers[number], DATA[c], seed[c]) for c in mine]
            centers[number] = mean(fits, [N[c] for c in mine])
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        assert fleet.state.assignment == own


@pytest.mark.parametrize(("trim_clusters", "trim_updates"), [(0.15, 0.2), (0.29, 0.34), (0.0, 0.2)])
def test_tkm_is_the_best_clustering_of_the_best_kept_devices(trim_clusters: float, trim_updates: float) -> None:
    local = grouped_fleet(7, 2)
    fleet = world(build("tkm", {"trim-clusters": trim_clusters, "trim-updates": trim_updates}, k=2), local)
    centers, own = fleet.state.centers.copy(), dict[ClientId, int]()
    start = centers[0].copy()
    for _ in range(3):
        fleet.round()
        seed = seeds(fleet, 0)
        points = np.stack([fit(centers[own[c]] if own else start, local[c].train, seed[c]) for c in WHO])
        kept, means = _trimmed(points, int(trim_clusters * len(WHO) + 1e-9))
        nearest = squared(points, means).argmin(axis=1)
        if not own and nearest[0] == 1:  # numbers are in the order of first appearance
            nearest, means = 1 - nearest, means[::-1]
        names = matched(squared(centers, means)) if own else np.arange(2)
        for j, name in enumerate(names):
            values = np.sort(points[[i for i in kept if nearest[i] == j]], axis=0)
            cut = int(trim_updates * len(values) + 1e-9)
            centers[name] = values[cut : len(values) - cut].mean(axis=0)
        own = {c: int(names[j]) for c, j in zip(WHO, nearest, strict=True)}
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        assert fleet.state.assignment == own


def _trimmed(points: F64, spare: int) -> tuple[list[int], F64]:
    """The kept points of the least sum of squares, and the means of their two clusters, of every choice."""
    found = []
    for kept in itertools.combinations(range(len(points)), len(points) - spare):
        some = points[list(kept)]
        labels = best_partition(some, np.ones(len(some)), 2)
        means = np.stack([some[labels == j].mean(axis=0) for j in range(2)])
        found.append((float(squared(some, means).min(axis=1).sum()), list(kept), means))
    return min(found, key=lambda one: one[0])[1:]


@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_wecfl_clusters_who_is_asked_with_who_is_remembered(fraction: float) -> None:
    settings = {"fraction-train": fraction, "max-age": 2, "server-momentum": BETA}
    fleet = world(build("wecfl", settings, k=3), LOCAL)
    centers, own = fleet.state.centers.copy(), dict[ClientId, int]()
    start, remembered, age = centers[0].copy(), dict[ClientId, Flat](), dict[ClientId, int]()
    coasting = [PlainMomentum(BETA) for _ in centers]
    for _ in range(7):
        fleet.round()
        new = [c for c, task in fleet.exchanges[0].items() if isinstance(task, Probe)]
        assert new == [c for c in sorted(fleet.exchanges[0]) if own and c not in own]
        seed, chosen = seeds(fleet, 0), {c: _best(centers, c) for c in new}
        fits = {c: fit(centers[own[c]] if own else start, DATA[c], seed[c]) for c in sorted(seed)}
        away = [c for c in sorted(remembered) if c not in fits]
        points, a = np.stack([*fits.values(), *(remembered[c] for c in away)]), np.array([N[c] for c in [*fits, *away]])
        labels = best_partition(points, a, 3)
        means = [np.average(points[labels == j], axis=0, weights=a[labels == j]) for j in range(labels.max() + 1)]
        names = matched(squared(centers, np.stack(means))) if own else np.arange(len(means))
        chosen |= {c: int(names[j]) for c, j in zip(fits, labels, strict=False)}
        for k, old in enumerate(centers.copy()):
            if mine := [c for c in fits if chosen[c] == k]:
                centers[k] = coasting[k].move(old, mean([fits[c] for c in mine], [N[c] for c in mine]))
        own |= chosen
        if fraction < 1:
            age = {c: age[c] + 1 for c in away} | dict.fromkeys(fits, 0)
            remembered = {c: point for c, point in {**remembered, **fits}.items() if age.get(c, 2) < 2}
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        assert fleet.state.assignment == own


def _best(centers: F64, who: ClientId) -> int:
    return int(np.argmin([losses(center, DATA[who]).mean() for center in centers]))


def test_hypcluster_with_a_label_prior_chooses_by_the_losses_of_corrected_centers() -> None:
    fleet = world(build("hypcluster start=redraw", {"label-prior": "device", "server-momentum": BETA}, k=3), LOCAL)
    centers, totals = fleet.state.centers.copy(), np.zeros((3, CLASSES))
    counts = {c: np.bincount(DATA[c].y, minlength=CLASSES) for c in WHO}
    coasting = [PlainMomentum(BETA) for _ in centers]
    for _ in range(4):
        fleet.round()
        shifts = {c: [np.log(counts[c] + 0.1) - np.log(t + 0.1) if t.any() else None for t in totals] for c in WHO}
        told = {c: [losses(m, DATA[c], s).mean() for m, s in zip(centers, shifts[c], strict=True)] for c in WHO}
        own, seed = {c: int(np.argmin(told[c])) for c in WHO}, seeds(fleet, 1)
        for k, old in enumerate(centers.copy()):
            if mine := [c for c in WHO if own[c] == k]:
                new = mean([fit(old, DATA[c], seed[c]) for c in mine], [N[c] for c in mine])
                centers[k], totals[k] = coasting[k].move(old, new), sum(counts[c] for c in mine)
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        np.testing.assert_array_equal(fleet.state.extra["label-totals"], totals)
        assert fleet.state.assignment == own
