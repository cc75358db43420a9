"""A converter that cannot be imported is the installation's fault, and no message blames the model for it."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest

from edge_client.errors import RuntimeMissing
from export.bundle.center_files import export_center
from export.bundle.quantize import quantize_file
from export.compiler.program import compile_program
from tests.support.programs import model


def program() -> None:
    m = model("digits-mlp")
    compile_program(m.module, name="digits-mlp", input=m.input, classes=m.classes, batch=8, engines=("litert",))


def onnx_program() -> None:
    m = model("digits-mlp")
    compile_program(m.module, name="digits-mlp", input=m.input, classes=m.classes, batch=8, engines=("onnx",))


def center() -> None:
    m = model("digits-mlp")
    export_center(m.module, m.input, "tflite")


@pytest.mark.parametrize(
    ("package", "use"),
    [
        ("litert_torch", program),
        ("litert_torch", center),
        ("onnxscript", onnx_program),  # an older one lacks a module for this torch
        ("ai_edge_quantizer", lambda: quantize_file(b"", "tflite", "int8")),
    ],
)
def test_what_cannot_be_imported_is_said_to_be_missing(
    package: str, use: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where an older ai-edge-litert lies beside it
    with pytest.raises(RuntimeMissing, match=rf"cannot be imported: .*{package}[\s\S]*\.\[export\]"):
        use()
