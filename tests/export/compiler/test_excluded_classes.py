"""A mask gives excluded classes minus infinity as their logit: the losses of others, and gradients, stay torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import IGNORED, Loss
from export.compiler.losses.label_losses import cross_entropy
from export.compiler.losses.sample_losses import per_sample_loss
from export.compiler.program import compile_program

CLOSE = 1e-12  # float64
EXCLUDED = torch.tensor([False, False, True, False])
LABELS = torch.tensor([[0, 1, 3], [1, IGNORED, 0]])  # a label per position of two samples
WEIGHT = torch.tensor([1.0, 2.0, 3.0, 4.0]).double()


def masked(start: Tensor) -> Tensor:
    """[2, classes, 3] logits."""
    return start.masked_fill(EXCLUDED.unsqueeze(1), -torch.inf)


def start() -> Tensor:
    return torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


def check(found: Tensor, expected: Tensor, x: Tensor) -> None:
    assert expected.isfinite().all()
    assert torch.allclose(found, expected, rtol=0, atol=CLOSE)
    ours, torchs = (torch.autograd.grad(loss.sum(), x, retain_graph=True)[0] for loss in (found, expected))
    assert torch.allclose(ours, torchs, rtol=0, atol=CLOSE)
    assert not ours[:, EXCLUDED].any()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_torchs_function_in_a_loss_of_ones_own(weight: Tensor | None, reduction: str) -> None:
    x = start()
    ways = (cross_entropy, F.cross_entropy)
    found, expected = (way(masked(x), LABELS, weight=weight, ignore_index=IGNORED, reduction=reduction) for way in ways)
    check(found, expected, x)


@pytest.mark.parametrize("loss", ["pixel-cross-entropy", "token-cross-entropy"])
def test_a_label_per_position(loss: Loss) -> None:
    x = start()
    out = masked(x) if loss == "pixel-cross-entropy" else masked(x).movedim(1, -1)
    each = F.cross_entropy(masked(x), LABELS, reduction="none", ignore_index=IGNORED)
    check(per_sample_loss(loss, out, LABELS.double()), each.sum(1) / (LABELS != IGNORED).sum(1), x)


def test_a_label_per_sample() -> None:
    x = start()
    labels = LABELS[:, 0]
    found = per_sample_loss("cross-entropy", masked(x)[..., 0], F.one_hot(labels, 4).double())
    check(found, F.cross_entropy(masked(x)[..., 0], labels, reduction="none"), x)


class ExcludedByMask(nn.Linear):
    """Logits of which the second one is always this low."""

    def __init__(self, low: float) -> None:
        super().__init__(4, 3)
        self.low = low

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).masked_fill(torch.tensor([False, True, False]), self.low)


@pytest.mark.parametrize("low", [-torch.inf, torch.finfo(torch.float32).min])
def test_logits_of_infinity_or_of_float32s_end_are_refused_and_compile_as_the_hint_says(low: float) -> None:
    with pytest.raises(ProgramRefused, match="gives values as low as -") as refused:
        compile_program(ExcludedByMask(low), (4,), engines=("pt2",))
    assert "as -1e9" in str(refused.value.hint)
    assert compile_program(ExcludedByMask(-1e9), (4,), engines=("pt2",)).program.parity["pt2"] < 1e-5
