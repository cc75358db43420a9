"""LiteRT without its Interpreter, which is deprecated: CompiledModel computes the same, to the last bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_client.engines import litert_compiled
from edge_client.engines.base import Engine
from edge_client.errors import ProgramRefused
from edge_client.protocol.task import Array
from export.compiler.program import CompilerOutput
from tests.support.no_interpreter import hide_interpreter
from tests.support.programs import BATCH, compiled, feeds, opened

FUNCTIONS = ("step", "evaluate")
MODELS = ("digits-mlp", "wecfl-cnn", "rotary")  # rotary has buffers that no step changes


def program_of(name: str) -> CompilerOutput:
    return compiled(name, engines=("litert",))


def both(name: str, folder: Path) -> tuple[Engine, Engine]:
    """The engine on the Interpreter, and on CompiledModel."""
    made, usual = program_of(name), opened(program_of(name), "litert", folder)
    files = {function: folder / file.sha256 for function, file in made.program.files("litert", FUNCTIONS).items()}
    return usual, litert_compiled.open_program(made.program, files, threads=1)


def same(found: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("name", MODELS)
def test_three_steps_without_an_interpreter_end_with_the_same_bits(name: str, tmp_path: Path) -> None:
    """An odd number: the weights lie in the other set of buffers than at first."""
    given = feeds(program_of(name).program, "step", batch=BATCH)
    usual, other = (engine.update(given) for engine in both(name, tmp_path))
    for seed in range(3):
        batch = feeds(program_of(name).program, "step", batch=BATCH, seed=seed)
        assert usual.step(batch) == other.step(batch)
    assert same(other.read(), usual.read())


def test_a_rule_moves_the_weights_without_an_interpreter_too(tmp_path: Path) -> None:
    given = feeds(program_of("wecfl-cnn").program, "step", batch=BATCH)
    given |= {"lr": np.zeros((), np.float32), "momentum": np.zeros((), np.float32)}

    def rule(w: Array, g: Array) -> None:
        w -= np.float32(0.1) * np.sign(g)

    usual, other = (engine.update(given, rule) for engine in both("wecfl-cnn", tmp_path))
    for _ in range(2):
        assert usual.step(given) == other.step(given)
    found, wanted = other.read(), usual.read()
    kept = [name for name in wanted if not name.startswith("velocity/")]
    assert same({n: found[n] for n in kept}, {n: wanted[n] for n in kept})


@pytest.mark.parametrize("name", MODELS)
def test_evaluation_without_an_interpreter_has_the_same_bits(name: str, tmp_path: Path) -> None:
    given = feeds(program_of(name).program, "evaluate", batch=BATCH)
    usual, other = (engine.evaluate(given) for engine in both(name, tmp_path))
    assert same(other, usual)


def test_where_there_is_no_interpreter_the_engine_takes_compiled_models_in_silence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made = program_of("digits-mlp")  # compiling may talk
    capfd.readouterr()
    hide_interpreter(monkeypatch)
    engine = opened(made, "litert", tmp_path)
    assert isinstance(engine, litert_compiled.CompiledEngine)
    engine.evaluate(feeds(made.program, "evaluate", batch=BATCH))
    assert capfd.readouterr() == ("", "")


def test_a_file_that_is_no_program_is_refused_without_an_interpreter_too(tmp_path: Path) -> None:
    (tmp_path / "step").write_bytes(b"not a program")
    with pytest.raises(ProgramRefused, match="hint: "):
        litert_compiled.open_program(program_of("digits-mlp").program, {"step": tmp_path / "step"}, threads=1)
