"""What users bring, as small as it can be: one factory per architecture, for the conformance suite."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coordinator.models.registry import Entry


class Recurrent(nn.Module):
    """Sequences of 6 steps with 5 features; the last hidden state is classified."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU]) -> None:
        super().__init__()
        self.body = kind(5, 7, batch_first=True)
        self.head = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])  # type: ignore[no-any-return]


class Encoder(nn.Module):
    """Six tokens of eleven, learned positions, one pre-norm layer of two heads, the mean classified."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8, padding_idx=0)
        self.positions = nn.Embedding(11, 8)
        self.register_buffer("index", torch.arange(6))
        self.layer = nn.TransformerEncoderLayer(
            8, 2, dim_feedforward=12, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x.long()) + self.positions(self.index)
        return self.head(self.norm(self.layer(h)).mean(1))  # type: ignore[no-any-return]


class NextToken(nn.Module):
    """Guesses one of eleven tokens after six; the output layer is the embedding itself."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11)
        self.out.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.tokens(x.long()).mean(1))))  # type: ignore[no-any-return]


class Smoothed(nn.Module):
    """Float buffers: written in place, put in place of the old one, never written, not saved; and an integer one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(5))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("scale", torch.full((5,), 2.0))
        self.register_buffer("mask", torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0]), persistent=False)
        self.register_buffer("order", torch.tensor([4, 3, 2, 1, 0]))
        self.head = nn.Linear(5, 3)
        self.largest: Tensor
        self.mean: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest.mul_(0.5).add_(x.detach().abs().mean(0))
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        x = (x - self.mean) / self.largest * self.scale * self.mask + self.order.to(x.dtype)  # type: ignore[operator]
        return self.head(x)  # type: ignore[no-any-return]


def frozen_body() -> nn.Module:
    """A convolution and a bias that stay as they are, and batch norm whose statistics move on."""
    body = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    body.requires_grad_(False)  # noqa: FBT003 - torch's own
    network = nn.Sequential(body, nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 3))
    network[1].bias.requires_grad = False
    return network


def frozen_middle() -> nn.Module:
    """The gradient passes through a layer that keeps its weights."""
    network = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    network[2].requires_grad_(False)  # noqa: FBT003 - torch's own
    return network


def shared_layer() -> nn.Module:
    """One layer, twice in the chain."""
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(5, 3))


def instance_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(144, 3)
    )


def dilated() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, dilation=2, padding=2),
        nn.Tanh(),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )


IMAGE, ROW, SEQUENCE, TOKENS = (1, 8, 8), (5,), (6, 5), (6,)
ENTRIES = {
    "frozen-body": Entry(make=frozen_body, input=IMAGE, classes=3),
    "frozen-middle": Entry(make=frozen_middle, input=ROW, classes=3),
    "shared-layer": Entry(make=shared_layer, input=ROW, classes=3),
    "tied-embedding": Entry(make=NextToken, input=TOKENS, classes=11),
    "several-buffers": Entry(make=Smoothed, input=ROW, classes=3),
    "lstm": Entry(make=lambda: Recurrent(nn.LSTM), input=SEQUENCE, classes=3),
    "gru": Entry(make=lambda: Recurrent(nn.GRU), input=SEQUENCE, classes=3),
    "transformer": Entry(make=Encoder, input=TOKENS, classes=3),
    "instance-norm": Entry(make=instance_norm, input=IMAGE, classes=3),
    "dilated": Entry(make=dilated, input=IMAGE, classes=3),
}
