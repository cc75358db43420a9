"""What an engine promises: it runs one training program.

Feeds and results carry the manifest's names, in torch's layout.

Names (PROTOCOL.md, program.json): `w/<parameter>`, `buffers/<buffer>`, `velocity/<parameter>`, `anchor/<parameter>`,
`linear/<parameter>`, `x`, `y`, `q`, `lr`, `momentum`, `mu` go in; a step gives `w/...`, `buffers/...`, `velocity/...`
and `loss` back, so that `feeds | result` is the next step's feed. Scalars are 0-d arrays of the program's float dtype.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from edge_client.errors import UsageError
from edge_client.protocol.program import Program
from edge_client.protocol.task import Array, Tensors

ENGINES = ("onnx", "litert", "pt2")


class Engine(Protocol):
    """One opened program. Never changes its feeds."""

    name: str
    fixed_batch: int | None  # None: any batch size from 1

    def step(self, feeds: Tensors) -> dict[str, Array]:
        """One proximal SGD step: new weights, buffers, velocity and the scalar loss."""
        ...

    def evaluate(self, feeds: Tensors) -> dict[str, Array]:
        """`loss` [batch] and `logits` [batch, n_classes]; batch norm in inference mode."""
        ...


def open_engine(name: str, program: Program, files: Mapping[str, Path], *, threads: int = 1) -> Engine:
    """Open the containers of `program` with the runtime `name`; `files` maps a function to its container on disk.

    `files` may hold only "step" or only "evaluate"; using an absent one raises KeyError.
    Raises RuntimeMissing when the runtime is not installed or does not work, ProgramRefused when it cannot load a file.
    """
    if name not in ENGINES:
        raise UsageError(f"unknown engine {name!r}", hint=f"use one of {', '.join(ENGINES)}")
    module = import_module(f"edge_client.engines.{name}")  # imports its runtime only when asked
    return cast("Engine", module.open_program(program, files, threads=threads))
