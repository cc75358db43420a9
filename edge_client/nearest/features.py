"""The distance of each center to a device's samples, per feature of protocol/nearest/router.py: numpy over a Learner.

Devices, the emulator and the figures use it. Models are flat vectors [schema.size]. The only randomness is
the seed of a local round.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.protocol.nearest import sketch
from edge_client.protocol.nearest.answer_moments import AnswerProfile
from edge_client.protocol.nearest.input_moments import InputProfile, moments_of
from edge_client.protocol.nearest.router import InputSketch, LocalRound
from edge_client.protocol.task import F64, Fit, Flat, Schema
from edge_client.training.fit_probe import batch_statistics, count_votes, mean_entropy, of_counted, run_fit
from edge_client.training.learner import Learner

EVALUATION_BATCH = 32
MAX_NORM_SAMPLES = 16  # samples of which batch norm's statistics are taken
MIN_VARIANCE = 1e-8  # a variance below this counts as this much
MIN_VARIANCE_SHARE = 1e-3  # none counts as less than this share of the kept one: few samples may have none at all


def model_distances(
    learner: Learner,
    models: Sequence[Flat],
    data: Dataset,
    *,
    labels: bool,
    answers: Sequence[AnswerProfile] | None = None,
) -> dict[str, F64]:
    """Each model on the samples -> distances [M]: "entropy" of what it answers, and with labels "loss" and "votes".

    With `answers`, the profile of each model, also "answers": how far its scores are from those of its own devices.

    The loss is IFCA's rule, the votes are FedSoft's: one minus the share of samples that a model explains best. One
    model of many takes the memory; logits stay here.
    """
    batch = learner.fixed_batch or EVALUATION_BATCH
    losses, entropies, apart = [], [], []
    for number, model in enumerate(models):
        loss, logits = learner.evaluate([model], data, batch=batch)
        losses.append(loss[0])
        entropies.append(mean_entropy(logits[0]) if learner.program.loss == "cross-entropy" else 0.0)
        if answers is not None:
            apart.append(answers[number].distance(logits[0]))
    found = {"entropy": np.array(entropies)} if learner.program.loss == "cross-entropy" else {}
    if answers is not None:
        found["answers"] = np.array(apart)
    if labels:
        each = of_counted(np.stack(losses), data)
        found |= {"loss": each.mean(axis=1), "votes": 1 - count_votes(each) / each.shape[1]}
    return found


def norm_distances(learner: Learner, models: Sequence[Flat], data: Dataset) -> F64 | None:
    """How far batch norm's statistics of these samples are from those that each model keeps -> [M]; None without any.

    The mean over channels of KL(N(samples) || N(kept)), of each layer, then of all layers; its square root. One batch
    is enough, and fewer samples are repeated to fill it. Labels are not looked at.
    """
    schema, batch = learner.program.schema, learner.fixed_batch or MAX_NORM_SAMPLES
    if not has_batch_norm(schema) or not models:
        return None
    few, n = sample_batches(data, batch, batch, seed=0), schema.n_params
    found, _ = batch_statistics(learner, models, few, [np.arange(batch)])
    return np.array([_buffer_distance(model[n:], stats, schema) for model, stats in zip(models, found, strict=True)])


def has_batch_norm(schema: Schema) -> bool:
    """Whether the model keeps batch norm's statistics."""
    return bool(_kept_pairs(schema))


def sketch_inputs(data: Dataset, about: InputSketch) -> F64:
    """The samples' sketch [size]."""
    return sketch.random_features(data.x, seed=about.seed, size=about.size, width=about.width)


def input_distance(data: Dataset, profile: InputProfile, centers: int) -> F64:
    """How far the inputs are from the fleet's -> [centers], the same for each."""
    return np.full(centers, profile.distance(moments_of(data.x)))


def sketch_local_round(learner: Learner, start: Flat, data: Dataset, about: LocalRound, *, seed: int = 0) -> F64:
    """One local round from the common start -> where it led, sketched [d]: FeSEM's rule compares such points.

    Every batch is full, so that a few samples can be trained on whatever batch the device's engine takes.
    """
    batch = learner.fixed_batch or about.batch
    task = Fit(start=start, steps=about.steps, lr=about.lr, momentum=about.momentum, batch=batch, seed=seed)
    trained = run_fit(learner, task, sample_batches(data, batch * about.steps, batch, seed=seed)).vector
    return sketch.update_direction(trained - start, learner.program.schema, about.representation)


def sample_batches(data: Dataset, most: int, batch: int, *, seed: int) -> Dataset:
    """At most `most` samples in a whole number of batches: in random order, and again where they do not suffice."""
    rng, count = np.random.Generator(np.random.PCG64(seed)), -(-min(most, max(len(data), batch)) // batch) * batch
    passes = [rng.permutation(len(data)) for _ in range(-(-count // len(data)))]
    rows = np.concatenate(passes)[:count]
    return Dataset(data.x[rows], data.y[rows])


def _kept_pairs(schema: Schema) -> list[tuple[str, str]]:
    """Names of every batch norm's running mean and variance."""
    names = {t.name for t in schema.tensors if t.role == "b"}
    pairs = [(n, f"{n.removesuffix('running_mean')}running_var") for n in sorted(names) if n.endswith("running_mean")]
    return [pair for pair in pairs if pair[1] in names]


def _buffer_distance(kept: Flat, found: F64, schema: Schema) -> float:
    """Two vectors of buffers [size - n_params] -> the root of the mean KL."""
    layers, n = [], schema.n_params
    for pair in _kept_pairs(schema):
        at = [slice(schema.slices[name].start - n, schema.slices[name].stop - n) for name in pair]
        (m0, v0), (m1, v1) = ([buffers[part].astype(np.float64) for part in at] for buffers in (kept, found))
        v0 = np.maximum(v0, MIN_VARIANCE)
        v1 = np.maximum(v1, MIN_VARIANCE_SHARE * v0)
        layers.append(0.5 * (np.square(m1 - m0) / v0 + v1 / v0 - 1 - np.log(v1 / v0)).mean())
    return float(np.sqrt(max(0.0, np.mean(layers))))
