"""Makes the tiny program of edge_client/probe, with which `doctor` asks whether a runtime works:

    python -m tests.boards.probe_source edge_client/probe

A softmax regression of 4 inputs and 3 classes; a test makes it again and compares.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

from edge_client.protocol.messages import canonical_json
from edge_client.protocol.program import Program
from export.compiler.program import CompilerOutput, compile_program

ENGINES = {"onnx": "step.onnx", "litert": "step.tflite"}
BATCH = 4


def compiled() -> CompilerOutput:
    """The program and its containers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 3))
    return compile_program(
        module, name="probe", input=(4,), classes=3, loss="cross-entropy", batch=BATCH, engines=tuple(ENGINES)
    )


def files(made: CompilerOutput) -> dict[str, bytes]:
    """What is shipped: the program, and one step per engine."""
    program: Program = made.program
    steps = {name: made.files[program.containers[engine]["step"].sha256] for engine, name in ENGINES.items()}
    return {"program.json": canonical_json(program.to_json()) + b"\n", **steps}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files(compiled()).items():
        (folder / name).write_bytes(data)
