"""A center in 8 bits answers alike on every processor; a bundle with smaller files has another signature."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest

from edge_client.protocol.task import Array
from export.bundle.center_files import export_center
from export.bundle.quantize import quantize_file
from export.bundle.reader import read_bundle
from export.bundle.run_source import LabelledSamples, make_signer
from export.bundle.writer import BundleOptions, write_bundle
from tests.support.bundle_material import material, reference
from tests.support.export_cli import run_export
from tests.support.programs import model


def logits(file: bytes, x: Array, level: ort.GraphOptimizationLevel) -> Array:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    session = ort.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    found: Array = session.run(["logits"], {"x": x})[0]
    return found


def test_the_8_bit_products_of_a_static_file_are_those_of_its_float_arithmetic() -> None:
    known, rng = model("digits-mlp"), np.random.default_rng(0)
    x = rng.standard_normal((8, *known.input)).astype(np.float32)
    file = quantize_file(export_center(known.module, known.input, "onnx"), "onnx", "int8-static", LabelledSamples(x=x))
    plain = logits(file, x, ort.GraphOptimizationLevel.ORT_DISABLE_ALL)  # each value is made a float before a product
    fast = logits(file, x, ort.GraphOptimizationLevel.ORT_ENABLE_ALL)
    assert np.abs(fast - plain).max() < 0.05 * np.abs(plain).max()
    stored = {tensor.data_type for tensor in onnx.load_from_string(file).graph.initializer}
    assert onnx.TensorProto.UINT8 in stored
    assert onnx.TensorProto.INT8 not in stored  # its products saturate on x86 without VNNI


def test_a_smaller_bundle_of_a_signed_one_is_said_not_to_be_signed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "signing.key"
    key.touch(mode=0o600)
    key.write_text("07" * 32)
    signed = material(sign=make_signer(bytes([7] * 32), "home"))
    write_bundle(tmp_path / "b", signed, BundleOptions(formats=("onnx",)))
    command = ("quantize", str(tmp_path / "b"), "--to", "fp16", "--out")
    assert run_export(*command, str(tmp_path / "small"), "--key", str(key), "--federation", "home") == 0
    assert "NOT signed" not in capsys.readouterr().err
    assert run_export(*command, str(tmp_path / "small")) == 0
    assert "the bundle is NOT signed, and devices refuse it" in capsys.readouterr().err


def test_a_smaller_file_that_loses_too_much_is_written_and_named_and_the_command_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The ranges are those of far smaller samples than devices have."""
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=("onnx",)))
    np.savez(tmp_path / "s.npz", x=1e-4 * reference()[:8])
    small, samples = tmp_path / "small", tmp_path / "s.npz"
    command = ("quantize", str(tmp_path / "b"), "--to", "int8-static", "--calibration", str(samples), "--json")
    assert run_export(*command, "--out", str(small)) == 1
    told = capsys.readouterr()
    rows = json.loads(told.out)
    assert (rows["bundle"], rows["ok"]) == (str(small), False)
    assert {r["format"] for r in rows["files"] if not r["ok"]} == {"onnx-int8-static"}
    assert "quantized, and more than 0.02 worse than torch" in told.err
    assert {"onnx", "onnx-int8-static"} <= read_bundle(small).manifest["centers"][0]["files"].keys()
