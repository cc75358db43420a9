"""The constants of an ONNX file are replaced by their names, without onnx."""

from __future__ import annotations

import numpy as np
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper

from edge_client.engines.onnx_files import replace_constants
from edge_client.errors import ProgramRefused

W, B = np.eye(2, dtype=np.float32), np.zeros(2, dtype=np.float32)


def file_of(weights: np.ndarray, bias: np.ndarray) -> bytes:
    """logits = x @ weights + bias; another constant has the bytes of the bias."""
    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 2]) for name in ("x", "logits")]
    nodes = [
        helper.make_node("MatMul", ["x", "w/head.weight"], ["a"]),
        helper.make_node("Add", ["a", "w/head.bias"], ["b"]),
        helper.make_node("Add", ["b", "nothing"], ["logits"]),
    ]
    named = {"w/head.weight": weights, "nothing": B, "w/head.bias": bias}
    constants = [numpy_helper.from_array(value, name) for name, value in named.items()]
    graph = helper.make_graph(nodes, "g", ports[:1], ports[1:], constants)
    return helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 18)]).SerializeToString()  # type: ignore[no-any-return]


def test_a_file_with_other_constants_is_the_one_that_was_written_with_them() -> None:
    mine = {"w/head.weight": 2 * W, "w/head.bias": B + 3}
    made = replace_constants(file_of(W, B), {name: value.tobytes() for name, value in mine.items()})
    assert made == file_of(*mine.values())
    found = onnxruntime.InferenceSession(made).run(["logits"], {"x": np.ones((1, 2), np.float32)})[0]
    assert found.tolist() == [[5, 5]]


@pytest.mark.parametrize("values", [{"w/tail.bias": B.tobytes()}, {"w/head.bias": b"\0" * 4}, {"w/tail.bias": b""}])
def test_a_constant_that_is_not_there_or_has_another_size_is_refused_by_name(values: dict[str, bytes]) -> None:
    with pytest.raises(ProgramRefused, match=f"no constant {next(iter(values))}"):
        replace_constants(file_of(W, B), values)


@pytest.mark.parametrize("data", [b"no ONNX file", file_of(W, B)[:-9]])
def test_what_is_no_onnx_file_is_refused(data: bytes) -> None:
    with pytest.raises(ProgramRefused, match="no ONNX file"):
        replace_constants(data, {"w/head.bias": B.tobytes()})
