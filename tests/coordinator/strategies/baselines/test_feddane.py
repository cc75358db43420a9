from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from coordinator.strategies.base import Exchange, drive
from coordinator.strategies.baselines.feddane import FedDANE
from edge_client.protocol.task import Fit, Flat, Probe, Reply
from tests.support.softmax_gradient import gradient
from tests.support.softmax_program import grouped_fleet, play, schema, start_of

LOCAL = grouped_fleet(4, 2)
FLEET = {c: len(local.train) for c, local in LOCAL.items()}


def test_devices_descend_their_own_loss_with_the_fleets_gradient_put_in_for_their_own() -> None:
    lr, mu, w = 0.1, 0.5, start_of()
    n = np.array(list(FLEET.values()), dtype=np.float64)
    for _ in range(2):
        own = {c: gradient(w, local.train) for c, local in LOCAL.items()}
        g = n / n.sum() @ list(own.values())
        solved = []
        for c, local in LOCAL.items():
            v = w
            for _ in range(3):
                v = v - lr * (gradient(v, local.train) + (g - own[c]) + mu * (v - w))
            solved.append(v)
        w = n / n.sum() @ solved
    method = FedDANE(learning_rate=lr, mu=mu, local_steps=3, batch_size=1_000, momentum=0.0)
    np.testing.assert_allclose(play(method, LOCAL, rounds=2).centers[0], w, rtol=1e-11)


def exchanges(method: FedDANE, silent: Mapping[int, set[str]], seed: int = 0) -> tuple[list[Exchange], Flat]:
    """One round in which device i answers gradient i and model -i in every value; `silent`: by exchange."""
    state = method.begin(start_of(), schema(), FLEET, np.random.default_rng(0))
    seen: list[Exchange] = []

    def ask(exchange: Exchange) -> dict[str, Reply]:
        quiet = silent.get(len(seen), set())
        seen.append(exchange)
        size, replies = schema().size, {}
        for c, task in exchange.items():
            value = np.full(size, float(c[1:]))
            if c not in quiet:
                replies[c] = Reply(n=10, grad=value) if isinstance(task, Probe) else Reply(n=10, update=-value)
        return replies

    after = drive(method.round(state, schema(), FLEET, np.random.default_rng(seed)), ask)
    return seen, after.centers[0]


def test_who_does_not_tell_a_gradient_is_not_asked_to_fit_and_does_not_count() -> None:
    (_, fits), center = exchanges(FedDANE(mu=0.0), {0: {"d00"}})
    linear = {c: float(task.linear[0]) for c, task in fits.items() if isinstance(task, Fit) and task.linear is not None}
    assert linear == {"d01": 1.0, "d02": 0.0, "d03": -1.0}  # their mean is 2
    np.testing.assert_allclose(center, -2.0)


@pytest.mark.parametrize("silent", [{0: set(FLEET)}, {1: set(FLEET)}])
def test_without_gradients_or_without_fits_the_center_stays(silent: dict[int, set[str]]) -> None:
    np.testing.assert_array_equal(exchanges(FedDANE(), silent)[1], start_of())


def test_the_gradient_and_the_fits_come_from_two_independent_cohorts_asked_at_once() -> None:
    sizes = set()
    for seed in range(20):
        (asked, fits), _ = exchanges(FedDANE(fraction_train=0.5, mu=0.0), {}, seed)
        assert len(fits) == 2
        assert set(fits) <= set(asked)
        sizes.add(len(asked))
        terms = {
            float(c[1:]) + task.linear[0]
            for c, task in fits.items()
            if isinstance(task, Fit) and task.linear is not None
        }
        assert len(terms) == 1  # everybody got the same g
        if len(asked) == 4:
            assert terms == {np.mean([float(c[1:]) for c in set(asked) - set(fits)])}  # and it is that of the others
    assert sizes == {2, 3, 4}  # the same two, one in common, none in common
