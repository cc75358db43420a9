"""The engine `graphs` without its recordings: the same lanes and the same step, on the CPU in float64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from coordinator.models.registry import Model
from edge_client.training.learner import Learner
from emulator.engines.gpu.cuda_graphs import GraphLearner
from emulator.engines.gpu.objective import Objective


@dataclass(frozen=True, kw_only=True)
class Unrecorded:
    """See `Recipe`."""

    model: Model
    lanes: int = 2

    def open(self) -> Learner:
        objective = Objective(self.model, device=torch.device("cpu"), dtype="float64")
        return GraphLearner(objective, lanes=self.lanes, record=lambda run: run)
