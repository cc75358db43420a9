"""A training program from Python: compiled, stepped, saved, and opened again where torch cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from edge_client.errors import Malformed, UsageError
from emulator.api import progress
from emulator.api.training_program import TrainingProgram
from emulator.api.training_program import compile as compile_module
from export.compiler.program import weights_of
from tests.support.programs import BATCH, compiled, model

X = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])
TOLERANCE = 1e-5  # float32 through another runtime: its sums have another order


class SmallNet(nn.Module):
    """Batch norm and dropout: a step moves buffers and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layers(x)
        return out


class LightningLike(SmallNet):
    """The shape of a LightningModule: hooks around the same `forward`, and a trainer that is not there yet."""

    @property
    def trainer(self) -> object:
        raise RuntimeError(f"{type(self).__name__} is not attached to a `Trainer`.")

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def program() -> TrainingProgram:
    return compile_module(SmallNet(), X)


def test_a_model_in_float64_and_weights_of_it_are_narrowed_wherever_they_enter(tmp_path: Path) -> None:
    program = compile_module(nn.Linear(3, 3).double(), X)
    wide = {name: value.astype(np.float64) for name, value in program.weights.items()}
    once, again = (program.step(program.start(w), X, Y, anchor=wide, mu=0.1) for w in (None, wide))
    assert once.loss == again.loss
    with np.load(program.save(tmp_path / "program") / "weights.npz") as stored:
        assert {stored[name].dtype.name for name in stored.files} == {"float32"}


def test_steps_with_momentum_and_an_anchor_are_those_of_torch() -> None:
    module = nn.Linear(3, 3)
    program = compile_module(module, X)
    anchor = {name: value + 1 for name, value in program.weights.items()}
    state = program.start()
    far = {name: p.detach() + 1 for name, p in module.named_parameters()}
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        state = program.step(state, X, Y, lr=0.1, momentum=0.9, anchor=anchor, mu=0.5)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(Y))
        pull = sum(((p - far[name]) ** 2).sum() for name, p in module.named_parameters())
        (loss + 0.25 * pull).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert state.loss == pytest.approx(loss.item(), rel=TOLERANCE)
    for name, value in module.named_parameters():
        np.testing.assert_allclose(state.weights[name], value.detach(), rtol=TOLERANCE, atol=TOLERANCE)
    assert state.steps == 3


def test_targets_are_fitted_with_the_squared_error() -> None:
    program = compile_module(nn.Linear(3, 2), (3,), loss="mse")
    y = X[:, :2] * 2
    first = state = program.step(program.start(), X, y, lr=0.5)
    for _ in range(100):
        state = program.step(state, X, y, lr=0.5)
    assert state.loss is not None
    assert first.loss is not None
    assert state.loss < 0.01 * first.loss  # the targets are a linear function of the samples
    assert program.predict(state.weights, X).shape == (6, 2)


def test_a_step_changes_neither_the_program_nor_the_state_that_it_is_given(program: TrainingProgram) -> None:
    start = program.start()
    before = {name: value.copy() for name, value in start.weights.items()}
    after = program.step(start, X, Y, lr=1.0)
    assert all((start.weights[name] == value).all() for name, value in before.items())
    assert any((after.weights[name] != value).any() for name, value in before.items() if "running_mean" in name)


def test_the_same_seed_draws_the_same_dropout(program: TrainingProgram) -> None:
    one, same, other = (program.step(program.start(), X, Y, seed=seed).loss for seed in (1, 1, 2))
    assert one == same != other


def test_a_saved_program_trains_where_torch_cannot_be_imported(program: TrainingProgram, tmp_path: Path) -> None:
    folder = program.save(tmp_path / "program")
    np.savez(tmp_path / "data.npz", x=X, y=Y)
    script = f"""
import sys
sys.modules["torch"] = None
import numpy as np
from emulator.api.training_program import TrainingProgram
data = np.load({str(tmp_path / "data.npz")!r})
program = TrainingProgram.open({str(folder)!r})
print(program.step(program.start(), data["x"], data["y"], seed=3).loss)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) == program.step(program.start(), X, Y, seed=3).loss


def test_weights_of_another_model_are_refused(program: TrainingProgram, tmp_path: Path) -> None:
    folder = program.save(tmp_path / "program")
    others: dict[str, Any] = {"w/weight": np.zeros((3, 3), np.float32)}
    np.savez(folder / "weights.npz", **others)
    with pytest.raises(Malformed, match="another model"):
        TrainingProgram.open(folder)


def test_what_was_wrong_is_said_with_what_to_write(program: TrainingProgram) -> None:
    with pytest.raises(UsageError, match="no torch module"):
        compile_module(SmallNet, X)  # type: ignore[arg-type]  # the class in place of the module
    with pytest.raises(UsageError, match=r"targets are a list, and no shape\n\nhint: .*np\.array"):
        compile_module(SmallNet(), X, loss=nn.CrossEntropyLoss(reduction="none"), targets=[0, 1, 1])
    with pytest.raises(UsageError, match="unknown loss 'nll'"):
        compile_module(SmallNet(), X, loss="nll")
    with pytest.raises(UsageError, match=r"the example input is the number 3\n\nhint: write \(3,\), a tuple"):
        compile_module(SmallNet(), 3)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"the example input is NoneType\n\nhint: give a batch"):
        compile_module(SmallNet(), None)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="unknown engine tflite"):
        compile_module(SmallNet(), X, engines="tflite")
    with pytest.raises(UsageError, match="samples of shape"):
        program.step(program.start(), X[:, :2], Y)
    with pytest.raises(UsageError, match="label 7"):
        program.step(program.start(), X, Y + 5)
    with pytest.raises(UsageError, match="weights"):
        program.predict({}, X)


def test_a_long_compilation_says_what_goes_on(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []
    monkeypatch.setattr(progress, "SILENCE_S", 3600.0)
    monkeypatch.setattr(progress.PlainLines, "busy", lambda _, text: told.append(text))
    compile_module(SmallNet(), X)
    parts = ["checks of the model", "onnx step", "onnx evaluate", "onnx infer", "onnx beside torch"]
    parts += ["golden run", "onnx in the golden run", "done"]
    assert told == [f"compiling SmallNet  {part}" for part in parts]
    compile_module(SmallNet(), X, progress=False)
    assert len(told) == len(parts)
    assert capfd.readouterr() == ("", "")


def test_one_engine_is_given_by_its_name(program: TrainingProgram) -> None:
    engines: list[Any] = ["onnx", iter(["onnx"])]
    for told in engines:
        assert repr(compile_module(SmallNet(), X, engines=told)) == repr(program)


def test_its_repr_has_the_shapes_the_size_and_the_runtimes(program: TrainingProgram) -> None:
    assert repr(program) == "TrainingProgram(SmallNet: (3,) -> (3,), cross-entropy, 75 parameters, for onnx)"


def test_a_module_with_the_hooks_of_lightning_is_taken_by_its_forward() -> None:
    """tests/emulator/api/test_lightning.py takes a real one where Lightning is installed."""
    program = compile_module(LightningLike(), X)
    assert program.predict(program.weights, X).shape == (6, 3)


@pytest.mark.parametrize("engine", ["onnx", "litert", "pt2"])
def test_every_runtime_runs_a_program_whose_files_are_in_memory(engine: str) -> None:
    """LiteRT opens one function at a time, and reads its file then."""
    made, rng = compiled("digits-mlp"), np.random.default_rng(0)
    weights = weights_of(model("digits-mlp").module, made.program.schema)
    program = TrainingProgram(manifest=made.program, files=made.files, weights=weights, engine=engine)
    x, y = rng.random((BATCH, 1, 8, 8), dtype=np.float32), rng.integers(10, size=BATCH)
    state = program.step(program.start(), x, y, lr=0.1)
    assert program.evaluate(state.weights, x, y)[0].mean() < program.evaluate(program.weights, x, y)[0].mean()
    again = program.step(state, x, y)
    assert state.loss is not None
    assert again.loss is not None
    assert again.loss < state.loss
