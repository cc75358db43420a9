from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from coordinator.rounds.metrics import ari
from coordinator.strategies.base import Exchange, State, drive
from coordinator.strategies.ifca import IFCA, HypCluster
from edge_client.protocol.task import Array, Fit, Probe, Reply
from tests.support.softmax_gradient import loss
from tests.support.softmax_program import devices_of, grouped_fleet, play, schema, start_of

LOCAL = grouped_fleet(9, 3)
FLEET = {c: len(local.train) for c, local in LOCAL.items()}
TRUTH = [i % 3 for i in range(9)]
FAR = np.repeat([[0.0], [10.0], [20.0]], schema().size, axis=1)


def answer(method: IFCA, losses: Mapping[str, Array], models: Mapping[str, Array], *, n: int = 10) -> State:
    """One round from the centers 0, 10 and 20, in which device c tells losses[c] and answers models[c]."""

    def ask(exchange: Exchange) -> dict[str, Reply]:
        if all(isinstance(task, Probe) for task in exchange.values()):
            return {c: Reply(n=n, losses=v) for c, v in losses.items()}
        assert set(exchange) == set(losses)
        return {c: Reply(n=n + 20 * (c == "b"), update=v) for c, v in models.items()}

    state = State(centers=FAR, assignment={"away": 2})
    return drive(method.round(state, schema(), dict.fromkeys("abcd", 10), np.random.default_rng(0)), ask)


def test_every_device_trains_the_center_with_the_least_loss_on_all_of_its_training_data() -> None:
    devices, method = devices_of(LOCAL), IFCA(clusters=3, start="redraw", batch_size=8)
    state = method.begin(start_of(), schema(), FLEET, np.random.default_rng(0))
    fits: dict[str, Fit] = {}

    def ask(exchange: Exchange) -> dict[str, Reply]:
        fits.update({c: task for c, task in exchange.items() if isinstance(task, Fit)})
        return {c: devices.answer(c, task) for c, task in exchange.items()}

    after = drive(method.round(state, schema(), FLEET, np.random.default_rng(1)), ask)
    best = {c: int(np.argmin([loss(w, local.train) for w in state.centers])) for c, local in LOCAL.items()}
    assert after.assignment == best
    assert all((np.asarray(fits[c].start) == state.centers[k]).all() for c, k in best.items())


def test_ifca_takes_the_plain_mean_and_hypcluster_that_by_samples() -> None:
    losses = {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([1.0, 2.0, 3.0]), "c": np.array([3.0, 1.0, 2.0])}
    models = {"a": FAR[0] + 1, "b": FAR[0] + 2, "c": FAR[1] + 3}
    for method, mean in ((IFCA(clusters=3), 1.5), (HypCluster(clusters=3), 1.75)):
        after = answer(method, losses, models)
        np.testing.assert_allclose(after.centers[:, 0], [mean, 13.0, 20.0])  # nobody chose the third: it stays
        assert after.assignment == {"a": 0, "b": 0, "c": 1, "away": 2}


def test_who_tells_no_losses_is_not_asked_to_fit_and_who_does_not_fit_has_still_chosen() -> None:
    after = answer(IFCA(clusters=3), {"a": np.array([1.0, 2.0, 3.0]), "b": np.array([2.0, 2.5, 1.0])}, {"b": FAR[1]})
    np.testing.assert_array_equal(after.centers[:, 0], [0.0, 10.0, 10.0])
    assert after.assignment == {"a": 0, "b": 2, "away": 2}


def test_known_groups_are_recovered_and_kept() -> None:
    method = IFCA(clusters=3, local_steps=10, batch_size=8)
    first, last = (play(method, LOCAL, rounds=r).assignment for r in (3, 6))
    assert ari(TRUTH, [last[c] for c in sorted(LOCAL)]) == 1.0
    assert first == last


def test_a_device_that_never_chose_is_served_the_most_common_center() -> None:
    method, state = IFCA(clusters=3), State(centers=FAR, assignment={"a": 1, "b": 1, "c": 0})
    assert [np.asarray(method.predictor(state, who)[0][1])[0] for who in (None, "new", "c")] == [10.0, 10.0, 0.0]
