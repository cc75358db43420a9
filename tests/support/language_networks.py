"""Networks over tokens as users write them from tutorials and papers, each with one habit that asks for care."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coordinator.models.registry import ModelEntry

TOKENS, LENGTH, WIDTH = 11, 6, 8


class Causal(nn.Module):
    """torch's encoder behind a mask of minus infinities, which is a buffer, as torch's tutorial of language models."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, dim_feedforward=12, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x.long()) + self.places(torch.arange(LENGTH))
        return self.head(self.layer(h, src_mask=self.mask, is_causal=True)[:, -1])  # type: ignore[no-any-return]


class Triangle(nn.Module):
    """Attention behind a saved triangle of ones, which no step writes, as nanoGPT's."""

    tril: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.mix, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 3)
        self.register_buffer("tril", torch.ones(LENGTH, LENGTH).tril())

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mix(self.tokens(x.long())).chunk(3, -1)
        near = (query @ key.mT).masked_fill(self.tril == 0, -torch.inf)
        return self.head((near.softmax(-1) @ value).mean(1))  # type: ignore[no-any-return]


class ComplexRotary(nn.Module):
    """Rotary positions as complex numbers that the module holds, as Llama's first code has them."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.keys, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
        angles = torch.outer(torch.arange(2 * LENGTH), 10.0 ** -torch.arange(0, 2, 0.5))
        self.turns = torch.polar(torch.ones_like(angles), angles)

    def turned(self, h: Tensor) -> Tensor:
        pairs = torch.view_as_complex(h.float().reshape(*h.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * self.turns[:LENGTH].unsqueeze(0)).flatten(2).type_as(h)

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x.long())
        near = (self.turned(h) @ self.turned(self.keys(h)).mT).softmax(-1)
        return self.head((near @ h).mean(1))  # type: ignore[no-any-return]


ENTRIES = {
    "complex-rotary": ModelEntry(make=ComplexRotary, input=(LENGTH,), classes=3),
    "triangle": ModelEntry(make=Triangle, input=(LENGTH,), classes=3),
    "causal": ModelEntry(make=Causal, input=(LENGTH,), classes=TOKENS),
}
