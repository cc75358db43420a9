"""The names of methods and engines in reports, and how a difference is written.

The keys are the names in files and commands.
"""

from __future__ import annotations

METHOD_NAMES = {
    "cam": "CAM",
    "cam-wecfl": "CAM over WeCFL",
    "cfl": "CFL",
    "clove": "CLoVE",
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
    "fedrc": "FedRC",
    "fedsgd": "FedSGD",
    "fedsoft": "FedSoft",
    "femam": "FeMAM",
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
ENGINE_NAMES = {"onnx": "ONNX Runtime", "litert": "LiteRT", "pt2": "torch"}
FORMAT_NAMES = {"onnx": "ONNX", "tflite": "TFLite"}


def method_label(name: str) -> str:
    """The name of a method as its paper writes it."""
    return METHOD_NAMES.get(name, name)


def engine_label(name: str) -> str:
    """The name of the runtime behind an engine."""
    return ENGINE_NAMES.get(name, name)


def format_label(name: str) -> str:
    """The name of a file format."""
    return FORMAT_NAMES.get(name, name)


def signed(value: float, digits: int = 2) -> str:
    """A difference with its sign; one that rounds to nothing has no minus: +0.00."""
    return f"{round(value, digits) + 0.0:+.{digits}f}"
