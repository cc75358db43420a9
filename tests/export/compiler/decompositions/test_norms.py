"""Batch norm and group norm, written out, are torch's, forward and backward."""

# ruff: noqa: FBT003 - these functions have torch's own signatures

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.decompositions.norms import (
    batch_norm_backward,
    batch_norm_training,
    group_norm,
    group_norm_backward,
)

EPS = 1e-5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def close(ours: Tensor | None, theirs: Tensor) -> bool:
    return ours is not None and torch.allclose(ours, theirs, rtol=0, atol=1e-10)


@pytest.mark.parametrize("size", [(), (5,), (4, 3)])
def test_batch_norm_trains_like_torch_and_keeps_the_unbiased_variance(size: tuple[int, ...]) -> None:
    x, weight, bias = drawn(6, 3, *size).requires_grad_(), drawn(3).requires_grad_(), drawn(3).requires_grad_()
    mean, var = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    out, saved_mean, rstd, new_mean, new_var = batch_norm_training(
        x.detach(), weight.detach(), bias.detach(), mean.clone(), var.clone(), True, 0.1, EPS
    )
    expected = F.batch_norm(x, mean, var, weight, bias, training=True, momentum=0.1, eps=EPS)  # writes mean and var
    assert close(out, expected.detach())
    assert close(new_mean, mean)
    assert close(new_var, var)
    grad = drawn(6, 3, *size)
    got = batch_norm_backward(
        grad, x.detach(), weight.detach(), None, None, saved_mean, rstd, True, EPS, [True, True, True]
    )
    for ours, theirs in zip(got, torch.autograd.grad(expected, [x, weight, bias], grad), strict=True):
        assert close(ours, theirs)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm_is_torchs(groups: int) -> None:
    x, weight, bias = drawn(3, 4, 5, 2).requires_grad_(), drawn(4).requires_grad_(), drawn(4).requires_grad_()
    expected = F.group_norm(x, groups, weight, bias, EPS)
    out, mean, rstd = group_norm(x.detach(), weight.detach(), bias.detach(), 3, 4, 10, groups, EPS)
    assert close(out, expected.detach())
    grad = drawn(3, 4, 5, 2)
    got = group_norm_backward(grad, x.detach(), mean, rstd, weight.detach(), 3, 4, 10, groups, [True] * 3)
    for ours, theirs in zip(got, torch.autograd.grad(expected, [x, weight, bias], grad), strict=True):
        assert close(ours, theirs)


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_without_weights_only_the_input_has_a_gradient(norm: str) -> None:
    x, grad = drawn(3, 4, 5, 2).requires_grad_(), drawn(4, 3, 2, 5).reshape(3, 4, 5, 2)
    if norm == "batch":
        expected, none = F.batch_norm(x, None, None, training=True, eps=EPS), torch.zeros(4, dtype=torch.float64)
        out, mean, rstd, *_ = batch_norm_training(x.detach(), None, None, none, none, True, 0.1, EPS)
        got = batch_norm_backward(grad, x.detach(), None, None, None, mean, rstd, True, EPS, [True, False, False])
    else:
        expected = F.group_norm(x, 2, None, None, EPS)
        out, mean, rstd = group_norm(x.detach(), None, None, 3, 4, 10, 2, EPS)
        got = group_norm_backward(grad, x.detach(), mean, rstd, None, 3, 4, 10, 2, [True, False, False])
    assert close(out, expected.detach())
    assert close(got[0], torch.autograd.grad(expected, x, grad)[0])
    assert got[1:] == (None, None)
