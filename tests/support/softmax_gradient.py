"""Loss and gradient of the tests' softmax regression by torch in float64: what devices ought to find."""

from __future__ import annotations

import numpy as np
import torch

from edge_client.data.dataset import Dataset
from edge_client.protocol.task import Flat
from tests.support.softmax_program import CLASSES, FEATURES


def gradient(model: Flat, data: Dataset) -> Flat:
    """Of the mean cross-entropy over all samples."""
    w = torch.tensor(model, dtype=torch.float64, requires_grad=True)
    logits = torch.tensor(data.x) @ w[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).T + w[CLASSES * FEATURES :]
    torch.nn.functional.cross_entropy(logits, torch.tensor(data.y)).backward()  # type: ignore[no-untyped-call]  # torch has no hints here
    assert w.grad is not None
    return np.asarray(w.grad.numpy())


def loss(model: Flat, data: Dataset) -> float:
    w = torch.tensor(model, dtype=torch.float64)
    logits = torch.tensor(data.x) @ w[: CLASSES * FEATURES].reshape(CLASSES, FEATURES).T + w[CLASSES * FEATURES :]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(data.y)))
