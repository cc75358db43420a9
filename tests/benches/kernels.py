"""What a training step cannot do without, each at the rate that this machine reaches on it alone.

The floor of a step is the sum of its matrix products and convolutions, forward and backward, and one pass of SGD with
momentum over the parameters. Everything else (activations, pools, norms, loss) counts nothing. A kernel is timed at its
own shape on warm buffers, and the fastest of the ways at hand counts: torch's and numpy's BLAS, both memory layouts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

Run = Callable[[], object]
TURN_S = 0.03  # CPU seconds of one measurement of one kernel
PASS_VALUES = 5  # a pass reads p, g and v, and writes p and v
BYTES = 4


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One kernel, its floating point operations (or bytes, for a pass), and the ways to run it."""

    name: str
    work: float
    ways: Sequence[Run]


def kernels(module: nn.Module, x: Tensor) -> list[Kernel]:
    """All of a step on the batch x [b, ...]; the first layer needs no gradient of its input."""
    found: list[Kernel] = []
    for layer, given in _layers(module, x):
        first = not found
        found += _dense(layer, given, first=first) if isinstance(layer, nn.Linear) else _conv(layer, given, first=first)
    return [*found, _pass(sum(p.numel() for p in module.parameters()))]


def seconds(kernel: Kernel) -> float:
    """CPU seconds of one run, the fastest way, measured once."""
    return min(_timed(way) for way in kernel.ways)


def _timed(run: Run) -> float:
    run()
    began = time.process_time()
    run()
    times = max(1, round(TURN_S / max(time.process_time() - began, 1e-6)))
    began = time.process_time()
    for _ in range(times):
        run()
    return (time.process_time() - began) / times


def _layers(module: nn.Module, x: Tensor) -> list[tuple[nn.Module, Tensor]]:
    """The dense and convolutional layers in order, each with its input."""
    seen: list[tuple[nn.Module, Tensor]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, given: seen.append((layer, given[0].detach())))
        for layer in module.modules()
        if isinstance(layer, (nn.Linear, nn.Conv2d))
    ]
    with torch.no_grad():
        module(x)
    for hook in hooks:
        hook.remove()
    return seen


def _dense(layer: nn.Module, x: Tensor, *, first: bool) -> list[Kernel]:
    if not isinstance(layer, nn.Linear):
        raise TypeError(f"{type(layer).__name__} is not dense")
    w = layer.weight.detach()
    g = torch.randn(len(x), len(w))
    flops = 2.0 * x.numel() * len(w)
    products = [("forward", x, w.T), ("weight gradient", g.T, x)] + ([] if first else [("input gradient", g, w)])
    return [Kernel(name=name, work=flops, ways=_product(a, b)) for name, a, b in products]


def _product(a: Tensor, b: Tensor) -> list[Run]:
    out = torch.empty(a.shape[0], b.shape[1])
    left, right, into = a.numpy(), b.numpy(), np.empty(out.shape, np.float32)
    return [lambda: torch.mm(a, b, out=out), lambda: np.matmul(left, right, out=into)]


def _conv(layer: nn.Module, x: Tensor, *, first: bool) -> list[Kernel]:
    if not isinstance(layer, nn.Conv2d):
        raise TypeError(f"{type(layer).__name__} is neither dense nor a convolution")
    w = layer.weight.detach()
    rest = [list(layer.stride), list(layer.padding), list(layer.dilation), False, [0, 0], layer.groups]
    shape = torch.ops.aten.convolution(x, w, None, *rest).shape
    flops = 2.0 * w[0].numel() * shape.numel()
    layouts = [
        [t.contiguous(memory_format=form) for t in (x, w, torch.randn(shape))]
        for form in (torch.contiguous_format, torch.channels_last)
    ]

    def forward(x: Tensor, w: Tensor, _: Tensor) -> Run:
        return lambda: torch.ops.aten.convolution(x, w, None, *rest)

    def backward(mask: list[bool]) -> Callable[[Tensor, Tensor, Tensor], Run]:
        def of(x: Tensor, w: Tensor, g: Tensor) -> Run:
            return lambda: torch.ops.aten.convolution_backward(g, x, w, None, *rest, mask)

        return of

    parts = [("forward", forward), ("weight gradient", backward([False, True, False]))]
    parts += [] if first else [("input gradient", backward([True, False, False]))]
    return [Kernel(name=name, work=flops, ways=[of(*tensors) for tensors in layouts]) for name, of in parts]


def _pass(parameters: int) -> Kernel:
    """Copying half as many values as a pass of SGD moves: a copy reads and writes each."""
    values = PASS_VALUES * parameters // 2
    a, b = torch.zeros(values), torch.zeros(values)
    return Kernel(name="pass", work=2.0 * BYTES * values, ways=[lambda: b.copy_(a)])
