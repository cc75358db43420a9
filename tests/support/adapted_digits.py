"""A network for the digits with LoRA on its frozen layers, as a federation's `[model] name` finds it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coordinator.models.registry import ModelEntry

RANK = 2


class LowRankLinear(nn.Module):
    """A linear layer that stays as it is, plus two factors that are trained; the second begins at zero."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)  # noqa: FBT003 - torch's own
        self.lora_A, self.lora_B = nn.Linear(inputs, RANK, bias=False), nn.Linear(RANK, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def network() -> nn.Module:
    torch.manual_seed(0)  # the base is the same for everyone
    return nn.Sequential(nn.Flatten(), LowRankLinear(64, 256), nn.Tanh(), LowRankLinear(256, 10))


ENTRY = ModelEntry(make=network, input=(1, 8, 8), classes=10)
