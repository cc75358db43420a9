"""FeSEM-MA against its formula, with every order of the hidden units looked at."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from edge_client.protocol.task import F64, ClientId, Fit, Flat, Probe, Reply
from tests.support.normed_network import HIDDEN, SAME, SCHEMA, fold, normed_fit, normed_world
from tests.support.plain_loops import RATE, best_partition, squared
from tests.support.uneven_fleets import away, uneven_fleet


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("representation", ["classifier", "all"])
@pytest.mark.parametrize("mixed", [False, True])
def test_fesem_ma_averages_units_in_the_order_that_is_nearest_to_the_center(
    seed: int,
    representation: str,
    mixed: bool,  # noqa: FBT001
) -> None:
    """Two of the devices send their units in another order."""
    local = uneven_fleet(2, seed, sizes=(17, 2, 40, 12, 25, 3))
    data, lam, k = {c: d.train for c, d in local.items()}, 0.2, 2
    n = {c: float(len(d)) for c, d in data.items()}
    settings: dict[str, float | str] = {"lam": lam, "representation": representation}
    fleet = normed_world("fesem-ma", settings, local, k=k, seed=seed)
    orders = {"d00": [2, 0, 3, 1], "d03": [3, 2, 1, 0]} if mixed else {}
    answer = fleet.devices.answer

    def shuffled(who: ClientId, task: Fit | Probe) -> Reply:
        reply = answer(who, task)
        known = reply.update is not None and who in orders
        return replace(reply, update=in_order(reply.update, orders[who])) if known else reply  # type: ignore[arg-type]

    fleet.devices.answer = shuffled  # type: ignore[method-assign]
    start, centers, own = fleet.state.centers[0].copy(), fleet.state.centers.copy(), dict[ClientId, int]()
    for number in range(1, 5):
        gone = away(number, data, seed)
        fleet.round(silent=gone, last=False)
        fits = {}
        for c, task in fleet.exchanges[0].items():
            if isinstance(task, Fit) and c not in gone:
                mu = min(2 * lam * sum(n.values()) / len(n) / n[c], 1 / RATE) if own else 0.0
                fits[c] = normed_fit(centers[own[c]] if own else start, data[c], task, mu=mu)
                fits[c] = in_order(fits[c], orders.get(c, range(HIDDEN)))
        if not fits:
            continue

        points = np.stack([_point(w, start, representation) for w in fits.values()])
        if own:
            old_points = np.stack([_point(center, start, representation) for center in centers])
            labels = squared(points, old_points).argmin(axis=1)
        else:
            labels = best_partition(points, np.ones(len(points)), k)
        chosen = dict(zip(fits, labels.tolist(), strict=True))
        for j, old in enumerate(centers.copy()):
            if mine := {c: nearest_order(fits[c], old) for c in fits if chosen[c] == j}:
                centers[j] = fold(mine, [1.0] * len(mine), [n[c] for c in mine])
        own |= chosen
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        assert fleet.state.assignment == own


def _point(model: Flat, start: Flat, representation: str) -> F64:
    """What is compared, with the units in the order of the start."""
    parts = SCHEMA.split(nearest_order(model, start))
    names = ["3.weight", "3.bias"] if representation == "classifier" else [n for n in parts if "running" not in n]
    return np.concatenate([parts[name].ravel() for name in names])


def in_order(model: Flat, order: Sequence[int]) -> Flat:
    """The same function, with hidden unit order[j] in place j."""
    parts = dict(SCHEMA.split(model))
    at = np.array(order)
    for name in parts:
        if name.startswith(("0.", "1.")):
            parts[name] = parts[name][at]
    parts["3.weight"] = parts["3.weight"][:, at]
    return SCHEMA.join(parts)


def nearest_order(model: Flat, to: Flat) -> Flat:
    """Of all orders of the hidden units the one with the least distance of incoming weights, bias and norm."""
    other = SCHEMA.split(to)

    def apart(order: Sequence[int]) -> float:
        mine = SCHEMA.split(in_order(model, order))
        return float(sum(((mine[x] - other[x]) ** 2).sum() for x in mine if x[0] in "01" and "running" not in x))

    return in_order(model, min(itertools.permutations(range(HIDDEN)), key=apart))
