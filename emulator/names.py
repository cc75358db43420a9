"""How methods and engines are called where people read them. The keys are the names used in files and commands."""

from __future__ import annotations

METHODS = {"fesem": "FeSEM", "fedavg": "FedAvg", "fedprox": "FedProx"}
ENGINES = {"onnx": "ONNX Runtime", "litert": "LiteRT", "pt2": "torch"}
FORMATS = {"onnx": "ONNX", "tflite": "TFLite"}


def method(name: str) -> str:
    """The name of a method as its paper writes it."""
    return METHODS.get(name, name)


def engine(name: str) -> str:
    """The name of the runtime behind an engine."""
    return ENGINES.get(name, name)


def file_format(name: str) -> str:
    """The name of a file format."""
    return FORMATS.get(name, name)
