from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import Malformed
from edge_client.protocol.task import Array, OwnModel, Probe
from edge_client.training.fit_probe import run_probe
from edge_client.training.label_prior import with_label_prior
from edge_client.training.learner import EngineLearner
from tests.support.softmax_program import CLASSES, SoftmaxEngine, program, samples

PROGRAM = program()
LEARNER = EngineLearner(SoftmaxEngine(), PROGRAM)
SCHEMA = PROGRAM.schema
RNG = np.random.default_rng(1)
DATA = samples(RNG, 23)


def test_a_center_is_corrected_from_the_labels_that_it_saw_to_those_of_the_device() -> None:
    train, test, totals = Dataset(DATA.x, np.where(DATA.y == 0, 1, DATA.y)), DATA, [9.0, 0.0, 40.0, 2.5]
    model, every = 0.1 * RNG.standard_normal(SCHEMA.size), np.arange(len(test))
    task = Probe(models=[model], want=frozenset({"loss", "confusion"}), batch=8, seed=0, split="test")
    _, logits = LEARNER.evaluate([model], test, batch=8)
    seen = np.bincount(train.y, minlength=CLASSES)
    scores = logits[0] + np.log(seen + 0.1) - np.log(np.array(totals) + 0.1)
    chance = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    answers = []
    for known, values in (([None], logits[0]), ([totals], scores)):
        reply = run_probe(LEARNER, replace(task, label_totals=known), DeviceData(train=train, test=test))
        expected = np.zeros((CLASSES, CLASSES))
        np.add.at(expected, (test.y, values.argmax(axis=1)), 1)
        np.testing.assert_array_equal(reply.confusion, [expected])
        answers.append(reply)
    assert answers[1].losses == pytest.approx([-np.log(chance[every, test.y]).mean()], rel=1e-12)
    assert answers[1].confusion is not None
    assert (answers[1].confusion != answers[0].confusion).any()


def test_soft_labels_count_by_their_shares() -> None:
    shares = np.eye(CLASSES)[DATA.y]
    model = RNG.standard_normal(SCHEMA.size)
    task = Probe(models=[model], want=frozenset({"loss", "confusion"}), batch=8, seed=0, label_totals=[[1, 2, 3, 4]])
    hard, soft = (run_probe(LEARNER, task, DeviceData(train=Dataset(DATA.x, y))) for y in (DATA.y, shares))
    assert hard.losses == pytest.approx(soft.losses, rel=1e-12)
    np.testing.assert_array_equal(hard.confusion, soft.confusion)


def test_a_model_that_the_device_trained_itself_is_not_corrected() -> None:
    kept, init = (RNG.standard_normal(SCHEMA.size) for _ in range(2))
    plain = Probe(models=[OwnModel(slot="personal", init=init)], want=frozenset({"loss"}), batch=8, seed=0)
    task = replace(plain, label_totals=[[1, 2, 3, 4]])

    def loss(task: Probe, **own: Array) -> Array | None:
        return run_probe(LEARNER, task, DeviceData(train=DATA), own=own.get).losses

    np.testing.assert_array_equal(loss(task, personal=kept), loss(plain, personal=kept))
    np.testing.assert_array_equal(loss(task), loss(replace(task, models=[init])))  # a center that stands in for it


def test_label_counts_are_those_of_all_training_samples() -> None:
    task = Probe(models=(), want=frozenset({"labels"}), batch=1, seed=0)
    shares = Dataset(DATA.x, np.full((len(DATA), CLASSES), 1 / CLASSES))
    for data, counts in (
        (DATA, np.bincount(DATA.y, minlength=CLASSES)),
        (shares, np.full(CLASSES, len(DATA) / CLASSES)),
    ):
        reply = run_probe(LEARNER, task, DeviceData(train=data))
        assert (reply.n, reply.losses) == (len(DATA), None)
        assert reply.labels == pytest.approx(counts, rel=1e-12)


def test_label_totals_need_a_classifier_with_as_many_classes() -> None:
    regression = replace(LEARNER.program, loss="squared-error")
    with pytest.raises(Malformed, match="a label prior needs a classifier"):
        with_label_prior(regression, np.zeros((1, 2, 3)), DATA, np.ones(CLASSES), [None])
    with pytest.raises(Malformed, match=f"needs {CLASSES} numbers"):
        with_label_prior(LEARNER.program, np.zeros((1, 2, CLASSES)), DATA, np.ones(CLASSES), [[1.0]])
