"""Adaptive averages and picks by index, written as products along one axis, are torch's; so are their gradients."""

# ruff: noqa: FBT001, FBT003 - torch's own signatures; hypothesis draws booleans too

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's custom

from export.compiler.decompositions import matrices
from export.compiler.decompositions.supported_ops import UnsupportedOperator

TOLERANCE = 1e-12  # float64; sums of fewer than a hundred values
small = st.tuples(st.integers(1, 7), st.integers(1, 7))


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def same(ours: Tensor, theirs: Tensor) -> bool:
    return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@settings(max_examples=100)
@given(size=small, count=small)
def test_adaptive_averages_of_any_size_are_torchs_with_their_gradient(
    size: tuple[int, int], count: tuple[int, int]
) -> None:
    x = noise(2, 3, *size).requires_grad_()
    expected = F.adaptive_avg_pool2d(x, count)
    assert same(matrices.adaptive_avg_pool2d(x.detach(), count), expected)
    grad = noise(2, 3, *count, seed=1)
    (back,) = torch.autograd.grad(expected, x, grad)
    assert same(matrices.adaptive_avg_pool2d_backward(grad, x.detach()), back)


@settings(max_examples=100)
@given(
    axis=st.integers(0, 3),
    rows=st.lists(st.integers(-2, 1), min_size=1, max_size=6),
    folded=st.booleans(),
)
def test_rows_picked_by_number_and_their_gradient_are_torchs(axis: int, rows: list[int], folded: bool) -> None:
    x = noise(2, 2, 2, 2).requires_grad_()
    pick = torch.tensor(rows).reshape([1, -1, 1] if folded else [-1])
    indices = [None] * axis + [pick]
    expected = torch.ops.aten.index(x, indices)
    assert same(matrices.index(x.detach(), indices), expected)
    grad = noise(*expected.shape, seed=1)
    (back,) = torch.autograd.grad(expected, x, grad)
    assert same(matrices.index_put(torch.zeros_like(x), indices, grad, True), back)


@settings(max_examples=60)
@given(rows=st.lists(st.integers(-3, 2), min_size=1, max_size=5), columns=st.lists(st.integers(-4, 3), max_size=5))
def test_rows_and_columns_picked_together_and_their_gradient_are_torchs(rows: list[int], columns: list[int]) -> None:
    x = noise(2, 3, 4).requires_grad_()
    indices = [None, torch.tensor([*rows, 0]).unsqueeze(-1), torch.tensor([*columns, 0, 1])]
    expected = torch.ops.aten.index(x, indices)
    assert same(matrices.index(x.detach(), indices), expected)
    grad = noise(*expected.shape, seed=1)
    (back,) = torch.autograd.grad(expected, x, grad)
    assert same(matrices.index_put(torch.zeros_like(x), indices, grad, True), back)


@pytest.mark.parametrize(
    ("x", "indices"),
    [
        (noise(3, 3), [torch.tensor([0, 1]), torch.tensor([0, 1])]),  # single places, not rows and columns
        (noise(3, 3), [torch.tensor([0, 1]), torch.tensor([[0], [1]])]),  # columns before rows
        (noise(3, 3, 3), [torch.tensor([[0], [1]]), None, torch.tensor([0, 1])]),
        (noise(3, 3), [torch.tensor([True, False, True])]),
        (torch.arange(3), [torch.tensor([0, 1])]),
    ],
)
def test_other_ways_to_index_are_refused_by_name(x: Tensor, indices: list[Tensor | None]) -> None:
    with pytest.raises(UnsupportedOperator, match=r"^index: .*index"):
        matrices.index(x, indices)


def test_assigning_by_index_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedOperator, match="index_put: assigning"):
        matrices.index_put(noise(3), [torch.tensor([0])], noise(1))
