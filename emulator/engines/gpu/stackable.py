"""Check that a model can train with clients as a batch dimension: stacked passes are compared with single ones.

torch.func.vmap supports most operators, but not all code between them, such as a branch on values or a buffer that
mixes the results of several passes. A refusal names the model and says what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from edge_client.errors import ProgramRefused
from emulator.engines.gpu.objective import Objective, use_exact_kernels, use_noise
from export.compiler.program_functions import (
    TraceSource,
    changed_places,
    example_inputs,
    function_ports,
    tensor_places,
)
from export.diagnostics import first_sentence

CLIENTS, BATCH = 2, 3
# of the largest number: rounding; mixed clients are wrong by about 1
STACKING_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-2}
LEAN_HINT = "choose the engine lean, which runs any module"


@dataclass(frozen=True, kw_only=True)
class StackedPasses:
    """The inputs of clients' passes, stacked; `noise` [clients, batch, numbers per sample] may have no columns."""

    w: Tensor
    b: Tensor
    x: Tensor
    y: Tensor
    q: Tensor
    noise: Tensor

    def run_stacked(self, objective: Objective) -> tuple[Tensor, ...]:
        """g, buffers and loss, each [clients, ...]."""
        objective.training()
        with use_noise(self.noise.flatten(0, 1) if self.noise.numel() else None):
            return objective.gradients(self.w, self.b, self.x, self.y, self.q)

    def run_single(self, objective: Objective, i: int) -> tuple[Tensor, ...]:
        """g, buffers and loss of one client, computed without the others."""
        objective.training()
        with use_noise(self.noise[i] if self.noise.numel() else None):
            return objective.gradient(self.w[i], self.b[i], self.x[i], self.y[i], self.q[i])


def random_passes(objective: Objective, *, clients: int, batch: int) -> StackedPasses:
    """Random passes, with weights near the model's own."""
    source = objective.source
    names = [port.name.partition("/")[0] for port in function_ports(source, "step").inputs]
    each = [dict[str, list[Tensor]]() for _ in range(clients)]
    for i, found in enumerate(each):
        for name, value in zip(names, example_inputs(source, "step", batch, seed=i), strict=True):
            found.setdefault(name, []).append(value)

    def flat(name: str) -> Tensor:
        rows = [torch.cat([part.reshape(-1) for part in found.get(name, [torch.empty(0)])]) for found in each]
        return torch.stack(rows).to(objective.device, objective.dtype)

    return StackedPasses(
        w=flat("w"),
        b=flat("buffers"),
        x=flat("x").view(clients, batch, *source.input),
        y=flat("y").view(clients, batch, *source.y_shape),
        q=flat("q"),
        noise=flat("noise").view(clients, batch, source.noise),
    )


def check_stackable(objective: Objective) -> None:
    """Raise ProgramRefused for a model that torch cannot stack, or that comes out differently when it is stacked."""
    name, other = objective.source.name, foreign_buffers(objective.source)
    if other:
        raise ProgramRefused(
            f"model {name!r} writes buffers that are not batch norm's: {', '.join(other)}", hint=LEAN_HINT
        )
    some = random_passes(objective, clients=CLIENTS, batch=BATCH)
    with use_exact_kernels(objective.device):
        try:
            together = some.run_stacked(objective)
        except (RuntimeError, ValueError, TypeError) as wrong:
            raise ProgramRefused(
                f"model {name!r} cannot be stacked: {first_sentence(wrong)}", hint=LEAN_HINT
            ) from wrong
        for i in range(CLIENTS):
            for stacked, single in zip(together, some.run_single(objective, i), strict=True):
                if not _error(stacked[i], single) <= STACKING_TOLERANCE[objective.dtype]:
                    raise ProgramRefused(f"model {name!r} mixes the clients of a stack", hint=LEAN_HINT)


def predicts_stacked(objective: Objective) -> bool:
    """Whether torch can also stack the model in inference mode, where it calls other operators."""
    some = random_passes(objective, clients=CLIENTS, batch=BATCH)
    try:
        with use_exact_kernels(objective.device):
            objective.stacked_predictions(some.w, some.b, some.x, shared=False)
    except RuntimeError:
        return False
    return True


def foreign_buffers(source: TraceSource) -> list[str]:
    """Names of buffers outside of batch norm layers that a pass writes: those are not known to stay apart."""
    norms = {name for name, layer in source.module.named_modules() if isinstance(layer, _BatchNorm)}
    changed, places = set.union(*changed_places(source)), tensor_places(source.module)
    moving = {places[place] for place in changed if place.rpartition(".")[0] not in norms}
    return [name for name in source.buffers if name in moving]


def _error(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest value; 0 for empty tensors."""
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp_min(torch.finfo(other.dtype).tiny))
