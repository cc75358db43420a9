"""The interface of an engine: it runs one training program, on one runtime and one device.

Feeds and results carry the manifest's names, in torch's layout (PROTOCOL.md, program.json). A local update begins with
`w/<parameter>`, `buffers/<buffer>` and `velocity/<parameter>`, which each step moves, and `anchor/<parameter>`,
`linear/<parameter>`, `lr`, `momentum` and `mu`, which stay. Every other input is fresh with each step: `x`, `y`, `q`.
Scalars are 0-d arrays of the program's float dtype.

With a `Rule` a step only tells the gradient (its `lr` and `momentum` are zero, so its velocity is the gradient of the
whole objective), and the rule moves the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.program import ENGINES, Function, Port, Program
from edge_client.protocol.task import Array, Tensors

DEVICES = ("auto", "cpu", "cuda", "tensorrt")
UPDATED_ROLES = ("w", "buffers", "velocity")  # the names up to a slash
FIXED_ROLES = ("anchor", "linear", "lr", "momentum", "mu")
Rule = Callable[[Any, Any], None]  # moves weights [n_params] in place by their gradient; training/optimiser.py


class LocalUpdate(Protocol):
    """One local update under way. Its tensors stay with the runtime, on its device."""

    def step(self, feeds: Tensors) -> float:
        """One proximal SGD step on a batch, read from `x` [b, ...], `y` [b, ...] and `q` [b]; the loss before it."""
        ...

    def read(self) -> dict[str, Array]:
        """`w/...`, `buffers/...` and `velocity/...` as they are now: arrays of the caller's own."""
        ...


class Engine(Protocol):
    """One opened program. It never changes its feeds."""

    name: str
    place: str  # where it computes: "cpu", "cuda" or "tensorrt"
    fixed_batch: int | None  # None: any batch size from 1

    def update(self, feeds: Tensors, rule: Rule | None = None) -> LocalUpdate:
        """Begin a local update. One at a time: the one before it is over.

        The caller leaves the arrays as they are for as long as the update lasts. With a `rule` the feeds' `lr` and
        `momentum` are zero, and what `read` gives as velocity has no meaning.
        """
        ...

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        """`loss` [batch] and `logits` [batch, n_classes]; batch norm in inference mode."""
        ...


def run_step(engine: Engine, feeds: Tensors) -> dict[str, Array]:
    """A local update of one step: all its feeds -> what it moves, and `loss` []; `feeds | result` feeds the next."""
    update = engine.update(feeds)
    loss = update.step(feeds)
    return update.read() | {"loss": np.asarray(loss)}


def unfit(told: str) -> ProgramRefused:
    """The refusal of a file that is not what its manifest says."""
    return ProgramRefused(told, hint="compile the program again")


class FlatPorts:
    """One array [n_params] for all ports of a role, and a view of it for each of them, by name."""

    def __init__(self, function: Function, role: str) -> None:
        ports = [port for port in function.inputs if port.name.partition("/")[0] == role]
        sizes = [math.prod(int(d) for d in port.shape) for port in ports]
        self.flat = np.zeros(sum(sizes), dtype=ports[0].dtype)
        parts = np.split(self.flat, np.cumsum(sizes)[:-1])
        self.views = {
            port.name: part.reshape(tuple(int(d) for d in port.shape)) for port, part in zip(ports, parts, strict=True)
        }

    def fill(self, values: Mapping[str, Array]) -> None:
        """Copy one array per port."""
        for name, view in self.views.items():
            np.copyto(view, values[name])

    def copies(self) -> dict[str, Array]:
        """Arrays of the caller's own."""
        return {name: view.copy() for name, view in self.views.items()}


def ports_by_role(function: Function) -> tuple[tuple[Port, ...], tuple[Port, ...], tuple[Port, ...]]:
    """The inputs of a step: those that it moves, those that are kept, those that are fresh each time."""

    def of(kinds: tuple[str, ...]) -> tuple[Port, ...]:
        return tuple(port for port in function.inputs if port.name.partition("/")[0] in kinds)

    given = of(UPDATED_ROLES), of(FIXED_ROLES)
    return (*given, tuple(port for port in function.inputs if port not in (*given[0], *given[1])))


def open_engine(
    name: str, program: Program, files: Mapping[str, Path], *, threads: int = 1, device: str = "auto"
) -> Engine:
    """Open the containers of `program` with the runtime `name`; `files` maps a function to its container on disk.

    `files` may hold only "step" or only "evaluate"; using an absent one raises KeyError. `device` is one of DEVICES;
    "auto" takes CUDA where the runtime can really use it and the CPU otherwise; what is asked for by name is used or
    refused. Raises RuntimeMissing when the runtime or the device is not there or does not work, ProgramRefused when the
    runtime cannot load a file.
    """
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", hint=f"use one of {', '.join(ENGINES)}")
    if device not in DEVICES:
        raise UsageError(f"unknown device {device!r}", hint=f"use one of {', '.join(DEVICES)}")
    module = import_module(f"edge_client.engines.{name}")  # the runtime is imported only if it is used
    return cast("Engine", module.open_program(program, files, threads=threads, device=device))
