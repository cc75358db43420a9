"""Which layer and which line of a model calls which operator, and what a training pass draws at random and writes.

Passes in torch's eager mode are watched. Refusals name the layers and lines that were seen in it.
"""

from __future__ import annotations

import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from edge_client.printable import first_of
from export.compiler.decompositions.supported_ops import RANDOM, Counts, UnsupportedOperator, every_call
from export.compiler.graph_passes.vmap_levels import no_gradients
from export.compiler.losses.sample_losses import LossFunction, loss_name
from export.compiler.program_functions import (
    TraceSource,
    call_module,
    changed_places,
    example_inputs,
    sample_losses,
    tensor_places,
    tensors_of,
)
from export.compiler.random_ops import COVERED_OPERATORS, TWICE, draws
from export.compiler.signatures.lasting_state import refuse_unmoved
from export.data_attribute import DataReplacedError, shares_memory
from export.diagnostics import first_sentence, raise_for_machine
from export.dispatch_mode import PlainDispatchMode
from export.float64_mode import as_in
from export.own_thread import own_random

TORCH, COMPILER, EXPORT = map(str, (Path(torch.__file__).parent, *Path(__file__).parents[:2]))
BETWEEN = (  # of the compiler, called by a model's code
    *("operator_watch.py", "forward_overrides.py", "random_ops.py", "vmap_levels.py", "label_losses.py", "dropout.py"),
    *("recurrent.py", "complex_pairs.py", "fourier.py", "short_time.py", "matrices.py", "indexing.py"),
    *("picks.py", "pools.py"),
)
OPERATOR = re.compile(r"aten\.\w+")
ALONE = re.compile(r"aten\.\w+\.\w+")
NONZERO = "nonzero() and torch.where(mask) alone find another number of places each time: multiply by the mask; "
SIZED_BY_VALUES = ("aten.nonzero", "aten.masked_select")  # a tensor of a size that the samples' values decide
PACKS = "aten._pack_padded_sequence"
PACKED = (
    "pack_padded_sequence gives another number of rows each time: give the layer whole sequences, and take each "
    "sample's last output by its number, out[torch.arange(out.shape[0]), lengths - 1]"
)
NO_BRANCHES = "forward must be the same operators for every batch: no branches on values, no .item()"
NO_DERIVATIVE = re.compile(r"derivative for '?(?:aten::)?(\w+)'? is not implemented")  # how torch tells it
UNDERIVED = "torch itself trains nothing through it: give it x.detach(), or replace it"
MEMORY_HINT = "make a new tensor, as torch.zeros(n), h[:, :n] or h.reshape(-1, n), in place of one with other memory"
INSTEAD = {
    **dict.fromkeys(("aten.set", "aten.resize"), MEMORY_HINT),
    "aten.repeat_interleave": "repeat by a number, or pick by numbers that stay: h[:, torch.tensor([0, 1, 1, 2])]",
    "aten.index_reduce": "use scatter_reduce: h.scatter_reduce(1, index.expand_as(source), source, 'amax')",
}
OVERWRITTEN = "modified by an inplace operation"  # how torch tells it
NAMED = 3  # of many tensors
FAULTS = (RuntimeError, ValueError, TypeError, IndexError, AssertionError)  # of a user's forward
ONE_SIZE = ("Constraints violated", "Specializations unexpectedly required")  # how torch.export begins
FAKE_CONSTANT = "fake tensor in the exported program constant's list"  # how torch.export tells of `.data`
CONSTRAINT_HINT = (
    "write into no parameter, also not by `.data`: take what a constraint gives in its place, as "
    "F.conv2d(x, torch.renorm(self.weight, 2, 0, 1.0))"
)


def count_random_numbers(source: TraceSource) -> tuple[int, frozenset[int]]:
    """The random numbers that a training pass draws per sample, and which draws are one for the whole batch.

    Such a draw, as a mask of weights, takes its numbers from the first sample's row. Raises ProgramRefused for draws
    that grow with the batch in another way, and for those that no rule covers: no seed of a task decides them.
    """
    first, second = (_watch_pass(source, n) for n in (2, 3))
    if others := sorted((RANDOM - COVERED_OPERATORS) & first.seen.keys()):
        refuse_operator(source, others[0], "a step draws masks and uniform, normal, exponential and whole numbers only")
    two, three = first.draws, second.draws
    for layer, operator in first.seeded:
        raise _refused_layer(source, layer, operator, "a generator of its own draws the same numbers in every step")
    shared = frozenset(i for i, (one, other) in enumerate(zip(two, three, strict=False)) if one[-1] == other[-1])
    for i, ((layer, operator, small), (*_, large)) in enumerate(zip(two, three, strict=False)):
        if i not in shared and small * 3 != large * 2:
            raise _refused_layer(source, layer, operator, "its random numbers do not belong to one sample each")
    if len(two) != len(three):
        raise _refused_layer(source, two[-1][0], two[-1][1], "it draws another number of times for other samples")
    return sum(small if i in shared else small // 2 for i, (*_, small) in enumerate(two)), shared


def check_writes(source: TraceSource) -> None:
    """A training pass may write only float buffers that torch saves: a step returns no others."""
    places = tensor_places(source.module)
    replaced, written, assigned = changed_places(source)
    changed = replaced | written | assigned
    own = [place for place, name in places.items() if name in source.params and place in changed]
    if own:
        raise ProgramRefused(
            f"model {source.name!r} writes its parameters {first_of(own, NAMED)} in forward, which no step can express",
            hint=CONSTRAINT_HINT,
        )
    shared = Counter(places.values())
    lost = [
        name
        for place, name in places.items()
        if (name in source.constant_names and place in changed)
        or (shared[name] > 1 and place in replaced)
        or place in assigned
    ]
    if lost:
        raise ProgramRefused(
            f"model {source.name!r} writes {', '.join(lost)} when it trains, which no step can give back",
            hint="use a buffer of finite floating point numbers with persistent=True, in one place, and write into it, "
            "as self.mean.copy_(new)",
        )


def check_samples(source: TraceSource) -> None:
    """Raise ProgramRefused for a pass that fails, or that writes into its samples, which a run reads again."""
    try:
        written = [layer for training in (True, False) for layer in _watch_pass(source, 2, training=training).written]
    except FAULTS as wrong:
        hint = "it must take the samples that it takes in inference mode: try model.train()(x)"
        raise _refused_pass(source, "in training mode", wrong, hint) from wrong
    if written:
        raise ProgramRefused(
            f"model {source.name!r} writes into its samples in layer {written[0]}",
            hint="make a new tensor, as x = x / 255 or x = x.clone() before the first write, and give the first layer "
            "no inplace=True",
        )


def check_gradient(source: TraceSource) -> None:
    """Raise ProgramRefused where no trained parameter has a gradient, or training gives other outputs than inference.

    A gradient taken in forward, and most of what fails backward, is told by the tracer.
    """
    state = {name: value.clone() for name, value in tensors_of(source.module).items()}
    state |= {name: state[name].requires_grad_() for name in source.params}

    def trained() -> Tensor:
        with own_random(), torch.enable_grad(), no_gradients():
            return call_module(source.module.train(), state, example_inputs(source, "infer", 2)[-1])[0]

    try:
        out = trained()
    except UnsupportedOperator:
        return
    except FAULTS as wrong:
        hint = "give a loss's target as y.detach(), and write x = torch.add(x, y) in place of out="
        raise _refused_pass(source, "where torch keeps gradients", wrong, hint) from wrong
    given = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
    if given != (2, *source.target):
        raise ProgramRefused(
            f"model {source.name!r} gives {given} when it trains, and {(2, *source.target)} in inference mode",
            hint="give one tensor of logits in both, as aux_logits=False does in torchvision's GoogLeNet",
        )
    if not out.requires_grad:
        raise ProgramRefused(
            f"model {source.name!r} gives outputs that no trained parameter has a gradient of",
            hint="leave torch.no_grad(), detach() and numpy out of forward, and unfreeze what its output comes from",
        )
    refuse_unmoved(source.name, source.module, out, trained)
    try:
        with own_random():
            torch.autograd.grad(out.sum(), [state[name] for name in source.params], allow_unused=True)
    except Exception as wrong:
        raise_for_machine(wrong)
        if OVERWRITTEN not in str(wrong):
            return
        seen = _watch_pass(source, 2).seen.items()
        writes = [f"{name} in layer {place}" for name, places in seen if name.endswith("_") for place in places]
        raise ProgramRefused(
            f"torch itself cannot train model {source.name!r}: a write in place changes what the gradient needs, one "
            f"of {first_of(writes, NAMED)}",
            hint="make a new tensor in place of the write, as h = h * 2 or torch.cat([h[:, :4], new], 1)",
        ) from wrong


def refuse_operator(source: TraceSource, operator: str, reason: str, wrong: Exception | None = None) -> NoReturn:
    """Raise an error with the operator and the layers and lines that use it or its forward counterpart.

    Where none was seen, as torch takes a function apart, they are those of the line at which `wrong` was raised.
    """
    counts = wrong.counts if isinstance(wrong, UnsupportedOperator) else every_call
    used = _watch_pass(source, 2, counts).seen
    line = "" if wrong is None else line_of(wrong)
    where: Mapping[str, None] = used.get(operator) or _places_at(used, line)
    if not where and source.own_loss is not None:
        seen = _places(_watch_loss(source, source.own_loss, counts), operator)
        if seen or operator.endswith("_") or not _places(used, operator):  # a forward pass has no writes in place left
            raise _refused_loss(source, next(iter(seen), f"loss {loss_name(source.own_loss)}"), operator, reason)
    where = where or _places(used, operator)
    some = f"some layer of {type(source.module).__name__}{f' at {line}' if line else ''}"
    layers = f"layer {', '.join(where)}" if where else some
    raise _refused_layer(source, layers, operator, reason)


def _places(seen: Mapping[str, Mapping[str, None]], operator: str) -> Mapping[str, None]:
    """Where an operator was seen, or its forward counterpart."""
    stem = operator.removeprefix("aten.").removesuffix("_backward").removesuffix("_with_indices").strip("_")
    return seen.get(operator) or next((places for name, places in seen.items() if stem in name), {})


def _places_at(seen: Mapping[str, Mapping[str, None]], line: str) -> Mapping[str, None]:
    """Where any operator was seen at this line of the user's code."""
    return {place: None for places in seen.values() for place in places if line and place.endswith(f" at {line}")}


class Untraceable(ProgramRefused):
    """Torch cannot trace the model for any batch size; it may do so for one."""


def one_size_only(source: TraceSource) -> Untraceable:
    """The error of a model that torch traces for one batch size."""
    return Untraceable(
        f"model {source.name!r} is not the same for every batch size",
        hint="write x.shape[0], not len(x), which is a plain number; branch on no batch size, halve none and give no "
        "convolution as many groups; torch.kron, torch.gradient and torch.linalg.multi_dot ask for it themselves",
    )


def refuse_untraceable(source: TraceSource, wrong: Exception) -> NoReturn:
    """Raise an error with what torch cannot trace, and the line of the model at which it happened."""
    raise_for_machine(wrong)
    if str(wrong).startswith(ONE_SIZE):
        raise one_size_only(source) from wrong
    line, told, hint = line_of(wrong), first_sentence(wrong), NO_BRANCHES
    where, seen, named = f" at {line}" if line else "", _watch_pass(source, 2).seen, OPERATOR.search(told)
    sized = next((name for name in SIZED_BY_VALUES if name in seen), "") if "data-dependent" in told else ""
    lacking = NO_DERIVATIVE.search(told)
    operator = f"aten.{lacking[1]}" if lacking else named[0] if named else sized
    if not line and operator:  # in the second stage, which knows no lines
        where = next((f" in layer {place}" for place in _places(seen, operator)), "")
        told = f"{operator} gives another number of values each time" if operator in SIZED_BY_VALUES else told
    if line and named and ALONE.fullmatch(told) and operator not in SIZED_BY_VALUES:
        told = f"{operator} depends on the values of a tensor"
    if isinstance(wrong, DataReplacedError):
        told, _, hint = told.partition(": ")
    elif FAKE_CONSTANT in told:
        told, hint = "torch.export loses a tensor that forward makes, as `.data` does", CONSTRAINT_HINT
    elif lacking:
        told, hint = f"torch has no gradient of {operator}", INSTEAD.get(operator, UNDERIVED)
    if PACKS in seen:
        where, told, hint = f" in layer {next(iter(seen[PACKS]))}", "it packs sequences", PACKED
    elif sized or operator in SIZED_BY_VALUES:
        hint = NONZERO + NO_BRANCHES
    raise Untraceable(
        f"model {source.name!r} cannot be traced{where}: {told}",
        hint=hint + ("" if source.own_loss is None else "; so must the loss"),
    ) from wrong


def _refused_pass(source: TraceSource, where: str, wrong: Exception, hint: str) -> ProgramRefused:
    raise_for_machine(wrong)
    at = f", at {line}" if (line := line_of(wrong)) else ""
    return ProgramRefused(f"model {source.name!r} fails {where}{at}: {first_sentence(wrong)}", hint=hint)


def _refused_layer(source: TraceSource, layers: str, operator: str, reason: str) -> ProgramRefused:
    return ProgramRefused(
        f"model {source.name!r} cannot become a training program: {layers} uses {operator}: {reason}",
        hint=INSTEAD.get(operator, "leave the layer out or replace it; docs/what-compiles.md lists what compiles"),
    )


def _refused_loss(source: TraceSource, loss: str, operator: str, reason: str) -> ProgramRefused:
    return ProgramRefused(
        f"model {source.name!r} cannot become a training program: {loss} uses {operator}: {reason}",
        hint="compute the loss by other operators, and without writes in place; docs/what-compiles.md lists "
        "what compiles",
    )


def _watch_loss(
    source: TraceSource, loss: LossFunction, counts: Counts = every_call
) -> Mapping[str, Mapping[str, None]]:
    """Which operators the user's own loss calls, and at which lines."""
    watch, (*_, x, y) = _Watch(counts), example_inputs(source, "evaluate", 2)
    with as_in(source.dtype), own_random(), torch.no_grad():
        out = source.module.eval()(x)
        watch.stack.append(f"loss {loss_name(loss)}")
        with watch:
            sample_losses(source, out, y)
    return watch.seen


def first_call(source: TraceSource, operators: Sequence[str], counts: Counts = every_call) -> str:
    """The first of these operators that a training pass or a loss of the user's calls, and where; "" for none.

    `counts`: which of its calls do.
    """
    several: list[Mapping[str, Mapping[str, None]]] = [_watch_pass(source, 2, counts).seen]
    if source.own_loss is not None:
        several.append(_watch_loss(source, source.own_loss, counts))
    found = ((operator, seen[operator]) for operator in operators for seen in several if operator in seen)
    return next((f"{operator} in layer {next(iter(places))}" for operator, places in found), "")


def loss_calls(source: TraceSource, operator: str) -> bool:
    """Whether a loss of the user's calls the operator, as aten.binary_cross_entropy."""
    return source.own_loss is not None and operator in _watch_loss(source, source.own_loss)


def _watch_pass(source: TraceSource, batch: int, counts: Counts = every_call, *, training: bool = True) -> _Watch:
    """Watch one pass, in training mode unless told otherwise; torch's generator keeps its state."""
    x = torch.zeros(batch, *source.input, dtype=getattr(torch, source.dtype))
    watch = _Watch(counts, x)
    state = {name: value.clone() for name, value in tensors_of(source.module).items()}
    handles = [h for name, layer in source.module.named_modules() for h in watch.follow(name, layer)]
    try:
        with as_in(source.dtype), own_random(), torch.no_grad(), watch:
            call_module(source.module.train(training), state, x)
    finally:
        for handle in handles:
            handle.remove()
    return watch


class _Watch(PlainDispatchMode):
    """Records which layers call which operator, what random operators draw, and what writes into the `samples`.

    `seen`: operator -> "name (Class) at file:line", of the calls that count.
    """

    def __init__(self, counts: Counts, samples: Tensor | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._samples = counts, samples
        self.written: list[str] = []  # layers
        self.stack: list[str] = []
        self.seen: defaultdict[str, dict[str, None]] = defaultdict(dict)
        self.draws: list[tuple[str, str, int]] = []  # layer, random operator, how many numbers
        self.seeded: list[tuple[str, str]] = []  # layer and random operator with a generator of the user's

    def follow(self, name: str, layer: nn.Module) -> list[Any]:
        label = f"{name or 'the model itself'} ({type(layer).__name__})"
        return [
            layer.register_forward_pre_hook(lambda *_: self.stack.append(label)),
            layer.register_forward_hook(lambda *_: self.stack.pop() and None),
        ]

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401 - torch's
        name, layer = operator_name(func), self.stack[-1] if self.stack else "the model itself"
        line = _users(_outwards(sys._getframe()))  # noqa: SLF001 - inspect.stack would read every source file
        layer += f" at {line}" if line else ""
        if self._counts(name, args):
            self.seen[name][layer] = None
        if self._samples is not None:
            self.written += [layer for v in _written(func, args, kwargs or {}) if shares_memory(v, self._samples)]
        out = func(*args, **(kwargs or {}))
        if name in COVERED_OPERATORS and draws(func, args):
            drawn = out if isinstance(out, Tensor) else out[0]
            self.draws += [(f"layer {layer}", name, drawn.numel())] * (2 if name in TWICE else 1)
            self.seeded += [(f"layer {layer}", name)] if (kwargs or {}).get("generator") is not None else []
        return out


def _written(operator: Any, args: Sequence[Any], named: dict[str, Any]) -> list[Tensor]:  # noqa: ANN401 - an OpOverload
    """What a call writes into: the first argument of `add_`, the `out` of `torch.mul(x, 2, out=x)`, each of a list."""
    takes = operator._schema.arguments  # noqa: SLF001 - no other way
    given = dict(zip((argument.name for argument in takes), args, strict=False)) | named
    values = [given.get(argument.name) for argument in takes if argument.is_write]
    flat = [each for value in values for each in (value if isinstance(value, list | tuple) else [value])]
    return [each for each in flat if isinstance(each, Tensor)]


def operator_name(operator: Any) -> str:  # noqa: ANN401 - an OpOverload
    """aten.mul.Tensor -> "aten.mul"."""
    return str(operator.overloadpacket).removeprefix("torch.ops.")


def line_of(wrong: Exception) -> str:
    """The innermost line of the user's code that raised, or "": `net.py:12`."""
    frames, trace = list[tuple[str, int]](), wrong.__traceback__
    while trace is not None:
        frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    return _users(reversed(frames))


def _outwards(frame: FrameType | None) -> Iterator[tuple[str, int]]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back


def _users(frames: Iterator[tuple[str, int]]) -> str:
    """The first line, from inside out, that is neither torch's nor the compiler's; "" if there is none."""
    for file, number in frames:
        if file.startswith(COMPILER) and Path(file).name not in BETWEEN:
            return ""  # what called the model
        if not file.startswith((TORCH, EXPORT, "<")):
            return f"{Path(file).name}:{number}"
    return ""
