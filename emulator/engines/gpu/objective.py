"""The client objective over flat tensors, for engines that run torch: one gradient, one update, in any batch dimension.

    gradient(w, b, x, y, q) -> g = d/dw sum_j q_j loss(model(w, x_j), y_j), the buffers afterwards, the loss
    sgd_step_(...)          v = momentum v + g + pull + mu w;   w = w - lr v;   with pull = linear - mu anchor

w, v, g and pull are [n_params] and b is [size - n_params], in the schema's order; stacked clients come in front, as in
 [c, n_params]. The sum is that of `Fit` (edge_client/protocol/task.py): linear + mu (w - anchor) is pull + mu w, and
pull is the same in every step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from coordinator.models.registry import Model
from edge_client.errors import ProgramRefused, RuntimeMissing
from edge_client.protocol.task import Flat, Optimiser, TensorSpec
from edge_client.training.optimiser import NORM_FLOOR, move
from emulator.engines.gpu.convolutions import ProductConvolutions
from export.compiler.losses.sample_losses import per_sample_loss
from export.compiler.program import make_source, program_without_containers
from export.compiler.program_functions import tensor_places
from export.compiler.random_ops import NoiseReader
from export.one_value_norm import batch_norm_of_one_value


class Objective:
    """One model on one device; its module is a private copy, and every call brings the weights."""

    def __init__(self, model: Model, *, device: torch.device, dtype: str) -> None:
        self.source = make_source(
            model.module,
            name=model.name,
            input=model.input,
            target=model.output,
            loss=model.loss,
            dtype=dtype,
            frozen=model.frozen,
            parts=model.parts,
        )
        if self.source.shared_draws:
            raise ProgramRefused(
                f"model {model.name!r} draws masks for a whole batch, which clients side by side cannot share",
                hint="choose the engine lean",
            )
        self.device, self.dtype = device, getattr(torch, dtype)
        self.program = program_without_containers(self.source)
        self.n_params, self.size = self.source.schema.n_params, self.source.schema.size
        self._module: nn.Module = self.source.module
        self._constants = {name: value.to(device) for name, value in self.source.constants.items()}
        self._places = tensor_places(self._module)
        tensors = self.source.schema.tensors
        self._params = [t for t in tensors if t.role == "p"]
        self._buffers = [t for t in tensors if t.role == "b"]

    def gradient(self, w: Tensor, b: Tensor, x: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> g, the buffers that a training pass leaves, and the loss of one client; for torch.func.vmap too.

        x [batch, *input], y [batch, *target] (one-hot for labels), q [batch]. Call `training` first.
        """
        g, (loss, after) = grad_and_value(self._loss, has_aux=True)(w, b, x, y, q)
        return g, after, loss

    def gradients(self, w: Tensor, b: Tensor, x: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`gradient` of clients side by side: everything has them in front."""
        of_each = vmap(self.gradient, randomness="different")
        with ProductConvolutions():
            g, after, loss = of_each(w, b, x, y, q)
        return g, after, loss

    def training(self) -> None:
        """Switch to training mode, before `gradient`; batch norm uses the statistics of its batch."""
        self._module.train()

    def predictions(self, w: Tensor, b: Tensor, x: Tensor) -> Tensor:
        """Logits [batch, *target] of one model in inference mode; for torch.func.vmap too."""
        self._module.eval()
        with torch.no_grad():
            return self._call(w, b, x)[0]

    def stacked_predictions(self, w: Tensor, b: Tensor, x: Tensor, *, shared: bool) -> Tensor:
        """[M, batch, *target] of models [M, ...], on samples [M, batch, ...] of their own or [batch, ...] for all."""
        with ProductConvolutions():
            out: Tensor = vmap(self.predictions, in_dims=(0, 0, None if shared else 0))(w, b, x)
            return out

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        return per_sample_loss(self.source.loss, out, y)

    def _loss(self, w: Tensor, b: Tensor, x: Tensor, y: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        out, held = self._call(w, b, x)
        after = torch.cat([held[t.name].reshape(-1) for t in self._buffers]) if self._buffers else b
        return (q * self.losses(out, y)).sum(), after

    def _call(self, w: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        # Copies, which batch norm writes into: under vmap a write into a part of a larger tensor is lost (torch 2.13).
        buffers = {name: part.clone() for name, part in _cut(b, self._buffers).items()}
        state = {**self._constants, **_cut(w, self._params), **buffers}
        held = {place: state[name] for place, name in self._places.items()}
        with self._recurrent_kernels(), batch_norm_of_one_value():
            return functional_call(self._module, held, (x,), tie_weights=False), held

    def _recurrent_kernels(self) -> AbstractContextManager[None]:
        """Without cuDNN for recurrent layers: it wants their weights in one piece of memory."""
        recurrent = any(isinstance(layer, nn.RNNBase) for layer in self._module.modules())
        return torch.backends.cudnn.flags(enabled=False) if recurrent else nullcontext()

    def tensor(self, values: Any) -> Tensor:  # noqa: ANN401 - whatever numpy takes
        """A copy in the program's dtype on the device, of an array or of numbers."""
        return torch.as_tensor(np.asarray(values)).to(device=self.device, dtype=self.dtype, copy=True)

    def once_each(self, vectors: Sequence[Flat]) -> Tensor:
        """[clients, size]; what several clients share, as they share a center, is moved to the device once."""
        unique = {id(vector): vector for vector in vectors}
        place = {key: i for i, key in enumerate(unique)}
        which = torch.tensor([place[id(vector)] for vector in vectors], device=self.device)
        return self.tensor(np.stack(list(unique.values())))[which]

    def vector(self, w: Tensor, b: Tensor) -> Flat:
        """[size] of one client, on the host."""
        flat: Flat = torch.cat([w, b]).cpu().numpy()
        return flat


def sgd_step_(  # noqa: PLR0913, PLR0917 - the terms of the formula
    w: Tensor, v: Tensor, g: Tensor, pull: Tensor | None, lr: Tensor, momentum: Tensor, mu: Tensor
) -> None:
    """One step of SGD with momentum: updates w and v in place and allocates nothing of their size.

    The scalars are 0-d, or [c, 1] where the rest is [c, n_params]. No pull: neither an anchor nor a linear term.
    """
    v.mul_(momentum).add_(g).addcmul_(mu, w)
    if pull is not None:
        v.add_(pull)
    w.addcmul_(lr, v, value=-1)


@dataclass(frozen=True, kw_only=True)
class RuleState:
    """The sums of an optimiser (edge_client/training/optimiser.py) for w as above, from zero; `squares` for Adam."""

    optimiser: Optimiser
    sums: Tensor
    squares: Tensor | None

    @staticmethod
    def zeros(optimiser: Optimiser, like: Tensor) -> RuleState:
        squares = torch.zeros_like(like) if optimiser.name != "sgd" else None
        return RuleState(optimiser=optimiser, sums=torch.zeros_like(like), squares=squares)

    def step_(  # noqa: PLR0913, PLR0917 - the terms of the formula
        self,
        w: Tensor,
        g: Tensor,
        pull: Tensor | None,
        lr: Tensor,
        mu: Tensor,
        scale: Tensor | float,
        floor: Tensor | float,
    ) -> None:
        """One step in place of the first clients, those of w; `scale` and `floor` as StepScalars."""
        g.addcmul_(mu, w)
        if pull is not None:
            g.add_(pull)
        if self.optimiser.clip_norm:
            norm = torch.linalg.vector_norm(g, dim=-1, keepdim=True)
            g.mul_((self.optimiser.clip_norm / (norm + NORM_FLOOR)).clamp(max=1))
        active = slice(0, len(w))
        squares = None if self.squares is None else self.squares[active]
        move(self.optimiser, w, g, self.sums[active], squares, lr=lr, scale=scale, floor=floor)


def torch_device(name: str) -> torch.device:
    """`auto` is the first CUDA device, else the CPU. Raises RuntimeMissing for a device that is not there."""
    there = torch.cuda.is_available()
    if name.startswith("cuda") and not there:
        raise RuntimeMissing(
            f"torch {torch.__version__} finds no CUDA device here",
            hint="choose the engine lean, or install a torch build for this machine's driver",
        )
    return torch.device(("cuda" if there else "cpu") if name == "auto" else name)


@contextmanager
def use_exact_kernels(device: torch.device, *, search: bool = False) -> Iterator[None]:
    """Attention by its formula: vmap has no other, and fused kernels draw their own random numbers.

    On CUDA, convolutions in full float32: TF32, which torch allows by default, keeps 10 bits of 23. `search`: cuDNN
    tries its kernels for each new shape, which pays for shapes that come back often.
    """
    with ExitStack() as stack:
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if device.type == "cuda":
            stack.enter_context(torch.backends.cudnn.flags(enabled=True, benchmark=search, allow_tf32=False))
        yield


@contextmanager
def use_noise(noise: Tensor | None) -> Iterator[None]:
    """Random operators take their numbers from noise [rows, numbers per sample]: all rows of all clients in order."""
    if noise is None:
        yield
        return
    with NoiseReader(noise) as draws:
        yield
    draws.check()


def _cut(flat: Tensor, tensors: list[TensorSpec]) -> dict[str, Tensor]:
    """One split, whose gradient is one concatenation; slices would each fill a whole vector with zeros."""
    parts = torch.split(flat, [t.size for t in tensors]) if tensors else ()
    return {t.name: part.view(t.shape) for t, part in zip(tensors, parts, strict=True)}
