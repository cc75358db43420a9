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


ENTRIES = {
    "causal": ModelEntry(make=Causal, input=(LENGTH,), classes=TOKENS),
}
