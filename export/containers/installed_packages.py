"""Whether the packages are installed that write and check the containers; none of them is imported."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from edge_client.errors import RuntimeMissing, install_hint

ENGINE_OF_FORMAT = {"onnx": "onnx", "tflite": "litert"}
# engine -> the module and the package of what writes its containers and compares them with torch
PACKAGES = {
    "pt2": {"torch": "torch"},
    "onnx": {"torch": "torch", "onnx": "onnx", "onnxscript": "onnxscript", "onnxruntime": "onnxruntime"},
    "litert": {"torch": "torch", "litert_torch": "litert-torch", "ai_edge_litert": "ai-edge-litert"},
}


def check_installed(engines: Sequence[str], formats: Sequence[str]) -> None:
    """Raise RuntimeMissing for the first package that a program of `engines` or a bundle of `formats` needs.

    A package that is installed but broken is told when it is used.
    """
    needs = [("engines", engine, engine) for engine in engines]
    needs += [("formats", each, ENGINE_OF_FORMAT[each]) for each in formats]
    for key, name, engine in needs:
        for module, package in PACKAGES[engine].items():
            if find_spec(module) is None:
                leave = "" if package == "torch" else f"; or leave {name} out of `{key}`"
                raise RuntimeMissing(
                    f"{package} is not installed: {name} in `{key}` needs it", hint=f"{install_hint('server')}{leave}"
                )
