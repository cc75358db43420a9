"""Frozen parameters: one file beside the containers, which step, evaluate and infer take as further inputs.

A device fetches the file once, and no round sends it. It is named by its hash and holds nothing of the trained part, so
models with other adapters on the same base share it. It is stored in one of the codecs of updates (PROTOCOL.md,
section 6); what is compiled and compared computes with the numbers that come out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from edge_client.protocol import codecs
from edge_client.protocol.task import Schema, Tensors, TensorSpec

LARGEST_THAT_TRAVELS = 1e30  # a mask of attention has infinities: their mean and difference are no numbers


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """The frozen parameters in torch's order, and the file that holds them."""

    schema: Schema
    file: bytes = field(repr=False)


def freeze(module: nn.Module, codec: str) -> Frozen | None:
    """Store the frozen parameters of a module, which then holds them as they were stored; None without any."""
    held = frozen_parameters(module)
    if not held:
        return None
    schema = Schema(tuple(TensorSpec(name=name, role="p", shape=tuple(p.shape)) for name, p in held.items()))
    vector = np.concatenate([p.detach().float().numpy().ravel() for p in held.values()])
    file = codecs.encode_vector(vector, schema, codec=codec, kind="frozen")
    load_frozen(module, codecs.decode_frozen(file, schema))
    return Frozen(schema=schema, file=file)


def load_frozen(module: nn.Module, values: Tensors) -> None:
    """Write frozen parameters into the module, in place."""
    held = frozen_parameters(module)
    with torch.no_grad():
        for name, value in values.items():
            held[name].copy_(torch.from_numpy(np.array(value)))


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Real numbers that want no gradient, by name; not those of size 0, nor a mask of infinities."""
    held = {name: p for name, p in module.named_parameters() if not p.requires_grad}
    return {name: p for name, p in held.items() if p.is_floating_point() and p.numel() and travels(p)}


def travels(value: Tensor) -> bool:
    """Whether a float tensor can be sent and averaged; another one is a constant of the program."""
    return not bool((value.detach().abs() > LARGEST_THAT_TRAVELS).any())
