from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from coordinator.rounds.metrics import ari
from coordinator.strategies.base import Exchange, Replies, State, drive
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.fesem import FeSEM
from edge_client.errors import ConfigError
from edge_client.protocol.task import Fit, Flat, Probe, Reply, Schema, TensorSpec
from tests.support.softmax_program import devices_of, grouped_fleet, play, schema, start_of

LOCAL = grouped_fleet(9, 3)
FLEET = {c: len(local.train) for c, local in LOCAL.items()}
TRUTH = [i % 3 for i in range(9)]
METHOD = FeSEM(clusters=3, local_steps=10, batch_size=8)


def answer(state: State, models: dict[str, Flat], method: FeSEM = METHOD) -> State:
    """One round in which device c answers models[c]."""
    replies = {c: Reply(n=10, update=model) for c, model in models.items()}
    round_ = method.round(state, schema(), dict.fromkeys(models, 10), np.random.default_rng(0))
    return drive(round_, lambda _: replies)


def settled(centers: np.ndarray, assignment: dict[str, int]) -> State:
    return State(centers=centers, assignment=assignment, extra={"start": start_of()})


def asked(state: State, method: FeSEM = METHOD) -> dict[str, Fit]:
    exchange = next(method.round(state, schema(), FLEET, np.random.default_rng(0)))
    return {c: task for c, task in exchange.items() if isinstance(task, Fit)}


@pytest.mark.parametrize("representation", ["classifier", "all", "delta", "projection"])
@pytest.mark.parametrize("e_step", ["nearest", "k-means"])
def test_known_groups_are_recovered_and_kept(representation: str, e_step: str) -> None:
    method = FeSEM(clusters=3, local_steps=10, batch_size=8, representation=representation, e_step=e_step)
    first, last = (play(method, LOCAL, rounds=r).assignment for r in (1, 4))
    assert ari(TRUTH, [last[c] for c in sorted(LOCAL)]) == 1.0
    assert first == last


def test_a_tiny_device_is_pulled_no_more_than_to_its_center_and_stops_nobody() -> None:
    fleet = {"big": 1_000, "tiny": 1}  # mu of tiny would be 2 * 0.05 * 500.5 / 1 = 50.05; learning rate 0.1
    at = {"big": 0, "tiny": 1}
    tasks = next(METHOD.round(settled(np.zeros((3, schema().size)), at), schema(), fleet, np.random.default_rng(0)))
    assert [task.mu for _, task in sorted(tasks.items()) if isinstance(task, Fit)] == [0.1 * 500.5 / 1_000, 10.0]


def test_a_device_that_appears_later_tells_its_losses_beside_the_others_fits_then_begins_at_the_best_center() -> None:
    state = play(METHOD, LOCAL, rounds=2, silent=["d08"])
    assert "d08" not in state.assignment
    round_ = METHOD.round(state, schema(), FLEET, np.random.default_rng(0))
    exchange = next(round_)
    probe = exchange["d08"]
    assert isinstance(probe, Probe)
    assert (probe.want, probe.split) == (frozenset({"loss"}), "train")
    np.testing.assert_array_equal(np.stack([np.asarray(model) for model in probe.models]), state.centers)
    assert [c for c, task in exchange.items() if isinstance(task, Fit)] == sorted(set(FLEET) - {"d08"})
    told = {f"d{i:02}": Reply(n=40, update=state.centers[i]) for i in range(3)}
    with pytest.raises(StopIteration) as ended:
        round_.send({**told, "d08": Reply(n=40, losses=np.array([2.0, np.nan, 1.0]))})
    after = ended.value.value
    assert after.assignment == {**state.assignment, "d08": 2}
    task = asked(after)["d08"]
    np.testing.assert_array_equal(task.start, after.centers[2])
    np.testing.assert_array_equal(task.anchor, after.centers[2])
    assert task.mu > 0
    assert task.center == 2


def test_a_newcomer_that_tells_no_losses_is_asked_again_and_nothing_waits_for_it_alone() -> None:
    state = play(METHOD, LOCAL, rounds=2, silent=["d08"])
    exchanges = []

    def answer(exchange: Exchange) -> Replies:
        exchanges.append(sorted(exchange))
        return {}

    assert drive(METHOD.round(state, schema(), FLEET, np.random.default_rng(0)), answer) is state
    assert exchanges == [sorted(FLEET)]


def test_with_one_center_a_newcomer_begins_there_and_is_asked_nothing_else() -> None:
    one = FeSEM(clusters=1, local_steps=4, batch_size=8)
    state = play(one, LOCAL, rounds=2, silent=["d08"])
    late = asked(state, one)["d08"]
    np.testing.assert_array_equal(late.start, state.centers[0])
    assert late.mu > 0


@pytest.mark.parametrize("e_step", ["nearest", "k-means"])
def test_devices_whose_first_round_is_a_late_one_find_their_group(e_step: str) -> None:
    """A model from the common start would be nearest to the center that has moved least, whatever its data."""
    method = FeSEM(clusters=3, e_step=e_step, local_steps=5, batch_size=8)
    late = ["d06", "d07", "d08"]
    devices = devices_of(LOCAL)
    state = play(method, {c: local for c, local in LOCAL.items() if c not in late}, rounds=20)
    for _ in range(2):
        round_ = method.round(state, schema(), FLEET, np.random.default_rng(0))
        state = drive(round_, lambda exchange: {c: devices.answer(c, task) for c, task in exchange.items()})
    assert ari(TRUTH, [state.assignment[c] for c in sorted(LOCAL)]) == 1.0


def test_a_device_without_a_center_is_served_the_most_common_one() -> None:
    state = settled(np.arange(3.0)[:, None] * np.ones(schema().size), {"a": 1, "b": 1, "c": 0})
    assert [np.asarray(METHOD.predictor(state, who)[0][1])[0] for who in (None, "new", "c")] == [1.0, 1.0, 0.0]


def test_the_classifier_alone_decides_unless_all_parameters_are_asked_for() -> None:
    two = Schema(
        (TensorSpec(name="body", role="p", shape=(8,)), TensorSpec(name="head", role="p", shape=(2,))), ("head",)
    )
    state = State(centers=np.repeat([[0.0], [1.0]], 10, axis=1), assignment={"a": 0}, extra={"start": np.zeros(10)})
    update = np.array([0.0] * 8 + [1.0] * 2)  # the body lies with the first center, the head with the second
    for kind, expected in (("classifier", 1), ("all", 0)):
        round_ = FeSEM(clusters=2, representation=kind).round(state, two, {"a": 10}, np.random.default_rng(0))
        assert drive(round_, lambda _: {"a": Reply(n=10, update=update)}).assignment == {"a": expected}


@pytest.mark.parametrize("e_step", ["nearest", "k-means"])
def test_with_hysteresis_a_device_moves_only_when_it_gains_enough(e_step: str) -> None:
    far = np.zeros((2, schema().size))
    far[1] = 10.0
    models = {c: far[0] + at for c, at in {"a": 5.5, "b": 9.0, "c": 0.0, "d": 0.0, "e": 10.0, "f": 11.0}.items()}
    before = settled(far, {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1, "f": 1})
    for h, of_a in ((0.0, 1), (0.5, 0)):  # a is nearer to the second center, but not by half
        after = answer(before, models, FeSEM(clusters=2, hysteresis=h, e_step=e_step))
        assert after.assignment == {"a": of_a, "b": 1, "c": 0, "d": 0, "e": 1, "f": 1}


def test_everybody_asked_needs_no_memory() -> None:
    method = FeSEM(clusters=3, e_step="k-means", local_steps=4, batch_size=8)
    assert set(play(method, LOCAL).extra) == {"start"}


def test_buffers_are_averaged_by_samples_however_devices_count() -> None:
    buffered = schema(buffered=True)
    fleet = {"a": 10, "b": 30}
    method = FeSEM(clusters=1, lam=0.0)
    state = method.begin(start_of(buffered=True), buffered, fleet, np.random.default_rng(0))
    replies = {c: Reply(n=n, update=np.full(buffered.size, float(n))) for c, n in fleet.items()}
    center = drive(method.round(state, buffered, fleet, np.random.default_rng(0)), lambda _: replies).centers[0]
    np.testing.assert_allclose(center[: buffered.n_params], 20.0)
    np.testing.assert_allclose(center[buffered.n_params :], 25.0)


def test_more_centers_than_a_device_can_compare_are_refused_where_devices_choose_among_them() -> None:
    assert FeSEM(17).clusters == 17  # the server compares
    chosen_by_devices: list[dict[str, Any]] = [{"start": "loss"}, {"server": ServerOptions(secure="updates")}]
    for settings in chosen_by_devices:
        assert FeSEM(16, **settings).clusters == 16
        with pytest.raises(ConfigError, match="clusters is 17") as refused:
            FeSEM(17, **settings)
        assert "at most 16" in refused.value.hint
