"""The devices' own runtimes: the compiled program in ONNX Runtime, LiteRT or torch, as on a board."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from edge_client.engines.base import open_engine
from edge_client.protocol.program import Program
from edge_client.runtime.golden_results import require_golden
from edge_client.training.learner import EngineLearner, Learner


@dataclass(frozen=True, kw_only=True)
class RuntimeRecipe:
    """One of the client's engines; `files` maps a function to its container on disk."""

    engine: str
    program: Program
    files: Mapping[str, Path]

    def open(self) -> Learner:
        opened = open_engine(self.engine, self.program, self.files)
        require_golden(opened, self.program)
        return EngineLearner(opened, self.program)
