"""The layers that docs/what-compiles.md lists: each one there is compiled here or refused here, and no other.

Layers of one kind stand side by side in one network, so that each sees the same values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from edge_client.errors import ProgramRefused
from export.compiler.program import compile_program

PAGE = (Path(__file__).parents[2] / "docs" / "what-compiles.md").read_text(encoding="utf-8")
INPUTS = {
    "vector": (6,),
    "series": (4, 8),
    "sequence": (5, 8),
    "image": (4, 6, 6),
    "volume": (2, 4, 4, 4),
    "tokens": (6,),
}
Makers = Mapping[str, Callable[[], nn.Module]]


class First(nn.Module):
    """The output of a layer that gives more than one."""

    def __init__(self, layer: nn.Module, inputs: int = 1) -> None:
        super().__init__()
        self.layer, self.inputs = layer, inputs

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(*[x] * self.inputs)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]


class CellLoop(nn.Module):
    """A recurrent cell over a sequence; its last state."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in x.unbind(1):
            state = self.cell(step, state)
        return state[0] if isinstance(state, tuple) else state  # type: ignore[no-any-return]


class TokenHead(nn.Module):
    def __init__(self, table: nn.Module) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.long())  # type: ignore[no-any-return]


class SideBySide(nn.Module):
    """The layers behind a linear or convolution layer (so that all of them have a gradient to pass on), then a head."""

    def __init__(self, layers: list[nn.Module], kind: str) -> None:
        super().__init__()
        channels = INPUTS[kind][0]
        stems: dict[str, nn.Module] = {
            "vector": nn.Linear(6, 6),
            "series": nn.Conv1d(channels, channels, 1),
            "image": nn.Conv2d(channels, channels, 1),
            "volume": nn.Conv3d(channels, channels, 1),
        }
        self.stem, self.layers = stems.get(kind, nn.Identity()), nn.ModuleList(layers)
        self.head = nn.Linear(self.sides(torch.zeros(2, *INPUTS[kind])).shape[1], 3)

    def sides(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return torch.cat([layer(x).flatten(1) for layer in self.layers], 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.sides(x))  # type: ignore[no-any-return]


ACTIVATIONS = (
    *("ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "CELU", "SELU", "GELU", "SiLU", "Mish", "Sigmoid", "Tanh", "GLU"),
    *("Hardswish", "Hardsigmoid", "Hardtanh", "Hardshrink", "Softshrink", "Softplus", "Softsign", "Tanhshrink"),
    *("LogSigmoid", "RReLU"),
)
COMPILES: Mapping[tuple[str, str], Makers] = {
    ("vector", "plain"): {
        "Linear": lambda: nn.Linear(6, 4),
        "Flatten": nn.Flatten,
        "BatchNorm1d": lambda: nn.BatchNorm1d(6),
        "LayerNorm": lambda: nn.LayerNorm(6),
        "RMSNorm": lambda: nn.RMSNorm(6),
        "Bilinear": lambda: First(nn.Bilinear(6, 6, 3), 2),
    },
    ("vector", "activations"): {name: getattr(nn, name) for name in ACTIVATIONS},
    ("vector", "dropout"): {"Dropout": lambda: nn.Dropout(0.3), "AlphaDropout": lambda: nn.AlphaDropout(0.3)},
    ("series", "one dimension"): {
        "Conv1d": lambda: nn.Conv1d(4, 4, 3, stride=2, padding=1),
        "MaxPool1d": lambda: nn.MaxPool1d(2),
        "AvgPool1d": lambda: nn.AvgPool1d(2),
        "Dropout1d": lambda: nn.Dropout1d(0.3),
    },
    ("image", "convolutions and norms"): {
        "Conv2d": lambda: nn.Conv2d(4, 4, 3, stride=2, padding=1, groups=2),
        "ConvTranspose2d": lambda: nn.ConvTranspose2d(4, 2, 3, stride=2, padding=1),
        "BatchNorm2d": lambda: nn.BatchNorm2d(4),
        "GroupNorm": lambda: nn.GroupNorm(2, 4),
        "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, affine=True),
        "Dropout2d": lambda: nn.Dropout2d(0.3),
    },
    ("image", "pools and sizes"): {
        "MaxPool2d": lambda: nn.MaxPool2d(3, 2, 1),
        "AvgPool2d": lambda: nn.AvgPool2d(3, 2),
        "AdaptiveAvgPool2d": lambda: nn.AdaptiveAvgPool2d(4),
        "AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d(3),
        "Upsample": lambda: nn.Upsample(scale_factor=2),
        "PixelShuffle": lambda: nn.PixelShuffle(2),
        "ReplicationPad2d": lambda: nn.ReplicationPad2d(1),
        "LocalResponseNorm": lambda: nn.LocalResponseNorm(2),
    },
    ("volume", "three dimensions"): {
        "Conv3d": lambda: nn.Conv3d(2, 2, 3),
        "MaxPool3d": lambda: nn.MaxPool3d(2),
        "AvgPool3d": lambda: nn.AvgPool3d(2),
        "AdaptiveAvgPool3d": lambda: nn.AdaptiveAvgPool3d((3, None, 2)),
        "AdaptiveMaxPool3d": lambda: nn.AdaptiveMaxPool3d(2),
    },
    ("sequence", "recurrent"): {
        "RNN": lambda: First(nn.RNN(8, 3, batch_first=True)),
        "GRU": lambda: First(nn.GRU(8, 3, batch_first=True)),
        "LSTM": lambda: First(nn.LSTM(8, 3, batch_first=True)),
    },
    ("sequence", "cells"): {
        "RNNCell": lambda: CellLoop(nn.RNNCell(8, 3, nonlinearity="relu")),
        "GRUCell": lambda: CellLoop(nn.GRUCell(8, 3, bias=False)),
        "LSTMCell": lambda: CellLoop(nn.LSTMCell(8, 3)),
    },
    ("sequence", "attention"): {
        "MultiheadAttention": lambda: First(nn.MultiheadAttention(8, 2, batch_first=True), 3),
        "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(8, 2, 12, batch_first=True),
        "TransformerEncoder": lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 12, batch_first=True), 2, enable_nested_tensor=False
        ),
        "Transformer": lambda: First(nn.Transformer(8, 2, 1, 1, 12, batch_first=True), 2),
    },
    ("tokens", "embedding"): {
        "Embedding": lambda: TokenHead(nn.Embedding(11, 4)),
        "EmbeddingBag": lambda: TokenHead(nn.EmbeddingBag(11, 4)),
    },
}
REFUSED: Mapping[tuple[str, str], Makers] = {
    ("image", "unequal windows"): {"AdaptiveMaxPool2d": lambda: nn.AdaptiveMaxPool2d(4)},
    ("volume", "unequal windows"): {"AdaptiveMaxPool3d": lambda: nn.AdaptiveMaxPool3d(3)},
}
QUICK = {"plain"}


def network(kind: str, makers: Makers) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return SideBySide([make() for make in makers.values()], kind)


@pytest.mark.parametrize("row", [r for r in COMPILES if r[1] in QUICK], ids="-".join)
def test_layers_of_the_page_compile_for_onnx_runtime(row: tuple[str, str]) -> None:
    made = compile_program(network(row[0], COMPILES[row]), INPUTS[row[0]], engines=("onnx",))
    assert made.program.parity["onnx"] < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("row", COMPILES, ids="-".join)
def test_every_layer_of_the_page_compiles_for_every_engine(row: tuple[str, str]) -> None:
    made = compile_program(network(row[0], COMPILES[row]), INPUTS[row[0]], batch=4)
    assert max(made.program.parity.values()) < 1e-5


@pytest.mark.parametrize("row", REFUSED, ids="-".join)
def test_what_the_page_says_is_refused_is_refused_by_layer(row: tuple[str, str]) -> None:
    (name,) = REFUSED[row]
    with pytest.raises(ProgramRefused, match=rf"layer layers\.0 \({name}\)"):
        compile_program(network(row[0], REFUSED[row]), INPUTS[row[0]], engines=("pt2",))


@pytest.mark.parametrize(("heading", "rows"), [("| layers |", COMPILES), ("| refused when", REFUSED)])
def test_the_page_lists_these_layers_and_no_others(heading: str, rows: Mapping[tuple[str, str], Makers]) -> None:
    table = PAGE[PAGE.index(heading) :].split("\n\n")[0]
    first = " ".join(line.split("|")[1] for line in table.splitlines())
    listed = {name for name in re.findall(r"`(\w+)`", first) if hasattr(nn, name)}
    assert listed == {name for makers in rows.values() for name in makers}
