"""The installed runtimes and their versions, from package metadata; a runtime without any is imported."""

from __future__ import annotations

import re
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec

RUNTIME_PACKAGES = {
    "onnx": ("onnxruntime", "onnxruntime-gpu"),
    "litert": ("ai-edge-litert", "tflite-runtime"),
    "pt2": ("torch",),
}
LIMIT = 64  # characters, of those that a presence message takes (protocol/message_schemas.py)
_OTHERS = re.compile(r"[^A-Za-z0-9_.+ -]")
MODULES = {"onnx": ("onnxruntime",), "litert": ("ai_edge_litert", "tflite_runtime"), "pt2": ("torch",)}


def runtime_version(engine: str) -> str | None:
    """Package and version of the engine's runtime, as "onnxruntime 1.31.1"; of both where two are installed.

    None where there is none. A vendor's build may come as a module without a package.
    """
    found = [f"{name} {version}" for name in RUNTIME_PACKAGES[engine] if (version := _version(name)) is not None]
    if not found:
        there = [name for name in MODULES[engine] if find_spec(name) is not None]
        found = [f"{name} {_told(name)}" for name in there]
    return _OTHERS.sub("_", " + ".join(found))[:LIMIT] or None


@cache
def _version(package: str) -> str | None:
    """Read once: a package that is installed anew while this process runs is not the one that it has loaded."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _told(module: str) -> str:
    try:
        return str(getattr(import_module(module), "__version__", "of unknown version"))
    except (ImportError, OSError):
        return "that cannot be imported"
