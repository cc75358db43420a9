"""Torch modules of the user: prepared for a run, and made again from a run's centers."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce
from inspect import signature
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import fx, nn

from coordinator.models.registry import Model, build_model, summed
from edge_client.errors import UsageError
from edge_client.protocol.program import IGNORED, class_axis
from edge_client.protocol.samples.input_parts import Parts, joined_parts
from edge_client.protocol.task import Array, Flat, Schema
from edge_client.training.scores import MAX_COUNTED_CLASSES
from export.compiler.losses.choose_loss import layout_of
from export.compiler.losses.sample_losses import LossFunction
from export.compiler.program import load_vector, make_source, schema_of, vector_of
from export.compiler.program_functions import TraceSource, vocabulary_size
from export.compiler.signatures.module_copies import copied
from export.compiler.signatures.packed_inputs import pack_module
from export.own_thread import own_random

if TYPE_CHECKING:
    from emulator.data.fleet_split import FleetData

log = logging.getLogger(__name__)
HIDDEN = 64
NO_CLASSES = "; or, for yes and no or other numbers, y.astype('float32') and a loss of these"
ONE_HOT = "; one-hot labels are y.argmax(1) as classes"
CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)  # of one output the first is always 0
CLASS_FUNCTIONS: tuple[object, ...] = (nn.functional.cross_entropy, nn.functional.nll_loss)
TRIED = 8  # samples of which a loss of the user's own is known again


def own_model(
    model: nn.Module | Callable[[], nn.Module] | str | None,
    split: FleetData,
    *,
    loss: LossFunction | None,
    seed: int,
    members: int = 1,
) -> Model:
    """The model for the samples of these devices; a function that makes one is called with torch's generator at `seed`.

    With `members` above 1 it is a sum of so many like it (coordinator/models/sums.py). None is a `Perceptron`. Raises
    UsageError for a model that has fewer outputs than the devices have classes, ProgramRefused for one that takes no
    such samples or cannot be trained.
    """
    return summed(_own_model(model, split, loss=loss, seed=seed), members)


def _own_model(
    model: nn.Module | Callable[[], nn.Module] | str | None, split: FleetData, *, loss: LossFunction | None, seed: int
) -> Model:
    if isinstance(model, str):
        ours = build_model(model, seed=seed)
        return ours if loss is None else replace(ours, own_loss=loss)
    one = next(iter(split.devices.values())).train
    shape, labels = tuple(one.x.shape[1:]), np.issubdtype(one.y.dtype, np.integer)
    per_sample, packed, used = one.y.shape[1:], _parts(split), _used_classes(split) if labels else np.empty(0)
    _check_not_of_classes(loss, None if labels else per_sample)
    module = make_module(_perceptron(shape, per_sample, used, packed, labels=labels) if model is None else model, seed)
    _warn_of_pixels(module, shape, split)
    if packed:
        module = pack_module(module, packed)
    targets = None if labels else per_sample
    source = make_source(module, input=shape, loss="squared-error", own_loss=loss, own_targets=targets, parts=packed)
    facts: dict[str, Any] = {"name": source.name, "module": module, "input": shape, "parts": packed, "own_loss": loss}
    if labels:
        return Model(**facts, **_facts_of_classes(source, per_sample, used, loss))
    return Model(**facts, target=source.target, loss="squared-error", own_targets=source.own_targets)


def _used_classes(split: FleetData) -> Array:
    """The classes that a device has a sample of, rising."""
    parts = [y for local in split.devices.values() for y in (local.train.y, local.test.y if local.test else None)]
    found = np.unique(np.concatenate([np.unique(y) for y in parts if y is not None]))
    used: Array = found[found != IGNORED]
    return used


def _perceptron(
    shape: tuple[int, ...], per_sample: tuple[int, ...], used: Array, packed: Parts, *, labels: bool
) -> Callable[[], nn.Module]:
    """What makes the model of samples for which none is given. Raises UsageError where it would not suit them."""
    if per_sample and labels:
        raise UsageError(
            "these samples have a label per token or pixel, and no model of ours gives so many",
            hint="give model=, a torch module whose output has one more axis than a sample's labels: the classes"
            + ONE_HOT
            + NO_CLASSES,
        )
    if labels and used[-1] >= MAX_COUNTED_CLASSES:
        told = f"y has the class {used[-1]}, of {len(used)} classes; accuracy is counted for {MAX_COUNTED_CLASSES}"
        raise UsageError(told, hint="number the classes from 0: y = np.unique(y, return_inverse=True)[1]")
    if packed:
        named = ", ".join(part.name for part in packed)
        hint = f"give model=, a torch module whose forward takes {named}"
        raise UsageError("these samples are several arrays, and no model of ours takes them", hint=hint)
    return partial(Perceptron, shape, (int(used[-1]) + 1,) if labels else per_sample)


def _facts_of_classes(
    source: TraceSource, per_sample: tuple[int, ...], used: Array, loss: LossFunction | None
) -> dict[str, Any]:
    """The loss of a model of classes, and how many it has. Raises UsageError where the labels do not suit it."""
    kind = layout_of(source.target, per_sample)
    if kind is None:
        raise UsageError(
            f"{source.name} gives {source.target} for a sample, whose labels are of shape {per_sample}",
            hint="give it one row of outputs for each label: the classes are the first axis of a sample's output, "
            f"or the last{ONE_HOT}{NO_CLASSES}",
        )
    most, outputs = int(used[-1]), source.target[class_axis(kind, source.target)]
    if most >= outputs:
        raise UsageError(
            f"{source.name} has {outputs} outputs, and a device has a sample of class {most}",
            hint=f"give it one output per class: {most + 1}{_other_labels(used, outputs, 1 + len(per_sample), loss)}",
        )
    return {"loss": kind} | ({"classes": outputs} if kind == "cross-entropy" else {"target": source.target})


def _check_not_of_classes(loss: LossFunction | None, target: tuple[int, ...] | None) -> None:
    """Raise UsageError for torch's losses of classes where a sample has one floating point number."""
    if target == (1,) and (isinstance(loss, CLASS_LOSSES) or loss in CLASS_FUNCTIONS):
        told = "y is floating point numbers, which are targets, and the loss is one of classes"
        raise UsageError(told, hint="give classes as whole numbers, y.astype(int), or a loss of targets")


def _warn_of_pixels(model: nn.Module, shape: tuple[int, ...], split: FleetData) -> None:
    if split.pixels and len(shape) == 1 and vocabulary_size(model):
        told = "x is uint8: pixels, which become 0 to 1, and %s has an embedding. For tokens give x.astype('int64')"
        log.warning(told, type(model).__name__)


def _other_labels(used: Array, outputs: int, axes: int, loss: LossFunction | None) -> str:
    """What else a user may mean whose labels `used` are more than the outputs; y has so many `axes`."""
    more = NO_CLASSES if outputs == 1 or loss is not None else ""
    if axes > 1 and len(used) <= outputs + 1:
        return f"{more}; {IGNORED} leaves a position out: y[y == {used[-1]}] = {IGNORED}"
    return more + (
        "" if len(used) > used[-1] else ", or number the classes from 0: y = np.unique(y, return_inverse=True)[1]"
    )


def _parts(split: FleetData) -> Parts:
    """The arrays of a sample, with whole numbers as far as those of any device go."""
    held = [d.parts for local in split.devices.values() for d in (local.train, local.test) if d is not None]
    return reduce(joined_parts, held)


class Perceptron(nn.Sequential):
    """The model of a fleet of the user's own where none is given: one hidden layer of 64 units."""

    def __init__(self, sample: tuple[int, ...], target: tuple[int, ...]) -> None:
        out = [nn.Linear(HIDDEN, prod(target))]
        shaped = [nn.Unflatten(1, target)] if len(target) > 1 else []
        super().__init__(nn.Flatten(), nn.Linear(prod(sample), HIDDEN), nn.ReLU(), *out, *shaped)


def try_loss(model: Model, split: FleetData) -> list[float]:
    """What the user's own loss gives for labels or targets of the first device, by which it is known again.

    The outputs are drawn: shares, as a loss of probabilities takes, then larger numbers, as logits. A loss that takes
    one kind only fails for the other, which tells nothing.
    """
    if model.own_loss is None:
        return []
    y = torch.from_numpy(np.array(next(iter(split.devices.values())).train.y[:TRIED]))
    shape, rng, found = (len(y), *model.output), np.random.default_rng(0), list[float]()
    for drawn in (rng.uniform(0.05, 0.95, shape), rng.normal(0, 3, shape)):
        with suppress(Exception), torch.no_grad(), own_random(0):
            found += model.own_loss(torch.from_numpy(drawn).float(), y).double().flatten().tolist()
    return found


def frozen_checksum(module: nn.Module) -> int:
    """Another number for other values of the parameters that are not trained; 0 where there are none."""
    found = 0
    for _, value in sorted(module.named_parameters()):
        if not value.requires_grad:
            found = zlib.crc32(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().data, found)
    return found


def is_traced(module: nn.Module) -> bool:
    """Whether it is the copy in a run's folder, which is traced in inference mode."""
    return isinstance(module, fx.GraphModule)


def make_module(make: object, seed: int) -> nn.Module:
    """A module as it is, or what a function makes of torch's generator at `seed`. Raises UsageError."""
    if isinstance(make, nn.Module):
        return make
    if not callable(make):
        raise UsageError(f"model is {type(make).__name__}", hint="give a torch module, or a function that makes one")
    try:
        signature(make).bind()
    except TypeError as wrong:
        called = getattr(make, "__name__", type(make).__name__)
        hint = f"write its arguments: model=lambda: {called}(...)"
        raise UsageError(f"model {called} is made without arguments: {wrong}", hint=hint) from None
    except ValueError:  # of one that tells no signature
        pass
    with own_random(seed):
        made = make()
    if not isinstance(made, nn.Module):
        raise UsageError(f"the model's function gives {type(made).__name__}", hint="return a torch.nn.Module")
    return made


def module_of(module: nn.Module, schema: Schema, center: Flat) -> nn.Module:
    """A copy of the module with the center's values [schema.size], in evaluation mode."""
    mine = copied(module).cpu().eval()
    load_vector(mine, schema, center)
    return mine


def schema_for(model: Model) -> Schema:
    """The names and shapes of the numbers of a center."""
    return schema_of(model.module)


def first_model(model: Model) -> Flat:
    """The weights and buffers [schema.size] that a run begins with."""
    return vector_of(model.module, schema_of(model.module))
