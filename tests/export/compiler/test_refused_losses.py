"""A loss of the user's own that cannot become a program is refused by its own name, not by that of a layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - torch's custom

from edge_client.errors import ProgramRefused
from export.compiler.forward_pass import ForwardPasses
from export.compiler.losses.choose_loss import loss_of_targets
from export.compiler.program import compile_program, make_source
from export.compiler.tracing import trace_function

Loss = Callable[[Tensor, Tensor], Tensor]
LINES = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
LABELS = torch.zeros(2, dtype=torch.int64)


def first_doubled(out: Tensor, y: Tensor) -> Tensor:
    each = (out - y) ** 2
    each[:, 0] *= 2
    return each.mean(1)


def von_mises(out: Tensor, y: Tensor) -> Tensor:
    return (torch.special.i0e(out.exp()).log() - out.exp() * (torch.cos(y) - 1)).mean(1)  # type: ignore[no-any-return]


def ctc(out: Tensor, y: Tensor) -> Tensor:
    steps, labels = torch.full((len(out),), 2), torch.ones(len(out), dtype=torch.long)
    scores = torch.stack([out, y.tanh() + out]).log_softmax(-1)
    return F.ctc_loss(scores, torch.ones(len(out), 1, dtype=torch.long), steps, labels, reduction="none")


def decides(out: Tensor, y: Tensor) -> Tensor:
    each = (out - y).square().mean(1)
    return each * 2 if bool((each > 1).all()) else each


@pytest.mark.parametrize(
    ("loss", "told"),
    [
        (first_doubled, "loss first_doubled uses aten.as_strided.*without writes in place"),
        (von_mises, "loss von_mises at test_refused_losses.py:[0-9]+ uses aten.special_i0e"),  # not told of the layers
        (ctc, "at test_refused_losses.py:[0-9]+: aten._ctc_loss depends on the values of a tensor"),
        (decides, "cannot be traced at test_refused_losses.py:[0-9]+.*so must the loss"),
    ],
)
def test_an_operator_of_the_loss_is_told_as_the_losss(loss: Loss, told: str) -> None:
    with pytest.raises(ProgramRefused, match=f"(?s){told}"):
        compile_program(LINES, (4,), loss=loss, engines=("onnx",))


def test_an_operator_of_a_layer_stays_the_layers_beside_a_loss_of_ones_own() -> None:
    layers = nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.AdaptiveMaxPool2d(5), nn.Flatten(), nn.Linear(25, 3))
    source = make_source(layers, input=(64,), loss="squared-error", own_loss=decides)
    with pytest.raises(ProgramRefused, match=r"layer 1 \(AdaptiveMaxPool2d\)"):
        trace_function(ForwardPasses(source), "step", batch=4, dynamic=False)


class TwoQuantiles(nn.Linear):
    """Several quantiles of its outputs, which torch computes by other operators."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.quantile(super().forward(x), torch.tensor([0.2, 0.4]), dim=1).transpose(0, 1)


@pytest.mark.parametrize("loss", [None, decides], ids=["squared-error", "own"])
def test_a_function_that_torch_takes_apart_names_the_layer_of_its_line(loss: Loss | None) -> None:
    """It was "some layer", or the loss, whose line has no such function."""
    source = make_source(nn.Sequential(TwoQuantiles(6, 4)), input=(6,), loss="squared-error", own_loss=loss)
    with pytest.raises(ProgramRefused, match=r"layer 0 \(TwoQuantiles\) at test_refused_losses.py:\d+ uses quantile"):
        trace_function(ForwardPasses(source), "step", batch=4, dynamic=False)


@pytest.mark.parametrize(
    ("loss", "targets", "told"),
    [
        (lambda out, y: ((out.detach() - y) ** 2).mean(1), None, "has no gradient in the outputs"),
        (
            lambda out, y: ((out - y) ** 2).mean(1) + LINES.get_parameter("0.weight").norm(),
            None,
            r"a parameter of shape \(5, 4\)",
        ),
        (
            lambda out, y: F.binary_cross_entropy_with_logits(out[:, 0], y.float(), reduction="none"),
            LABELS,
            "one class",
        ),
    ],
)
def test_a_loss_that_trains_nothing_or_less_than_it_says_is_refused_before_it_is_traced(
    loss: Loss, targets: Tensor | None, told: str
) -> None:
    module = LINES if targets is None else nn.Linear(4, 1)
    with pytest.raises(ProgramRefused, match=told) as refused:
        compile_program(module, (4,), loss=loss, targets=targets, engines=("onnx",))
    assert "floating point numbers" in refused.value.hint or targets is None


def excludes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.masked_fill(torch.tensor([False, True, False]), -torch.inf), y, reduction="none")


def test_a_loss_that_gives_excluded_classes_minus_infinity_is_told_what_to_write() -> None:
    """It was asked to be reported."""
    with pytest.raises(ProgramRefused) as refused:
        compile_program(LINES, (4,), loss=excludes, targets=LABELS, engines=("pt2",))
    assert "loss excludes is not finite for targets drawn at random" in str(refused.value.hint)
    assert "as -1e9" in str(refused.value.hint)


def test_labels_beyond_the_outputs_are_told_when_they_are_given() -> None:
    with pytest.warns(UserWarning, match="4 classes, and targets hold the label 4, which devices refuse") as told:
        assert loss_of_targets("coral", (4,), torch.tensor([0, 4, 2])) == ("cross-entropy", None)
    assert "targets as floating point numbers, and take y.long()" in str(told[0].message)


def test_logits_beside_another_output_are_told_that_labels_are_drawn_for_all_of_them() -> None:
    def with_balance(out: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(out[:, :3], y, reduction="none") + out[:, 3]

    with pytest.raises(ProgramRefused, match="Target 3 is out of bounds") as refused:
        compile_program(nn.Linear(4, 4), (4,), loss=with_balance, targets=torch.tensor([0, 1]), engines=("onnx",))
    assert "where these hold more than logits, give targets as floating point numbers" in refused.value.hint
