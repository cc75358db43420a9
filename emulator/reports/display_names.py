"""How methods and engines are called where people read them. The keys are the names used in files and commands."""

from __future__ import annotations

METHODS = {
    "cfl": "CFL",
    "ditto": "Ditto",
    "fedavg": "FedAvg",
    "fedavg-late": "FedAvg with late updates",
    "fedavg-plus": "FedAvg+",
    "feddane": "FedDANE",
    "feddist": "FedDist",
    "feddws": "FedDWS",
    "fedem": "FedEM",
    "fedgroup": "FedGroup",
    "fedprox": "FedProx",
    "fedprox-plus": "FedProx+",
    "fedsgd": "FedSGD",
    "fedsoft": "FedSoft",
    "fesem": "FeSEM",
    "fesem-ma": "FeSEM-MA",
    "flhc": "FL+HC",
    "hypcluster": "HypCluster",
    "ifca": "IFCA",
    "nonfed": "NonFed",
    "pfedme": "pFedMe",
    "tkm": "Robust(TKM)",
    "wecfl": "WeCFL",
}
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
