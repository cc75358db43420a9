"""What users bring, as small as it can be: one factory per architecture, for the conformance suite."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from coordinator.models.registry import ModelEntry
from edge_client.protocol.samples.input_parts import InputPart
from tests.support import language_networks, networks, own_gradient_networks, picking_networks


class Recurrent(nn.Module):
    """Sequences of 6 steps with 5 features; the last hidden state is classified."""

    def __init__(self, kind: type[nn.LSTM | nn.GRU], **settings: Any) -> None:  # noqa: ANN401 - torch's
        super().__init__()
        self.body = kind(5, 7, batch_first=True, **settings)
        self.head = nn.Linear(14 if settings.get("bidirectional") else 7, 3)

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


class Attention(nn.Module):
    """Six steps of 8 features through torch's own layers, samples first or time first, the mean classified."""

    def __init__(self, body: nn.Module, *, batch_first: bool = True) -> None:
        super().__init__()
        self.body, self.batch_first = body, batch_first
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        out = self.body(x, x, x)[0] if isinstance(self.body, nn.MultiheadAttention) else self.body(x)
        return self.head(out.mean(1 if self.batch_first else 0))  # type: ignore[no-any-return]


def encoder(layers: int, *, norm_first: bool = False, batch_first: bool = True, dropout: float = 0.1) -> nn.Module:
    """torch's own encoder; post-norm is its default."""
    layer = nn.TransformerEncoderLayer(
        8, 2, dim_feedforward=12, dropout=dropout, batch_first=batch_first, norm_first=norm_first
    )
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False) if layers > 1 else layer
    return Attention(body, batch_first=batch_first)


def dropouts() -> nn.Module:
    """Two rates, one layer before and one behind a kink."""
    return nn.Sequential(
        nn.Linear(5, 16), nn.Dropout(0.3), nn.ReLU(), nn.Linear(16, 8), nn.Tanh(), nn.Dropout(), nn.Linear(8, 3)
    )


def channel_dropouts() -> nn.Module:
    """Whole channels of images, then of sequences; and the two that keep mean and variance."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.Dropout2d(0.4), nn.SELU(), nn.AlphaDropout(0.2), nn.Flatten(2), nn.Dropout1d(0.3),
        nn.FeatureAlphaDropout(0.1), nn.Flatten(), nn.Linear(144, 3),
    )  # fmt: skip


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


def pools() -> nn.Module:
    """Windows that overlap, are dilated, reach beyond the image, do not count their padding, or differ in length."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.MaxPool2d(3, stride=1, padding=1),
        nn.Conv2d(4, 4, 3, padding=2),
        nn.MaxPool2d(3, stride=2, ceil_mode=True),
        nn.AvgPool2d(2, stride=1, padding=1, count_include_pad=False),
        nn.MaxPool2d(2, stride=1, dilation=2),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.Flatten(),
        nn.Linear(24, 3),
    )


def pools_of_rows() -> nn.Module:
    """The same in one dimension."""
    return nn.Sequential(
        nn.Conv1d(6, 6, 3, stride=2, dilation=2, padding=9),
        nn.MaxPool1d(3, stride=2, padding=1, ceil_mode=True),
        nn.AvgPool1d(3, stride=2, padding=1, ceil_mode=True),
        nn.AdaptiveAvgPool1d(6),
        nn.AdaptiveMaxPool1d(2),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def decoder() -> nn.Module:
    """Down by convolution, up by four other ways."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, stride=2, padding=1, padding_mode="reflect"),
        nn.ConvTranspose2d(4, 4, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.AdaptiveMaxPool2d(4),
        nn.Upsample(scale_factor=2),
        nn.Conv2d(4, 4, 3, stride=3),
        nn.Upsample(size=(3, 5), mode="bilinear"),
        nn.PixelShuffle(2),
        nn.Flatten(),
        nn.Linear(60, 3),
    )


def decoder_of_rows() -> nn.Module:
    """Transposed convolutions with and without a stride, and the nearest neighbour."""
    return nn.Sequential(
        nn.ConvTranspose1d(6, 4, 3, stride=2, padding=2, dilation=2, output_padding=1),
        nn.Tanh(),
        nn.ConvTranspose1d(4, 4, 4, padding=1),
        nn.Upsample(size=19),
        nn.Flatten(),
        nn.Linear(76, 3),
    )


class SeveralInputs(nn.Module):
    """Words where a mask says so, an image and a number of its own: integers, booleans and floats."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv, self.head = nn.Embedding(11, 4), nn.Conv2d(1, 2, 3), nn.Linear(4 + 18 + 1, 3)

    def forward(self, words: Tensor, seen: Tensor, image: Tensor, age: Tensor) -> Tensor:
        counted = seen.unsqueeze(-1)
        text = (self.embed(words) * counted).sum(1) / counted.sum(1).clamp(min=1)
        pixels = torch.relu(self.conv(image)).view(words.shape[0], -1)
        return self.head(torch.cat([text, pixels, age.view(-1, 1)], 1))  # type: ignore[no-any-return]


PARTS = (
    InputPart(name="words", shape=(6,), kind="int", below=11),
    InputPart(name="seen", shape=(6,), kind="bool", below=2),
    InputPart(name="image", shape=(1, 5, 5)),
    InputPart(name="age", shape=()),
)
SEVERAL_INPUTS = ModelEntry(make=SeveralInputs, parts=PARTS, classes=3)
IMAGE, ROW, SEQUENCE, TOKENS, VECTORS = (1, 8, 8), (5,), (6, 5), (6,), (6, 8)
ENTRIES = {
    **networks.ENTRIES,
    **language_networks.ENTRIES,
    **own_gradient_networks.ENTRIES,
    **picking_networks.ENTRIES,
    "frozen-body": ModelEntry(make=frozen_body, input=IMAGE, classes=3),
    "frozen-middle": ModelEntry(make=frozen_middle, input=ROW, classes=3),
    "shared-layer": ModelEntry(make=shared_layer, input=ROW, classes=3),
    "tied-embedding": ModelEntry(make=NextToken, input=TOKENS, classes=11),
    "several-inputs": SEVERAL_INPUTS,
    "several-buffers": ModelEntry(make=Smoothed, input=ROW, classes=3),
    "lstm": ModelEntry(make=lambda: Recurrent(nn.LSTM), input=SEQUENCE, classes=3),
    "gru": ModelEntry(make=lambda: Recurrent(nn.GRU), input=SEQUENCE, classes=3),
    "lstm-dropout": ModelEntry(make=lambda: Recurrent(nn.LSTM, num_layers=2, dropout=0.2), input=SEQUENCE, classes=3),
    "gru-dropout": ModelEntry(
        make=lambda: Recurrent(nn.GRU, num_layers=2, dropout=0.2, bidirectional=True), input=SEQUENCE, classes=3
    ),
    "transformer": ModelEntry(make=Encoder, input=TOKENS, classes=3),
    "dropout": ModelEntry(make=dropouts, input=ROW, classes=3),
    "channel-dropout": ModelEntry(make=channel_dropouts, input=IMAGE, classes=3),
    "attention": ModelEntry(
        make=lambda: Attention(nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)), input=VECTORS, classes=3
    ),
    "post-norm": ModelEntry(make=lambda: encoder(1, dropout=0.0), input=VECTORS, classes=3),
    "encoder": ModelEntry(make=lambda: encoder(2), input=VECTORS, classes=3),
    "encoder-time-first": ModelEntry(make=lambda: encoder(2, batch_first=False), input=VECTORS, classes=3),
    "pre-norm-time-first": ModelEntry(
        make=lambda: encoder(1, norm_first=True, batch_first=False), input=VECTORS, classes=3
    ),
    "instance-norm": ModelEntry(make=instance_norm, input=IMAGE, classes=3),
    "dilated": ModelEntry(make=dilated, input=IMAGE, classes=3),
    "pools": ModelEntry(make=pools, input=IMAGE, classes=3),
    "pools-of-rows": ModelEntry(make=pools_of_rows, input=SEQUENCE, classes=3),
    "decoder": ModelEntry(make=decoder, input=IMAGE, classes=3),
    "decoder-of-rows": ModelEntry(make=decoder_of_rows, input=SEQUENCE, classes=3),
}
