from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import cast

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData, batches
from edge_client.errors import Malformed
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import OWN_MODEL, Array, Fit, Flat, Probe, Tensors
from edge_client.training.fit_probe import (
    count_votes,
    fit_result,
    make_job,
    recalibrate,
    responsibilities,
    run_fit,
    run_probe,
    with_buffers,
)
from edge_client.training.learner import EngineLearner, Learner, TrainedModel
from tests.support import regression
from tests.support.softmax_program import CLASSES, FEATURES, SoftmaxEngine, program, samples
from tests.support.token_learner import TokenLearner

ENGINE, PROGRAM = SoftmaxEngine(), program()
LEARNER = EngineLearner(ENGINE, PROGRAM)
SCHEMA = PROGRAM.schema
RNG = np.random.default_rng(0)
DATA = samples(RNG, 23)
TASK = Fit(start=RNG.standard_normal(SCHEMA.size), steps=7, lr=0.1, batch=8, seed=5)


def gradient(w: Flat, data: Dataset, q: Array) -> Flat:
    """Of sum_j q_j loss_j at w, by central differences."""

    def loss(at: Flat) -> float:
        return float(q @ LEARNER.evaluate([at], data, batch=64)[0][0])

    step = 1e-6
    return np.array([(loss(w + step * e) - loss(w - step * e)) / (2 * step) for e in np.eye(SCHEMA.size)])


def test_fit_is_sgd_with_momentum_a_linear_term_and_a_pull_to_the_anchor() -> None:
    anchor, linear = RNG.standard_normal(SCHEMA.size), 0.1 * RNG.standard_normal(SCHEMA.size)
    task = replace(TASK, anchor=anchor, linear=linear, mu=0.3, momentum=0.8)
    w, velocity = np.array(task.start), np.zeros(SCHEMA.size)
    for index in batches(len(DATA), task.batch, task.seed, task.steps, fixed=False):
        part = Dataset(DATA.x[index], DATA.y[index])
        g = gradient(w, part, np.full(len(index), 1 / len(index))) + linear + task.mu * (w - anchor)
        velocity = task.momentum * velocity + g
        w = w - task.lr * velocity
    # Central differences are good to about 1e-9 per step.
    np.testing.assert_allclose(run_fit(LEARNER, task, DATA).vector, w, atol=1e-7)


def test_fit_leaves_the_task_and_the_data_alone_and_repeats_itself() -> None:
    start, x = np.array(TASK.start), DATA.x.copy()
    first, second = run_fit(LEARNER, TASK, DATA), run_fit(LEARNER, TASK, DATA)
    assert (first.vector == second.vector).all()
    np.testing.assert_array_equal(np.asarray(TASK.start), start)
    assert (DATA.x == x).all()


def test_fit_reports_the_mean_loss_of_its_steps() -> None:
    one = run_fit(LEARNER, replace(TASK, steps=1, lr=0.0, batch=64), DATA)
    assert one.loss == pytest.approx(LEARNER.evaluate([np.array(TASK.start)], DATA, batch=64)[0].mean())


def test_the_batches_of_many_steps_take_no_memory_before_they_are_read() -> None:
    """A task may ask for a million steps, and a board has little memory."""
    data = samples(np.random.default_rng(0), 100)
    task = Fit(start=np.zeros(PROGRAM.schema.size), steps=100_000, batch=65_536, lr=0.1, seed=7)
    tracemalloc.start()
    job = make_job(PROGRAM, task, data)
    cuts = [len(cut) for cut in islice(job.batches, 3)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (len(job.batches), cuts) == (100_000, [100] * 3)
    assert peak < 1 << 17
    few = make_job(PROGRAM, replace(task, steps=5, batch=32), data).batches
    assert [few[k].tolist() for k in range(5)] == [cut.tolist() for cut in few]


def test_own_resumes_the_devices_model_and_falls_back_to_init() -> None:
    own = RNG.standard_normal(SCHEMA.size)
    resumed = run_fit(LEARNER, replace(TASK, start=OWN_MODEL, init=np.array(TASK.start)), DATA, own=own)
    fallen = run_fit(LEARNER, replace(TASK, start=OWN_MODEL, init=np.array(TASK.start)), DATA)
    assert (resumed.vector == run_fit(LEARNER, replace(TASK, start=own), DATA).vector).all()
    assert (fallen.vector == run_fit(LEARNER, TASK, DATA).vector).all()


def test_row_weights_of_a_probe_scale_each_samples_loss() -> None:
    weights = RNG.random(len(DATA))
    posterior = np.stack([np.ones(len(DATA)), weights])
    task = replace(TASK, steps=1, batch=64, lr=1.0, rows="posterior:1")
    moved = np.array(TASK.start) - run_fit(LEARNER, task, DATA, posterior=posterior).vector
    np.testing.assert_allclose(moved, gradient(np.array(TASK.start), DATA, weights / len(DATA)), atol=1e-8)


def test_a_fit_that_holds_samples_out_trains_on_those_that_its_probe_does_not_evaluate() -> None:
    held, n = 4, len(DATA)
    out = np.random.Generator(np.random.PCG64(0)).permutation(n)[:held]
    changed = Dataset(DATA.x.copy(), DATA.y.copy())
    changed.x[out] = 7.0
    task = replace(TASK, rows=f"all-but:{held}")
    assert (run_fit(LEARNER, task, DATA).vector == run_fit(LEARNER, task, changed).vector).all()
    weights = np.full(n, 1 / (n - held))
    weights[out] = 0
    one = replace(task, steps=1, batch=64, lr=1.0)
    moved = np.array(TASK.start) - run_fit(LEARNER, one, DATA).vector
    np.testing.assert_allclose(moved, gradient(np.array(TASK.start), DATA, weights), atol=1e-8)
    looked = replace(asked("loss"), limit=held, seed=0)
    local, there = DeviceData(train=DATA), DeviceData(train=Dataset(DATA.x[out], DATA.y[out]))
    np.testing.assert_array_equal(
        run_probe(LEARNER, looked, local).losses, run_probe(LEARNER, asked("loss"), there).losses
    )


def test_a_fit_resumes_the_running_statistics_that_the_device_keeps() -> None:
    learner = EngineLearner(ENGINE, program(buffered=True))
    n, size = learner.program.schema.n_params, learner.program.schema.size
    sent, own = RNG.standard_normal(size), RNG.standard_normal(size)
    task = replace(TASK, start=sent, buffers="own")
    both = np.concatenate([sent[:n], own[n:]])
    assert (
        run_fit(learner, task, DATA, own=own).vector == run_fit(learner, replace(TASK, start=both), DATA).vector
    ).all()
    assert (run_fit(learner, task, DATA).vector == run_fit(learner, replace(TASK, start=sent), DATA).vector).all()


@pytest.mark.parametrize(("batch", "used"), [(8, 16), (64, 23)])
def test_a_model_takes_the_mean_statistics_of_the_batches_of_the_samples(batch: int, used: int) -> None:
    learner = EngineLearner(ENGINE, program(buffered=True))
    schema = learner.program.schema
    found = recalibrate(learner, RNG.standard_normal(schema.size), DATA, batch=batch)
    np.testing.assert_allclose(found[schema.slices["mean"]], DATA.x[:used].mean(axis=0), rtol=1e-12)


class OverflowingEngine(SoftmaxEngine):
    """Infinite where numbers overflow, without a warning, as runtimes are."""

    def step(self, feeds: Tensors) -> dict[str, Array]:
        with np.errstate(all="ignore"):
            return super().step(feeds)


def test_statistics_that_overflow_are_not_taken() -> None:
    learner = EngineLearner(OverflowingEngine(), program(buffered=True))
    sent, huge = RNG.standard_normal(learner.program.schema.size), Dataset(np.full_like(DATA.x, 1e308), DATA.y)
    np.testing.assert_array_equal(recalibrate(learner, sent, huge, batch=8), sent)


def test_without_training_samples_no_statistics_are_taken() -> None:
    learner = EngineLearner(ENGINE, program(buffered=True))
    sent = RNG.standard_normal(learner.program.schema.size)
    assert recalibrate(learner, sent, Dataset(DATA.x[:0], DATA.y[:0]), batch=8) is sent


@pytest.mark.parametrize("buffers", ["own", "batch"])
def test_a_probe_evaluates_with_the_statistics_that_it_names(buffers: str) -> None:
    learner = EngineLearner(ENGINE, program(buffered=True))
    size = learner.program.schema.size
    sent, own = RNG.standard_normal(size), RNG.standard_normal(size)
    task = Probe(models=[sent], want=frozenset({"loss"}), batch=8, seed=0, buffers=buffers, split="test")
    told = run_probe(learner, task, LOCAL, own={"main": own}.get).losses
    with_own = with_buffers(learner.program, sent, own)
    used = {"own": with_own, "batch": recalibrate(learner, sent, LOCAL.train, batch=8)}[buffers]
    assert LOCAL.test is not None
    np.testing.assert_array_equal(told, learner.evaluate([used], LOCAL.test, batch=8)[0].mean(axis=1))


def test_buffers_are_trained_along_and_come_back_at_the_end_of_the_vector() -> None:
    with_buffers = program(buffered=True)
    task = replace(TASK, start=np.zeros(with_buffers.schema.size), steps=1, batch=64)
    result = run_fit(EngineLearner(ENGINE, with_buffers), task, DATA).vector
    np.testing.assert_allclose(result[with_buffers.schema.slices["mean"]], 0.1 * DATA.x.mean(axis=0))


@pytest.mark.parametrize(
    ("code", "task", "data", "engine"),
    [
        ("no_own_model", replace(TASK, start=OWN_MODEL), DATA, ENGINE),
        ("no_posterior", replace(TASK, rows="posterior:0"), DATA, ENGINE),
        ("no_data", replace(TASK, rows=f"all-but:{len(DATA)}"), DATA, ENGINE),
        ("bad_task", TASK, DATA, SoftmaxEngine(fixed_batch=4)),
        ("no_data", TASK, Dataset(DATA.x[:5], DATA.y[:5]), SoftmaxEngine(fixed_batch=8)),
        ("no_data", TASK, Dataset(DATA.x[:0], DATA.y[:0]), ENGINE),
        ("bad_schema", replace(TASK, start=np.zeros(3)), DATA, ENGINE),
        ("no_data", TASK, Dataset(np.ones((2, FEATURES + 1)), np.zeros(2, int)), ENGINE),
        ("no_data", TASK, Dataset(DATA.x[:1], np.array([CLASSES])), ENGINE),
        ("no_data", TASK, Dataset(DATA.x[:1], np.ones((1, CLASSES + 1))), ENGINE),
        (
            "not_finite",
            replace(TASK, start=np.full(SCHEMA.size, 1e308), linear=np.full(SCHEMA.size, 1e308)),
            DATA,
            ENGINE,
        ),
    ],
)
def test_what_cannot_be_done_is_refused_by_the_protocols_code(
    code: str, task: Fit, data: Dataset, engine: SoftmaxEngine
) -> None:
    with np.errstate(all="ignore"), pytest.raises(Malformed, match=rf"^{code}: "):
        run_fit(EngineLearner(engine, PROGRAM), task, data)


@pytest.mark.parametrize("loss", [np.inf, np.nan])
def test_a_fit_whose_loss_is_no_number_is_refused_as_no_announcement_can_carry_it(loss: float) -> None:
    with pytest.raises(Malformed, match=r"^not_finite: "):
        fit_result(TASK, TrainedModel(vector=np.ones(SCHEMA.size), losses=np.array([1.0, loss])))


MODELS = [RNG.standard_normal(SCHEMA.size) for _ in range(3)]
LOCAL = DeviceData(train=DATA, test=samples(RNG, 11))


def asked(*want: str, **more: object) -> Probe:
    return replace(Probe(models=MODELS, want=frozenset(want), batch=8, seed=0), **more)  # type: ignore[arg-type]


def test_a_model_that_float32_cannot_hold_has_diverged() -> None:
    """A program may compute in float64; what is kept and sent is float32."""
    for value in (1e39, -1e39, np.nan, np.inf):
        with pytest.raises(Malformed, match="not_finite: training diverged"):
            fit_result(TASK, TrainedModel(vector=np.array([0.0, value]), losses=np.ones(1)))
    assert fit_result(TASK, TrainedModel(vector=np.array([3e38, -3e38]), losses=np.ones(1))).loss == 1.0


def test_a_padded_fixed_batch_gives_what_a_free_one_gives() -> None:
    task = asked("loss", "votes", "posterior", "confusion")
    free, fixed = (
        run_probe(LEARNER, task, LOCAL),
        run_probe(EngineLearner(SoftmaxEngine(fixed_batch=6), PROGRAM), task, LOCAL),
    )
    for name in ("losses", "votes", "posterior", "confusion"):
        np.testing.assert_allclose(getattr(free, name), getattr(fixed, name), rtol=1e-12)


def test_padding_gives_every_sample_its_own_loss_and_logits() -> None:
    free = LEARNER.evaluate(MODELS, DATA, batch=64)
    fixed = EngineLearner(SoftmaxEngine(fixed_batch=6), PROGRAM).evaluate(MODELS, DATA, batch=64)
    for ours, theirs in zip(fixed, free, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)


def test_votes_and_confusions_count_every_sample_once() -> None:
    reply = run_probe(LEARNER, asked("votes", "confusion", split="test"), LOCAL)
    assert reply.votes is not None
    assert reply.confusion is not None
    assert reply.n == reply.votes.sum() == 11
    assert reply.confusion.sum(axis=(1, 2)).tolist() == [11, 11, 11]
    assert LOCAL.test is not None
    assert (reply.confusion[0].sum(axis=1) == np.bincount(LOCAL.test.y, minlength=CLASSES)).all()


def test_a_loss_that_is_no_number_wins_no_vote() -> None:
    nan = float("nan")
    assert count_votes(np.array([[0.1, nan, 2.0, nan], [0.5, 9.0, 1.0, nan], [nan, nan, nan, 1.0]])).tolist() == [
        1,
        2,
        1,
    ]


def test_a_regression_is_probed_in_parts_whose_answer_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that draws pictures has outputs as large as its samples, for each of the models."""
    rng = np.random.default_rng(0)
    data = Dataset(rng.standard_normal((50, regression.FEATURES)), rng.standard_normal((50, 1)))
    local, held = DeviceData(train=data), list[Dataset]()

    class Noted(EngineLearner):
        def evaluate(self, models: Sequence[Flat], data: Dataset, *, batch: int) -> tuple[Array, Array]:
            held.append(data)
            return super().evaluate(models, data, batch=batch)

    probe = Probe(models=[np.ones(10), np.zeros(10)], want=frozenset({"loss", "votes", "errors"}), batch=8, seed=0)
    learner = Noted(regression.LinearEngine(), regression.PROGRAM)
    whole = run_probe(learner, probe, local)
    monkeypatch.setattr("edge_client.training.fit_probe.PROBED_VALUES", 16)
    parts = run_probe(learner, probe, local)
    assert held[0] is data  # whose tensors an emulator keeps
    assert [len(each) for each in held] == [50, 16, 16, 16, 2]
    least = run_probe(learner, replace(probe, want=frozenset({"loss"}), least=True), local)
    assert max(len(each) for each in held[5:]) == 16
    assert least.losses is not None
    assert whole.losses is not None
    assert least.losses.min() == pytest.approx(whole.losses.min(), rel=1e-12)
    assert whole.errors is not None
    assert parts.errors is not None
    np.testing.assert_array_equal(whole.losses, parts.losses)
    np.testing.assert_array_equal(whole.votes, parts.votes)
    np.testing.assert_allclose(whole.errors, parts.errors, rtol=1e-12)
    np.testing.assert_array_equal(whole.errors[:, 2], np.full(2, data.y.var()))


def test_only_what_was_asked_for_is_answered() -> None:
    reply = run_probe(LEARNER, asked("loss"), LOCAL)
    assert reply.losses is not None
    assert [reply.votes, reply.posterior, reply.grad, reply.confusion, reply.update] == [None] * 5


def test_responsibilities_are_bayes_rule() -> None:
    losses = -np.log(np.array([[0.5, 0.1], [0.25, 0.1]]))
    np.testing.assert_allclose(responsibilities(losses, [0.2, 0.8]), [[1 / 3, 0.2], [2 / 3, 0.8]])
    np.testing.assert_allclose(responsibilities(losses, [0.0, 1.0]), [[0, 0], [1, 1]])


def test_with_a_prior_the_confusion_is_that_of_the_mixture_of_probabilities() -> None:
    one = run_probe(LEARNER, asked("confusion", prior=[1.0, 0.0, 0.0]), LOCAL).confusion
    plain = run_probe(LEARNER, asked("confusion"), LOCAL).confusion
    assert one is not None
    assert plain is not None
    assert one.shape == (1, CLASSES, CLASSES)
    assert (one[0] == plain[0]).all()


@pytest.mark.parametrize("engine", [ENGINE, SoftmaxEngine(fixed_batch=6)])
def test_the_gradient_is_that_of_the_mean_loss(engine: SoftmaxEngine) -> None:
    reply = run_probe(EngineLearner(engine, PROGRAM), asked("grad", models=MODELS[:1]), LOCAL)
    expected = gradient(MODELS[0], DATA, np.full(len(DATA), 1 / len(DATA)))
    assert reply.grad is not None
    np.testing.assert_allclose(reply.grad, expected, atol=1e-8)


def test_a_limit_takes_the_same_samples_for_the_same_seed() -> None:
    first, again = (run_probe(LEARNER, asked("loss", limit=5), LOCAL) for _ in range(2))
    assert first.n == 5
    np.testing.assert_array_equal(first.losses, again.losses)


def test_a_device_without_held_out_samples_says_so() -> None:
    with pytest.raises(Malformed, match=r"^no_data: "):
        run_probe(LEARNER, asked("confusion", split="test"), DeviceData(train=DATA))


def test_answers_of_a_device_whose_held_out_samples_are_none_or_wrong() -> None:
    """It answered "internal", and only its own log had the reason."""
    task = Probe(models=[np.zeros(SCHEMA.size)], want=frozenset({"answers"}), batch=8, seed=0)
    nothing, beyond = Dataset(DATA.x[:0], DATA.y[:0]), Dataset(DATA.x, DATA.y + CLASSES)
    found, alone = (run_probe(LEARNER, task, DeviceData(train=DATA, test=test)).answers for test in (nothing, None))
    assert found is not None
    assert alone is not None
    assert (found == alone).all()
    with pytest.raises(Malformed, match=f"no_data: y holds the label {2 * CLASSES - 1}"):
        run_probe(LEARNER, task, DeviceData(train=DATA, test=beyond))


def test_where_each_sample_counts_the_sums_are_those_of_before_to_the_bit() -> None:
    """Rounding depends on the order in which memory is read."""
    data = samples(np.random.default_rng(1), 1_000)
    losses, _ = LEARNER.evaluate(list(MODELS), data, batch=8)
    reply = run_probe(LEARNER, asked("loss", "posterior"), DeviceData(train=data))
    assert reply.losses is not None
    assert (reply.losses == losses.mean(axis=1)).all()
    assert (reply.posterior == responsibilities(losses).mean(axis=1)).all()


def test_samples_without_a_label_that_counts_say_nothing_of_a_candidate() -> None:
    """Each counted as a loss of 0 and as a vote for the first candidate: few labels made every center look good."""
    y = np.full((6, 3), IGNORED)
    learner, kept = cast("Learner", TokenLearner()), list[Array]()
    probe = Probe(
        models=[np.array([9.0, 9.0, 9.0, 9.0, 2.0, 4.0]), np.array([9.0, 9.0, 9.0, 9.0, 1.0, 3.0])],
        want=frozenset({"loss", "votes", "posterior"}), batch=64, seed=0,
    )  # fmt: skip
    with pytest.raises(Malformed, match="no_data"):
        run_probe(learner, probe, DeviceData(train=Dataset(np.zeros((6, 5)), y)))
    y[4, 1], y[5] = 1, 0
    reply = run_probe(learner, probe, DeviceData(train=Dataset(np.zeros((6, 5)), y)), keep=kept.append)
    assert reply.losses == pytest.approx([3.0, 2.0])
    least = run_probe(
        learner, replace(probe, want=frozenset({"loss"}), least=True), DeviceData(train=Dataset(np.zeros((6, 5)), y))
    )
    assert least.losses == pytest.approx([3.0, 2.0])
    assert reply.votes == pytest.approx([0, 2])
    assert reply.posterior == pytest.approx(responsibilities(np.array([[1.0], [0.0]])).T[0])
    assert kept[0].shape == (2, 6)  # the fits that follow weigh all samples
