from __future__ import annotations

from functools import partial
from typing import ClassVar

import numpy as np
import pytest

from coordinator.rounds.metrics import Scoring
from coordinator.rounds.round import (
    EvaluationPlan,
    center_members,
    evaluate_round,
    round_rng,
    run_round,
    serving_probe,
)
from coordinator.strategies.base import Exchange, Mixture, Replies, Round, ServingOptions, State, drive
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.registry import METHODS
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.task import Fit, Flat, OwnModel, Probe, Reply
from tests.support.methods import build, world
from tests.support.softmax_program import devices_of, grouped_fleet, start_of

DEVICES = devices_of(grouped_fleet(4, 2))
SCHEMA, FLEET = DEVICES.program.schema, DEVICES.fleet
METHOD = FedAvg(local_steps=3, batch_size=8)
POSITIONS = Scoring(want=frozenset({"positions"}))
SAMPLED = FedAvg(local_steps=3, batch_size=8, fraction_train=0.5)


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
    after, report = drive(run_round(METHOD, state, SCHEMA, FLEET, round_rng(0, 1), batch=8), ask)
    assert len(seen) == 2
    for task in seen[1].values():
        assert isinstance(task, Probe)
        assert (task.split, task.want, task.prior) == ("test", frozenset({"confusion", "loss"}), None)
        assert (task.models[0] == after.centers[0]).all()
    assert sorted(report.per_device) == sorted(FLEET)
    assert report.assignment == dict.fromkeys(FLEET, 0)


def test_devices_that_do_not_test_are_left_out_of_the_report() -> None:
    state = METHOD.begin(start_of(), SCHEMA, FLEET, round_rng(0, 0))
    _, report = drive(
        run_round(METHOD, state, SCHEMA, FLEET, round_rng(0, 1), batch=8),
        lambda exchange: {c: DEVICES.answer(c, t) for c, t in exchange.items() if c != "d00"},
    )
    assert "d00" not in report.per_device
    assert len(report.per_device) == 3


class Two:
    """Serves everybody a mixture."""

    serving: ClassVar[ServingOptions] = {"buffers": "sent"}

    def begin(self, model: Flat, *_: object) -> State:
        return State(centers=model[None])

    def round(self, *_: object) -> Round:
        raise NotImplementedError

    def predictor(self, state: State, who: str | None) -> Mixture:
        return ((0.25, state.centers[0]), (0.75, np.zeros_like(state.centers[0])))


def test_a_mixture_travels_with_its_weights() -> None:
    task = serving_probe(Two(), State(centers=start_of()[None]), "d00", batch=8)
    assert task.prior == [0.25, 0.75]
    assert DEVICES.answer("d00", task).confusion.shape[0] == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("want", [{"loss"}, {"loss", "confusion"}])
def test_the_loss_of_a_mixture_is_the_mean_of_its_models_by_their_shares(want: set[str]) -> None:
    """It was that of the first model, or missing beside other scores, so that the default method had none."""
    state, told = State(centers=start_of()[None]), {"d00": np.array([1.0, 3.0]), "d01": np.array([2.0, 0.0])}
    scoring = Scoring(want=frozenset(want), signed=True)
    rounds = evaluate_round(Two(), state, SCHEMA, sorted(told), batch=8, last=False, scoring=scoring)
    report = drive(rounds, lambda exchange: {c: Reply(n=8, losses=told[c]) for c in exchange})
    assert report.loss_per_device == {"d00": 2.5, "d01": 0.5}


def test_right_labels_are_counted_where_no_device_has_a_matrix() -> None:
    """As of texts of many words."""
    state = State(centers=start_of()[None])
    report = drive(
        evaluate_round(METHOD, state, SCHEMA, ["d00"], batch=8, last=False, scoring=POSITIONS),
        lambda exchange: {c: Reply(n=10, positions=np.array([[40.0, 30.0, 0.5]])) for c in exchange},
    )
    assert report.accuracy.micro == 0.75


def run(method: FedAvg | FeSEM, evaluation: EvaluationPlan, of: int = 4) -> tuple[State, list[list[str]]]:
    """The last state, and for each round who was tested (the report's devices)."""
    tested, state = [], method.begin(start_of(), SCHEMA, FLEET, round_rng(0, 0))
    for number in range(1, of + 1):
        rng = round_rng(0, number)
        exchanges = run_round(method, state, SCHEMA, FLEET, rng, batch=8, evaluation=evaluation, round=number, of=of)
        state, report = drive(exchanges, lambda exchange: {c: DEVICES.answer(c, t) for c, t in exchange.items()})
        tested.append(sorted(report.per_device))
    return state, tested


def test_rounds_between_tests_have_none_and_the_last_one_always_has() -> None:
    everybody = sorted(FLEET)
    assert run(METHOD, EvaluationPlan())[1] == [everybody] * 4
    assert run(METHOD, EvaluationPlan(every=2), of=5)[1] == [[], everybody, [], everybody, everybody]
    assert run(METHOD, EvaluationPlan(every=100))[1] == [[], [], [], everybody]


def test_a_round_that_tests_nobody_has_one_exchange_less() -> None:
    state = METHOD.begin(start_of(), SCHEMA, FLEET, round_rng(0, 0))
    asked: list[Exchange] = []

    def ask(exchange: Exchange) -> Replies:
        asked.append(exchange)
        return {}

    never = EvaluationPlan(every=3)
    _, report = drive(
        run_round(METHOD, state, SCHEMA, FLEET, round_rng(0, 1), batch=8, evaluation=never, round=1, of=3), ask
    )
    assert len(asked) == 1
    assert report.accuracy.micro is None


def test_a_share_of_the_fleet_is_tested_another_in_each_round_and_in_the_last_everybody() -> None:
    _, tested = run(METHOD, EvaluationPlan(fraction=0.5), of=8)
    assert [len(who) for who in tested] == [2] * 7 + [4]
    assert len({tuple(who) for who in tested[:-1]}) > 1


def test_the_last_round_of_a_large_fleet_may_test_a_share_of_it() -> None:
    _, tested = run(METHOD, EvaluationPlan(fraction=0.5, last=0.5), of=4)
    assert [len(who) for who in tested] == [2] * 4


def test_whom_a_round_tests_is_the_same_for_every_method_and_changes_nothing_about_training() -> None:
    """With half of the fleet sampled, training draws from the round's generator; so would a careless evaluation."""
    (half, tested), (everybody, _) = run(SAMPLED, EvaluationPlan(fraction=0.5)), run(SAMPLED, EvaluationPlan())
    np.testing.assert_array_equal(half.centers, everybody.centers)
    assert run(FeSEM(clusters=2, local_steps=3, batch_size=8), EvaluationPlan(fraction=0.5))[1] == tested


@pytest.mark.parametrize(
    ("wrong", "key"),
    [
        ({"every": 0}, "evaluate-every"),
        ({"fraction": 0.0}, "fraction"),
        ({"fraction": 1.5}, "evaluate"),
        ({"last": 0.0}, "last"),
        ({"last": 1.5}, "last"),
    ],
)
def test_an_evaluation_that_would_never_take_place_is_refused(wrong: dict[str, float], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        EvaluationPlan(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_last_round_scores_the_centers_where_devices_are_served_other_models(method: str) -> None:
    """As they are exported: each center alone, on the held-out samples of each of its devices."""
    there = world(build(method), grouped_fleet(4, 2))
    there.round()
    report = there.round()
    served = {c: there.strategy.predictor(there.state, c) for c in there.fleet}
    if all(len(models) == 1 and not isinstance(models[0][1], OwnModel) for models in served.values()):
        assert report.centers is None
        return
    assert report.centers is not None
    for k, center in enumerate(there.state.centers):
        for who, found in report.centers.per_device[k].items():
            test = there.devices.local[who].test
            assert test is not None
            _, logits = there.devices.learner.evaluate([center], test, batch=64)
            assert found == pytest.approx(float((logits[0].argmax(axis=1) == test.y).mean()))
    assert sum(map(len, report.centers.per_device)) >= len(there.fleet)


def test_a_label_prior_is_not_part_of_an_exported_center() -> None:
    there = world(build("fedavg", {"label-prior": "device"}), grouped_fleet(4, 2))
    report = there.round()
    assert report.centers is not None
    assert sorted(report.centers.per_device[0]) == sorted(there.fleet)


def test_by_default_every_round_ends_with_an_evaluation_of_all_devices() -> None:
    assert EvaluationPlan() == EvaluationPlan(every=1, fraction=1.0, last=1.0)
    assert EvaluationPlan(fraction=1e-9, last=1e-9).cohort(FLEET, round_rng(0, 1), round=1, of=2) == [
        *EvaluationPlan(fraction=1e-9).cohort(FLEET, round_rng(0, 1), round=1, of=2)
    ]


class Ends:
    """A method whose round ends with what a test gives it."""

    serving: ClassVar[ServingOptions] = {"buffers": "sent"}

    def __init__(self, end: object) -> None:
        self.end = end

    def begin(self, model: Flat, *_: object) -> State:
        return State(centers=model[None])

    def round(self, *_: object) -> Round:
        if self.end == "no generator":
            return []  # type: ignore[return-value]
        return self._ended()

    def _ended(self) -> Round:
        yield {}
        return self.end  # type: ignore[return-value]

    def predictor(self, state: State, who: str | None) -> Mixture:
        return ((1.0, state.centers[0]),)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("no generator", "Ends.round gives list, not a generator"),
        (7, "Ends.round returned int"),
        (State(centers=np.zeros((1, SCHEMA.size + 1))), r"centers of shape \[1, 25\]"),
        (State(centers=np.zeros(SCHEMA.size)), r"centers of shape \[24\]"),
        (State(centers=np.stack([np.zeros(SCHEMA.size), np.full(SCHEMA.size, np.nan)])), "NaN or infinity in center 1"),
    ],
)
def test_a_method_of_the_users_own_that_ends_a_round_with_no_state_of_this_model_is_told_so(
    end: object, words: str
) -> None:
    method = Ends(end)
    state = method.begin(start_of())
    exchanges = run_round(method, state, SCHEMA, FLEET, round_rng(0, 1), batch=8)
    with pytest.raises(UsageError, match=words) as wrong:
        drive(exchanges, lambda _: {})
    assert wrong.value.hint


def _note(asked: list[Exchange], tasks: Exchange) -> Replies:
    asked.append(tasks)
    return {}


@pytest.mark.parametrize(
    "task",
    [
        Fit(start=np.zeros((1, SCHEMA.size)), steps=1, lr=0.1, batch=8, seed=0),
        Fit(start="own", init=np.zeros(SCHEMA.size + 1), steps=1, lr=0.1, batch=8, seed=0),
        Probe(models=[start_of(), np.zeros(3)], want=frozenset({"loss"}), batch=8, seed=0),
    ],
)
def test_a_task_with_a_model_of_another_shape_is_refused_before_a_device_is_asked(task: Fit | Probe) -> None:
    """Devices refuse it too, one by one: a method that goes on without replies would end where it began."""

    class Asks(Ends):
        def _ended(self) -> Round:
            yield {"d00": task}
            return self.end  # type: ignore[return-value]

    method, asked = Asks(State(centers=start_of()[None])), list[Exchange]()
    exchanges = run_round(method, method.begin(start_of()), SCHEMA, FLEET, round_rng(0, 1), batch=8)
    with pytest.raises(UsageError, match=r"test_round.py, line \d+, in _ended: Asks.round gives d00 a model of shape"):
        drive(exchanges, partial(_note, asked))
    assert not asked


def test_a_mixture_is_asked_for_no_loss_unless_nothing_else_is_known() -> None:
    """The mean of the losses of its models is not the loss of the mixture."""
    state = State(centers=start_of()[None])
    for want, asked in (({"loss", "confusion"}, {"confusion"}), ({"loss"}, {"loss"})):
        assert serving_probe(Two(), state, "d00", batch=8, want=frozenset(want)).want == asked
    own = serving_probe(Two(), state, "d00", batch=8, want=frozenset({"loss", "errors"}), own_loss=True)
    assert own.want == {"loss", "errors"}  # of logits and targets of 0 or 1 the errors mean nothing
    one = serving_probe(METHOD, state, "d00", batch=7, want=frozenset({"loss", "confusion"}))
    assert (one.want, one.prior, one.batch, one.seed, one.split) == (
        frozenset({"loss", "confusion"}),
        None,
        7,
        0,
        "test",
    )


def test_a_device_belongs_to_its_center_and_to_all_where_none_is_assigned() -> None:
    centers = np.zeros((3, 2))
    assert center_members(State(centers=centers), "a") == [0, 1, 2]
    assigned = State(centers=centers, assignment={"a": 2})
    assert (center_members(assigned, "a"), center_members(assigned, "b")) == ([2], [])


@pytest.mark.parametrize(("centers", "measured"), [(16, True), (17, False)])
def test_centers_that_no_device_is_assigned_to_are_measured_as_many_as_a_probe_carries(
    centers: int,
    measured: bool,  # noqa: FBT001 - a row
) -> None:
    method, asked = Ends(None), list[Exchange]()
    state = State(centers=np.repeat(start_of()[None], centers, axis=0))

    def ask(exchange: Exchange) -> Replies:
        asked.append(exchange)
        return {c: DEVICES.answer(c, t) for c, t in exchange.items()}

    report = drive(evaluate_round(method, state, SCHEMA, ["d00"], batch=8, last=True), ask)
    assert len(asked) == 1 + measured
    assert report.centers is not None
    assert [len(devices) for devices in report.centers.per_device] == [measured] * centers


def test_only_the_last_evaluation_measures_the_centers_as_such() -> None:
    state = State(centers=np.repeat(start_of()[None], 2, axis=0))
    for last in (False, True):
        report = drive(
            evaluate_round(Ends(None), state, SCHEMA, ["d00"], batch=8, last=last),
            lambda exchange: {c: DEVICES.answer(c, t) for c, t in exchange.items()},
        )
        assert (report.centers is not None) == last
