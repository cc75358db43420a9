"""A center as one file: input x, output logits, weights inside, equal to torch; and a way to measure that."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edge_client.errors import ProgramRefused, UsageError
from edge_client.protocol.task import Array
from export.bundle.bundle_contents import BundleSource
from export.bundle.center_files import export_center, export_stacked, load_infer_module
from export.bundle.verify_centers import file_logits, largest_difference
from export.bundle.writer import BundleOptions, write_bundle
from export.compiler.program import vector_of
from export.containers.write_onnx import MAX_IR_VERSION, bake_weights, open_onnx
from tests.support.programs import compiled, model

PARITY = 1e-4
FORMATS = ("onnx", "tflite", "pt2")
x_of = np.random.default_rng(0).standard_normal


def samples(n: int = 5) -> Array:
    return np.asarray(x_of((n, 1, 8, 8)), dtype=np.float32)


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_written_module_answers_like_torch(fmt: str) -> None:
    module = model("digits-mlp").module
    assert largest_difference(module, export_center(module, (1, 8, 8), fmt), fmt, samples()) < PARITY


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_batch_norm_is_written_in_inference_mode(fmt: str) -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 4)).train()
    module(torch.tensor(samples(16)))  # gives it statistics
    assert largest_difference(module, export_center(module, (1, 8, 8), fmt), fmt, samples()) < PARITY


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_file_of_another_center_is_seen_as_different(fmt: str) -> None:
    file = export_center(model("digits-mlp").module, (1, 8, 8), fmt)
    other = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    assert largest_difference(other, file, fmt, samples()) > PARITY


def test_a_program_with_weights_is_the_model_itself() -> None:
    made, module = compiled("digits-mlp"), model("digits-mlp").module
    vector = vector_of(module, made.program.schema)
    infer = made.files[made.program.containers["pt2"]["infer"].sha256]
    center = load_infer_module(infer, made.program.schema, vector)
    x = torch.tensor(samples())
    assert torch.allclose(center(x), module.eval()(x), atol=1e-6)


def test_centers_of_one_program_stay_apart_whatever_became_of_the_others() -> None:
    made, module = compiled("digits-mlp"), model("digits-mlp").module
    schema, start = made.program.schema, vector_of(module, made.program.schema)
    infer = made.files[made.program.containers["pt2"]["infer"].sha256]
    centers = [load_infer_module(infer, schema, start * (1 + k)) for k in range(3)]
    x = torch.tensor(samples())
    before = [center(x) for center in centers]
    for format_ in ("onnx", "pt2", "tflite"):
        export_center(centers[0], (1, 8, 8), format_)
    with torch.no_grad():
        for buffer in centers[0].buffers():
            buffer.zero_()
    assert not torch.allclose(before[1], before[2])
    assert all(torch.equal(center(x), told) for center, told in zip(centers[1:], before[1:], strict=True))


def test_baking_turns_weights_into_constants_and_leaves_x_alone() -> None:
    import onnx

    made, module = compiled("digits-mlp"), model("digits-mlp").module
    weights = {f"w/{k}": v.numpy() for k, v in module.state_dict().items()}
    file = bake_weights(made.files[made.program.containers["onnx"]["infer"].sha256], weights)
    proto = onnx.load_model_from_string(file)
    onnx.checker.check_model(proto)
    assert [i.name for i in proto.graph.input] == ["x"]
    assert [o.name for o in proto.graph.output] == ["logits"]
    assert proto.ir_version <= MAX_IR_VERSION
    assert largest_difference(module, file, "onnx", samples()) < PARITY


def test_onnx_and_pt2_take_any_number_of_samples_and_tflite_one_at_a_time() -> None:
    module = model("digits-mlp").module
    assert file_logits(export_center(module, (1, 8, 8), "pt2"), "pt2", samples(13)).shape == (13, 10)
    assert open_onnx(export_center(module, (1, 8, 8), "onnx"))({"x": samples(13)})[0].shape == (13, 10)
    assert file_logits(export_center(module, (1, 8, 8), "tflite"), "tflite", samples(3)).shape == (3, 10)


def test_an_onnx_file_looks_as_people_expect_it() -> None:
    """A viewer shows x and logits, a dimension called batch, and no unused node or weight."""
    import onnx

    graph = onnx.load_model_from_string(export_center(model("wecfl-cnn").module, (1, 28, 28), "onnx")).graph
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in (*graph.input, *graph.output)
    }
    assert shapes == {"x": ["batch", 1, 28, 28], "logits": ["batch", 10]}
    used = {name for node in graph.node for name in node.input} | {"logits"}
    assert all(set(node.output) & used for node in graph.node)
    assert {tensor.name for tensor in graph.initializer} <= used
    assert [n.op_type for n in graph.node] == ["Conv", "Relu", "MaxPool", "Conv", "Relu", "MaxPool", "Reshape", "Gemm"]


def test_an_unknown_format_is_named_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match=r"coreml[\s\S]*onnx, tflite"):
        export_center(nn.Linear(2, 2), (2,), "coreml")


def test_a_module_that_cannot_be_written_is_refused() -> None:
    with pytest.raises(ProgramRefused, match="cannot be written as onnx"):
        export_center(nn.Linear(2, 2), (3,), "onnx")


def test_a_stacked_file_that_answers_no_number_for_its_second_center_is_refused(tmp_path: Path) -> None:
    made, module = compiled("digits-mlp"), model("digits-mlp").module
    schema, start = made.program.schema, vector_of(module, made.program.schema)
    infer = made.files[made.program.containers["pt2"]["infer"].sha256]
    wrong = export_stacked(infer, schema, np.stack([start, start * np.nan]), made.program.input, "onnx")
    source = BundleSource(
        program=made.program,
        files=made.files,
        centers=[start, start],
        cards=[{}, {}],
        made={"stacked/centers.onnx": wrong},
    )
    with pytest.raises(ProgramRefused, match="stacked onnx file differs from torch by nan"):
        write_bundle(tmp_path / "bundle", source, BundleOptions(formats=("onnx",), stacked=True))
