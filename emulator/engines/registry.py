"""The engines by their names on the command line, and the recipe of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from coordinator.models.compiled import compiled_model
from coordinator.models.registry import Model
from edge_client.errors import UsageError
from edge_client.protocol.program import ENGINES as RUNTIMES
from emulator.engines.autotune import candidates, choose_engine
from emulator.engines.base import GPU_ENGINES, Recipe, check_engine
from emulator.engines.cpu.cpu_engine import cpu_recipe
from emulator.engines.device_runtime import RuntimeRecipe
from emulator.engines.gpu.cuda_graphs import GraphRecipe
from emulator.engines.gpu.stacked import StackedRecipe

RECIPES: Mapping[str, Callable[[Model], Recipe]] = {
    "lean": cpu_recipe,
    "stacked": lambda model: StackedRecipe(model=model),
    "graphs": lambda model: GraphRecipe(model=model),
}


def make_recipe(name: str, model: Model, *, batch: int, folder: Path, processes: int) -> tuple[str, Recipe]:
    """-> the engine's name and its recipe; "auto" measures the candidates and takes the fastest.

    The devices' own runtimes are compiled for batches of `batch` samples; their files lie in `folder`. `processes`: how
    many processes would open the recipe. Raises UsageError for an unknown name, RuntimeMissing where it cannot run.
    """
    check_engine(name)
    if model.own_loss is not None:
        if name in GPU_ENGINES:
            raise UsageError(f"engine {name} has no loss of your own", hint="leave out `engine`, or name lean")
        name = "lean" if name == "auto" else name
    if name == "auto":
        return choose_engine(model, candidates(model, processes=processes))
    if name in RUNTIMES:
        return name, _compiled(name, model, batch=batch, folder=folder)
    return name, RECIPES[name](model)


def _compiled(name: str, model: Model, *, batch: int, folder: Path) -> RuntimeRecipe:
    made = compiled_model(model, batch=batch, engines=(name,))
    for sha256, blob in made.files.items():
        (folder / sha256).write_bytes(blob)
    files = {function: folder / container.sha256 for function, container in made.program.containers[name].items()}
    return RuntimeRecipe(engine=name, program=made.program, files=files)
