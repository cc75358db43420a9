"""The difference of a container from torch, on inputs that can judge it. The compiler and `--check` use it.

Torch runs the model itself through autograd, sharing no formula with what was traced, and in float64: its own float32
step is up to 5e-5 off where a gradient is a difference of large sums. Differences are relative to the largest value of
each output.

A step is not continuous everywhere. Where a window of a max-pool nearly ties, or a value is next to the kink of a ReLU,
rounding alone decides which way a gradient flows: one of femnist-cnn's 200,704 windows is enough for 3e-3, and torch's
own float32 step differs as much. A norm of a constant channel multiplies the rounding of its mean by 316, and three
norms in a row do so three times. Such inputs cannot judge a program. Torch alone tells which inputs these are: in
float64, with weights and samples moved by a few roundings, and in float32, whose error must stay small.

Some gradients have no digits in float32: that of a bias before a group norm of one channel consists of cancelled sums,
and torch's own is up to 1e-3 off. Such an output may differ by ERROR_MARGIN times torch's own error. The same rule is
the last resort for deep networks: at any inputs some of ResNet-18's millions of ReLUs are next to a kink.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.protocol.program import FROZEN, IGNORED
from edge_client.protocol.task import Array
from export.compiler.losses.sample_losses import POSITION_LOSSES
from export.compiler.program_functions import (
    TraceSource,
    example_inputs,
    function_ports,
    private_copy,
    whole_numbers,
)
from export.compiler.random_ops import NoiseReader
from export.containers.write_onnx import open_onnx
from export.containers.write_pt2 import run_pt2
from export.containers.write_tflite import open_tflite
from export.float64_mode import Float64Mode, without_autocast
from export.one_value_norm import batch_norm_of_one_value

MAX_RELATIVE_DIFFERENCE = 1e-4  # relative; float32 steps differ by about 1e-6, a wrong graph by about 1
MAX_INPUT_DRAWS = 4  # inputs to try until torch agrees with itself on some
PERTURBATION = 2.0**-20  # eight units of float32's last place: more than a container's own sums round
PERTURBED_PAIRS = 2  # of weights on both sides: a value next to a kink crosses it on one of them
MAX_TORCH_ERROR = 1e-2  # torch's own float32 off by more: a kink in float32 alone
LONE_SAMPLES = 3  # one alone left 3 of 40 draws of a small model's weights unseen
ERROR_MARGIN = 10  # roundings fall differently in sums of another order: 4 times as far was seen

Inputs = Callable[
    [TraceSource, str, int, int], list[Tensor]
]  # source, function, batch, seed -> the function's arguments
Run = Callable[[Sequence[Tensor]], list[Array]]  # a container's function: arguments -> outputs, in their order


def tied_inputs(source: TraceSource, function: str, batch: int, seed: int) -> list[Tensor]:
    """`example_inputs`, one half of the numbers of one half of the samples zero, as images have black borders.

    So windows of pools have ties, and norms, roots and angles see zeros. Whole numbers stay: they repeat by themselves.
    """
    args = example_inputs(source, function, batch, seed)
    if not whole_numbers(source):
        x = args[[p.name for p in function_ports(source, function).inputs].index("x")]
        x[: batch // 2, ..., : (x.shape[-1] + 1) // 2] = 0
    return args


DRAWS: Sequence[Inputs] = (tied_inputs, *[example_inputs] * (MAX_INPUT_DRAWS - 1))


def max_difference(  # noqa: PLR0913 - what is compared
    source: TraceSource,
    engine: str,
    function: str,
    file: bytes,
    *,
    batch: int,
    seed: int,
    limit: float,
    draws: Sequence[Inputs] = DRAWS,
) -> float:
    """The largest difference of one function at the first inputs that can judge it; infinite for what is not finite.

    A file below `limit` computes what torch computes. Above it the file is wrong, or none of the inputs can judge a
    float32 program. Numbers that are finite in torch and not in the file need no other judge. An output on which
    torch's own float32 is off by more than `limit / ERROR_MARGIN` is scaled down by that error; where no inputs can
    judge, so is an output that moves as far in torch under a few roundings. Torch is asked only what the answer needs.
    """
    worst, run = float("inf"), open_container(engine, file, source, function)
    for draw, inputs in enumerate(draws):
        args = inputs(source, function, batch, seed + 1000 * draw)
        expected = torch_outputs(source, function, args)
        found = output_differences(run(args), expected)
        worst = max(found)
        if worst <= limit:
            return worst
        if math.isinf(worst) and all_finite(torch_outputs(source, function, args, dtype=source.dtype)):
            return worst
        judged = _difference_beside_torchs(source, function, args, expected, found, limit)
        if judged is not None:
            return judged
    return worst


def _difference_beside_torchs(
    source: TraceSource,
    function: str,
    args: Sequence[Tensor],
    expected: Sequence[Array],
    found: Sequence[float],
    limit: float,
) -> float | None:
    """The largest of the differences `found`, measured by torch's own; None where these inputs cannot judge.

    More evidence lowers what is told, or rules the inputs out, so the first answer below a `limit` that float32 keeps
    is the answer. A smaller limit is judged by all evidence, as how far torch moves comes last.
    """
    far = own = [0.0] * len(found)
    for inputs in chain([args], _perturbed_inputs(source, function, args)):
        told = expected if inputs is args else torch_outputs(source, function, inputs)
        far = _worst([far, output_differences(told, expected)])
        if source.dtype != "float64":
            rounded = torch_outputs(source, function, inputs, dtype="float32")
            own = _worst([own, output_differences(rounded, told)])
        if max(*far, *own) > MAX_TORCH_ERROR:
            return None
        judged = _judged(found, own, far, limit)
        if judged <= limit and limit >= MAX_RELATIVE_DIFFERENCE:
            return judged
    return judged if max(far) <= limit or judged <= limit else None


def _judged(found: Sequence[float], own: Sequence[float], far: Sequence[float], limit: float) -> float:
    """The largest difference beside torch's `own` and how `far` torch moves; infinite where these cannot judge."""
    if max(far) <= limit:
        return _scaled(found, own, limit)
    if max(far) > MAX_RELATIVE_DIFFERENCE:  # a kink, not a tolerance that asks for more than float32 has
        return _scaled(found, _worst([far, own]), MAX_RELATIVE_DIFFERENCE)
    return math.inf


def one_sample_differs(source: TraceSource, engine: str, file: bytes) -> bool:
    """Whether a step on one sample has another loss than torch's: a trace does not see the size that Python asks for.

    Several draws of a sample, as two different computations are alike on one by chance. A loss that a few roundings
    move in torch, as behind norms of few values, says nothing and counts as the same; so does a model that takes no
    such batch in training.
    """
    run = open_container(engine, file, source, "step")
    draws = (example_inputs(source, "step", 1, 1 + n) for n in range(LONE_SAMPLES))
    return any(_differs_on(args, source, run) for args in draws)


def _differs_on(args: Sequence[Tensor], source: TraceSource, run: Run) -> bool:
    place = [p.name for p in function_ports(source, "step").outputs].index("loss")

    def loss(outputs: Sequence[Array]) -> list[Array]:
        return [outputs[place]]

    try:
        expected = loss(torch_outputs(source, "step", args))
    except Exception:  # noqa: BLE001 - whatever the model raises
        return False
    (found,) = output_differences(loss(run(args)), expected)
    if found <= MAX_TORCH_ERROR:
        return False
    moved = (loss(torch_outputs(source, "step", m)) for m in _perturbed_inputs(source, "step", args))
    return max(output_differences(m, expected)[0] for m in moved) <= MAX_TORCH_ERROR / ERROR_MARGIN


def _scaled(found: Sequence[float], torchs: Sequence[float], limit: float) -> float:
    """The largest difference, each divided by what torch itself is off by more than a tenth of the limit."""
    return max(f / max(1.0, ERROR_MARGIN * t / limit) for f, t in zip(found, torchs, strict=True))


def _perturbed_inputs(source: TraceSource, function: str, args: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The inputs, their weights and samples moved by a few roundings to both sides; numbers of the program's dtype."""
    names = [p.name for p in function_ports(source, function).inputs]
    draw = torch.Generator().manual_seed(0)
    still = {"x"} if whole_numbers(source) else set()  # a token moved by a rounding is another token
    for _ in range(PERTURBED_PAIRS):
        shifts = [None if name in still else _shift(name, a, draw) for name, a in zip(names, args, strict=True)]
        for side in (1, -1):
            yield [
                a if shift is None else (a.double() + side * shift).to(a.dtype)
                for a, shift in zip(args, shifts, strict=True)
            ]


def _shift(name: str, value: Tensor, draw: torch.Generator) -> Tensor | None:
    """Roundings of each weight, and of a sample's largest value; None for what is neither."""
    if not (name.startswith("w/") or (name == "x" and value.is_floating_point())) or value.numel() == 0:
        return None
    noise = torch.randn(value.shape, generator=draw, dtype=torch.float64) * PERTURBATION
    return noise * (value if name.startswith("w/") else value.abs().max())


def _worst(rows: Iterable[Sequence[float]]) -> list[float]:
    """The largest value of each column."""
    return [max(column) for column in zip(*rows, strict=True)]


def torch_outputs(source: TraceSource, function: str, args: Sequence[Tensor], *, dtype: str = "float64") -> list[Array]:
    """Torch's own outputs of the function, in their order, computed in `dtype`."""
    names = function_ports(source, function)
    given = {p.name: a.to(getattr(torch, dtype)) for p, a in zip(names.inputs, args, strict=True)}
    found = (torch_step if function == "step" else torch_evaluate)(source, given, dtype)
    return [found[p.name].detach().numpy() for p in names.outputs]


def torch_step(source: TraceSource, given: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """One proximal step by torch's autograd on the model itself; by the names of the outputs."""
    net = _loaded(source, given, dtype).train()
    moving = {n: p for n, p in net.named_parameters() if f"w/{n}" in given}
    drawn = NoiseReader(given["noise"], source.shared_draws) if "noise" in given else nullcontext()
    with batch_norm_of_one_value(), drawn, _all_in(dtype):
        out = net(given["x"])
    loss = (given["q"] * _loss(source, out, given["y"], dtype)).sum()
    grads = torch.autograd.grad(loss, list(moving.values()), allow_unused=True)
    stepped = {f"buffers/{n}": b for n, b in net.named_buffers()}
    for (n, p), grad in zip(moving.items(), grads, strict=True):
        pull = given[f"linear/{n}"] + given["mu"] * (p.detach() - given[f"anchor/{n}"])
        velocity = given["momentum"] * given[f"velocity/{n}"] + pull + (0 if grad is None else grad)
        stepped |= {f"velocity/{n}": velocity, f"w/{n}": p.detach() - given["lr"] * velocity}
    return {**stepped, "loss": loss}


def torch_evaluate(source: TraceSource, given: Mapping[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """Logits, and the loss per sample where there are targets; batch norm in inference mode."""
    net = _loaded(source, given, dtype).eval()
    with torch.no_grad():
        with _all_in(dtype):
            logits = net(given["x"])
        return {"logits": logits} | ({"loss": _loss(source, logits, given["y"], dtype)} if "y" in given else {})


def _loaded(source: TraceSource, given: Mapping[str, Tensor], dtype: str) -> nn.Module:
    """A copy with the weights and buffers of `given`; other tensors keep the module's values."""
    net = private_copy(source.module, dtype)
    state = {f"w/{n}": p for n, p in net.named_parameters()} | {f"buffers/{n}": b for n, b in net.named_buffers()}
    with torch.no_grad():
        for name in state.keys() & given.keys():
            state[name].copy_(given[name])
    return net


def moved_network(source: TraceSource) -> Callable[[Tensor], Tensor]:
    """The model in inference mode and float64, its weights moved: a last layer of zeros would hide all other layers."""
    names = [p.name for p in function_ports(source, "infer").inputs]
    given = {n: a for n, a in zip(names, example_inputs(source, "infer", 1), strict=True) if n.startswith("w/")}
    net = _loaded(source, given, "float64").eval()

    def network(x: Tensor) -> Tensor:
        with _all_in("float64"):
            return net(x.double())  # type: ignore[no-any-return]

    return network


def _all_in(dtype: str) -> AbstractContextManager[Any]:
    """Where the user's code runs: what it computes in float32 or in less of its own accord is in `dtype`."""
    return Float64Mode() if dtype == "float64" else without_autocast()


def _loss(source: TraceSource, out: Tensor, y: Tensor, dtype: str) -> Tensor:
    if source.own_loss is not None:
        with _all_in(dtype):
            return source.own_loss(out.clone(), y.long() if source.has_labels else y.clone())
    if source.loss in POSITION_LOSSES:
        scores = out if source.loss == "pixel-cross-entropy" else out.movedim(-1, 1)
        each = nn.functional.cross_entropy(scores, y.long(), reduction="none", ignore_index=IGNORED)
        return each.flatten(1).sum(1) / (y != IGNORED).flatten(1).sum(1).clamp(min=1)
    if source.loss == "cross-entropy":
        return nn.functional.cross_entropy(out, y, reduction="none")
    return (out - y).square().flatten(1).mean(1)


def open_container(engine: str, file: bytes, source: TraceSource, function: str) -> Run:
    """A function from arguments to the container's outputs, in their order; both raise whatever the runtime raises.

    A runtime takes seconds to open a large file, and a file is run several times.
    """
    frozen = source.frozen_tensors
    if engine == "onnx":
        ports = (p.name for p in function_ports(source, function).inputs)
        names = [*ports, *(f"{FROZEN}/{name}" for name in source.frozen_names)]
        opened = open_onnx(file, source.dtype)
        return lambda args: opened({n: a.numpy() for n, a in zip(names, (*args, *frozen), strict=True)})
    if engine == "litert":
        signature = open_tflite(file, function)

        def run(args: Sequence[Tensor]) -> list[Array]:
            out = signature({f"args_{i}": a.numpy() for i, a in enumerate(args)})
            return [out[f"output_{i}"] for i in range(len(out))]

        return run
    return lambda args: [t.detach().numpy() for t in run_pt2(file, [*args, *frozen])]


def output_differences(got: Sequence[Array], expected: Sequence[Array]) -> list[float]:
    """The relative difference of each output; infinite for another shape and for values that are not finite."""
    if len(got) != len(expected):
        return [float("inf")] * len(expected)
    return [_difference(g, e) for g, e in zip(got, expected, strict=True)]


def all_finite(outputs: Iterable[Array]) -> bool:
    """Whether no value is infinite or NaN."""
    return all(bool(np.isfinite(out).all()) for out in outputs)


def _difference(got: Array, expected: Array) -> float:
    if got.shape != expected.shape:
        return float("inf")
    with np.errstate(invalid="ignore"):  # the difference of two infinities
        found = float(np.abs(got - expected).max() / max(1e-6, float(np.abs(expected).max())))
    return found if np.isfinite(found) else float("inf")
