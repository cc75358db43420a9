"""The three `batch-norm` options against plain loops: how running statistics are averaged, and whose a device uses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from edge_client.protocol.task import ClientId, Fit, Flat, Probe
from tests.support.normed_network import SAME, P, fold, normed_fit, normed_losses, normed_world, of_samples
from tests.support.plain_loops import BATCH, PlainMomentum
from tests.support.uneven_fleets import away, uneven_fleet


def most_common(own: dict[ClientId, int]) -> int:
    return Counter(sorted(own.values())).most_common(1)[0][0] if own else 0


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("option", ["average", "local", "batch"])
@pytest.mark.parametrize(
    ("case", "k", "beta"),
    [
        ("fedavg", 1, 0.5),
        ("feddist eps=0.6", 1, 0.0),
        ("ifca start=redraw", 2, 0.5),
        ("hypcluster start=redraw", 2, 0.0),
    ],
)
def test_statistics_are_averaged_by_samples_and_each_option_says_whose_a_device_uses(  # noqa: C901 - one round of the method, from its exchanges to its state
    case: str, k: int, beta: float, option: str, seed: int
) -> None:
    local = uneven_fleet(2, seed)
    data, held_out = ({c: getattr(d, part) for c, d in local.items()} for part in ("train", "test"))
    n = {c: float(len(d)) for c, d in data.items()}
    settings: dict[str, float | str] = {"batch-norm": option, "fraction-train": 0.7, "server-momentum": beta}
    fleet = normed_world(case, settings, local, k=k, seed=seed)
    centers, kept, own = fleet.state.centers.copy(), dict[ClientId, Flat](), dict[ClientId, int]()
    coasting, step = [PlainMomentum(beta) for _ in range(k)], 0.6 if "feddist" in case else 1.0

    def seen(model: Flat, who: ClientId, batch: int) -> Flat:
        if option == "batch":
            return of_samples(model, data[who], batch)
        return np.concatenate([model[:P], kept[who][P:]]) if option == "local" and who in kept else model

    def begun(center: Flat, who: ClientId) -> Flat:
        return seen(center, who, BATCH) if option == "local" else center

    for number in range(1, 6):
        gone = away(number, data, seed)
        fleet.round(silent=gone, last=False)
        at, chosen = 0, dict.fromkeys(data, 0)
        if k > 1:
            at, chosen = 1, {}
            for c, task in fleet.exchanges[0].items():
                if c not in gone and isinstance(task, Probe):
                    views = [seen(center, c, BATCH) for center in centers]
                    chosen[c] = int(np.argmin([normed_losses(v, data[c], v).mean() for v in views]))
            own |= chosen
        fits = {
            c: normed_fit(begun(centers[chosen[c]], c), data[c], task)
            for c, task in fleet.exchanges[at].items()
            if isinstance(task, Fit) and c not in gone
        }
        kept |= fits
        for j in range(k):
            mine = {c: row for c, row in fits.items() if chosen[c] == j}
            if mine:
                samples = [n[c] for c in mine]
                new = fold(mine, samples if case.startswith(("fedavg", "hyp")) else [1.0] * len(mine), samples)
                new = (1 - step) * centers[j] + step * new
                centers[j] = np.concatenate([coasting[j].move(centers[j][:P], new[:P]), new[P:]])
        np.testing.assert_allclose(fleet.state.centers, centers, rtol=0, atol=SAME)
        for c, task in [pair for exchange in fleet.exchanges[1:] for pair in exchange.items()]:
            if isinstance(task, Fit) or task.split == "train" or len(task.models) > 1:
                continue
            found = fleet.devices.answer(c, replace(task, want=frozenset({"loss"}))).losses
            view = seen(centers[own.get(c, most_common(own))], c, 64)
            assert found is not None
            np.testing.assert_allclose(found, [normed_losses(view, held_out[c], view).mean()], rtol=1e-9)
