"""Tries to learn of one device from sums that are right: cohorts that differ by it, known rounding, exact fractions.

The coordinator knows what it asked (each device's task with its seed, scale, models) and what `SealedSums` it was sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from coordinator.aggregation.packed_words import add_packed_into, read_upload
from coordinator.aggregation.summed_centers import cluster_sums
from coordinator.rounds.round import round_rng, run_round
from coordinator.rounds.secure_recovery import Secrets
from coordinator.strategies.base import Exchange, Replies, SealedSums, drive, learned
from coordinator.strategies.common.loss_starts import COUNTS_KEY
from coordinator.strategies.plans.sum_plan import SORTS
from coordinator.strategies.registry import Setting, make_method
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError
from edge_client.protocol.secure import keys
from edge_client.protocol.secure.device_sums import on_relay, on_vector
from edge_client.protocol.secure.masks import add_masks_into, pair_sign
from edge_client.protocol.secure.sum_messages import RevealedShares
from edge_client.protocol.summed_task import SCORE_LEVELS, SummedFit, SummedProbe, SumScale, Words
from edge_client.protocol.task import Array, Reply, Task
from edge_client.training import summed_work
from edge_client.training.learner import EngineLearner
from edge_client.training.skellam import secret_stream
from edge_client.training.summed import CHOICE_SLOT, TrainedChoice, evaluation_words
from tests.support.methods import MethodWorld, build, world
from tests.support.secure_cohort import SecureCohort, vector_of
from tests.support.softmax_program import CLASSES, FEATURES, SoftmaxEngine, grouped_fleet, program
from tests.support.sum_attacks import Step, single_points

VICTIM = "d01"
SETTINGS: Mapping[str, Setting] = {
    "local-steps": 5,
    "learning-rate": 0.1,
    "batch-size": 1000,
    "secure-clip": 10.0,
    "secure": "updates",
}


class Seat:
    """What the coordinator is sent in one round; the devices in `silent` answer nothing of a kind of task."""

    def __init__(self, made: MethodWorld, silent: Mapping[type, set[str]] | None = None) -> None:
        self.made, self.silent, self.asked = made, silent or {}, list[type]()
        self.sums: list[Words] = []
        self.clusters = list[Step]()

    def ask(self, exchange: Exchange) -> Replies:
        kind = next((type(task) for task in exchange.values()), type(None))
        here = {who: task for who, task in exchange.items() if who not in self.silent.get(kind, set())}
        found = learned(exchange, {who: self.made.devices.answer(who, task) for who, task in here.items()})
        self.asked.append(kind)
        if isinstance(found, SealedSums) and found.sums:
            self.sums.append(next(iter(found.sums.values())))
            task = next(iter(exchange.values()))
            if isinstance(task, SummedFit) and task.stage == "points" and task.points is not None:
                self.clusters.append((task.points, cluster_sums(task.points.shape, found.sums[0], task.scale)))
        return found

    def round(self) -> None:
        made, schema = self.made, self.made.devices.program.schema
        rounds = run_round(made.strategy, made.state, schema, made.devices.fleet, round_rng(0, 1), batch=16)
        made.state, _ = drive(rounds, self.ask)


def of_one_class(label: int, n: int = 12) -> Dataset:
    """Samples that a trained model of group 0 gets right, all of one class."""
    return Dataset(3.0 * np.eye(CLASSES, FEATURES)[np.full(n, label)], np.full(n, label))


def evaluated(label: int, silent: set[str]) -> Words:
    """The sum of an evaluation in which all samples of the victim are of one class."""
    local = grouped_fleet(7, 1)
    local[VICTIM] = DeviceData(train=local[VICTIM].train, test=of_one_class(label))
    seat = Seat(world(build("fedavg", {**SETTINGS, "local-steps": 40}), local), {SummedProbe: silent})
    seat.round()
    return seat.sums[-1]


def test_evaluations_with_and_without_a_device_do_not_tell_its_labels() -> None:
    """Counts of labels are the same each time, so their sums over two cohorts differ by those of one device."""
    differences = [evaluated(label, set()) - evaluated(label, {VICTIM}) for label in range(CLASSES)]
    assert differences[0].tolist() == [12, 12, SCORE_LEVELS, SCORE_LEVELS, 1]  # all right
    assert all(other.tolist() == differences[0].tolist() for other in differences)


def test_a_round_that_changes_nothing_ends_without_an_evaluation() -> None:
    """Else the same models are evaluated twice, and a device that misses one of the two is told apart."""
    made = world(build("fedavg", SETTINGS), grouped_fleet(7, 1))
    Seat(made).round()
    gone = {"d00", "d01", "d02"}
    second = Seat(made, {SummedFit: gone})
    second.round()
    assert (second.asked, second.sums) == ([SummedFit], [])


def test_the_mean_accuracy_of_few_devices_does_not_tell_the_accuracy_of_each() -> None:
    """From an exact sum of fractions with known denominators without a common factor each numerator follows."""
    samples, right = np.array([21, 22, 23, 25, 29]), np.array([13, 20, 5, 24, 17])
    learner, total = EngineLearner(SoftmaxEngine(), program()), np.zeros(5, np.uint32)
    model = np.zeros(program().schema.size)  # always the first class
    for n, hits in zip(samples, right, strict=True):
        labels = np.where(np.arange(n) < hits, 0, 1)
        local = DeviceData(train=of_one_class(0), test=Dataset(np.zeros((n, FEATURES)), labels))
        probe = SummedProbe(
            models=[model], want=frozenset({"confusion"}), split="test", batch=64, seed=0, served="asked", usual=0,
            scale=SumScale(bits=32, devices=5, clip=1.0),
        )  # fmt: skip
        reply = evaluation_words(learner, probe, local, own=lambda _: None, drawn=secret_stream())
        assert reply.words is not None
        total += reply.words
    assert total[:2].tolist() == [right.sum(), samples.sum()]
    axes = np.ix_(*(np.arange(n + 1) for n in samples))
    accuracies = sum((axis / n for axis, n in zip(axes, samples, strict=True)), np.zeros(1))
    possible = (np.abs(accuracies - total[2] / SCORE_LEVELS) < 5 / SCORE_LEVELS) & (sum(axes, np.zeros(1)) == total[0])
    for device, n in enumerate(samples):
        others = tuple(axis for axis in range(5) if axis != device)
        assert possible.any(axis=others).mean() > 0.5, f"of {n} samples"


def test_the_first_round_of_fesem_sums_no_points() -> None:
    made = world(build("fesem", {**SETTINGS, "clusters": 4, "batch-size": 8}), grouped_fleet(40, 4))
    seat = Seat(made)
    seat.round()
    assert seat.sums
    assert seat.clusters == []


def test_no_two_sums_of_a_start_by_loss_differ_by_what_one_device_trained() -> None:
    """Its first round sums the devices six times, by centers that change a little: they train anew for each.

    Of two sums that differ in one device, the difference is further from the model of any device than a tenth of what
    the released mean of its center is. The first k-means sums one model at each step, and there it is the model itself.
    """
    local = grouped_fleet(60, 4)
    made = world(build("fesem", {**SETTINGS, "clusters": 4, "batch-size": 8}), local)
    seat, answer = Seat(made), made.devices.answer
    trained = dict[tuple[str, str], tuple[Array, int]]()

    def watched(who: str, task: Task) -> Reply:
        reply = answer(who, task)
        if isinstance(task, SummedFit) and task.stage == "add":
            trained[task.slot, who] = made.devices.sums.models[who, task.slot], task.open[0]
        return reply

    made.devices.answer = watched  # type: ignore[method-assign]
    seat.round()
    by_step: dict[str, list[tuple[Array, int]]] = {}
    for (slot, _), one in trained.items():
        by_step.setdefault(slot, []).append(one)
    assert len(by_step) == 2 + SORTS
    totals, counts, models, apart = [np.zeros(made.state.centers.shape[1])], [0], list[Array](), list[float]()
    for ones in by_step.values():
        for center in {k for _, k in ones}:
            mine = np.stack([model for model, k in ones if k == center])
            totals.append(mine.sum(axis=0))
            counts.append(len(mine))
            models += list(mine)
            apart += np.linalg.norm(mine - mine.mean(axis=0), axis=1).tolist()
    pairs = [(i, j) for i, n in enumerate(counts) for j, m in enumerate(counts) if n - m == 1]
    assert len(pairs) > 20
    for i, j in pairs:
        off = np.linalg.norm(np.stack(models) - (totals[i] - totals[j]), axis=1)
        assert (off > np.array(apart) / 10).all(), (counts[i], counts[j])


def test_a_first_k_means_tells_the_updates_of_devices() -> None:
    """What docs/privacy.md says of it, so that nobody takes it for safe: it sums the same points 20 times and more."""
    made = world(
        build("fesem", {**SETTINGS, "clusters": 4, "batch-size": 8, "secure-start": "k-means"}), grouped_fleet(40, 4)
    )
    seat = Seat(made)
    seat.round()
    told, first = single_points(seat.clusters), seat.clusters[0][0][0, 0]
    trained = {who: made.devices.sums.models[who, "main"][: made.state.centers.shape[1]] for who in made.devices.fleet}
    assert [who for who, model in trained.items() if (np.abs(told - (model - first)) < 1e-5).all(axis=1).any()]


@pytest.mark.parametrize("method", ["fedsoft", "fedem"])
def test_a_center_of_weights_that_serves_one_device_does_not_tell_its_update(method: str) -> None:
    """Each device has a part in each center, and eleven of twelve one of nothing here.

    Summed, the center would move the way of the one device's update, with a cosine of 0.9999 (of `fedem` in the second
    round, when devices know their weights). So it is closed: fewer than five devices weigh a half or more there.
    """
    local = grouped_fleet(11, 1) | {"lone": grouped_fleet(2, 2, seed=1)["d01"]}
    settings = {**SETTINGS, "learning-rate": 0.3, "clusters": 2}
    both = [_trained_alone(local, who) for who in (sorted(local)[:11], ["lone"])]
    made = world(build(method, settings), local)
    made.state = replace(made.state, centers=np.stack(both), extra={**made.state.extra, COUNTS_KEY: np.array([11, 1])})
    for _ in range(2):
        made.devices.open_round()
        Seat(made).round()
        assert made.state.extra[COUNTS_KEY].tolist() == [12, 0]
    np.testing.assert_array_equal(made.state.centers[1], both[1])
    assert (made.state.centers[0] != both[0]).any()
    assert made.devices.own["lone", CHOICE_SLOT].argmax() == 1  # it keeps its weights, and is served by the center


def test_weights_that_are_nearly_alike_close_no_center() -> None:
    """By their greatest weights alone all twelve devices would be counted at one of the centers, which would go on."""
    made = world(build("fedem", {**SETTINGS, "clusters": 2}), grouped_fleet(12, 1))
    made.state = replace(made.state, centers=np.stack([made.state.centers[0]] * 2))
    Seat(made).round()
    assert made.state.extra[COUNTS_KEY].tolist() == [12, 12]


def _trained_alone(local: Mapping[str, DeviceData], who: list[str]) -> Array:
    """A model that serves these devices and no others."""
    made = world(build("fedavg", {"local-steps": 60, "learning-rate": 0.3}), {c: local[c] for c in who}, rounds=1)
    return np.asarray(made.state.centers[0])


def summed_fit(seed: int, centers: Array) -> SummedFit:
    """Coarse words, of which the rounding is as large as the update."""
    scale = SumScale(bits=16, devices=12, clip=1.0)
    given = {"stage": "add", "choose": "loss", "centers": centers, "scale": scale, "open": (0, 1)}
    return SummedFit(start=centers[0], steps=1, lr=0.1, batch=1, seed=seed, **given)  # type: ignore[arg-type]


def test_the_seed_of_a_task_does_not_tell_in_which_sum_its_device_is() -> None:
    """The rounding of a device that follows from its task shows in the sum of its center."""
    size, rng, total = 20_000, np.random.default_rng(0), np.zeros(1, np.uint32)
    centers = np.zeros((2, size), np.float32)
    for seed in range(12):
        model = (rng.standard_normal(size) / (50 * size**0.5)).astype(np.float32)
        mine = TrainedChoice(models=model[None], weights=np.eye(2)[seed % 2], order=np.array([seed % 2, 1 - seed % 2]))
        memory = summed_work.SummedMemory(trained=mine, choice=None, own=lambda _: None)
        learner, local = EngineLearner(SoftmaxEngine(), program()), grouped_fleet(1, 1)["d00"]
        found = summed_work.add_words(learner, summed_fit(seed, centers), local, memory)
        total = total + found.words
    sums = summed_fit(0, centers).scale.signed(total).reshape(2, -1)[:, :size]
    for seed in range(12):
        drawn = np.random.Generator(np.random.PCG64(np.random.SeedSequence(seed, spawn_key=(1,)))).random(size) - 0.5
        deviations = sums @ drawn / np.sqrt((sums**2).sum(axis=1) / 12)
        assert (np.abs(deviations) < 6).all(), f"device {seed}"  # with known rounding 28 to 30 for its own center


@pytest.mark.parametrize(("method", "more"), [("hypcluster", {}), ("wecfl", {"e-step": "nearest"})])
def test_weights_that_tell_the_devices_of_a_center_are_refused_where_these_are_hidden(
    method: str, more: dict[str, str]
) -> None:
    """Of 12 devices with known samples, the sum of the weights of a center belongs to one set of them or to few."""
    make_method(method, secure="updates", **more)
    with pytest.raises(ConfigError, match="tells which devices") as refused:
        make_method(method, secure="updates+membership", **more)
    assert "ifca" in (refused.value.hint or "")


def test_an_upload_that_comes_after_its_device_was_given_up_keeps_its_own_mask() -> None:
    """The neighbours have shown the key of the pair masks by then, and none of them a share of the self mask."""
    cohort = SecureCohort.of(20)
    cohort.deal()
    cohort.upload([VICTIM := "dev-003"])
    cohort.reveal()
    assert isinstance(cohort.outcome, Secrets)
    cohort.on_device(VICTIM, on_relay, cohort.sent["relay"][VICTIM])
    late = cohort.on_device(VICTIM, on_vector, cohort.server.roster, vector_of(VICTIM))
    form, state = cohort.form, cohort.server
    packed = read_upload(late, roster=state.roster, words=form.words, bits=form.bits)
    opened = np.zeros(form.words, np.uint32)
    add_packed_into(opened, packed, form.bits)
    private = keys.mask_private(cohort.outcome.mask_secrets[VICTIM])
    for cid in state.graph[VICTIM]:
        key = keys.pair_mask_key(private, state.devices[cid].mask, state.context, VICTIM, cid)
        add_masks_into(opened, [(key, -pair_sign(VICTIM, cid))])
    mine = np.asarray((opened - vector_of(VICTIM)) & np.uint32(2**form.bits - 1))
    own, hidden = cohort.devices[VICTIM].sums[state.roster], np.zeros(form.words, np.uint32)
    add_masks_into(hidden, [(keys.self_mask_key(keys.self_secret(own.root, state.context), state.context), 1)])
    np.testing.assert_array_equal(mine, hidden & np.uint32(2**form.bits - 1))
    told = sum(VICTIM in RevealedShares.from_bytes(answer).self_shares for answer in cohort.shown.values())
    colluding = len(state.devices) // 10
    assert told + colluding < state.parameters.threshold
