"""The models that a fleet can train, by name. A name with a colon is an import path, one with a plus a sum of models.

A model is a plain torch module that maps a batch of samples [batch, *input] to logits [batch, classes], or to targets
of any shape. The same seed gives the same weights; torch's global generator keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn

from coordinator.models import zoo
from coordinator.models.members import PLUS, summed_name
from coordinator.models.sums import Sum, with_members
from edge_client.errors import ConfigError
from edge_client.protocol.message_schemas import CODECS
from edge_client.protocol.program import Loss, class_axis
from edge_client.protocol.samples.input_parts import Parts, row_size
from export.compiler.losses.choose_loss import loss_of_output
from export.compiler.losses.sample_losses import LossFunction
from export.compiler.signatures.packed_inputs import pack_module
from export.own_thread import own_random
from export.plugins import find_by_name

T = TypeVar("T")
ENTRY_HINT = (
    "name a function that returns a ModelEntry of coordinator.models.registry, as "
    "def mine(): return ModelEntry(make=MyModule, input=(1, 28, 28), classes=10)"
)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a training program is compiled for: the shapes of one sample and of its output, and the loss.

    `classes` is short for an output of (classes,). `own_loss`, a function of outputs and targets, replaces `loss`,
    which then only says what y is; `own_targets` is the shape of a sample's numbers, where that is not the output's.
    `frozen` is how parameters with requires_grad=False are stored: "f32", "f16" or "i8". `parts`, instead of `input`:
    the arrays of one sample, for a model whose forward takes several; they travel as one row of numbers.
    """

    input: tuple[int, ...] = ()
    classes: int = 0
    target: tuple[int, ...] = ()
    loss: Loss = "cross-entropy"
    own_loss: LossFunction | None = None
    own_targets: tuple[int, ...] | None = None
    frozen: str = "f32"
    parts: Parts = ()

    def __post_init__(self) -> None:
        if self.parts:
            object.__setattr__(self, "parts", tuple(sorted(self.parts, key=lambda part: part.name)))
            object.__setattr__(self, "input", (row_size(self.parts),))
        if not self.input:
            raise ConfigError("neither input nor parts", hint="give the shape of one sample, as input=(1, 28, 28)")
        if bool(self.classes) == bool(self.target):
            raise ConfigError(
                f"classes={self.classes} and target={self.target}",
                hint="give classes for a classifier, or target, the shape of one sample's output",
            )
        if self.frozen not in CODECS:
            raise ConfigError(f"frozen={self.frozen!r}", hint=f"use one of {', '.join(CODECS)}")

    @property
    def output(self) -> tuple[int, ...]:
        return self.target or (self.classes,)


@dataclass(frozen=True, kw_only=True)
class Model(ModelShape):
    """A torch module with its name and shapes. With `parts` the module takes packed samples.

    `built_in`: it was made here from MODELS, so that its name and tensors say what it computes.
    """

    name: str
    module: nn.Module
    built_in: bool = False

    @property
    def program_facts(self) -> dict[str, Any]:
        """What `compile_program` is told beside the module."""
        facts: dict[str, Any] = {"name": self.name, "input": self.input, "target": self.output, "frozen": self.frozen}
        facts["parts"] = self.parts
        if self.own_loss is None:
            return {**facts, "loss": self.loss}
        if self.loss == "squared-error":
            return {**facts, "loss": self.own_loss, "targets": self.own_targets}
        axis = class_axis(loss_of_output(self.loss, self.name, self.output), self.output)
        labels = self.output[:axis] + self.output[axis + 1 :]
        return {**facts, "loss": self.own_loss, "targets": torch.zeros((1, *labels), dtype=torch.int64)}


@dataclass(frozen=True, kw_only=True)
class ModelEntry(ModelShape):
    """How to make a model, and its shapes."""

    make: Callable[[], nn.Module]


MODELS = {
    "digits-mlp": ModelEntry(make=zoo.digits_mlp, input=(1, 8, 8), classes=10),
    "wecfl-cnn": ModelEntry(make=zoo.wecfl_cnn, input=(1, 28, 28), classes=10),
    "gn-cnn": ModelEntry(make=zoo.GnCnn, input=(1, 28, 28), classes=10),
    "mnist-mlp": ModelEntry(make=zoo.mnist_mlp, input=(1, 28, 28), classes=10),
    "wisdm-mlp": ModelEntry(make=zoo.wisdm_mlp, input=(43,), classes=6),
    "cifar-lenet": ModelEntry(make=zoo.cifar_lenet, input=(3, 32, 32), classes=10),
    "femnist-cnn": ModelEntry(make=zoo.femnist_cnn, input=(1, 28, 28), classes=62),
    "celeba-cnn": ModelEntry(make=zoo.celeba_cnn, input=(3, 84, 84), classes=2),
    "letters-cnn": ModelEntry(make=zoo.letters_cnn, input=(1, 28, 28), classes=26),
    "linear-regression": ModelEntry(make=zoo.linear_regression, input=(10,), classes=1, loss="squared-error"),
}


def build_model(name: str, *, seed: int) -> Model:
    """The built-in model `name`, or one by import path `package.module:factory` or registered name (plugins.py).

    "a+b" is the sum of the outputs of both (sums.py). A factory is a callable without arguments that returns a
    `ModelEntry`; a `ModelEntry` itself is accepted too. Raises UsageError for an unknown name, ConfigError for an
    object of another kind, and for a sum of models of different samples or outputs.

    >>> model = build_model("digits-mlp", seed=0)
    >>> model.input, model.output
    ((1, 8, 8), (10,))
    """
    if PLUS in name:
        return _sum_of(name, [build_model(part, seed=seed + m) for m, part in enumerate(name.split(PLUS))])
    entry = find_by_name("models", name, MODELS)
    if not isinstance(entry, ModelEntry) and callable(entry):
        entry = _call(name, entry)
    if not isinstance(entry, ModelEntry):
        raise ConfigError(f"model {name!r} is {type(entry).__name__}", hint=ENTRY_HINT)
    with own_random(seed):
        module = _call(name, entry.make)
    if entry.parts:
        module = pack_module(module, entry.parts)
    facts = {key.name: getattr(entry, key.name) for key in fields(ModelShape)}
    return Model(name=name, module=module, built_in=entry is MODELS.get(name), **facts)


def _call(name: str, make: Callable[[], T]) -> T:
    """What the user's function gives. Raises ConfigError for one that needs arguments."""
    try:
        signature(make).bind()
    except TypeError as wrong:
        raise ConfigError(f"model {name!r} is made without arguments: {wrong}", hint=ENTRY_HINT) from None
    except ValueError:  # it tells no signature
        pass
    return make()


def summed(model: Model, members: int) -> Model:
    """The sum of `members` models of this kind; a sum, and a model that is to be alone, stays what it is."""
    module = with_members(model.module, members)
    return model if module is model.module else replace(model, name=summed_name(model.name, members), module=module)


def _sum_of(name: str, members: Sequence[Model]) -> Model:
    first = members[0]
    for other in members[1:]:
        if (other.input, other.output, other.loss) != (first.input, first.output, first.loss):
            raise ConfigError(
                f"{name}: {other.name} takes {other.input} and gives {other.output}, {first.name} {first.input} and "
                f"{first.output}",
                hint="add models of the same samples, outputs and loss",
            )
    built_in = all(member.built_in for member in members)
    return replace(first, name=name, module=Sum([member.module for member in members]), built_in=built_in)
