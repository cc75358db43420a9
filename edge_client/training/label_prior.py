"""The label prior of classifiers: outputs corrected from the labels that a model was trained on to the device's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.engines.targets import one_hot
from edge_client.errors import Malformed
from edge_client.protocol.program import Program
from edge_client.protocol.task import F64, Array, Flat, OwnModel, Probe
from edge_client.training.learner import log_softmax

LABEL_PRIOR_SAMPLES = 0.1  # samples of each class beside one's own


def label_totals(task: Probe, own: Callable[[str], Flat | None]) -> list[Sequence[float] | None]:
    """The label totals of each model of a task that has some; None for a model that the device trained for itself."""
    return [
        None if isinstance(model, OwnModel) and own(model.slot) is not None else row
        for model, row in zip(task.models, task.label_totals or (), strict=True)
    ]


def with_label_prior(
    program: Program, logits: Array, data: Dataset, here: F64, totals: Sequence[Sequence[float] | None]
) -> tuple[F64, Array]:
    """Losses [M, n] and logits [M, n, C] of classifiers that are corrected to the labels of the training samples.

    log(n_c + e) - log(t_c + e) is added to class c: n are the device's training samples [C], `here`, t those that the
    candidate was trained on, its entry of `totals`; e is LABEL_PRIOR_SAMPLES. A candidate without an entry stays as it
    is. This is Bayes' rule for a new prior: Saerens, Latinne, Decaestecker 2002, "Adjusting the Outputs of a
    Classifier", (2.4).
    """
    if program.own_loss:
        raise Malformed("bad_task", "a label prior corrects cross-entropy, and this program has a loss of its own")
    check_classifier(program, "a label prior")
    truth = one_hot(program, data.y)
    if any(row is not None and len(row) != program.classes for row in totals):
        raise Malformed("bad_task", f"label_totals needs {program.classes} numbers for each model")
    known = np.array([here if row is None else np.asarray(row, dtype=np.float64) for row in totals])
    shift = np.log(here + LABEL_PRIOR_SAMPLES) - np.log(known + LABEL_PRIOR_SAMPLES)  # [M, C]
    scores = logits + shift[:, None]
    return -(truth * log_softmax(scores)).sum(axis=-1), scores


def label_counts(program: Program, data: Dataset) -> F64:
    """[C] samples of each class; soft labels count by their shares. Raises Malformed for a program without classes."""
    check_classifier(program, "a label prior")
    counts: F64 = one_hot(program, data.y).sum(axis=0, dtype=np.float64)
    return counts


def check_classifier(program: Program, what: str) -> None:
    """Raise Malformed for a program without one label for each sample; `what` needs it."""
    if program.loss != "cross-entropy":
        raise Malformed("bad_task", f"{what} needs a classifier of one label per sample")
