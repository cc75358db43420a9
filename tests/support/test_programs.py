"""A program for the tests is compiled once for its values' type and all source that it depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coordinator.models import compiled as whole_programs
from export.compiler.container_cache import VARIABLE
from export.compiler.program import CompilerOutput
from tests.support import programs
from tests.support.virtual_federation import CONTAINERS, program


def test_a_later_test_run_finds_a_program_unless_what_it_depends_on_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shas = {function: container.sha256 for function, container in program().containers["onnx"].items()}
    made = CompilerOutput(program=program(), files={shas[function]: data for function, data in CONTAINERS.items()})
    calls: list[Any] = []

    def counted(*_: object, **facts: object) -> CompilerOutput:
        calls.append(facts["dtype"])
        return made

    def in_a_new_run(dtype: str) -> CompilerOutput:
        return programs.compiled.__wrapped__("linear-regression", dtype, ("onnx",))

    monkeypatch.setenv(VARIABLE, str(tmp_path))
    monkeypatch.delenv(programs.SHARED)
    monkeypatch.setattr(programs, "compile_program", counted)
    assert [in_a_new_run("float32") for _ in range(2)] == [made, made]
    in_a_new_run("float64")
    assert calls == ["float32", "float64"]
    hashed: list[str] = []

    def another_source(*folders: str) -> str:
        hashed.extend(folders)
        return "another source"

    monkeypatch.setattr(whole_programs, "source_hash", another_source)
    in_a_new_run("float32")
    assert calls == ["float32", "float64", "float32"]
    assert {"export", "edge_client", "coordinator/models", "tests/support"} == set(hashed)
