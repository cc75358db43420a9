"""A float64 graph written as ONNX keeps its numbers: none of them passes through float32."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

from export.compiler.decompositions.table import decompositions_for
from export.containers.write_onnx import open_onnx, to_onnx

F = nn.functional
NUMBERS = {
    "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
    "elu": lambda x: F.elu(x, 0.3),
    "elu_plain": F.elu,
    "selu": F.selu,
    "celu": lambda x: F.celu(x, 0.3),
    "hardtanh": lambda x: F.hardtanh(x, -0.3, 0.7),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "softplus": lambda x: F.softplus(x, 0.3, 0.5),
    "softshrink": lambda x: F.softshrink(x, 0.3),
    "hardshrink": lambda x: F.hardshrink(x, 0.3),
    "threshold": lambda x: F.threshold(x, 0.1, 0.3),
    "mish": F.mish,
    "silu": F.silu,
    "logsigmoid": F.logsigmoid,
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "relu6": F.relu6,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "layer norm": lambda x: F.layer_norm(x, (4,), eps=0.1),
    "rms norm": lambda x: F.rms_norm(x, (4,), eps=0.1),
    "clamp": lambda x: x.clamp(-0.1, 0.7),
    "clamp by numbers of two kinds": lambda x: x.clamp(0, 0.7) + x.clamp(-0.1, 1),
    "full": lambda x: x * torch.full((4,), 0.1, dtype=x.dtype),
    "full_like": lambda x: torch.full_like(x, 0.1) + x,
    "add": lambda x: torch.add(x, x * x, alpha=0.3),
    "sub": lambda x: torch.sub(x, x * x, alpha=0.3),
    "rsub": lambda x: torch.rsub(x, 0.3, alpha=0.7),
    "power": lambda x: 1.3**x,
    "where": lambda x: torch.where(x > 0.1, 0.3, x),
    "product": lambda x: torch.ops.aten.mul.Scalar(x, 0.3),
}


class _All(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(f(x) for f in NUMBERS.values())  # type: ignore[no-untyped-call]


def test_no_number_of_a_float64_graph_is_rounded_to_float32() -> None:
    x = torch.linspace(-2, 2, 24, dtype=torch.float64).reshape(6, 4)
    graph = make_fx(_All(), decomposition_table=decompositions_for("infer"))(x)
    names = [f"out/{name}" for name in NUMBERS]
    file = to_onnx(torch.export.export(graph, (x,), strict=False), ["x"], names)
    found = open_onnx(file, "float64")({"x": x.numpy()})
    far = {
        name: float(np.abs(got - expected.numpy()).max())
        for name, got, expected in zip(NUMBERS, found, _All()(x), strict=True)
    }
    assert {name: d for name, d in far.items() if not d < 1e-14} == {}
