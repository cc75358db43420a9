""".pt2 files are run where they are compared with torch: as often as needed, but made ready once."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn
from torch.export import ExportedProgram

from export.compiler.program import compile_program


def test_a_compilation_makes_a_file_ready_once_to_compare_it_and_once_for_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch makes the module of an exported program anew at each call, and a step is compared on several batches."""
    made, module = list[ExportedProgram](), ExportedProgram.module

    def counted(program: ExportedProgram, *args: Any, **kwargs: Any) -> nn.Module:  # noqa: ANN401 - torch's own
        made.append(program)
        return module(program, *args, **kwargs)

    monkeypatch.setattr(ExportedProgram, "module", counted)
    compile_program(nn.Linear(6, 3), (6,), engines=("pt2",))
    assert max(sum(each is program for each in made) for program in made) == 2
