"""The models that a fleet can train, by name. A name with a colon is an import path.

A model is a plain torch module that maps a batch of samples [batch, *input] to logits [batch, classes], or to targets
of any shape. The same seed gives the same weights; torch's global generator keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from coordinator.models import zoo
from edge_client.errors import ConfigError
from edge_client.protocol.message_schemas import CODECS
from edge_client.protocol.program import Loss, class_axis
from export.compiler.losses.choose_loss import loss_of_output
from export.compiler.losses.sample_losses import LossFunction
from export.plugins import find_by_name


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """What a training program is compiled for: the shapes of one sample and of its output, and the loss.

    `classes` is short for an output of (classes,). `own_loss`, a function of outputs and targets, replaces `loss`,
    which then only says what y is; `own_targets` is the shape of a sample's numbers, where that is not the output's.
    `frozen` is how parameters with requires_grad=False are stored: "f32", "f16" or "i8".
    """

    input: tuple[int, ...]
    classes: int = 0
    target: tuple[int, ...] = ()
    loss: Loss = "cross-entropy"
    own_loss: LossFunction | None = None
    own_targets: tuple[int, ...] | None = None
    frozen: str = "f32"

    def __post_init__(self) -> None:
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
    """A torch module with its name and shapes."""

    name: str
    module: nn.Module

    @property
    def program_facts(self) -> dict[str, Any]:
        """What `compile_program` is told beside the module."""
        facts: dict[str, Any] = {"name": self.name, "input": self.input, "target": self.output, "frozen": self.frozen}
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

    A factory is a callable without arguments that returns a `ModelEntry`; a `ModelEntry` itself is accepted too. Raises
    UsageError for an unknown name, ConfigError for an object of another kind.

    >>> model = build_model("digits-mlp", seed=0)
    >>> model.input, model.output
    ((1, 8, 8), (10,))
    """
    entry = find_by_name("models", name, MODELS)
    if not isinstance(entry, ModelEntry) and callable(entry):
        entry = entry()
    if not isinstance(entry, ModelEntry):
        raise ConfigError(
            f"model {name!r} is {type(entry).__name__}",
            hint="name a function that returns a models.registry.ModelEntry",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = entry.make()
    facts = {key.name: getattr(entry, key.name) for key in fields(ModelShape)}
    return Model(name=name, module=module, **facts)
