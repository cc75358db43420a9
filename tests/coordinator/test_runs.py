from __future__ import annotations

import numpy as np

from coordinator.runs import one_round, round_rng, served
from coordinator.strategies.base import Exchange, Mixture, Replies, Round, State, drive
from coordinator.strategies.fedavg import FedAvg
from edge_client.protocol.task import Flat, Probe
from tests.softmax import devices_of, grouped_fleet, start_of

DEVICES = devices_of(grouped_fleet(4, 2))
SCHEMA, FLEET = DEVICES.program.schema, DEVICES.fleet
METHOD = FedAvg(local_steps=3, batch_size=8)


def test_each_round_has_its_own_generator_and_a_replay_the_same_one() -> None:
    draws = [round_rng(seed, number).integers(2**53) for seed in (0, 1) for number in (0, 1, 2)]
    assert len(set(draws)) == 6
    assert draws[1] == round_rng(0, 1).integers(2**53)


def test_a_round_ends_with_everybody_testing_what_it_would_be_served() -> None:
    seen: list[Exchange] = []

    def ask(exchange: Exchange) -> Replies:
        seen.append(exchange)
        return {c: DEVICES.answer(c, task) for c, task in exchange.items()}

    state = METHOD.begin(start_of(), SCHEMA, FLEET, round_rng(0, 0))
    after, report = drive(one_round(METHOD, state, SCHEMA, FLEET, round_rng(0, 1), batch=8), ask)
    assert len(seen) == 2
    for task in seen[1].values():
        assert isinstance(task, Probe)
        assert (task.split, task.want, task.prior) == ("test", frozenset({"confusion"}), None)
        assert (task.models[0] == after.centers[0]).all()
    assert sorted(report.per_device) == sorted(FLEET)
    assert report.assignment == dict.fromkeys(FLEET, 0)


def test_devices_that_do_not_test_are_left_out_of_the_report() -> None:
    state = METHOD.begin(start_of(), SCHEMA, FLEET, round_rng(0, 0))
    _, report = drive(
        one_round(METHOD, state, SCHEMA, FLEET, round_rng(0, 1), batch=8),
        lambda exchange: {c: DEVICES.answer(c, t) for c, t in exchange.items() if c != "d00"},
    )
    assert "d00" not in report.per_device
    assert len(report.per_device) == 3


class Two:
    """Serves everybody a mixture."""

    def begin(self, model: Flat, *_: object) -> State:
        return State(centers=model[None])

    def round(self, *_: object) -> Round:
        raise NotImplementedError

    def predictor(self, state: State, who: str | None) -> Mixture:
        return ((0.25, state.centers[0]), (0.75, np.zeros_like(state.centers[0])))


def test_a_mixture_travels_with_its_weights() -> None:
    task = served(Two(), State(centers=start_of()[None]), "d00", batch=8)
    assert task.prior == [0.25, 0.75]
    assert DEVICES.answer("d00", task).confusion.shape[0] == 1  # type: ignore[union-attr]
