"""A real LightningModule is taken as it is. No extra of ours has Lightning: `pip install pytorch-lightning` first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from emulator.api.training_program import compile as compile_module

lightning: Any = pytest.importorskip(
    "pytorch_lightning", reason="Lightning is not installed; test_training_program.py has a module of the same shape"
)


def test_a_lightning_module_becomes_a_training_program() -> None:
    class Net(lightning.LightningModule):  # type: ignore[misc]  # a base class that mypy does not know
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            return out

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ANN401 - Lightning's hook
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

    program = compile_module(Net(), (3,))
    state = program.step(program.start(), np.zeros((2, 3), np.float32), np.array([0, 1]))
    assert state.loss is not None
