"""A run is rounds of one method over one fleet; a round is the method's exchanges, then one of evaluation.

A round is a generator of exchanges; its driver (server, simulation or replay) sends them and returns the replies.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index

import numpy as np

from coordinator.rounds.label_counting import count_labels
from coordinator.rounds.metrics import (
    CLASSES,
    CenterReport,
    RoundReport,
    Scoring,
    make_center_report,
    make_report,
    other_scores,
)
from coordinator.rounds.privacy_accounting import count_releases
from coordinator.rounds.sealed_evaluation import sealed_evaluation
from coordinator.rounds.sealed_round import is_sealed, sealed_round
from coordinator.strategies.base import Exchange, Fleet, PartOfCohort, Replies, Round, State, Strategy, relay
from coordinator.strategies.common.assignment import told_assignment
from coordinator.strategies.common.label_totals import label_totals_of
from coordinator.strategies.common.momentum import with_momentum
from coordinator.strategies.common.representation import check_compared
from coordinator.strategies.common.sampling import sample_cohort
from coordinator.strategies.common.setting_checks import check_range
from coordinator.strategies.numbered_fleet import NumberedAssignment, used_centers
from edge_client.errors import UsageError
from edge_client.protocol.task import F64, MAX_MODELS, Array, ClientId, Fit, Flat, OwnModel, Probe, Reply, Schema
from edge_client.users_code import place_of

TASKS_HINT = "yield a dict of tasks by device: {who: self.fit(start=state.centers[0], seed=0) for who in sorted(fleet)}"
PAIR = 2  # a weight and a model
INITIAL_ROUND = 0  # the "round" of Strategy.begin; rounds count from 1


def round_rng(seed: int, round: int) -> np.random.Generator:  # noqa: A002 - the protocol's word
    """The random generator of one round: the same in a replay, independent of every other round's."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, round])))


def first_state(strategy: Strategy, model: Flat, schema: Schema, fleet: Fleet, seed: int) -> State:
    """The state before the first round, from one common model [schema.size].

    Raises UsageError for what is none, ConfigError for a model that does not suit the method.
    """
    check_compared(getattr(strategy, "representation", None), schema)
    state = strategy.begin(model, schema, fleet, round_rng(seed, INITIAL_ROUND))
    return _plain_state(f"{type(strategy).__name__}.begin", state, schema)


@dataclass(frozen=True, kw_only=True)
class EvaluationPlan:
    """Which rounds end with an evaluation, and on which share of the fleet.

    The last round evaluates on all devices, or on the share `last` of them.
    """

    every: int = 1
    fraction: float = 1.0
    last: float = 1.0

    def __post_init__(self) -> None:
        check_range("evaluate-every", self.every, low=1)
        check_range("fraction-evaluate", self.fraction, low=1e-9, high=1.0)
        check_range("last", self.last, low=1e-9, high=1.0)

    def cohort(self, fleet: Fleet, rng: np.random.Generator, *, round: int, of: int) -> list[ClientId]:  # noqa: A002 - the protocol's word
        """The devices that evaluate after round `round` of `of`, sorted; rounds count from 1. `rng` is not advanced."""
        if round == of:
            return sample_cohort(fleet, self.last, rng.spawn(1)[0])
        return [] if round % self.every else sample_cohort(fleet, self.fraction, rng.spawn(1)[0])

    def smallest_share(self, rounds: int) -> float:
        """The smallest share of the fleet that a test of so many rounds asks."""
        return min(self.last, self.fraction) if self.every < rounds else self.last


EVERY_ROUND = EvaluationPlan()


def run_round(  # noqa: PLR0913 - a round has these
    strategy: Strategy,
    state: State,
    schema: Schema,
    fleet: Fleet,
    rng: np.random.Generator,
    *,
    batch: int,
    evaluation: EvaluationPlan = EVERY_ROUND,
    scoring: Scoring = CLASSES,
    round: int = 1,  # noqa: A002 - the protocol's word
    of: int = 1,
) -> Generator[Exchange, Replies, tuple[State, RoundReport]]:
    """The strategy's exchanges, then devices evaluate what they would be served, in batches of `batch` samples.

    The devices that `evaluation` samples depend on the round's seed alone: they are the same for every method, and
    training draws the same numbers with and without evaluation. A round without evaluation has no such exchange.
    """
    cohort = evaluation.cohort(fleet, rng, round=round, of=of)
    training = (
        sealed_round(strategy, state, schema, fleet, rng)
        if is_sealed(strategy)
        else strategy.round(state, schema, fleet, rng)
    )
    exchanges = with_momentum(strategy, state, schema, _checked(strategy, state, schema, fleet, training))
    exchanges = count_labels(strategy, state, exchanges)
    after = yield from count_releases(strategy, state, exchanges)
    if is_sealed(strategy):
        # The same centers again would have the same answers: two sums of them tell those of a device that one lacks.
        # What an evaluation sums are confusion matrices; where targets are no classes, each device would refuse it.
        asked = cohort if "confusion" in scoring.want and (after.centers != state.centers).any() else []
        return after, (yield from sealed_evaluation(strategy, after, fleet, asked, batch=batch, last=round == of))
    report = yield from evaluate_round(
        strategy, after, schema, cohort, batch=batch, last=round == of, scoring=scoring, fleet=fleet
    )
    return after, report


def evaluate_round(  # noqa: PLR0913 - an evaluation has these
    strategy: Strategy,
    after: State,
    schema: Schema,
    cohort: Sequence[ClientId],
    *,
    batch: int,
    last: bool,
    scoring: Scoring = CLASSES,
    fleet: Fleet | None = None,
) -> Generator[Exchange, Replies, RoundReport]:
    """The devices of `cohort` evaluate what they would be served; after the `last` round also the centers as such.

    `fleet`: all devices, which the report counts on a single center where the method assigns none.
    """
    served = {
        c: serving_probe(strategy, after, c, batch=batch, want=scoring.want, own_loss=scoring.signed) for c in cohort
    }
    asking = served if fleet is None else PartOfCohort(served, of=len(fleet))
    replies = {c: r for c, r in sorted((yield asking).items()) if isinstance(r, Reply)} if served else {}
    matrices = {c: r.confusion[0] for c, r in replies.items() if r.confusion is not None}
    report = make_report(
        matrices,
        after.assignment if fleet is None else told_assignment(strategy, after, fleet),
        n_centers=len(after.centers),
        losses={c: _mean_loss(r.losses, served[c].prior) for c, r in replies.items() if r.losses is not None},
        counted_labels={c: _labels(r)[0] for c, r in replies.items() if r.positions is not None and c not in matrices},
        samples={c: r.n for c, r in replies.items()},
        signed=scoring.signed,
    )
    report = replace(report, scores=other_scores(replies, scoring))
    if last and (counts := scoring.want & {"confusion", "positions"}):
        want = counts - {"positions"} if "confusion" in counts else counts
        report = replace(report, centers=(yield from _measure_centers(strategy, after, schema, cohort, batch, want)))
    return report


def _mean_loss(losses: F64, prior: Sequence[float] | None) -> float:
    """The loss of one model, or the mean of those of a mixture by their shares."""
    return float(losses[0] if prior is None else np.average(losses, weights=prior))


def _labels(reply: Reply) -> list[tuple[float, float]]:
    """Of each model: how many labels the device has, and how many of them are right."""
    if reply.confusion is not None:
        return [(float(matrix.sum()), float(np.trace(matrix))) for matrix in reply.confusion]
    return [] if reply.positions is None else [(float(n), float(right)) for n, right, _ in reply.positions]


def _checked(strategy: Strategy, before: State, schema: Schema, fleet: Fleet, exchanges: object) -> Round:
    """The exchanges of a round, which ends with a state for this model and fleet. Raises UsageError for another end."""
    name = type(strategy).__name__
    if not isinstance(exchanges, Generator):
        hint = "yield tasks by device, receive replies by device, and return the next state"
        raise UsageError(f"{name}.round gives {type(exchanges).__name__}, not a generator", hint=hint)
    after = yield from _checked_exchanges(name, schema, exchanges)
    after = _plain_state(f"{name}.round", after, schema)
    _check_names(f"{name}.round", after.assignment, before.assignment, fleet)
    if wrong := [k for k, center in enumerate(after.centers) if not np.isfinite(center).all()]:
        hint = "look at what `round` computes: a mean over no replies, or too high a learning rate, gives NaN"
        raise UsageError(f"{name}.round returned NaN or infinity in center {wrong[0]}", hint=hint)
    return after


def _plain_state(made_by: str, after: object, schema: Schema) -> State:
    """The state, with arrays and whole numbers of Python. Raises UsageError for what is no state of this model."""
    if not isinstance(after, State):
        hint = "return the next State, as replace(state, centers=...)"
        raise UsageError(f"{made_by} returned {type(after).__name__}", hint=hint)
    hint = f"give an array of [number of centers, {schema.size}]"
    if not isinstance(after.centers, np.ndarray):
        raise UsageError(f"{made_by} returned centers of {type(after.centers).__name__}", hint=hint)
    if after.centers.ndim != 2 or after.centers.shape[1] != schema.size or not len(after.centers):  # noqa: PLR2004
        raise UsageError(f"{made_by} returned centers of shape {list(after.centers.shape)}", hint=hint)
    if after.centers.dtype.kind != "f":
        raise UsageError(f"{made_by} returned centers of {after.centers.dtype}", hint="centers.astype(np.float32)")
    extra = {name: _plain_array(made_by, name, value) for name, value in after.extra.items()}
    assignment = _plain_assignment(made_by, after.assignment)
    if strange := used_centers(assignment) - {*range(len(after.centers))}:
        told = f"{made_by} assigns a device to center {next(iter(strange))!r}"
        raise UsageError(told, hint=f"there are {len(after.centers)}, from 0 on")
    return replace(after, assignment=assignment, extra=extra)


def _plain_assignment(made_by: str, given: object) -> Mapping[ClientId, int]:
    """Device -> the number of its center, also where numpy or torch counted. Raises UsageError for another thing."""
    if isinstance(given, NumberedAssignment):
        return given
    hint = "give a dict {who: number of its center}, by the devices of `fleet`, as {'device-00': 0}"
    if not isinstance(given, Mapping):
        raise UsageError(f"{made_by} returned an assignment of {type(given).__name__}", hint=hint)
    plain = {}
    for who, center in given.items():
        if not isinstance(who, str):
            raise UsageError(f"{made_by} assigns {who!r}, which is no name of a device", hint=hint)
        try:
            plain[who] = index(center)
        except TypeError:
            raise UsageError(f"{made_by} assigns {who} to {center!r:.80}", hint=f"{hint}: a whole number") from None
    return plain


def _check_names(made_by: str, after: Mapping[ClientId, int], before: Mapping[ClientId, int], fleet: Fleet) -> None:
    """Raise UsageError for a device that is neither in the fleet nor was there before, which keeps its center."""
    if isinstance(after, NumberedAssignment):
        return
    new = [who for who in after if who not in before]
    if strange := set(new) - {*fleet} if new else None:
        hint = f"use the names of `fleet`, as {next(iter(fleet), '')!r}"
        raise UsageError(f"{made_by} assigns {min(strange)!r}, which is no device of the fleet", hint=hint)


def _plain_array(made_by: str, name: str, value: object) -> Array:
    """What a method keeps under a name of `extra`, as a checkpoint gives it back: an array of numbers."""
    try:
        array = np.asarray(value)
    except ValueError:  # rows of different lengths
        array = np.array(None)
    if array.dtype.kind not in "biuf":
        told = f"{made_by} keeps {type(value).__name__} that is no array of numbers in extra[{name!r}]"
        raise UsageError(told, hint="keep arrays of numbers, one under each name; for each device a row, in one order")
    return array


def _checked_exchanges(name: str, schema: Schema, exchanges: Round) -> Round:
    """The exchanges as they are. Raises UsageError for what is no dict of tasks by device, each of this model."""

    def checked(exchange: Exchange) -> Exchange:
        if not isinstance(exchange, Mapping):
            raise UsageError(f"{_line(name, exchanges)} yields {type(exchange).__name__}", hint=TASKS_HINT)
        tasks = exchange.items() if isinstance(exchange, dict) else ()
        if wrong := [(who, task) for who, task in tasks if not isinstance(task, (Fit, Probe))]:
            who, task = wrong[0]
            told = f"{_line(name, exchanges)} yields {type(task).__name__} for {who}"
            raise UsageError(told, hint=TASKS_HINT)
        misfits = ((who, v) for who, task in tasks for v in task.vectors if v.shape != (schema.size,))
        if misfit := next(misfits, None):
            told = f"{_line(name, exchanges)} gives {misfit[0]} a model of shape {list(misfit[1].shape)}"
            raise UsageError(told, hint=f"a model is one row of state.centers, of shape [{schema.size}]")
        return exchange

    return relay(exchanges, change=checked)


def _line(name: str, exchanges: Round) -> str:
    """Where a round waits, and whose it is."""
    frame = getattr(exchanges, "gi_frame", None)
    return f"{name}.round" if frame is None else f"{place_of(frame, frame.f_lineno)}: {name}.round"


def _measure_centers(
    strategy: Strategy, state: State, schema: Schema, cohort: Sequence[ClientId], batch: int, want: frozenset[str]
) -> Generator[Exchange, Replies, CenterReport | None]:
    """Devices evaluate their centers as they are exported; None where each is served just its center."""
    members = {c: center_members(state, c) for c in cohort}
    served = {c: serving_probe(strategy, state, c, batch=batch) for c in cohort}
    if all(_serves_center(served[c], members[c], schema) for c in cohort):
        return None
    tasks = {
        c: Probe(models=[state.centers[k] for k in ks], want=want, split="test", batch=batch, seed=0)
        for c, ks in members.items()
        if 0 < len(ks) <= MAX_MODELS
    }
    replies = (yield PartOfCohort(tasks, of=len(cohort))) if tasks else {}
    found = {
        (k, c): counted
        for c, reply in replies.items()
        if (labels := _labels(reply))
        for k, counted in zip(members[c], labels, strict=True)
    }
    return make_center_report(found, n_centers=len(state.centers))


def center_members(state: State, who: ClientId) -> list[int]:
    """The centers that a device belongs to: its own, or none; all of them where no device is assigned."""
    if not state.assignment:
        return list(range(len(state.centers)))
    return [state.assignment[who]] if who in state.assignment else []


def _serves_center(task: Probe, centers: Sequence[int], schema: Schema) -> bool:
    """Whether a task evaluates one center as it is exported, with its own statistics and without a label prior."""
    if len(task.models) != 1 or isinstance(task.models[0], OwnModel) or len(centers) > 1:
        return False
    sent = task.buffers == "sent" or schema.size == schema.n_params
    return sent and all(row is None for row in task.label_totals or ())


def serving_probe(
    strategy: Strategy,
    state: State,
    who: ClientId,
    *,
    batch: int,
    want: frozenset[str] = CLASSES.want,
    own_loss: bool = False,
) -> Probe:
    """The scores of a device's own predictor on its held-out samples, and its loss where it is one model.

    A loss of the user's own is asked for of each model of a mixture: other scores may mean nothing there.
    """
    mixture = strategy.predictor(state, who)
    if not isinstance(mixture, Sequence) or any(not isinstance(m, Sequence) or len(m) != PAIR for m in mixture):
        hint = "return pairs of a weight and a model, as ((1.0, state.centers[0]),)"
        raise UsageError(f"{type(strategy).__name__}.predictor returned {type(mixture).__name__}", hint=hint)
    # The mean of a mixture's losses is not its loss; where nothing else is asked for, nothing else is known.
    wanted = want - {"loss"} or want if len(mixture) > 1 and not own_loss else want
    return Probe(
        models=[model for _, model in mixture],
        prior=[weight for weight, _ in mixture] if len(mixture) > 1 else None,
        want=wanted,
        split="test",
        batch=batch,
        seed=0,
        label_totals=label_totals_of(state, [model for _, model in mixture]),
        **strategy.serving,
    )
