"""torch's ONNX exporter takes less time, and its files are the same to the last byte."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from export.containers import quick_exporter, write_onnx
from export.silence import suppress_output


class MixedTypes(nn.Module):
    """[batch, 4] -> [batch, 4] by operators whose arguments torch widens, and by onnxscript's functions."""

    def forward(self, x: Tensor) -> Tensor:
        above = x > 0.5
        counted = above.sum(1, keepdim=True)
        return torch.where(above, x * 2, 1) + counted / 3 + torch.nn.functional.gelu(x)[:, :4] * above


class Squeezed(nn.Module):
    """[batch, 4] -> [batch, 4] by one operator that drops two axes, and one that drops none."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[:, None, :, None] * 2).squeeze((3, 1)) + x.squeeze((-1, 0))


def written(module: nn.Module) -> bytes:
    exported = torch.export.export(module, (torch.ones(3, 4),))
    return write_onnx.to_onnx(exported, ["x"], ["out"])


def test_a_file_of_mixed_types_is_that_of_torchs_own_exporter() -> None:
    quick = written(MixedTypes())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(write_onnx, "quick_exporter", lambda _opset: nullcontext())
        assert quick == written(MixedTypes())


def test_dropped_axes_need_no_second_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    def traced_again(_program: object, *_given: object) -> None:
        raise AssertionError("torch traces the graph again")

    x = torch.linspace(-1, 1, 12).reshape(3, 4)
    exported = torch.export.export(Squeezed(), (x,))
    assert torch.ops.aten.squeeze.dims in {node.target for node in exported.graph.nodes}
    monkeypatch.setattr(torch.export.ExportedProgram, "run_decompositions", traced_again)
    (out,) = write_onnx.open_onnx(write_onnx.to_onnx(exported, ["x"], ["out"]))({"x": x.numpy()})
    np.testing.assert_array_equal(out, Squeezed()(x).numpy())


def test_no_table_of_decompositions_is_made_where_each_operator_has_a_translation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def made(_registered: object) -> None:
        raise AssertionError("a table is made")

    monkeypatch.setattr("torch.onnx._internal.exporter._decomp.create_onnx_friendly_decomposition_table", made)
    assert written(MixedTypes())


def test_the_source_of_a_translation_is_read_when_it_is_used() -> None:
    with suppress_output():
        from onnxscript._internal import values

    read = list[str]()
    own = values.TracedOnnxFunction.function_ir

    def told(function: values.TracedOnnxFunction) -> object:
        read.append(function.name)
        return own.fget(function)

    quick_exporter._torchlib.cache_clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(values.TracedOnnxFunction, "function_ir", property(told))
        written(MixedTypes())
    assert len(read) < 50, read
