"""A loss of the user's own, asked for one sample at a time: so it may give a batch's mean, and samples have weights."""

from __future__ import annotations

import logging
import math
from functools import partial

import torch
from torch import Tensor

from edge_client.errors import ProgramRefused
from edge_client.protocol.program import IGNORED, class_axis
from export.compiler.losses.choose_loss import NO_GRADIENT, NO_GRADIENT_HINT
from export.compiler.losses.sample_losses import LossFunction, loss_name
from export.compiler.program_functions import TraceSource, example_inputs
from export.diagnostics import first_sentence
from export.own_thread import own_random

log = logging.getLogger(__name__)
TRIED, MOST_TRIED = 8, 64  # samples; one of each class, as far as so many go
CLOSE = 1e-3  # relative: float32's order of sums


def losses_alone(loss: LossFunction, out: Tensor, y: Tensor) -> Tensor:
    """[batch] losses of outputs [batch, ...] and labels or targets y [batch, ...].

    A sample whose labels are all left out has 0, as with the usual losses; a mean over no label is NaN.
    """
    losses: Tensor = torch.vmap(lambda one, truth: loss(one[None], truth[None]).mean())(out, y)
    if y.dim() == 1 or y.is_floating_point():
        return losses
    return torch.where((y != IGNORED).flatten(1).any(1), losses, 0.0)


def asked_alone(loss: LossFunction) -> LossFunction:
    """The same loss as a function of one number per sample, for a program."""
    alone = partial(losses_alone, loss)
    alone.__name__ = loss_name(loss)  # type: ignore[attr-defined]  # what messages call it
    return alone


def check_own_loss(source: TraceSource) -> None:
    """Raise ProgramRefused for a loss that cannot be asked so, or of which a batch's number is no mean of its samples'.

    Of a mean over the weights of classes one sample's number is its plain loss: the weights would have no effect.
    Where a sample has several labels they have one within each sample, so that is told and no more.
    """
    loss = source.own_loss
    if loss is None:
        return
    name = loss_name(loss)
    out, y = _tried(source)
    try:
        with own_random(), torch.enable_grad():
            alone = losses_alone(loss, out.requires_grad_(), y)
            whole = loss(out, y).mean()
    except Exception as wrong:
        raise ProgramRefused(
            f"loss {name} fails for outputs {list(out.shape)} and targets {list(y.shape)}, one sample at a time: "
            f"{first_sentence(wrong)}",
            hint="take outputs, then labels (int64) or targets (float32); no branches on values, .item(), indexing by "
            "a mask (torch.where) or random numbers",
        ) from wrong
    if not alone.requires_grad:
        raise ProgramRefused(f"loss {name} {NO_GRADIENT}", hint=NO_GRADIENT_HINT)
    one, other, far = float(alone.detach().mean()), float(whole.detach()), float(alone.detach().abs().mean())
    if abs(one - other) <= CLOSE * far or one == other or (math.isnan(one) and math.isnan(other)):
        return
    told = (
        f"loss {name} gives {other:.4g} for outputs {list(out.shape)} and targets {list(y.shape)}, and {one:.4g} as "
        "the mean of these samples, each alone"
    )
    if y.dim() > 1 and not y.is_floating_point():
        log.warning("%s: each sample counts alike, whatever its labels", told)
        return
    raise ProgramRefused(
        told,
        hint='give one number per sample, as with reduction="none"; a sum, or a mean by the weights of classes or over '
        "the labels that count, is no mean over samples, which training takes",
    )


def _tried(source: TraceSource) -> tuple[Tensor, Tensor]:
    """The model's outputs of drawn samples, and labels that take each class in turn, or drawn targets."""
    *_, x, y = example_inputs(source, "evaluate", TRIED)
    with own_random(), torch.no_grad():
        out = source.module.eval()(x)
    if not source.has_labels:
        return out, y
    classes = source.target[class_axis(source.loss, source.target)]
    out = out.repeat(min(math.ceil(classes / TRIED), MOST_TRIED // TRIED), *[1] * (out.dim() - 1))
    shape = (len(out), *y.shape[1:])
    return out, (torch.arange(math.prod(shape)) % classes).reshape(shape)
