"""How a center does on a device's labels: one for each sample, or one for each token or pixel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from scipy.special import log_softmax
from torch import nn

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.engines.targets import accuracy_of
from edge_client.nearest.choose_center import CenterSource, Selection, choose_center
from edge_client.nearest.features import model_distances
from edge_client.nearest.personalise import evaluate_model
from edge_client.nearest.result import evaluate_center, score
from edge_client.protocol.program import IGNORED, Program
from edge_client.protocol.task import Array, Probe
from edge_client.training.fit_probe import run_probe
from edge_client.training.learner import Learner
from export.bundle.center_files import export_center
from export.bundle.verify_centers import torch_logits
from tests.support import softmax_program
from tests.support.token_learner import TokenLearner

RNG = np.random.default_rng(0)


@pytest.mark.parametrize("axis", [1, -1])
def test_positions_that_are_not_ignored_score_wherever_the_classes_lie(axis: int) -> None:
    rows, y = RNG.standard_normal((6, 4, 5, 3)), RNG.integers(3, size=(6, 4, 5))
    y[RNG.random(y.shape) < 0.3] = IGNORED
    counted = y != IGNORED
    right = (rows.argmax(-1) == y)[counted].mean()
    lost = -np.take_along_axis(log_softmax(rows, -1), np.maximum(y, 0)[..., None], -1)[..., 0][counted].mean()
    outputs = np.moveaxis(rows, -1, axis)
    assert accuracy_of(outputs, y) == pytest.approx(right)
    assert score(outputs, Dataset(np.zeros((6, 2)), y)) == pytest.approx((right, lost))


def test_one_label_for_each_sample_scores_the_rows() -> None:
    assert accuracy_of(np.eye(3), np.array([0, 1, 0])) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("own_loss", "y", "labels", "loss"),
    [
        (False, np.ones((4, 2), np.float32), True, "squared"),
        (True, np.ones((4, 2), np.float32), True, None),
        (True, np.ones((4, 3), np.float32), True, None),  # as for a mean and a spread, or a quantile each
        (False, np.zeros(4, np.int64), False, None),
    ],
    ids=["squared-error", "own-loss", "own-targets", "unlabelled"],
)
def test_a_model_of_numbers_names_no_class_and_has_a_loss_only_where_that_is_known(
    tmp_path: Path, *, own_loss: bool, y: Array, labels: bool, loss: str | None
) -> None:
    network = nn.Linear(softmax_program.FEATURES, 2)
    file = tmp_path / "file"
    file.write_bytes(export_center(network, (softmax_program.FEATURES,), "onnx"))
    x = RNG.random((4, softmax_program.FEATURES)).astype(np.float32)
    answer = evaluate_center(
        "d",
        Selection(center=0, best=0, way="loss", samples=4, ranking=(0,)),
        file,
        DeviceData(train=Dataset(x, y)),
        program=replace(softmax_program.program(), loss="squared-error", target=(2,), own_loss=own_loss),
        state=tmp_path,
        file_format="onnx",
        sha256="",
        labels=labels,
        threads=1,
        fetched=0,
        signed_by=None,
    )
    assert (answer.accuracy, answer.predicted) == (None, {})
    known = None if loss is None else float(np.square(torch_logits(network, x) - y).mean())
    assert answer.loss == (known if known is None else pytest.approx(known, rel=1e-4))


def test_samples_without_a_label_that_counts_say_nothing_of_how_a_center_fits() -> None:
    """Each counted as a loss of 0, so that most of them made every center fit."""
    y = np.full((6, 3), IGNORED)
    y[4, 1], y[5] = 1, 0
    far = np.array([9.0, 9.0, 9.0, 9.0, 2.0, 4.0])
    learner = cast("Learner", TokenLearner())
    found = model_distances(
        learner, [far, far + np.array([0, 0, 0, 0, 1.0, -1.0])], Dataset(np.zeros((6, 1)), y), labels=True
    )
    assert found["loss"].tolist() == [3.0, 3.0]
    assert found["votes"].tolist() == [0.5, 0.5]


def test_losses_of_the_nearest_center_and_of_a_probe_have_the_same_bits() -> None:
    learner, y = cast("Learner", TokenLearner()), RNG.integers(2, size=(97, 3))
    y[RNG.random(97) < 0.3] = IGNORED
    models, data = list(RNG.random((3, 97))), Dataset(np.zeros((97, softmax_program.FEATURES), np.float32), y)
    task = Probe(models=tuple(models), want=frozenset({"loss"}), batch=32, seed=0)
    asked = run_probe(learner, task, DeviceData(train=data, test=data)).losses
    assert asked is not None
    assert model_distances(learner, models, data, labels=True)["loss"].tolist() == asked.tolist()


def test_they_say_nothing_of_what_personal_steps_gained_either() -> None:
    """Each counted as a loss of 0; where none counts, the accuracy was NaN, which is no JSON."""
    y = np.full((6, 3), IGNORED)
    learner, far = cast("Learner", TokenLearner()), np.array([9.0, 9.0, 9.0, 9.0, 2.0, 4.0])
    assert evaluate_model(learner, far, Dataset(np.zeros((6, 1)), y)) == (None, None)
    y[4, 1], y[5] = 1, 0
    assert evaluate_model(learner, far, Dataset(np.zeros((6, 1)), y)) == (0.75, 3.0)


@dataclass
class OneCenter:
    """See `CenterSource`; a center of which the loss is given."""

    loss: float
    program: Program = TokenLearner.program
    centers: int = 1
    router: None = None
    tree: None = None
    abstain: float = 1.0

    def learner(self, *, training: bool) -> Learner:
        assert not training
        return cast("Learner", TokenLearner())

    def models(self, centers: Sequence[int]) -> list[Array]:
        return [np.array(self.loss) for _ in centers]


def test_the_few_labels_of_many_samples_are_looked_at() -> None:
    """Of 10,000 samples 256 are measured; without the one that has a label it was said that none has one."""
    y = np.full((10_000, 3), IGNORED)
    y[1234, 1] = 1
    offer = cast("CenterSource", OneCenter(loss=0.5))
    found = choose_center(offer, Dataset(np.zeros((10_000, 1)), y), labels=True)
    assert (found.center, found.distances["loss"]) == (0, {0: 0.5})
