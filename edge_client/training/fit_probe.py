"""Execution of a task (fit or probe): numpy over a Learner. The real client and the emulator run this same code.

`run_fit` runs SGD steps, `run_probe` evaluates candidate models. Models are flat vectors [schema.size]. The only
randomness is the task's seed. A task that cannot be done raises Malformed with the protocol's code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from edge_client.data.dataset import Dataset, DeviceData, batches, describe_misfit
from edge_client.errors import Malformed
from edge_client.protocol.nearest.answer_moments import MAX_CLASSES, AnswerLook, answer_moments
from edge_client.protocol.nearest.input_moments import InputMoments, moments_of
from edge_client.protocol.program import Program
from edge_client.protocol.task import F64, I64, Array, Fit, Flat, OwnModel, Probe, Reply
from edge_client.training.label_prior import check_classifier, label_counts, label_totals, with_label_prior
from edge_client.training.learner import Learner, TrainedModel, TrainingJob, log_softmax
from edge_client.training.least_losses import SAMPLES_AT_ONCE, least_losses
from edge_client.training.scores import score_outputs

MIN_STATISTIC_SHARE = 1e-4  # a step moves a running statistic by a share of at least this, or does not move it at all
PROBED_VALUES = 1 << 22  # outputs of a model that are held at once where a sample has many


@dataclass(frozen=True, kw_only=True)
class FitResult:
    """The trained model [schema.size] in the program's dtype, and the mean training loss over all steps."""

    vector: Flat
    loss: float


def make_job(
    program: Program,
    task: Fit,
    data: Dataset,
    *,
    own: Flat | None = None,
    posterior: Array | None = None,
    fixed_batch: int | None = None,
) -> TrainingJob:
    """What a learner needs to carry the task out on `data`.

    `own` [schema.size] is the device's own model in the task's slot, if it has one; `posterior` [M, n] are the
    responsibilities that the last probe left on the device, for `task.rows = "posterior:m"`.
    """
    _check_data(program, data)
    weights = _row_weights(task, data, posterior)
    if fixed_batch is not None and fixed_batch != task.batch:
        raise Malformed("bad_task", f"batch {task.batch}, but this program runs batches of {fixed_batch}")
    start = _start(task, own)
    if task.buffers == "own" and own is not None:
        start = with_buffers(program, start, own)
    for vector in (start, task.anchor, task.linear):
        if vector is not None and vector.shape != (program.schema.size,):
            raise Malformed(
                "bad_schema", f"a model of shape {vector.shape}, the program has {program.schema.size} values"
            )
    order = batches(len(data), task.batch, task.seed, task.steps, fixed=fixed_batch is not None)
    return TrainingJob(task=task, start=start, data=data, batches=order, weights=weights)


def run_fit(
    learner: Learner,
    task: Fit,
    data: Dataset,
    *,
    own: Flat | None = None,
    posterior: Array | None = None,
) -> FitResult:
    """Run the task's SGD steps on `data`; `own` and `posterior` as for `make_job`."""
    mine = make_job(learner.program, task, data, own=own, posterior=posterior, fixed_batch=learner.fixed_batch)
    (trained,) = learner.train([mine])
    return fit_result(task, trained)


def fit_result(task: Fit, trained: TrainedModel) -> FitResult:
    """A finished update; raises Malformed where it diverged."""
    loss = float(np.mean(trained.losses))
    if not (np.isfinite(loss) and (np.abs(trained.vector) <= np.finfo(np.float32).max).all()):
        raise Malformed("not_finite", f"training diverged; the learning rate {task.lr} may be too high")
    return FitResult(vector=trained.vector, loss=loss)


def run_probe(
    learner: Learner,
    task: Probe,
    local: DeviceData,
    *,
    own: Callable[[str], Flat | None] = lambda slot: None,  # noqa: ARG005 - named for its readers
    keep: Callable[[F64], None] = lambda posterior: None,  # noqa: ARG005
) -> Reply:
    """Evaluate the task's models on the asked split; the reply holds what was asked for and nothing else.

    `own` gives the device's model [schema.size] in a slot, if it has one. `keep` is handed the responsibilities [M, n]
    of a probe of all training samples for "posterior": they stay on the device, for the fits that follow.
    """
    program, data, want = learner.program, _probe_data(task, local), task.want
    _check_data(program, data)
    if "labels" in want:
        return Reply(n=len(data), labels=label_counts(program, data))
    if "grad" in want:
        if len(task.models) != 1:
            raise Malformed("bad_task", f"a gradient is taken of one model, got {len(task.models)}")
        model = _candidate(task.models[0], own)
        return Reply(n=len(data), grad=learner.gradient(model, data, batch=task.batch, seed=task.seed))
    models = probed_models(learner, task, train=lambda: local.train, own=own)
    if task.least and not program.own_loss:
        return _reply(local, data, task, _least_losses(learner, models, data, local, task, own), {}, keep)
    if program.positions > 1 or not program.has_classes:
        return _probe_in_parts(learner, models, data, local, task, keep=keep)
    losses, logits = learner.evaluate(models, data, batch=task.batch)
    if task.label_totals is not None:
        totals = label_totals(task, own)
        losses, logits = with_label_prior(program, logits, data, label_counts(program, local.train), totals)
    reply = _reply(local, data, task, losses, score_outputs(program, logits, data.y, task), keep)
    if "answers" in want:
        reply = replace(reply, answers=_answer_looks(learner, models, local, logits, batch=task.batch))
    return reply


def probed_models(
    learner: Learner, task: Probe, *, train: Callable[[], Dataset], own: Callable[[str], Flat | None]
) -> list[Flat]:
    """The task's models [schema.size], with the running statistics that it names.

    `train` gives the device's training samples, `own` its model in a slot; neither is called where it is not needed.
    """
    program, models = learner.program, [_candidate(model, own) for model in task.models]
    if task.buffers == "own" and (kept := own("main")) is not None:
        sent = [not isinstance(model, OwnModel) for model in task.models]
        return [with_buffers(program, m, kept) if s else m for m, s in zip(models, sent, strict=True)]
    if task.buffers == "batch" and program.schema.n_params < program.schema.size:
        return [recalibrate(learner, model, train(), batch=task.batch) for model in models]
    return models


def _reply(
    local: DeviceData,
    data: Dataset,
    task: Probe,
    losses: F64,
    scores: Mapping[str, Array],
    keep: Callable[[F64], None],
) -> Reply:
    """What was asked for, without the answers' looks; `losses` [M, n] and `scores` are those of `data`."""
    want = task.want
    shares = responsibilities(losses, task.prior) if "posterior" in want else None
    if shares is not None and task.split == "train" and len(data) == len(local.train):
        keep(shares)
    if not data.counted.any():
        raise Malformed("no_data", "no sample here has a label that counts")
    losses = of_counted(losses, data)
    return Reply(
        n=len(data),
        losses=losses.mean(axis=1) if "loss" in want else None,
        votes=count_votes(losses) if "votes" in want else None,
        posterior=None if shares is None else of_counted(shares, data).mean(axis=1),
        confusion=scores.get("confusion"),
        errors=scores.get("errors"),
        positions=scores.get("positions"),
        inputs=_input_moments(local).to_vector() if "inputs" in want else None,
    )


def _least_losses(
    learner: Learner,
    models: Sequence[Flat],
    data: Dataset,
    local: DeviceData,
    task: Probe,
    own: Callable[[str], Flat | None],
) -> F64:
    """As `least_losses` says, each model with its label prior."""
    program, totals = learner.program, None if task.label_totals is None else label_totals(task, own)
    here = None if totals is None else label_counts(program, local.train)

    def evaluate(m: int, some: Dataset) -> F64:
        losses, logits = learner.evaluate([models[m]], some, batch=task.batch)
        if totals is not None and here is not None:
            losses, _ = with_label_prior(program, logits, some, here, [totals[m]])
        mine: F64 = losses[0]
        return mine

    width = learner.fixed_batch or task.batch
    at_once = min(SAMPLES_AT_ONCE, PROBED_VALUES // math.prod(program.target))
    return least_losses(evaluate, len(models), data, at_once=width * max(1, at_once // width))


def _probe_in_parts(
    learner: Learner,
    models: Sequence[Flat],
    data: Dataset,
    local: DeviceData,
    task: Probe,
    keep: Callable[[F64], None],
) -> Reply:
    """A probe whose outputs may be as large as its samples: they are counted some samples at a time."""
    program, want = learner.program, task.want
    if "answers" in want or task.label_totals is not None:
        check_classifier(program, "answers, like a label prior,")
    width = learner.fixed_batch or task.batch
    rows = width * max(1, PROBED_VALUES // (width * math.prod(program.target)))
    losses: list[F64] = []
    scores: dict[str, Array] = {}
    for at in range(0, len(data), rows):
        some = data if rows >= len(data) else Dataset(data.x[at : at + rows], data.y[at : at + rows])
        found, logits = learner.evaluate(models, some, batch=task.batch)
        losses.append(found)
        for name, value in score_outputs(program, logits, some.y, task).items():
            share = len(some) / len(data) if name == "errors" else 1  # these are means
            scores[name] = scores.get(name, 0) + value * share
    if "errors" in scores:
        scores["errors"][:, 2] = data.y.var(axis=0, dtype=np.float64).mean()
    return _reply(local, data, task, np.concatenate(losses, axis=1), scores, keep)


def _input_moments(local: DeviceData) -> InputMoments:
    """Of all inputs of the device."""
    moments = moments_of(local.train.x)
    return moments if local.test is None else moments + moments_of(local.test.x)


def _answer_looks(learner: Learner, models: Sequence[Flat], local: DeviceData, logits: Array, *, batch: int) -> F64:
    """[M, d] of each model; `logits` [M, n, C] are those of the samples that the probe evaluates."""
    check_classifier(learner.program, "answers")
    if learner.program.classes > MAX_CLASSES:
        raise Malformed("bad_task", f"answers are asked of at most {MAX_CLASSES} classes")
    parts = (local.train, *([local.test] if local.test else ()))  # one without samples is none
    for data in parts:
        _check_data(learner.program, data)
    train, *held = (learner.evaluate(models, data, batch=batch)[1] for data in parts)
    test = held[0] if held else train[:, :0]
    looks = [
        AnswerLook(entropy=mean_entropy(rows), train=answer_moments(trained), test=answer_moments(held_out))
        for rows, trained, held_out in zip(logits, train, test, strict=True)
    ]
    return np.stack([look.to_vector() for look in looks])


def mean_entropy(logits: Array) -> float:
    """In nats, of the answers [n, C]."""
    logs = log_softmax(logits)
    return float(-(np.exp(logs) * logs).sum(axis=-1).mean())


def with_buffers(program: Program, model: Flat, other: Flat) -> Flat:
    """[schema.size] the parameters of one model and the buffers of another."""
    n = program.schema.n_params
    return np.concatenate([model[:n], other[n:].astype(model.dtype)])


def recalibrate(learner: Learner, model: Flat, data: Dataset, *, batch: int) -> Flat:
    """The model [schema.size] with the statistics of these samples in its buffers instead of running ones.

    Those of all batches of `batch` samples (a shorter rest is left out, unless it is all there is; so is one sample,
    which has no variance) take their places. What no step moves stays. Li et al. 2016, "Revisiting Batch Normalization
    For Practical Domain Adaptation", section 3.3.
    """
    n, size = learner.program.schema.n_params, learner.fixed_batch or batch
    cuts = [np.arange(at, min(at + size, len(data))) for at in range(0, len(data), size)]
    whole = [cut for cut in cuts if len(cut) == size] or (cuts[:1] if learner.fixed_batch is None else [])
    if not whole or len(whole[0]) == 1:
        return model
    (found,), moved = batch_statistics(learner, [model], data, whole)
    return np.concatenate([model[:n], np.where(moved, found, model[n:]).astype(model.dtype)])


def batch_statistics(learner: Learner, models: Sequence[Flat], data: Dataset, cuts: Sequence[I64]) -> tuple[F64, Array]:
    """Batch norm's statistics of batches under each model, their mean [M, buffers]; which buffers a step moves.

    A training step moves a running statistic from b to (1 - m) b + m s: from zero that tells m s, from one, once, m.
    """
    n, ones = learner.program.schema.n_params, np.ones(len(data))
    starts = [np.concatenate([model[:n], np.zeros_like(model[n:])]) for model in models]
    starts.append(np.concatenate([models[0][:n], np.ones_like(models[0][n:])]))
    still = partial(Fit, steps=1, lr=0.0, batch=len(cuts[0]), seed=0)
    jobs = [
        TrainingJob(task=still(start=start), start=start, data=data, batches=[cut], weights=ones)
        for start in starts
        for cut in cuts
    ]
    each = np.stack([trained.vector[n:].astype(np.float64) for trained in learner.train(jobs)])
    *zeros, one = each.reshape(len(starts), len(cuts), -1).mean(axis=1)
    with np.errstate(invalid="ignore"):  # statistics of values near float32's largest are infinite: they are not taken
        m = 1 - (one - zeros[0])
    moved = m > MIN_STATISTIC_SHARE
    return np.where(moved, np.stack(zeros) / np.where(moved, m, 1.0), 0.0), moved


def of_counted(values: F64, data: Dataset) -> F64:
    """[M, n] -> the columns of samples that count."""
    return values.compress(data.counted, axis=1)


def count_votes(losses: F64) -> I64:
    """How many samples each model explains best: [M, n] losses -> [M]. A loss that is NaN is the worst.

    >>> count_votes(np.array([[0.1, np.nan, 2.0], [0.5, 9.0, 1.0]])).tolist()
    [1, 2]
    """
    return np.bincount(np.where(np.isnan(losses), np.inf, losses).argmin(axis=0), minlength=len(losses))


def responsibilities(losses: F64, prior: Sequence[float] | None = None) -> F64:
    """[M, n] losses and prior weights [M] (uniform when absent) -> [M, n], each column sums to 1."""
    weight = np.ones(len(losses)) if prior is None else np.asarray(prior, dtype=np.float64)
    with np.errstate(divide="ignore"):  # a weight of zero is a log of minus infinity: no responsibility
        score = np.log(weight)[:, None] - losses
    top = score.max(axis=0)
    if not np.isfinite(top).all():
        raise Malformed("bad_task", "every prior weight is zero, or a loss is not finite")
    share: F64 = np.exp(score - top)
    share /= share.sum(axis=0)
    return share


def _check_data(program: Program, data: Dataset) -> None:
    if misfit := describe_misfit(program, data):
        raise Malformed("no_data", misfit)


def _row_weights(task: Fit, data: Dataset, posterior: Array | None) -> F64:
    if task.rows == "ones":
        return np.ones(len(data))
    kind, _, number = task.rows.partition(":")
    m = int(number)
    if kind == "all-but":
        return _all_but(m, len(data))
    if posterior is None or m >= len(posterior) or posterior.shape[1:] != (len(data),):
        raise Malformed("no_posterior", f"rows {task.rows!r}, but no probe left such weights for {len(data)} samples")
    return np.asarray(posterior[m], dtype=np.float64)


def _all_but(m: int, n: int) -> F64:
    """[n] 0 for the samples that a probe with `limit` m and seed 0 evaluates; the mean of all is 1."""
    if m >= n:
        raise Malformed("no_data", f"{m} of {n} samples are to be held out, and none is left to train on")
    weights = np.full(n, n / (n - m))
    weights[probed(n, m, 0)] = 0.0
    return weights


def probed(n: int, limit: int, seed: int) -> I64:
    """[limit] which of n samples a probe with this `limit` below n evaluates."""
    return np.random.Generator(np.random.PCG64(seed)).permutation(n)[:limit]


def _start(task: Fit, own: Flat | None) -> Flat:
    if isinstance(task.start, np.ndarray):
        return task.start
    start = own if own is not None else task.init
    if start is None:
        raise Malformed("no_own_model", f"no model in slot {task.slot!r}, and the task brings none")
    return start


def _candidate(model: Flat | OwnModel, own: Callable[[str], Flat | None]) -> Flat:
    if not isinstance(model, OwnModel):
        return model
    kept = own(model.slot)
    found = kept if kept is not None else model.init
    if found is None:
        raise Malformed("no_own_model", f"no model in slot {model.slot!r}, and the task brings none")
    return found


def _probe_data(task: Probe, local: DeviceData) -> Dataset:
    data = local.train if task.split == "train" else local.test
    if data is None:
        raise Malformed("no_data", "no held-out samples on this device")
    if task.limit is None or task.limit >= len(data):
        return data
    index = probed(len(data), task.limit, task.seed)
    return Dataset(data.x[index], data.y[index])
