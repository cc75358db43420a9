"""A coordinator that lies asks for one choice of a center after another, among centroids that it makes up.

With `secure = "updates"` a choice is told in the clear. docs/security.md names this limit; a device that demands
`updates+membership` tells none.
"""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.errors import Malformed
from edge_client.protocol.summed_task import SummedFit, SumScale
from edge_client.runtime.active_task import check_secure
from edge_client.training.learner import EngineLearner
from edge_client.training.summed import TrainedChoice
from edge_client.training.summed_work import SummedMemory, add_words
from tests.support.softmax_program import SoftmaxEngine, grouped_fleet, program

QUESTIONS = 12
CENTERS = 16


def asked(column: int, low: float, high: float, size: int) -> SummedFit:
    """Which of 16 numbers from `low` to `high` is the nearest to this one of the model."""
    points = np.linspace(low, high, CENTERS).reshape(1, CENTERS, 1)
    fit = {"start": np.zeros(size, np.float32), "steps": 1, "lr": 0.1, "batch": 8, "seed": 0, "upload": False}
    how = {"stage": "choose", "choose": "nearest", "open": tuple(range(CENTERS)), "compare": ((column, column + 1),)}
    centers, scale = np.zeros((CENTERS, size), np.float32), SumScale(bits=16, devices=5, clip=1.0)
    return SummedFit(**fit, **how, centers=centers, scale=scale, points=points)  # type: ignore[arg-type]  # each by its name


def test_choices_among_made_up_centroids_tell_an_update_number_by_number_as_documented() -> None:
    trained = np.random.default_rng(0).standard_normal(24).astype(np.float32)
    mine = TrainedChoice(models=trained[None], weights=np.eye(CENTERS)[0], order=np.arange(CENTERS))
    learner, local = EngineLearner(SoftmaxEngine(), program()), grouped_fleet(1, 1)["d00"]
    found = []
    for column in range(len(trained)):
        low, high = -8.0, 8.0
        for _ in range(QUESTIONS):
            task = asked(column, low, high, len(trained))
            memory = SummedMemory(trained=mine, choice=None, own=lambda _: None)
            told = int(add_words(learner, task, local, memory).words.argmax())
            step = (high - low) / (CENTERS - 1)
            low, high = low + (told - 0.5) * step, low + (told + 0.5) * step
        found.append((low + high) / 2)
    np.testing.assert_allclose(found, trained, atol=1e-6)


def test_a_device_that_demands_hidden_choices_tells_none() -> None:
    task = {"job": "sum", "stage": "tell", "work": {"sum": {"choose": "nearest", "part": "choose", "share": 1.0}}}
    check_secure(task, "updates")
    with pytest.raises(Malformed, match="asks for the choice of a center"):
        check_secure(task, "updates+membership")
