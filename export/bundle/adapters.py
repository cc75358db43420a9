"""A center of a peft model as peft's own files: `peft.PeftModel.from_pretrained(base, folder)` loads them."""

from __future__ import annotations

import json

import numpy as np
from safetensors.numpy import save

from edge_client.protocol.program import Program
from edge_client.protocol.task import Flat


def adapter_files(program: Program, vector: Flat) -> dict[str, tuple[str, bytes]] | None:
    """config, model -> (file name, bytes) of a center [schema.size]; None for a program without an adapter."""
    told = program.adapter
    if told is None:
        return None
    values = program.schema.split(np.asarray(vector, dtype=np.float32))
    tensors = {key: np.ascontiguousarray(values[name]) for key, name in told.tensors.items()}
    config = json.dumps(told.config, indent=2, sort_keys=True).encode()
    return {
        "config": ("adapter_config.json", config),
        "model": ("adapter_model.safetensors", save(tensors, metadata={"format": "pt"})),
    }
