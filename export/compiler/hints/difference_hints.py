"""What to do about numbers of a program that differ from torch's, or are not finite.

Torch alone is asked, and the operators that the model calls: a hint names the first of them that explains what was
seen, with its line.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from edge_client.printable import first_of
from export.compiler.losses.sample_losses import loss_name
from export.compiler.operator_watch import first_call, loss_calls
from export.compiler.program_functions import (
    TraceSource,
    changed_places,
    example_inputs,
    function_ports,
    private_copy,
    tensor_places,
    tensors_of,
)
from export.compiler.program_parity import all_finite, torch_outputs
from export.compiler.signatures.lasting_state import HOOK_HINT, hooks_on_gradients, kept_hint

LABELLED = 64  # samples whose drawn labels have every class, of not too many
SHOWN = 3  # buffers that a hint names

STEEP = tuple(f"aten.{name}" for name in ("sqrt", "rsqrt", "log", "log2", "log10", "pow"))  # at 0
ARCS = ("aten.asin", "aten.acos")  # steep at 1 and -1
ANGLES, REMAINDERS = ("aten.angle", "aten.atan2"), ("aten.remainder", "aten.fmod")
RESAMPLES = tuple(
    f"aten.upsample_{name}" for name in ("nearest1d", "nearest2d", "nearest3d", "bilinear2d", "bicubic2d")
)


def difference_hint(source: TraceSource, engine: str, worst: float) -> str:
    """What to do about a program of `engine` whose difference from torch is `worst`."""
    hooks = hooks_on_gradients(private_copy(source.module, source.dtype), example_inputs(source, "infer", 2)[-1])
    if hooks:
        return f"no program calls the hook on the gradient of {hooks}: {HOOK_HINT}"
    told = jump_hint(source) if math.isfinite(worst) else not_finite_hint(source, ours=True)
    return kept_hint(source.module) or told or f"leave {engine} out of the engines and report the model"


def jump_hint(source: TraceSource) -> str:
    """What to do about what jumps where rounding decides, lost digits and an order that is not kept; "" for none."""
    if called := first_call(source, ANGLES):
        return (
            f"{called}: an angle jumps from pi to -pi where y, the imaginary part, is 0, and rounding decides: take "
            "its cosine and sine, x / (r + 1e-6) and y / (r + 1e-6) with r the size, in place of the angle"
        )
    if called := first_call(source, REMAINDERS):
        return (
            f"{called}: it divides in float32, which has whole numbers up to 2^24: keep them below, or look the result "
            "up in a table, as self.register_buffer('bucket', buckets) and self.bucket[ids]"
        )
    if called := first_call(source, ("aten.topk",), _is_unsorted):
        return f"{called}: the order of the values is arbitrary with sorted=False: leave sorted=True"
    return ""


def not_finite_hint(source: TraceSource, *, ours: bool = False) -> str:
    """Why numbers may be infinite or NaN for drawn inputs: a loss, buffers or a gradient; "" where none can be.

    `ours`: a container's numbers, where torch's own may be finite.
    """
    changed = set.union(*changed_places(source))
    moved = {name for place, name in tensor_places(source.module).items() if place in changed}
    still, own = sorted(set(source.buffers) - moved), tensors_of(source.module)

    def finite(function: str, *, drawn: bool) -> list[bool]:
        ports = function_ports(source, function).inputs
        names = [p.name.removeprefix("buffers/") for p in ports]
        given = example_inputs(source, function, LABELLED)
        args = [own[n] if n in still and not drawn else a for n, a in zip(names, given, strict=True)]
        return [all_finite([out]) for out in torch_outputs(source, function, args)]

    losses, answers = finite("evaluate", drawn=False)
    if source.own_loss is not None and answers and not losses:
        return (
            f"loss {loss_name(source.own_loss)} is not finite for targets drawn at random, as a device draws them for "
            "its check: give excluded classes a large negative number, as -1e9, in place of minus infinity"
        )
    by_buffers = still and all(finite("step", drawn=False)) and not (ours and all(finite("step", drawn=True)))
    if not by_buffers and (arc := first_call(source, ARCS)):
        return (
            f"{arc}: its gradient is infinite at 1 and -1, and 0 times infinity is NaN: keep what it takes between, as "
            "torch.acos(h.clamp(-0.9999, 0.9999))"
        )
    if not by_buffers and (steep := first_call(source, STEEP, _is_steep)):
        return (
            f"{steep}: the gradient of a root, a logarithm or a power is infinite at 0, and 0 times infinity is NaN: "
            "keep what it takes above 0, as torch.sqrt(h + 1e-6) or torch.log(h.clamp(min=1e-6))"
        )
    if ours and (picked := first_call(source, RESAMPLES)):
        return f"{picked}: it is a product here, and 0 times infinity is NaN: mask by -1e9 in place of minus infinity"
    if still:
        return (
            f"other values of {first_of(still, SHOWN)} were tried, as a center may bring: a table whose numbers must "
            "stay, as a schedule of probabilities, belongs into a buffer with persistent=False"
        )
    return ""


def _is_steep(operator: str, args: Sequence[Any]) -> bool:
    """Whether the gradient is infinite at 0: that of x**2 is not, and that of 2**x."""
    if operator != "aten.pow":
        return True
    base, exponent = args
    return isinstance(base, Tensor) and (isinstance(exponent, (Tensor, complex)) or (exponent < 1 and exponent != 0))


def _is_unsorted(_operator: str, args: Sequence[Any]) -> bool:
    """Whether torch.topk may give its values in any order: its fifth argument."""
    return len(args) == 5 and not args[4]  # noqa: PLR2004 - (values, k, dim, largest, sorted)


def saturation_hint(source: TraceSource) -> str:
    """What to do about a loss that takes the logarithm of a rounded sigmoid; "" where it does not."""
    if not loss_calls(source, "aten.binary_cross_entropy"):
        return ""
    return (
        "leave the sigmoid out of the model, and take binary_cross_entropy_with_logits: near 0 and 1 the logarithm of "
        "a sigmoid is the rounding of float32"
    )
