"""Models that the engines of these tests run, and the terms of the objective that they are tried with."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack

from coordinator.models.registry import Model, build_model

TERMS = [
    frozenset[str](),
    frozenset({"anchor"}),
    frozenset({"linear"}),
    frozenset({"momentum"}),
    frozenset({"q"}),
    frozenset({"anchor", "linear", "momentum", "q"}),
]


class Dropping(nn.Module):
    """Dropout of values and of whole channels, around batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout2d(0.3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.4)
        )
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


class Reading(nn.Module):
    """A recurrent layer, then attention, both with dropout: torch stacks neither without help."""

    def __init__(self) -> None:
        super().__init__()
        self.reader = nn.GRU(4, 6, num_layers=2, dropout=0.2, batch_first=True)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.3, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        read = self.reader(x)[0]
        out: Tensor = self.head(self.attention(read, read, read)[0][:, -1])
        return out


class CountingBuffer(nn.Module):
    """Writes a buffer that is no batch norm's."""

    seen: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        out: Tensor = self.head(x)
        return out


class Mixing(nn.Module):
    """Asks torch whether it is called for a stack, and answers otherwise there."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        stacked = any(one.key() == TransformType.Vmap for one in get_interpreter_stack() or ())
        out: Tensor = self.head(x) * (1 + stacked)
        return out


class StackBranching(nn.Module):
    """Looks at its weights to decide what to do."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x)
        return out if bool(self.head.weight.sum() > 0) else -out


def made(make: Callable[[], nn.Module], shape: tuple[int, ...], classes: int) -> Model:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return Model(name=make.__name__, module=make(), input=shape, classes=classes)


@cache
def model_of(name: str) -> Model:
    """By its name in the registry, or one of ours."""
    if name == "dropping":
        return made(Dropping, (1, 8, 8), 3)
    return made(Reading, (5, 4), 3) if name == "reading" else build_model(name, seed=1)
