"""A module with several inputs as a module of one: it cuts a packed row apart before its forward runs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.samples.input_parts import InputPart, Parts, describe_arrays, row_size
from edge_client.protocol.task import Array
from export.compiler.signatures.module_copies import copied
from export.own_thread import own_random

Example = Tensor | Array | Sequence[Any] | Mapping[str, Any]  # a batch, a sample's shape, or several batches

BEYOND = ("index out of range", "is out of bounds for dimension")  # of F.embedding, and of a table's rows by number
DRAWN = 64  # samples, among which most numbers of a column are


class PackedInputs(nn.Module):
    """Put in front of a module's class: one argument [batch, numbers] becomes forward's arguments by name."""

    parts: ClassVar[Parts] = ()

    def forward(self, packed: Tensor | None = None, *others: Any, **named: Any) -> Any:  # noqa: ANN401 - the module's own
        """Any other call, as a user makes it, reaches the module's own forward as it is."""
        if packed is None or others or named:
            return super().forward(*(() if packed is None else (packed,)), *others, **named)
        at = 0
        for part in self.parts:
            named[part.name] = _part(packed[:, at : at + part.size], part)
            at += part.size
        return super().forward(**named)


def pack_module(module: nn.Module, parts: Parts) -> nn.Module:
    """A copy of the module whose forward takes packed samples; its parameters keep their names.

    Raises ProgramRefused where forward has no parameter of a part's name.
    """
    known, any_name = _parameters(module)
    if strange := [part.name for part in parts if part.name not in known and not any_name]:
        raise ProgramRefused(
            f"forward of {type(module).__name__} has no parameter {strange[0]!r}",
            hint=f"name each array as a parameter of forward: {', '.join(known)}",
        )
    mine, kind = copied(module), type(module)
    mine.__class__ = type(kind.__name__, (PackedInputs, kind), {"parts": parts, "__module__": kind.__module__})
    return mine


def read_example(module: nn.Module, example: Example) -> tuple[nn.Module, tuple[int, ...], Parts]:
    """-> the module, packed where the example is several arrays; the shape of one sample; the parts of such a sample.

    `example`: a batch [batch, ...]; the shape of one sample; or several batches, as a dict by the names of forward's
    parameters or as a tuple in their order. Raises UsageError for none of these, ProgramRefused.
    """
    if isinstance(example, (int, np.integer)):
        hint = f"write ({example},), a tuple, for samples of {example} numbers; or give a batch of samples"
        raise UsageError(f"the example input is the number {example}", hint=hint)
    if not hasattr(example, "shape") and not isinstance(example, (Mapping, Sequence)):
        hint = "give a batch of samples as an array, or the shape of one sample, as (28, 28)"
        raise UsageError(f"the example input is {type(example).__name__}", hint=hint)
    if isinstance(example, Mapping):
        arrays = {str(name): _array(values) for name, values in example.items()}
    elif hasattr(example, "shape"):
        return module, tuple(example.shape[1:]), ()
    elif any(not hasattr(value, "shape") for value in example):
        return module, tuple(int(size) for size in example), ()
    else:
        known, _ = _parameters(module)
        if len(known) < len(example):
            raise ProgramRefused(
                f"{len(example)} inputs; forward of {type(module).__name__} names {len(known)} parameters",
                hint="give forward one named parameter for each input",
            )
        arrays = {name: _array(values) for name, values in zip(known, example, strict=False)}
    try:
        parts = describe_arrays(arrays)
    except ValueError as wrong:
        raise ProgramRefused(f"these inputs cannot be packed: {wrong}", hint="give batches [batch, ...]") from None
    packed, narrow = pack_module(module, parts), _by_columns(parts, arrays)
    if narrow != parts and _runs_beyond(packed, parts) and not _runs_beyond(packed, narrow):
        packed, parts = pack_module(module, narrow), narrow
    return packed, (row_size(parts),), parts


def lone_sample_hint(network: nn.Module, parts: Parts, example: Example, dtype: torch.dtype) -> str:
    """What to write where the example is one sample, without a batch axis, and the network takes it as that; else "".

    `network` takes numbers of `dtype`; one of several `parts` takes them by their names, too.
    """

    def row(values: Any) -> Tensor:  # noqa: ANN401 - a tensor or an array
        one = torch.as_tensor(_array(values)).unsqueeze(0)
        return one.to(dtype) if one.is_floating_point() else one

    if isinstance(example, Mapping):
        args, named = [], {str(name): row(values) for name, values in example.items()}
        line = "{name: values[None] for name, values in x.items()}"
    elif hasattr(example, "shape"):
        args, named, line = [row(example).to(dtype)], {}, "x[None]"
    elif all(hasattr(values, "shape") for values in example):
        args, named = [], {part.name: row(values) for part, values in zip(parts, example, strict=True)}
        line = "tuple(values[None] for values in x)"
    else:
        return ""
    try:
        with own_random(), torch.no_grad():
            network(*args, **named)
    except Exception:  # noqa: BLE001 - whatever the model raises
        return ""
    return f"the first axis of an example is its batch, and this one is a single sample: for an example x give {line}"


def _by_columns(parts: Parts, arrays: Mapping[str, Array]) -> Parts:
    """The parts with whole numbers as low as those of an array's lowest column, as tables of several sizes need."""
    lowest = {
        part.name: int(arrays[part.name].reshape(len(arrays[part.name]), -1).max(axis=0).min()) + 1
        for part in parts
        if part.kind == "int" and part.size > 1 and len(arrays[part.name])
    }
    return tuple(replace(part, below=max(1, min(part.below, lowest.get(part.name, part.below)))) for part in parts)


def _runs_beyond(module: nn.Module, parts: Parts) -> bool:
    """Whether drawn samples hold numbers beyond a table of the module."""
    mine, draw = copied(module).eval(), torch.Generator().manual_seed(0)
    try:
        with own_random(), torch.no_grad():
            mine(example_rows(parts, DRAWN, draw, torch.get_default_dtype()))
    except Exception as wrong:  # noqa: BLE001 - whatever the model raises
        return any(told in str(wrong) for told in BEYOND)
    return False


def example_rows(parts: Parts, batch: int, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    """Drawn samples [batch, numbers]: normal numbers, and whole ones below `InputPart.below`."""
    return torch.cat([_drawn(part, batch, draw, dtype) for part in parts], 1)


def _drawn(part: InputPart, batch: int, draw: torch.Generator, dtype: torch.dtype) -> Tensor:
    if part.below:
        return torch.randint(part.below, [batch, part.size], generator=draw).to(dtype)
    return torch.randn([batch, part.size], generator=draw, dtype=dtype)


def _part(x: Tensor, part: InputPart) -> Tensor:
    """Columns [batch, size] as the array that forward takes."""
    if part.kind != "float":
        x = x.to(torch.int64) if part.kind == "int" else x != 0
    return x.reshape([x.shape[0], *part.shape]).contiguous()  # the model may call `view`


def _parameters(module: nn.Module) -> tuple[list[str], bool]:
    """Names of forward's parameters, and whether it takes any other name."""
    given = inspect.signature(module.forward).parameters.values()
    named = [p.name for p in given if p.kind in {p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY}]
    return named, any(p.kind is p.VAR_KEYWORD for p in given)


def _array(values: Any) -> Array:  # noqa: ANN401 - a tensor or an array
    return values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
