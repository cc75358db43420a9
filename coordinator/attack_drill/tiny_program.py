"""The program of a drill without a configuration: a classifier with batch norm's buffers, which no runtime runs.

With `secure` it has no buffers, since masked sums refuse them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from coordinator.artifacts import signed_program
from coordinator.config import CoordinatorConfig, config_from_keys
from coordinator.config_sections import ModelConfig, RunConfig
from coordinator.storage.store import Store
from edge_client.protocol.program import Container, Program
from edge_client.protocol.task import Schema, TensorSpec

FEATURES, CLASSES = 800, 10  # an update of several blocks, also as i8
FILE = b"no runtime opens this file"
SCHEMA = Schema(
    (
        TensorSpec(name="head.weight", role="p", shape=(CLASSES, FEATURES)),
        TensorSpec(name="head.bias", role="p", shape=(CLASSES,)),
        TensorSpec(name="norm.running_mean", role="b", shape=(FEATURES,)),
        TensorSpec(name="norm.running_var", role="b", shape=(FEATURES,)),
    ),
    ("head.weight", "head.bias"),
)
PLAIN = Schema(SCHEMA.tensors[:2], SCHEMA.classifier)


def config(folder: Path, secure: str = "off") -> CoordinatorConfig:
    """FedAvg with the defaults of every limit."""
    return config_from_keys(
        {"federation": "drill", "broker": "", "folder": folder},
        model=ModelConfig(name="tiny", engines=("onnx",)),
        runs=(RunConfig(method="fedavg", rounds=1, name="fedavg", settings={"secure": secure}),),
    )


def put(store: Store, schema: Schema) -> None:
    """Store the program as if it had been compiled."""
    file = Container(sha256=hashlib.sha256(FILE).hexdigest(), size=len(FILE))
    program = Program(
        model="tiny",
        loss="cross-entropy",
        optimizer="sgd",
        schema=schema,
        input=(FEATURES,),
        target=(CLASSES,),
        dtype="float32",
        functions={},
        containers={"onnx": {"step": file, "evaluate": file}},
        batch={"onnx": "any"},
        opset=18,
        versions={},
    )
    start = np.zeros(schema.size, np.float32)
    if "norm.running_var" in schema.slices:
        start[schema.slices["norm.running_var"]] = 1.0
    store.facts.put(signed_program.PROGRAM_FACT, signed_program.put_program(store, program, [FILE], start))
