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
    "indices",
    [
        [torch.tensor([0, -1]), torch.tensor([0, 1])],  # single places, not rows and columns
        [torch.tensor([0, 1]), torch.tensor([[0], [1]])],  # columns before rows
        [torch.tensor([[0], [1]]), None, torch.tensor([0, 1, 1])],
        [None, torch.tensor([2, 0, 0]), torch.tensor([[1], [3]])],
    ],
)
def test_places_of_several_axes_and_their_gradient_are_torchs(indices: list[Tensor | None]) -> None:
    x = noise(2, 3, 4).requires_grad_()
    expected = torch.ops.aten.index(x, indices)
    assert same(matrices.index(x.detach(), indices), expected)
    grad = noise(*expected.shape, seed=1)
    (back,) = torch.autograd.grad(expected, x, grad)
    assert same(matrices.index_put(torch.zeros_like(x), indices, grad, True), back)


@pytest.mark.parametrize("indices", [[None, torch.tensor([2, 0])], [torch.tensor([0, 1]), torch.tensor([1, 0])]])
def test_infinities_beside_the_picked_values_stay_there(indices: list[Tensor | None]) -> None:
    x = noise(3, 4)
    x[:, 3] = x[2] = -torch.inf
    assert same(matrices.index(x, indices), torch.ops.aten.index(x, indices))


def test_infinities_put_at_numbered_places_replace_what_is_there_alone() -> None:
    x, indices, values = noise(3, 4), [torch.tensor([0, -1]).unsqueeze(1), torch.tensor([3, 1])], noise(2, 2, seed=1)
    values[0, 0] = values[1, 1] = -torch.inf
    for put in (values, torch.tensor(-torch.inf, dtype=x.dtype)):
        assert same(matrices.index_put(x, indices, put), torch.ops.aten.index_put(x, indices, put))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_whole_numbers_and_masks_keep_their_type_when_they_are_indexed(dtype: torch.dtype) -> None:
    x, rows = torch.tensor([[1, 0, 7], [2, 5, 0]]).to(dtype), torch.tensor([2, 0])
    found = matrices.index(x, [None, rows])
    assert found.dtype == dtype
    assert torch.equal(found, x[:, rows])


def test_assigned_values_replace_those_at_their_places_alone() -> None:
    x, rows, values = noise(4, 3), torch.tensor([3, 1]), noise(2, 3, seed=1)
    expected = x.clone()
    expected[rows] = values
    assert same(matrices.index_put(x, [rows], values), expected)


def test_a_number_put_at_every_place_of_a_mask_is_torchs() -> None:
    x, mask = noise(4, 3), torch.tensor([True, False, True, False])
    expected = x.clone()
    expected[mask] = 2.5
    assert same(matrices.index_put(x, [mask], torch.tensor(2.5, dtype=x.dtype)), expected)


def test_a_mask_that_picks_values_is_refused_with_what_to_write() -> None:
    with pytest.raises(UnsupportedOperator, match=r"^index: .*torch\.where"):
        matrices.index(noise(3, 3), [torch.tensor([True, False, True])])


@pytest.mark.parametrize("corners", [True, False])
@pytest.mark.parametrize("padding", ["zeros", "border"])
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
@pytest.mark.parametrize("sizes", [(4, 6), (2, 3, 5)])
def test_a_sampled_grid_and_its_gradients_are_torchs_on_places_between_them_and_beyond(
    sizes: tuple[int, ...], mode: str, padding: str, corners: bool
) -> None:
    x = noise(2, 3, *sizes).requires_grad_()
    theta = 0.6 * noise(2, len(sizes), len(sizes) + 1, seed=1)
    theta[0] = torch.eye(len(sizes), len(sizes) + 1)  # each point on a place
    theta = theta.requires_grad_()
    size = [2, 3, *sizes]
    grids = [way(theta, size, align_corners=corners) for way in (matrices.affine_grid, F.affine_grid)]
    assert same(*grids)
    found, expected = (
        way(x, grids[1], mode=mode, padding_mode=padding, align_corners=corners)
        for way in (matrices.grid_sample, F.grid_sample)
    )
    assert same(found, expected)
    grad = noise(*expected.shape, seed=2)
    for moved in (x, grids[1])[: 1 if mode == "nearest" else 2]:
        assert same(*(torch.autograd.grad(out, moved, grad, retain_graph=True)[0] for out in (found, expected)))


def test_a_grid_that_mixes_more_than_two_neighbours_is_refused() -> None:
    with pytest.raises(UnsupportedOperator, match="bicubic"):
        matrices.grid_sample(noise(1, 1, 3, 3), noise(1, 2, 2, 2), mode="bicubic")
