"""A model may call its tensors what torch calls the parts of a graph, and any layer may replace its buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.export.compiler.test_forward_overrides import step_difference


class Centered(nn.Linear):
    """Without the mean of earlier batches, in a buffer that each pass replaces."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("unused", None)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        h, old = super().forward(x), self.mean
        if self.training:
            self.mean: Tensor = 0.9 * self.mean + 0.1 * h.detach().mean(0)
        return h - self.mean + 0.1 * old


class Lagging(nn.Linear):
    """Takes off the mean of the batch before the last one."""

    mean: Tensor
    older: Tensor

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("older", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = super().forward(x)
        if self.training:
            self.older, self.mean = self.mean, h.detach().mean(0)
        return h - self.older


class NamedAsGraphs(nn.Module):
    """An autoencoder's code, the layer of a graph, and what goes with a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.graph, self.head = nn.Linear(5, 4), nn.ModuleDict({"code": nn.Tanh()}), nn.Linear(4, 3)
        self.meta = nn.Parameter(torch.randn(4))
        self.register_buffer("recompile", torch.arange(4))
        self.offset = torch.arange(4.0)

    def forward(self, x: Tensor) -> Tensor:
        h = self.graph["code"](self.code(x) * self.meta + self.offset)
        return self.head(h * self.recompile)  # type: ignore[no-any-return]


def test_a_step_of_a_model_with_the_names_of_a_graphs_parts_is_torchs() -> None:
    assert step_difference(NamedAsGraphs(), (5,)) < 1e-12


def test_a_step_tells_what_layers_within_others_put_in_place_of_their_buffers() -> None:
    twice = Centered()
    module = nn.Sequential(nn.Linear(5, 4), nn.Sequential(twice, Lagging(), twice), nn.Linear(4, 3))
    assert step_difference(module, (5,)) < 1e-12
