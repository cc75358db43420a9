"""The outputs of what a device is served, for any samples: of the models of a probe, as the device evaluates them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import F64, Array, Flat, Probe
from edge_client.training.fit_probe import probed_models
from edge_client.training.label_prior import label_totals, with_label_prior
from edge_client.training.learner import Learner
from edge_client.training.scores import mixed_outputs


def served_outputs(
    learner: Learner,
    task: Probe,
    data: Dataset,
    *,
    train: Callable[[], Dataset],
    labels: Callable[[], F64],
    own: Callable[[str], Flat | None],
) -> Array:
    """[n, ...] those by which the device would be scored: with the statistics and the label prior of its `task`.

    Of a mixture, which has a `prior`, probabilities of classes, or where targets are no classes the mean outputs.
    `train` gives the device's training samples, `labels` how many it has of each class [C], `own` its model in a slot.
    """
    models = probed_models(learner, task, train=train, own=own)
    outputs = learner.evaluate(models, data, batch=task.batch)[1]
    if task.label_totals is not None:
        outputs = with_label_prior(learner.program, outputs, data, labels(), label_totals(task, own))[1]
    (mixed,) = outputs if task.prior is None else mixed_outputs(learner.program, outputs, task.prior)
    return np.asarray(mixed)
