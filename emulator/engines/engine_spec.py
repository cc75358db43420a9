"""A model and an engine by their names, from which a process makes a recipe. The names need no torch.

A model of the user's own is given itself. A run whose devices are in worker processes lets one of these make the
recipe, and does not load torch itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from edge_client.protocol.program import Program
from edge_client.protocol.task import Flat
from emulator.engines.base import GPU_ENGINES, Recipe
from emulator.engines.pickling import pickle_by_value

if TYPE_CHECKING:
    from coordinator.models.registry import Model


@dataclass(frozen=True, kw_only=True)
class ResolvedEngine:
    """A model, its recipe, and whether the recipe is for a GPU, which serves one process."""

    model: Model
    recipe: Recipe
    on_a_gpu: bool

    def initial_model(self, program: Program) -> Flat:
        """The common first model [schema.size]."""
        from export.compiler.program import vector_of

        return vector_of(self.model.module, program.schema)


@dataclass(frozen=True, kw_only=True)
class EngineSpec:
    """The arguments of `build_model` (coordinator/models/registry.py) and of `make_recipe` (registry.py).

    A `Model` in place of a name is taken as it is.
    """

    model: str | Model
    seed: int
    engine: str
    batch: int
    folder: Path
    processes: int = 1

    def resolve(self) -> ResolvedEngine:
        """Build the model and the recipe in this process. Raises what `build_model` and `make_recipe` raise."""
        from coordinator.models.registry import build_model
        from emulator.engines.registry import make_recipe

        model = build_model(self.model, seed=self.seed) if isinstance(self.model, str) else self.model
        chosen, made = make_recipe(self.engine, model, batch=self.batch, folder=self.folder, processes=self.processes)
        return ResolvedEngine(model=model, recipe=made, on_a_gpu=chosen in GPU_ENGINES)

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle_by_value(self)
