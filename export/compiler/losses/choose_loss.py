"""Which loss a program has: where the classes of its outputs lie, and the checks of a loss of the user's."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from edge_client.errors import FedcentersError, ProgramRefused
from edge_client.protocol.program import IGNORED, Loss, class_axis
from export.compiler.losses.sample_losses import POSITION_LOSSES, LossFunction, loss_name, own_losses
from export.compiler.signatures.lasting_state import parameters_behind
from export.diagnostics import first_sentence

Targets = Tensor | Sequence[int] | None  # a batch of targets, of which shape and kind count; or a sample's shape

AS_NUMBERS = "give targets as floating point numbers, and take y.long() in the loss where it wants labels"
NO_GRADIENT, NO_GRADIENT_HINT = "has no gradient in the outputs", "compute it of them, without detach()"


def loss_of_output(loss: Loss, name: str, target: tuple[int, ...]) -> Loss:
    """The loss of our own for one sample's output: torch's layout has the classes first. Raises ProgramRefused."""
    if loss == "cross-entropy" and len(target) > 1:
        loss = "pixel-cross-entropy"
    if loss != "squared-error" and target[class_axis(loss, target)] == 1:
        raise ProgramRefused(
            f"model {name!r} gives {target} for one sample: with one class the cross-entropy is always 0",
            hint='of a regression give loss="squared-error"; for yes and no give two outputs, or loss=function with '
            "binary_cross_entropy_with_logits, and its targets as numbers",
        )
    if loss in POSITION_LOSSES and len(target) == 1:
        raise ProgramRefused(
            f"model {name!r} gives {target} for one sample, and {loss} needs one row of logits per position",
            hint='use loss="cross-entropy" for one label per sample',
        )
    return loss


def warn_of_probabilities(name: str, out: Tensor, axis: int) -> None:
    """Tell of outputs [batch, ...] that a softmax has made: cross-entropy takes logits."""
    if bool((out >= 0).all()) and torch.allclose(out.sum(axis), torch.ones(()).to(out.dtype), atol=1e-4):
        warnings.warn(
            f"model {name!r} gives probabilities, and cross-entropy takes logits: leave the softmax out", stacklevel=4
        )


def loss_of_targets(name: str, target: tuple[int, ...], targets: Targets) -> tuple[Loss, tuple[int, ...] | None]:
    """For a loss of the user's: what y is, and the shape of a sample's numbers (None: labels, or as the output).

    Raises ProgramRefused for labels that do not belong to the output.
    """
    if targets is None:
        return "squared-error", None
    shape = tuple(int(size) for size in (targets.shape[1:] if isinstance(targets, Tensor) else targets))
    if not isinstance(targets, Tensor) or targets.is_floating_point():
        return "squared-error", shape
    found = layout_of(target, shape)
    if found is None:
        raise ProgramRefused(
            f"model {name!r} gives {target} for one sample, which has labels of shape {shape}: the output needs one "
            "more axis, that of the classes, first or last",
            hint="give targets as floating point numbers if they are no class labels",
        )
    if target[class_axis(found, target)] == 1:
        raise ProgramRefused(
            f"model {name!r} gives {target} for one sample: labels of one class",
            hint="give two outputs for yes and no, or targets as floating point numbers",
        )
    classes, highest = target[class_axis(found, target)], int(targets.max()) if targets.numel() else 0
    if highest >= classes:
        warnings.warn(
            f"model {name!r} gives {target} for one sample, {classes} classes, and targets hold the label {highest}, "
            f"which devices refuse: label a position {IGNORED} to leave it out; if these are no labels, {AS_NUMBERS}",
            stacklevel=4,
        )
    return found, None


def layout_of(target: Sequence[int], labels: Sequence[int]) -> Loss | None:
    """The cross-entropy of an output [*target] and labels [*labels] of one sample; None where there is none.

    Where the classes could be the first axis and the last, they are the first, as torch's own cross-entropy has them.
    """
    target, labels = tuple(target), tuple(labels)
    if not labels:
        return "cross-entropy" if len(target) == 1 else None
    if target[1:] == labels:
        if target[:-1] == labels:
            warnings.warn(
                f"{target} outputs for {labels} labels: the first axis is taken for the classes, as in torch's "
                "cross_entropy; where they are the last one, give the outputs transposed",
                stacklevel=4,
            )
        return "pixel-cross-entropy"
    return "token-cross-entropy" if target[:-1] == labels else None


def refuse_trained_loss(loss: LossFunction | None) -> None:
    """Raise ProgramRefused for a loss that has parameters to train: a program trains those of the model alone."""
    if isinstance(loss, nn.Module) and (names := [n for n, p in loss.named_parameters() if p.requires_grad]):
        raise ProgramRefused(
            f"loss {loss_name(loss)} has parameters of its own ({', '.join(names)}); a step trains the model's only",
            hint="put them into the model and give them out with its outputs, or set requires_grad=False",
        )


def check_own_loss(loss: LossFunction, out: Tensor, y: Tensor, *, labels: bool) -> None:
    """Raise ProgramRefused for a loss of the user's that fails, mixes samples or gives no number for each sample.

    `out` and `y` of a few samples, of the port's dtype; `labels`: whether y holds class labels.
    """
    try:
        with torch.enable_grad():
            out = out.detach().requires_grad_()
            found, alone = (own_losses(loss, out[:n], y[:n], labels=labels) for n in (len(out), 1))
    except FedcentersError:
        raise
    except Exception as wrong:
        raise ProgramRefused(
            f"loss {loss_name(loss)} fails for outputs {list(out.shape)} and targets {list(y.shape)}: "
            f"{first_sentence(wrong)}",
            hint=f"labels are drawn for all outputs; where these hold more than logits, {AS_NUMBERS}"
            if labels
            else "give a batch of your targets, as targets=y: without one they are numbers of the output's shape; a "
            'ModelEntry says with loss="squared-error" that y holds numbers',
        ) from wrong
    if not found.requires_grad:
        raise ProgramRefused(f"loss {loss_name(loss)} {NO_GRADIENT}", hint=NO_GRADIENT_HINT)
    kept = {id(p) for p in parameters_behind(alone)}
    if read := [p for p in parameters_behind(found) if id(p) in kept]:
        raise ProgramRefused(
            f"loss {loss_name(loss)} computes with a parameter of shape {tuple(read[0].shape)}, which it is not given, "
            "so no step moves it by this loss",
            hint="compute that part in forward, and give it out with the outputs; read a constant by detach()",
        )
    if len(found) != len(out) or len(alone) != 1:
        raise ProgramRefused(
            f"loss {loss_name(loss)} gives {len(found)} numbers for {len(out)} samples",
            hint="return one number per sample: [batch]",
        )
    if not torch.allclose(found[:1], alone, rtol=1e-4, atol=1e-5, equal_nan=True):
        raise ProgramRefused(
            f"loss {loss_name(loss)} gives a sample another number in other company",
            hint="compute each sample's number from its own outputs: no mean, sum or contrast over the batch",
        )
