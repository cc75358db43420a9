"""Can this model train with clients as a batch dimension? Tried before it is believed: stacked against one by one.

torch.func.vmap knows most operators, but not what a module does between them: a branch on its numbers, a buffer that
mixes what every pass leaves there. Refusals name the model and say what to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.modules.batchnorm import _BatchNorm

from edge_client.errors import ProgramRefused
from emulator.engines.gpu.objective import Objective, drawing, exact_kernels
from export.compiler.program_functions import Source, example, ports
from export.diagnostics import sentence

CLIENTS, BATCH = 2, 3
NEAR = {torch.float64: 1e-9, torch.float32: 1e-2}  # of the largest number: rounding; mixed clients are wrong by about 1
HINT = "choose the engine lean, which runs any module"


@dataclass(frozen=True, kw_only=True)
class Passes:
    """What some clients' passes need, stacked; `noise` [clients, batch, numbers per sample] may have no columns."""

    w: Tensor
    b: Tensor
    x: Tensor
    y: Tensor
    q: Tensor
    noise: Tensor

    def together(self, objective: Objective) -> tuple[Tensor, ...]:
        """g, buffers and loss, each [clients, ...]."""
        objective.training()
        with drawing(self.noise.flatten(0, 1) if self.noise.numel() else None):
            return objective.gradients(self.w, self.b, self.x, self.y, self.q)

    def alone(self, objective: Objective, i: int) -> tuple[Tensor, ...]:
        """Of one client, without the others."""
        objective.training()
        with drawing(self.noise[i] if self.noise.numel() else None):
            return objective.gradient(self.w[i], self.b[i], self.x[i], self.y[i], self.q[i])


def passes(objective: Objective, *, clients: int, batch: int) -> Passes:
    """Random ones, near the model's own weights."""
    source = objective.source
    names = [port.name.partition("/")[0] for port in ports(source, "step").inputs]
    each = [dict[str, list[Tensor]]() for _ in range(clients)]
    for i, found in enumerate(each):
        for name, value in zip(names, example(source, "step", batch, seed=i), strict=True):
            found.setdefault(name, []).append(value)

    def flat(name: str) -> Tensor:
        rows = [torch.cat([part.reshape(-1) for part in found.get(name, [torch.empty(0)])]) for found in each]
        return torch.stack(rows).to(objective.device, objective.dtype)

    return Passes(
        w=flat("w"),
        b=flat("buffers"),
        x=flat("x").view(clients, batch, *source.input),
        y=flat("y").view(clients, batch, *source.target),
        q=flat("q"),
        noise=flat("noise").view(clients, batch, source.noise),
    )


def check_stackable(objective: Objective) -> None:
    """Raise ProgramRefused for a model that torch cannot stack, or that comes out differently when it is stacked."""
    name, other = objective.source.name, foreign_buffers(objective.source)
    if other:
        raise ProgramRefused(f"model {name!r} has buffers that are not batch norm's: {', '.join(other)}", hint=HINT)
    some = passes(objective, clients=CLIENTS, batch=BATCH)
    with exact_kernels(objective.device):
        try:
            together = some.together(objective)
        except (RuntimeError, ValueError, TypeError) as wrong:
            raise ProgramRefused(f"model {name!r} cannot be stacked: {sentence(wrong)}", hint=HINT) from wrong
        for i in range(CLIENTS):
            for stacked, single in zip(together, some.alone(objective, i), strict=True):
                if not _error(stacked[i], single) <= NEAR[objective.dtype]:
                    raise ProgramRefused(f"model {name!r} mixes the clients of a stack", hint=HINT)


def predicts_stacked(objective: Objective) -> bool:
    """Whether torch can also stack the model in inference mode, where it calls other operators."""
    some = passes(objective, clients=CLIENTS, batch=BATCH)
    try:
        with exact_kernels(objective.device):
            vmap(objective.predictions, in_dims=(0, 0, None))(some.w, some.b, some.x[0])
    except RuntimeError:
        return False
    return True


def foreign_buffers(source: Source) -> list[str]:
    """Names of trained buffers outside of batch norm layers: what a pass writes there is not known to stay apart."""
    norms = {name for name, layer in source.module.named_modules() if isinstance(layer, _BatchNorm)}
    return [name for name in source.buffers if name.rpartition(".")[0] not in norms]


def _error(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest number; of nothing, none."""
    if not one.numel():
        return 0.0
    return float((one - other).abs().max() / other.abs().max().clamp_min(torch.finfo(other.dtype).tiny))
