"""The gradient of a batch, added to a flat buffer: through autograd, or as a recorded list of operators.

    step(x, y, q, noise) -> losses [batch] before the update; adds d/dw [sum_j q_j loss_j] to `model.gradient` and moves
    the model's buffers, as a forward in training mode does

Autograd builds its graph anew in every step, which takes longer than the arithmetic of a small model. A recorded step
calls the same operators in the same order, so its numbers equal autograd's to the last bit; it adds matrix products
directly to the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional as F  # noqa: N812 - torch's custom

from edge_client.protocol.program import IGNORED
from emulator.engines.cpu.flat import FlatModel
from emulator.engines.cpu.own_losses import losses_alone
from emulator.engines.cpu.recording import (
    aten,
    compile_graph,
    drop_unread,
    is_call,
    record_operators,
)
from export.compiler.losses.sample_losses import POSITION_LOSSES
from export.compiler.program_functions import TraceSource, call_module
from export.compiler.random_ops import NoiseReader
from export.one_value_norm import batch_norm_of_one_value

NO_REDUCTION = 0  # torch's number for reduction="none"
Step = Callable[[Tensor, Tensor, Tensor, "Tensor | None"], Tensor]


def sample_losses(source: TraceSource, out: Tensor, y: Tensor) -> Tensor:
    """[batch] losses of outputs [batch, ...]; y int64 labels, or [batch, ...] probabilities or targets.

    A loss of the user's own is asked for one sample at a time, so that it may give a batch's mean.
    """
    if (own := source.own_loss) is not None:
        return losses_alone(own, out, y)
    if source.loss == "cross-entropy":
        return _cross_entropy(out, y)
    if source.loss in POSITION_LOSSES:
        each = _cross_entropy(out if source.loss == "pixel-cross-entropy" else out.movedim(-1, 1), y)
        return each.flatten(1).sum(1) / (y != IGNORED).flatten(1).sum(1).clamp_min(1)
    return F.mse_loss(out, y, reduction="none").flatten(1).mean(1)


def _cross_entropy(scores: Tensor, y: Tensor) -> Tensor:
    """Each sample's or place's, as F.cross_entropy, which a recording replaces by a dozen operators (label_losses.py).

    Runtimes of devices need those; torch's own picks a class by its number, and gives the same bits in less time.
    """
    losses: Tensor = aten.cross_entropy_loss.default(scores, y, None, NO_REDUCTION, IGNORED)
    return losses


def autograd_step(source: TraceSource, model: FlatModel) -> Step:
    """For batches of any size."""
    model.module.train()
    model.with_gradients()

    def step(x: Tensor, y: Tensor, q: Tensor, noise: Tensor | None) -> Tensor:
        with torch.enable_grad(), batch_norm_of_one_value():
            if noise is None:
                out = model.module(x)
            else:
                with NoiseReader(noise, source.shared_draws) as draws:
                    out = model.module(x)
                draws.check()
            losses = sample_losses(source, out, y)
            torch.autograd.backward(losses, q)
        model.restore_buffers()
        return losses.detach()

    return step


def record_step(source: TraceSource, model: FlatModel, x: Tensor, y: Tensor, noise: Tensor | None) -> Step:
    """For batches of these shapes. Raises torch's own exceptions for a forward that cannot be recorded."""
    model.module.train()
    names, drawn = list(model.state), () if noise is None else (noise,)

    def step(*flat: Tensor) -> tuple[Tensor | None, ...]:
        state, rest = dict(zip(names, flat, strict=False)), flat[len(names) :]
        x, y, q, *noise = rest
        trained = [state[name].requires_grad_() for name in source.params]
        out, after = _forward(source, model, state, x, noise)
        losses = sample_losses(source, out, y)
        number = _WithGradient.apply(losses, q)  # type: ignore[no-untyped-call]
        gradients = torch.autograd.grad(number, trained, allow_unused=True)
        written = [after[name] if after[name] is not state[name] else None for name in source.buffers]
        return (losses, *gradients, *written)

    graph = record_operators(step, [*model.state.values(), x, y, torch.ones(len(x), dtype=x.dtype), *drawn])
    into = [*model.gradients.values()]
    _write(graph, len(source.params), {n: names.index(name) for n, name in enumerate(source.buffers)})
    play, held = compile_graph(graph), list(model.state.values())

    def played(x: Tensor, y: Tensor, q: Tensor, noise: Tensor | None) -> Tensor:
        with torch.inference_mode():
            losses: Tensor = play(*held, x, y, q, *(() if noise is None else (noise,)), *into)
        return losses

    return played


class _WithGradient(torch.autograd.Function):
    """A number whose gradient in `losses` is `q`. Given to autograd itself, q makes it import sympy (torch 2.13)."""

    @staticmethod
    def forward(ctx: Any, losses: Tensor, q: Tensor) -> Tensor:  # noqa: ANN401 - torch's
        ctx.save_for_backward(q)
        return losses.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, None]:  # noqa: ANN401 - torch's
        (q,) = ctx.saved_tensors
        return q, None


def _forward(
    source: TraceSource, model: FlatModel, state: Mapping[str, Tensor], x: Tensor, noise: Sequence[Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    if not noise:
        return call_module(model.module, state, x)
    with NoiseReader(noise[0], source.shared_draws) as draws:
        made = call_module(model.module, state, x)
    draws.check()
    return made


def _write(graph: fx.Graph, params: int, buffers: Mapping[int, int]) -> None:
    """Write results in place: gradients are added to new last inputs, buffers (number -> input) are overwritten."""
    given = [node for node in graph.nodes if node.op == "placeholder"]
    (output,) = (node for node in graph.nodes if node.op == "output")
    losses, *results = output.args[0]
    output.args = (losses,)
    last = given[-1]
    for node in results[:params]:
        with graph.inserting_after(last):
            last = graph.placeholder(f"into_{len(given)}")
        given.append(last)
        if node is not None:
            product = is_call(node, aten.mm.default) and not node.users
            with graph.inserting_before(output) if node.op == "placeholder" else graph.inserting_after(node):
                if product:
                    graph.call_function(aten.addmm_.default, (last, *node.args))
                else:
                    graph.call_function(aten.add_.Tensor, (last, node))
    with graph.inserting_before(output):
        for n, node in enumerate(results[params:]):
            if node is not None:
                graph.call_function(aten.copy_.default, (given[buffers[n]], node))
    drop_unread(graph)
