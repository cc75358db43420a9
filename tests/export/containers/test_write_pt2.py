""".pt2 files are torch's own, and are made ready once to be compared with torch, however often they are run."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import ExportedProgram

from export.compiler.program import compile_program
from export.containers.write_pt2 import to_pt2


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


def test_an_archive_is_torchs_own_though_torch_makes_no_other_form_of_the_program_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exported = torch.export.export(nn.Linear(6, 3), (torch.ones(2, 6),))
    exported.example_inputs = None
    usual = io.BytesIO()
    torch.export.save(exported, usual)

    def made(*_: object) -> None:
        raise AssertionError("another form is made")

    monkeypatch.setattr("torch._export.serde.serialize._canonicalize_graph", made)
    assert to_pt2(exported) == usual.getvalue()
