"""A machine without memory, or room on its disk, is told as that, by whichever library it is noticed."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import cast

import pytest

from edge_client.errors import ProgramRefused
from export.compiler.containers import refusal_context
from export.compiler.operator_watch import refuse_untraceable
from export.compiler.program_functions import TraceSource


@pytest.mark.parametrize(
    "wrong", [MemoryError(), RuntimeError("std::bad_alloc"), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_too_little_memory_is_no_fault_of_a_model(wrong: Exception) -> None:
    """It was told as `model 'mine' cannot be written for onnx: MemoryError`, with exit code 5 and a false hint."""
    source = cast("TraceSource", SimpleNamespace(name="mine"))
    with pytest.raises(MemoryError, match="too little memory"), refusal_context(source, "onnx"):
        raise wrong
    with pytest.raises(ProgramRefused, match="cannot be written for onnx"), refusal_context(source, "onnx"):
        raise RuntimeError("no operator")
    with pytest.raises(MemoryError, match="too little memory"):
        refuse_untraceable(source, wrong)


def test_a_disk_without_room_or_rights_is_no_fault_of_a_model() -> None:
    """It was told as `model 'mine' cannot be traced at tempfile.py:223`, with a hint about branches on values."""
    source = cast("TraceSource", SimpleNamespace(name="mine"))
    wrong = OSError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    with pytest.raises(OSError, match="No usable"), refusal_context(source, "onnx"):
        raise wrong
    with pytest.raises(OSError, match="No usable"):
        refuse_untraceable(source, wrong)
