"""A loss of the user's own that one sample at a time makes another loss, or that fails so, is refused before a run."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

import fedcenters as fc
from edge_client.errors import ProgramRefused
from edge_client.protocol.task import Array
from emulator.data.fleet import Fleet
from emulator.engines.cpu.own_losses import losses_alone

RNG = np.random.default_rng(0)
X, WHO = RNG.normal(size=(60, 4)), np.repeat([0, 1, 2], 20)
LABELS, NUMBERS = np.arange(60) % 3, RNG.normal(size=60)
RARE = torch.tensor([9.0, 1.0, 1.0])
Loss = Callable[[Tensor, Tensor], Tensor]


def fleet(y: Array) -> Fleet:
    return fc.fleet((X, y), by=WHO)


def trained(y: Array, loss: Loss, module: nn.Module | None = None) -> Array:
    torch.manual_seed(0)
    module = nn.Linear(4, 3 if y is LABELS else 1) if module is None else module
    result = fc.simulate(fc.FedAvg(local_steps=3), fleet=fleet(y), model=module, loss=loss, rounds=1, engine="lean")
    return np.asarray(result.run.state.centers)


@pytest.mark.parametrize(
    ("y", "loss", "told"),
    [
        (LABELS, nn.CrossEntropyLoss(weight=RARE), "loss CrossEntropyLoss gives .* of these samples, each alone"),
        (LABELS, nn.CrossEntropyLoss(ignore_index=0), "and nan as the mean"),
        (LABELS, nn.CrossEntropyLoss(reduction="sum"), "each alone"),
        (NUMBERS, lambda out, y: ((out.squeeze(1) - y) ** 2).mean(), r"outputs \[8, 1\] and targets \[8, 1\].*alone"),
        (LABELS, lambda out, y: F.cross_entropy(out[y > 0], y[y > 0]), "one sample at a time"),
        (LABELS, lambda out, y: F.cross_entropy(y, out), "one sample at a time"),
        (LABELS, lambda out, y: F.cross_entropy(out.detach(), y), "no gradient"),
    ],
)
def test_a_loss_that_no_sample_has_alone_is_refused(y: Array, loss: Loss, told: str) -> None:
    """Weights of classes had no effect with torch's usual reduction, and others ended in a traceback of torch."""
    with pytest.raises(ProgramRefused, match=told):
        trained(y, loss)


def test_a_mean_over_samples_is_what_one_number_per_sample_is() -> None:
    for y, kind in ((LABELS, nn.CrossEntropyLoss), (NUMBERS, nn.HuberLoss)):
        mean, each = (trained(y, kind(reduction=how)) for how in ("mean", "none"))
        np.testing.assert_allclose(mean, each, atol=1e-6)
    weighed = trained(LABELS, nn.CrossEntropyLoss(weight=RARE, reduction="none"))
    assert np.abs(weighed - trained(LABELS, nn.CrossEntropyLoss())).max() > 1e-2


def test_where_a_sample_has_several_labels_another_mean_over_a_batch_is_told(caplog: pytest.LogCaptureFixture) -> None:
    module = nn.Sequential(nn.Linear(4, 15), nn.Unflatten(1, (3, 5)))  # five labels of three classes
    y = RNG.integers(3, size=(60, 5))
    with caplog.at_level(logging.WARNING):
        trained(y, nn.CrossEntropyLoss(weight=RARE), module)
    assert "each sample counts alike, whatever its labels" in caplog.text
    caplog.clear()
    trained(y, nn.CrossEntropyLoss(), module)
    assert not caplog.text


def test_a_sample_whose_labels_are_all_left_out_has_no_loss_and_no_gradient() -> None:
    """Torch's mean over no label is NaN: a device with one such sample was missing in the fleet's loss."""
    y = torch.tensor([[0, 1, -100], [-100, -100, -100], [2, -100, 1]])
    out = torch.randn((3, 4, 3), generator=torch.Generator().manual_seed(0)).requires_grad_()
    losses = losses_alone(nn.CrossEntropyLoss(), out, y)
    usual = F.cross_entropy(out, y, reduction="none").sum(1) / torch.tensor([2.0, 1.0, 2.0])
    torch.testing.assert_close(losses, usual)
    torch.autograd.backward(losses.sum())
    assert out.grad is not None
    assert out.grad[1].eq(0).all()
    assert out.grad.isfinite().all()
