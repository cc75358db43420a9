"""A program that differs from torch, or is not finite, is refused with the operator that explains it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.hints.difference_hints import difference_hint
from export.compiler.program import compile_program, make_source


class Scheduled(nn.Module):
    """Takes the root of one minus a buffer, which only numbers below one have."""

    kept: Tensor

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.register_buffer("kept", torch.linspace(0.9, 0.95, 2), persistent=persistent)
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * torch.sqrt(1.0 - self.kept))  # type: ignore[no-any-return]


def test_a_table_whose_numbers_must_stay_is_refused_by_name_and_compiles_as_the_hint_says() -> None:
    with pytest.raises(ProgramRefused) as refused:
        compile_program(Scheduled(persistent=True), (2,), engines=("pt2",))
    assert "other values of kept were tried" in str(refused.value.hint)
    assert "persistent=False" in str(refused.value.hint)
    assert compile_program(Scheduled(persistent=False), (2,), engines=("pt2",)).program.parity["pt2"] < 1e-5


class BehindRelu(nn.Linear):
    """The root of a ReLU: where it is 0, torch's gradient is 0 and that of a product with a mask NaN."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x)).sqrt()


class RootOfSize(nn.Linear):
    """Its gradient is NaN in torch, too, for an output that is always 0."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out + (out - out).abs().sqrt()


class Hashed(nn.Linear):
    """A hash of whole numbers beyond float32's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward((x.abs().long() * 1_000_003 % 97).to(x.dtype))


class MaskedBeforeUpsampling(nn.Linear):
    """A mask of minus infinity is enlarged."""

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.where(torch.arange(3) == 0, -torch.inf, torch.zeros(3)).reshape(1, 1, 3)
        return super().forward(x).softmax(-1) * nn.functional.interpolate(mask, scale_factor=2.0).exp().reshape(6)[1:4]


class SquaredBehindMask(MaskedBeforeUpsampling):
    """A square, the only power here, has a finite gradient everywhere."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x**2)


class ArcOfOne(nn.Linear):
    """The angle of a cosine that is always 1."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out**2 + torch.cos(out - out).acos()


class TurnsAtRounding(nn.Linear):
    """The angle of what is 0 but for a rounding; at which side is the runtime's choice."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return torch.atan2(out * 3 - out - out - out, -out.abs() - 1)


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (
            BehindRelu(6, 3),
            r"aten.sqrt in layer .*BehindRelu.* at test_difference_hints.py:\d+: the gradient of a root",
        ),
        (RootOfSize(6, 3), r"aten.sqrt in layer .*torch.sqrt\(h \+ 1e-6\)"),
        (MaskedBeforeUpsampling(6, 3), r"aten.upsample_nearest1d in layer .*mask by -1e9"),
        (SquaredBehindMask(6, 3), r"aten.upsample_nearest1d in layer .*mask by -1e9"),
        (ArcOfOne(6, 3), r"aten.acos in layer .*infinite at 1 and -1"),
    ],
)
def test_what_makes_numbers_that_are_not_finite_is_named_with_the_line_and_what_to_write(
    module: nn.Module, says: str
) -> None:
    with pytest.raises(ProgramRefused, match=says):
        compile_program(module, (6,), loss="squared-error", engines=("onnx",))


def test_an_angle_that_rounding_turns_and_a_hash_are_named_with_what_to_write() -> None:
    source = make_source(TurnsAtRounding(6, 3), input=(6,), loss="squared-error")
    assert "aten.atan2 in layer" in difference_hint(source, "onnx", 0.5)
    hashed = make_source(Hashed(6, 3), input=(6,), loss="squared-error")
    assert "aten.remainder in layer" in difference_hint(hashed, "onnx", 0.5)
    other = make_source(nn.Linear(2, 2), input=(2,), loss="squared-error")
    assert "report the model" in difference_hint(other, "onnx", 0.5)


class LargestInAnyOrder(nn.Linear):
    """Torch gives three of six values in an order of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).topk(3, -1, sorted=False).values


def test_an_order_that_torch_leaves_open_is_named() -> None:
    with pytest.raises(ProgramRefused) as refused:
        compile_program(LargestInAnyOrder(6, 6), (6,), loss="squared-error", engines=("pt2",))
    assert "aten.topk in layer" in str(refused.value.hint)
    assert "leave sorted=True" in str(refused.value.hint)


class ListedScale(nn.Linear):
    """Reads a buffer from a plain list."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__(4, 3)
        self.register_buffer("scale", torch.rand(3))
        self.kept = [self.scale]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.kept[0]


def test_a_buffer_that_is_read_from_a_list_is_told_by_its_name() -> None:
    with pytest.raises(ProgramRefused) as refused:
        compile_program(ListedScale(), (4,), engines=("pt2",))
    assert "kept holds a buffer beside its own place" in str(refused.value.hint)
