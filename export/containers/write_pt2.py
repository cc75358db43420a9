"""Write exported programs as .pt2 archives, for devices with torch, and read them. No object needs a pickle."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from edge_client.engines.pt2 import read_exported, refuse_code
from export.silence import suppress_output

# A program has no state. torch makes the module of an exported program anew at each call, which takes as long as a run.
_MODULES: WeakKeyDictionary[ExportedProgram, nn.Module] = WeakKeyDictionary()
SAMPLE_INPUTS = "/data/sample_inputs/model.pt"  # a pickle, which nothing needs


def to_pt2(exported: ExportedProgram) -> bytes:
    """The archive's bytes, without the inputs that the program was traced with."""
    exported.example_inputs = None
    buffer = io.BytesIO()
    with suppress_output(), _no_canonical_form():
        torch.export.save(exported, buffer)
    return buffer.getvalue()


def _no_canonical_form() -> AbstractContextManager[object]:
    """Without a form of the program that torch makes from a deep copy to see whether it can, and throws away."""
    from torch._export.serde import serialize

    return patch.object(serialize, "canonicalize", lambda *_: None)


def read_pt2(file: bytes, name: str) -> ExportedProgram:
    """The program of an archive. Nothing in it is unpickled, and its graph calls operators on tensors alone.

    Raises ProgramRefused for another archive (`refuse_code`), and what torch raises for no archive.
    """
    plain = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(file)) as archive, zipfile.ZipFile(plain, "w") as without_samples:
        for member in archive.infolist():
            data = b"" if member.filename.endswith(SAMPLE_INPUTS) else archive.read(member)
            without_samples.writestr(member.filename, data)
    refuse_code(plain.getvalue(), name)
    found: ExportedProgram = read_exported(plain.getvalue())
    return found


def run_pt2(file: bytes, args: Sequence[Tensor]) -> list[Tensor]:
    """The outputs of one run, in the program's order."""
    exported = read_exported(file)
    with suppress_output(), torch.no_grad():
        if exported not in _MODULES:
            _MODULES[exported] = exported.module()
        return list(_MODULES[exported](*args))
