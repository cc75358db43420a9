"""The update of proximal SGD with momentum, from a gradient to the new weights and velocities.

    g = gradient + linear + mu (w - anchor);   velocity' = momentum velocity + g;   w' = w - lr velocity'

Runtimes take as long to start an operator as to add a few thousand numbers, so all vectors (biases, norms) are updated
as one. From FUSED_FROM numbers on a tensor is longer than caches are, and an operator is a pass over memory: of addcmul
torch makes five in place of eight. Other runtimes have no addcmul, and get its formula (decompositions/table.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

Tensors = Mapping[str, Tensor]
FUSED_FROM = 2**20


@dataclass(frozen=True, kw_only=True)
class SgdStep:
    """The scalars of a step, 0-d tensors."""

    lr: Tensor
    momentum: Tensor
    mu: Tensor

    def step(
        self, w: Tensors, velocity: Tensors, gradient: Tensors, linear: Tensors, anchor: Tensors
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Five maps with the same names -> new weights and velocities, names in the order of `w`."""
        terms = (w, velocity, gradient, linear, anchor)
        vectors = [name for name, tensor in w.items() if tensor.dim() == 1]
        moved = {name: self._moved(*(term[name] for term in terms)) for name in w if name not in vectors}
        if vectors:
            joined = self._moved(*(torch.cat([term[name] for name in vectors]) for term in terms))
            parts = (torch.split(whole, [w[name].shape[0] for name in vectors]) for whole in joined)
            moved |= dict(zip(vectors, zip(*parts, strict=True), strict=True))
        return {name: moved[name][0] for name in w}, {name: moved[name][1] for name in w}

    def _moved(
        self, w: Tensor, velocity: Tensor, gradient: Tensor, linear: Tensor, anchor: Tensor
    ) -> tuple[Tensor, Tensor]:
        if w.numel() >= FUSED_FROM:
            pull = torch.addcmul(gradient + linear, self.mu, w - anchor)
            velocity = torch.addcmul(pull, self.momentum, velocity)
            return torch.addcmul(w, self.lr, velocity, value=-1), velocity
        velocity = self.momentum * velocity + (gradient + linear + self.mu * (w - anchor))
        return w - self.lr * velocity, velocity
