"""Write exported programs as .pt2 archives, for devices with torch. Weights are inputs; constants need no pickle."""

from __future__ import annotations

import io
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.export import ExportedProgram

from edge_client.engines.pt2 import read_exported
from export.silence import suppress_output


def to_pt2(exported: ExportedProgram) -> bytes:
    """The archive's bytes."""
    buffer = io.BytesIO()
    with suppress_output():
        torch.export.save(exported, buffer)
    return buffer.getvalue()


def run_pt2(file: bytes, args: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of one run, in the program's order."""
    with suppress_output(), torch.no_grad():
        return list(read_exported(file).module()(*args))
