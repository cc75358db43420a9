"""A model of ours is compiled once for its source, tensors, runtimes and machine; another one each time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from coordinator.models import compiled, registry
from coordinator.models.compiled import compiled_model
from coordinator.models.registry import Model, ModelEntry, build_model
from export.compiler import container_cache
from export.compiler.program import CompilerOutput, compile_program

NAME = "linear-regression"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDCENTERS_CACHE", str(tmp_path))
    return tmp_path / "containers"


@pytest.fixture(scope="module")
def made() -> CompilerOutput:
    """A program of `NAME`, compiled."""
    model = build_model(NAME, seed=0)
    return compile_program(model.module, **model.program_facts, batch=8, engines=("pt2",))


@pytest.fixture
def calls(made: CompilerOutput, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The models that were compiled; each compilation has the same outcome and takes no seconds."""
    names: list[str] = []

    def counted(*_: Any, **facts: Any) -> CompilerOutput:  # noqa: ANN401 - compile_program's own
        names.append(facts["name"])
        return made

    monkeypatch.setattr(compiled, "compile_program", counted)
    return names


def pt2(model: Model, batch: int = 8) -> CompilerOutput:
    return compiled_model(model, batch=batch, engines=("pt2",))


def test_a_model_of_ours_is_compiled_once_and_comes_back_whole(calls: list[str], made: CompilerOutput) -> None:
    first, again = pt2(build_model(NAME, seed=0)), pt2(build_model(NAME, seed=0))
    assert calls == [NAME]
    for each in (first, again):
        assert (each.program, each.files) == (made.program, made.files)


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: pt2(build_model(NAME, seed=1)),
        lambda patch: pt2(build_model(NAME, seed=0), batch=9),
        lambda patch: pt2(replace(build_model(NAME, seed=0), frozen="f16")),
        lambda patch: patch.setattr(container_cache, "runtime_version", lambda engine: "another runtime"),
        lambda patch: patch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "another machine"),
        lambda patch: patch.setattr(compiled, "source_hash", lambda *folders: "another source"),
    ],
)
def test_what_a_program_depends_on_is_in_the_key(
    change: Callable[[pytest.MonkeyPatch], object], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pt2(build_model(NAME, seed=0))
    if change(monkeypatch) is None:
        pt2(build_model(NAME, seed=0))
    assert calls == [NAME, NAME]


def test_a_model_of_a_users_own_is_compiled_each_time_whatever_its_name(calls: list[str]) -> None:
    built = build_model(NAME, seed=0)
    mine = Model(name=NAME, module=built.module, input=built.input, classes=built.classes, loss=built.loss)
    assert [pt2(model).program.model for model in (built, mine, mine)] == [NAME] * 3
    assert calls == [NAME] * 3


def test_a_damaged_program_is_compiled_again(cache: Path, calls: list[str], made: CompilerOutput) -> None:
    pt2(build_model(NAME, seed=0))
    for entry in cache.iterdir():
        entry.write_bytes(entry.read_bytes()[:-1] + b"!")
    assert pt2(build_model(NAME, seed=0)).files == made.files
    assert calls == [NAME, NAME]


def test_a_name_of_a_plug_in_and_a_sum_with_one_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    own = ModelEntry(make=registry.MODELS[NAME].make, input=(10,), classes=1, loss="squared-error")
    monkeypatch.setattr(registry, "find_by_name", lambda kind, name, known: own if name == "mine" else known[name])
    told = {name: build_model(name, seed=0).built_in for name in (NAME, "mine", f"{NAME}+{NAME}", f"{NAME}+mine")}
    assert told == {NAME: True, "mine": False, f"{NAME}+{NAME}": True, f"{NAME}+mine": False}
