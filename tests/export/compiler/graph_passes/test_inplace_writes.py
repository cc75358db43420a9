"""Writes become plain operators, also where other names read them; others stay, and the numbers stay in every case."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from edge_client.errors import ProgramRefused
from export.compiler.graph_passes.inplace_writes import without_writes
from export.compiler.program import make_source

OF_THE_BUFFER = 2  # add_, and copy_ at the end


class Called(nn.Module):
    """`body`, and a buffer that counts its calls."""

    seen: Tensor

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        return self.body(x)


def _activated(x: Tensor) -> Tensor:
    return F.hardswish((2 * x).permute(0, 2, 1), inplace=True).permute(0, 2, 1)


def _added_twice(x: Tensor) -> Tensor:
    h = (2 * x)[:, 1:]
    h += 1
    h *= 3
    return h


def _base_is_read(x: Tensor) -> Tensor:
    h = 2 * x
    h[:, 0].relu_()
    return h


def _older_view_is_read(x: Tensor) -> Tensor:
    h = 2 * x
    flat = h.flatten(1)
    h.relu_()
    return flat + 1


def _dropped_is_its_input(x: Tensor) -> Tensor:
    h = 2 * x
    F.dropout(h, 0.5, training=False).relu_()
    return h


def _one_of_several_views_is_read(x: Tensor) -> Tensor:
    h = 2 * x
    first, second = torch.split(h, 1, 1)
    first.relu_()
    whole: Tensor = first + second + h[:, :1]
    return whole


def _input_is_written(x: Tensor) -> Tensor:
    x[0].relu_()
    return x * 2


def _written_twice_through_a_view(x: Tensor) -> Tensor:
    h = 2 * x
    part = h[:, 0]
    part += 1
    part *= 3
    return h + part.unsqueeze(1)


def _filled_row_by_row(x: Tensor) -> Tensor:
    h = torch.zeros_like(x).transpose(1, 2)
    for i in range(2):
        h[..., i] = x[:, 1 - i] * (i + 1)
        h[:, i] += x[:, 0, :2]
    return h


def _a_view_of_a_view_is_written(x: Tensor) -> Tensor:
    h = 2 * x
    flat, part = h.view(-1, 8), h.unsqueeze(1)[:, 0, :, 1:3]
    part.transpose(1, 2).diagonal(dim1=1, dim2=2).neg_()
    part.mul_(part.sum())
    return flat + h.flatten(1)


def _raised_to_a_power(x: Tensor) -> Tensor:
    h = x.abs() + 1
    return h.pow_(-0.5) * x


def _a_copy_is_no_view(x: Tensor) -> Tensor:
    h = 2 * x
    turned = h.transpose(1, 2).reshape(-1, 8)
    h[:, 0] = 0
    return turned + h.flatten(1)


def _filled_where_a_mask_is_true(x: Tensor) -> Tensor:
    h = 2 * x
    return h.masked_fill_(h < 0, -5.0)


def _a_mask_is_copied_into_numbers(x: Tensor) -> Tensor:
    h = 2 * x
    h.copy_(x > 0)
    return h / 3


def _a_mask_takes_numbers(x: Tensor) -> Tensor:
    return (x > 0).logical_and_(x - 1)


def _masks_are_combined(x: Tensor) -> Tensor:
    mask = x > -1
    mask &= x < 1
    mask |= x > 2
    mask ^= x < 0
    return x * mask


def _written_by_places_and_by_a_view(x: Tensor) -> Tensor:
    h = torch.zeros(len(x), 3, 4)
    h[:, [2, 0]] = x
    h[:, 1].copy_(x[:, 0])
    h.scatter_(1, (x[:, :1] > 0).long(), 2.0)
    h[..., 3] *= 2
    return h


def writes(module: torch.fx.GraphModule) -> int:
    targets = [str(node.target).split(".") for node in module.graph.nodes if node.op == "call_function"]
    return sum(target[0] == "aten" and target[1].endswith("_") for target in targets)


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (_activated, 0),
        (_added_twice, 0),
        (_base_is_read, 0),
        (_older_view_is_read, 0),
        (_written_twice_through_a_view, 0),
        (_filled_row_by_row, 0),
        (_a_view_of_a_view_is_written, 0),
        (_raised_to_a_power, 0),
        (_filled_where_a_mask_is_true, 0),
        (_masks_are_combined, 0),
        (_written_by_places_and_by_a_view, 0),
        (_a_mask_is_copied_into_numbers, 1),
        (_a_mask_takes_numbers, 1),
        (_a_copy_is_no_view, 1),
        (_dropped_is_its_input, 1),
        (_one_of_several_views_is_read, 1),
        (_input_is_written, 1),
    ],
)
def test_a_write_becomes_an_operator_and_what_reads_it_later_is_the_same(
    body: Callable[[Tensor], Tensor], left: int
) -> None:
    module, x = Called(body).eval(), torch.randn(3, 2, 4)
    exported = torch.export.export(module, (x.clone(),), strict=False).module(check_guards=False)
    before = writes(exported)
    plain = without_writes(exported)
    assert before > writes(plain) or left == 1
    assert writes(plain) == OF_THE_BUFFER + left
    assert torch.equal(plain(x.clone()), body(x.clone()))
    assert plain.get_buffer("seen").tolist() == [1.0] * 4


class Rescaled(nn.Linear):
    """Writes into what the gradient of exp, or of a product, needs."""

    def __init__(self, *, exponent: bool) -> None:
        super().__init__(6, 3)
        self.exponent = exponent

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if self.exponent:
            return h.exp().add_(1.0)
        h[:, 2].mul_(h[:, 0])
        return h


@pytest.mark.parametrize(("exponent", "written"), [(True, "add_"), (False, "mul_")])
def test_a_write_after_which_torch_has_no_gradient_is_told_by_its_line(exponent: bool, written: str) -> None:  # noqa: FBT001 - a case
    told = rf"cannot train model 'Rescaled'.*aten.{written} in layer .*\(Rescaled\) at test_inplace_writes.py:[0-9]+"
    with pytest.raises(ProgramRefused, match=told):
        make_source(Rescaled(exponent=exponent), input=(6,))
