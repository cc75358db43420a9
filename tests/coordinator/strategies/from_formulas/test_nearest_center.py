"""FeSEM against its equations (5), (7) and (9): pulls, nearest centers, hysteresis, newcomers, and who is away."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_client.protocol.task import F64, ClientId, Fit, Probe
from tests.support.methods import build, world
from tests.support.plain_loops import (
    RATE,
    SAME,
    PlainMomentum,
    best_partition,
    fit,
    losses,
    mean,
    seeds,
    squared,
)
from tests.support.softmax_program import CLASSES
from tests.support.uneven_fleets import away, uneven_fleet

PLACES = {"all": slice(None), "classifier": slice(None), "*weight": slice(0, -CLASSES)}


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    ("settings", "k"),
    [
        ({"lam": 0.05}, 3),
        ({"lam": 0.4, "hysteresis": 0.4, "server-momentum": 0.5}, 3),
        ({"lam": 2.0, "weights": "samples", "fraction-train": 0.5}, 3),
        ({"lam": 0.05, "fraction-train": 0.7, "hysteresis": 0.2, "representation": "*weight"}, 2),
        ({"lam": 0.05, "fraction-train": 0.5}, 12),
        ({"lam": 0.05, "representation": "delta"}, 3),
    ],
)
def test_fesem_gives_a_device_to_the_nearest_center_and_pulls_it_there(  # noqa: C901 - one round of the method, from its exchanges to its state
    settings: dict[str, float | str], k: int, seed: int
) -> None:
    local = uneven_fleet(3, seed)
    data = {c: d.train for c, d in local.items()}
    n = {c: float(len(d)) for c, d in data.items()}
    fleet = world(build("fesem", settings, k=k), local, seed=seed)
    start, centers = fleet.state.centers[0].copy(), fleet.state.centers.copy()
    coasting = [PlainMomentum(float(settings.get("server-momentum", 0))) for _ in range(k)]
    lam, h, own = float(settings["lam"]), float(settings.get("hysteresis", 0)), dict[ClientId, int]()
    mean_n = sum(n.values()) / len(n)

    def point(model: F64) -> F64:
        kind = str(settings.get("representation", "classifier"))
        if kind != "delta":
            return np.asarray(model[PLACES[kind]])
        move = model - start
        return np.asarray(move / (np.linalg.norm(move) or 1.0))

    for number in range(1, 9):
        gone = away(number, data, seed)
        if number in (3, 6):  # devices at other centers, which are near each other: else none would move
            middle, own = centers.mean(axis=0), {c: (j + 1) % k for c, j in own.items()}
            centers = middle + 0.3 * (centers - middle)
            fleet.state = replace(fleet.state, centers=centers.copy(), assignment=dict(own))
        fleet.round(silent=gone)
        asked = fleet.exchanges[0]
        new = {c for c, task in asked.items() if isinstance(task, Probe)}
        assert new == ({c for c in asked if c not in own} if own else set())
        told, fits, chosen = seeds(fleet, 0), dict[ClientId, F64](), dict[ClientId, int]()
        for c, task in asked.items():
            if isinstance(task, Fit) and c not in gone:
                mu = min(2 * lam * mean_n / n[c], max(2 * lam, 1 / RATE)) if own else 0.0
                begun = centers[own[c]] if own else start
                fits[c] = fit(begun, data[c], told[c], mu=mu, anchor=begun)
            elif c not in gone:
                chosen[c] = int(np.argmin([losses(center, data[c]).mean() for center in centers]))
        if fits:
            points = np.stack([point(w) for w in fits.values()])
            if own:
                d2 = squared(points, np.stack([point(center) for center in centers]))
                for c, row in zip(fits, d2, strict=True):
                    best = int(row.argmin())
                    chosen[c] = best if np.sqrt(row[best]) < (1 - h) * np.sqrt(row[own[c]]) else own[c]
            else:
                a = np.array([n[c] for c in fits]) if settings.get("weights") == "samples" else np.ones(len(fits))
                chosen = dict(zip(fits, best_partition(points, a, k).tolist(), strict=True))
            for j, old in enumerate(centers.copy()):
                if mine := [c for c in fits if chosen[c] == j]:
                    a_j = [n[c] if settings.get("weights") == "samples" else 1.0 for c in mine]
                    centers[j] = coasting[j].move(old, mean([fits[c] for c in mine], a_j))
        own |= chosen
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        assert fleet.state.assignment == own
