"""A few local SGD steps from a center, and their evaluation. numpy over a Learner; nothing is sent."""

from __future__ import annotations

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.engines.targets import accuracy_of
from edge_client.nearest import features
from edge_client.nearest.choose_center import CenterSource
from edge_client.protocol.task import Fit, Flat
from edge_client.training.fit_probe import run_fit
from edge_client.training.learner import Learner

PERSONAL_MU, PERSONAL_LEARNING_RATE = 0.1, 0.01  # towards the center, and the learning rate if the router has none


def personalise(source: CenterSource, center: Flat, data: Dataset, steps: int) -> Flat:
    """A few local steps from a center: min f(w) + (PERSONAL_MU / 2) |w - center|^2 -> the model [schema.size].

    Learning rate and momentum are the run's, if the router has them. Samples that fill no batch of an engine with a
    fixed one are repeated.
    """
    about = None if source.router is None else source.router.round
    learner = source.learner(training=True)
    if (fixed := learner.fixed_batch) is not None and len(data) < fixed:
        data = features.sample_batches(data, fixed, fixed, seed=0)
    task = Fit(
        start=center,
        anchor=center,
        mu=PERSONAL_MU,
        steps=steps,
        lr=PERSONAL_LEARNING_RATE if about is None else about.lr,
        momentum=0.0 if about is None else about.momentum,
        batch=fixed or min(features.EVALUATION_BATCH, max(1, len(data))),
        seed=0,
    )
    return run_fit(learner, task, data).vector.astype(np.float32)


def evaluate_model(learner: Learner, model: Flat, data: Dataset) -> tuple[float | None, float | None]:
    """A model on labelled samples -> (accuracy, None for targets that are no classes; mean loss).

    A sample without a label that counts has no loss; where all are such, both are None.
    """
    losses, logits = learner.evaluate([model], data, batch=learner.fixed_batch or features.EVALUATION_BATCH)
    if not np.issubdtype(data.y.dtype, np.integer):
        return None, float(losses.mean())
    if not data.counted.any():
        return None, None
    return accuracy_of(logits[0], data.y), float(losses[0, data.counted].mean())
