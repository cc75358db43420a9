"""What a module answers in inference mode: one row for each sample, the same whatever is beside it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from edge_client.protocol.samples.input_parts import Parts
from export.compiler.signatures.choose_output import refuse_several_outputs
from export.compiler.signatures.packed_inputs import BEYOND, Example, lone_sample_hint
from export.diagnostics import first_sentence
from export.own_thread import own_random

COMPANY = (
    "give each sample an output of its own: a loss that compares samples (contrast, triplets) takes those that belong "
    "together as one sample, [pairs, ...]"
)
ONE_SAMPLE = "ask for no batch size in forward (x.shape[0], len(x)), and name the axes of squeeze()"
COPIES, LARGE_BATCH = 16, 1 << 22  # of a sample in one batch; numbers of such a batch, or of its answers
ROUNDED = 1e-9  # the largest of smaller answers may be the rounding of float64 alone
LARGEST = 1e30  # beyond it are infinity and the ends of float32, which masks give: float64, to compare with, has others
INPUTS = (
    "check the input's shape; samples arrive as floating point numbers: for whole ones write x.long() in forward, or "
    "give a batch of them by the name of forward's parameter"
)
ARRAYS = (
    "check the arrays' shapes; where these are right, forward asks for certain numbers, as an end mark in each sample: "
    "checks draw numbers at random, and forward must take them"
)
CHANNELS = (
    "the channels of a sample come first, and are as many as the layer reads: x.transpose(0, 3, 1, 2) of images "
    "[n, height, width, channels], x[:, None] of grey images [n, height, width]"
)
COLUMNS = (
    "whole numbers of an array are drawn below one limit for all columns: give columns of other ranges as arrays of "
    "their own, forward(self, color, size)"
)
FROM_ZERO = "each check draws whole numbers from 0, on devices too: take a length as lengths.clamp(min=1)"
TOKENS = (
    "samples are drawn as normal numbers where no nn.Embedding tells how many tokens there are; give a batch of tokens "
    "by the name of forward's parameter, as fc.compile(model, {'ids': ids}) for forward(self, ids), and a fleet's "
    "samples so, too: 'Several inputs' in docs/train-your-own-model.md"
)


def check_zeros(name: str, network: nn.Module, samples: Tensor, parts: Parts) -> None:
    """Check that the module takes a 0 in each array of whole numbers, and not only numbers from 1, as of lengths.

    Only the last number of an array is 0, as words may end: a sample without any word may have no answer.
    `network` is in inference mode; `samples` [batch, numbers] are packed. Raises ProgramRefused with the array's name;
    a module that takes no 1 either has another fault, which is told elsewhere.
    """
    places, at = dict[str, slice](), 0
    for part in parts:
        if part.kind == "int" and part.below > 1:
            places[part.name] = slice(at, at + part.size)
        at += part.size
    ones = samples.clone()
    for place in places.values():
        ones[:, place] = 1
    if not places or _fault(network, ones) is not None:
        return
    for array, place in places.items():
        given = ones.clone()
        given[:, place.stop - 1] = 0
        if (wrong := _fault(network, given)) is not None:
            told = f"model {name!r} fails for a 0 in {array}: {first_sentence(wrong)}"
            raise ProgramRefused(told, hint=FROM_ZERO) from wrong


def _fault(network: nn.Module, samples: Tensor) -> Exception | None:
    """What the module raises for these samples; ArithmeticError for an answer that is not finite."""
    try:
        with own_random(), torch.no_grad():
            out = network(samples)
    except Exception as wrong:  # noqa: BLE001 - whatever the model raises
        return wrong
    finite = not isinstance(out, Tensor) or bool(torch.isfinite(out).all())
    return None if finite else ArithmeticError("its answer is not finite")


def check_answers(
    name: str,
    network: nn.Module,
    samples: Tensor,
    expected: tuple[int, ...] | None,
    *,
    parts: Parts,
    example: Example | None,
) -> tuple[int, ...]:
    """Check that a module takes batches of samples and gives one finite output for each. Returns its shape.

    `network` is in inference mode; `samples` are three. `example`: what the user gave to tell the shape of a sample.
    """
    try:
        with own_random(), torch.no_grad():
            out, others = (
                network(samples[:2]),
                network(samples),
            )  # three: of two samples batch norm leaves only the signs
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as wrong:
        given = ", ".join(map(str, parts)) or f"shape {tuple(samples.shape[1:])}"
        hint = "" if example is None else lone_sample_hint(network, parts, example, samples.dtype)
        usual = ARRAYS if parts else CHANNELS if " channels, but got " in str(wrong) else INPUTS
        usual = (COLUMNS if parts else TOKENS) if any(told in str(wrong) for told in BEYOND) else usual
        raise ProgramRefused(
            f"model {name!r} does not take samples of {given}: {first_sentence(wrong)}", hint=hint or usual
        ) from wrong
    refuse_several_outputs(name, out)
    if not isinstance(out, Tensor) or out.dim() < 2 or len(out) != 2:  # noqa: PLR2004 - samples
        told = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
        raise ProgramRefused(
            f"model {name!r} gives {told} for 2 samples, expected one tensor of (2, n) or more axes",
            hint="a training program needs one row of logits or targets per sample; a single number is [batch, 1]",
        )
    if not (out.is_floating_point() and out.numel()):
        raise ProgramRefused(
            f"model {name!r} gives {str(out.dtype).removeprefix('torch.')} of shape {tuple(out.shape)} for 2 samples, "
            "and a loss needs real numbers",
            hint="give the logits or targets themselves, before argmax or a comparison, and torch.view_as_real(out) of "
            "complex ones",
        )
    target = tuple(out.shape[1:])
    if expected is not None and target != expected:
        raise ProgramRefused(
            f"model {name!r} gives {tuple(out.shape)} for 2 samples, expected {(2, *expected)}",
            hint="give the shape of its output for one sample",
        )
    if out.shape[1:] != others.shape[1:]:
        raise ProgramRefused(
            f"model {name!r} gives {tuple(out.shape)} for 2 samples and {tuple(others.shape)} for 3", hint=COMPANY
        )
    _check_finite(name, out)
    return target


def check_company(name: str, network: Callable[[Tensor], Tensor], samples: Tensor, *, limit: float) -> None:
    """Check that a sample's output does not depend on the others, nor on those before or after it.

    Devices pad batches when they evaluate, and take samples in any order. `network` is in inference mode; `samples` are
    three; answers may differ by `limit`, relative to the largest. Copies of one sample all go where it goes.
    """
    try:
        with own_random(), torch.no_grad():
            out, others, turned = network(samples[:2]), network(samples), network(samples.flip(0)).flip(0)
            crowd = network(samples[:1].repeat(_copies(samples, out), *[1] * (samples.dim() - 1)))
    except Exception:  # noqa: BLE001 - whatever the model raises is told where the program is compared with torch
        return
    if not all(bool(torch.isfinite(answer).all()) for answer in (out, others, turned, crowd)):  # told there
        return
    pairs = ((out, others[:2]), (turned, others), (crowd, out[:1].expand_as(crowd)))
    if not all(_alike(one, other, other, limit) for one, other in pairs):
        with own_random(), torch.no_grad():
            torch.default_generator.manual_seed(1)  # that of the CPU alone
            if not _alike(network(samples[:2]), out, out, limit):
                raise ProgramRefused(
                    f"model {name!r} answers the same samples differently each time, even in inference mode",
                    hint="draw random numbers in training only: if self.training",
                )
        raise ProgramRefused(
            f"model {name!r} answers a sample differently in other company, even in inference mode",
            hint="let batch norm keep running statistics (track_running_stats=True), give recurrent layers and "
            "attention batch_first=True, give experts room for each sample of a batch (no capacity limit), and sum, "
            "compare and scale each sample alone: x / x.amax(1, keepdim=True), no `if x.sum() > 0`",
        )
    _check_one_answer(name, network, samples[:1], out[:1], limit=limit)


def _copies(samples: Tensor, out: Tensor) -> int:
    """How many copies of a sample fill what takes so many samples of a batch, as experts do; fewer large ones."""
    return min(COPIES, max(1, LARGE_BATCH // max(samples[0].numel(), out[0].numel())))


def _alike(one: Tensor, other: Tensor, out: Tensor, limit: float) -> bool:
    """Whether two answers differ by at most `limit`, relative to the largest of `out`."""
    return float((one - other).abs().max()) <= limit * max(ROUNDED, float(out.abs().max()))


def _check_finite(name: str, out: Tensor) -> None:
    if bool((out.abs() <= LARGEST).all()):
        return
    excluded = not bool(torch.isnan(out).any()) and not float(out.max()) > LARGEST
    told = f"as low as {float(out.min()):.2g}" if excluded else "that are not finite"
    raise ProgramRefused(
        f"model {name!r} gives values {told}, in {str(out.dtype).removeprefix('torch.')}, for samples drawn at random",
        hint="exclude classes by a smaller negative number, as -1e9: a label that is drawn for a check has no finite "
        "loss there"
        if excluded
        else "a mask must not overflow in float64, in which programs are compared, and a logarithm needs a bound",
    )


def _check_one_answer(
    name: str, network: Callable[[Tensor], Tensor], sample: Tensor, expected: Tensor, *, limit: float
) -> None:
    """Check that inference on one sample alone gives what it gives among others: a trace knows no batch of one."""
    try:
        with own_random(), torch.no_grad():
            found = network(sample)
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError) as wrong:
        raise ProgramRefused(
            f"model {name!r} does not take a batch of one sample: {first_sentence(wrong)}", hint=ONE_SAMPLE
        ) from wrong
    if found.shape != expected.shape:
        raise ProgramRefused(
            f"model {name!r} gives {tuple(found.shape)} for one sample, expected {tuple(expected.shape)}",
            hint=ONE_SAMPLE,
        )
    if not _alike(found, expected, expected, limit):
        raise ProgramRefused(f"model {name!r} answers one sample alone in another way", hint=ONE_SAMPLE)
