"""A model whose forward takes several tensors: compiled, trained from named arrays, and refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fedcenters as fc
from coordinator.models.registry import ModelEntry, build_model
from edge_client.data.dataset import describe_misfit, load_folder, load_with_or_without_labels
from edge_client.errors import ConfigError, ProgramRefused, UsageError
from edge_client.protocol.samples.input_parts import InputPart, pack_arrays
from edge_client.protocol.task import Array
from emulator.api.training_program import TrainingProgram
from export.compiler.check_program import check_folder
from export.compiler.program import make_source
from export.compiler.signatures.packed_inputs import pack_module, read_example
from tests.support.architectures import PARTS, SeveralInputs

N = 24
RNG = np.random.default_rng(0)
X: dict[str, Array] = {
    "words": RNG.integers(11, size=(N, 6)),
    "seen": RNG.random((N, 6)) < 0.7,
    "image": RNG.standard_normal((N, 1, 5, 5)).astype(np.float32),
    "age": RNG.standard_normal(N).astype(np.float32),
}
Y = RNG.integers(3, size=N)


def net() -> SeveralInputs:
    torch.manual_seed(0)
    return SeveralInputs()


def tensors(x: dict[str, Array] = X) -> dict[str, Tensor]:
    return {name: torch.from_numpy(values) for name, values in x.items()}


@pytest.fixture(scope="module")
def program() -> TrainingProgram:
    return fc.compile(net(), X)


def test_steps_from_a_dict_of_arrays_are_torchs(program: TrainingProgram) -> None:
    module, state = net(), program.start()
    optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.5)
    for _ in range(3):
        state = program.step(state, X, Y, lr=0.1, momentum=0.5)
        optimiser.zero_grad()
        loss = nn.functional.cross_entropy(module(**tensors()), torch.from_numpy(Y))
        loss.backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    for name, value in module.state_dict().items():
        np.testing.assert_allclose(state.weights[name], value.numpy(), atol=1e-5)
    with torch.no_grad():
        told = module(**tensors()).numpy()
    np.testing.assert_allclose(program.predict(state.weights, X), told, atol=1e-5)


def test_a_tuple_of_batches_is_taken_in_the_order_of_forward() -> None:
    words, seen, image, age = (X[name] for name in ("words", "seen", "image", "age"))
    module, shape, parts = read_example(net(), (words, seen, image, age))
    assert shape == (6 + 6 + 25 + 1,)
    assert {part.name: part.shape for part in parts} == {part.name: part.shape for part in PARTS}
    with torch.no_grad():
        torch.testing.assert_close(module(torch.from_numpy(pack_arrays(X))), net()(**tensors()))


def test_a_copy_that_takes_packed_samples_still_takes_its_own_arguments() -> None:
    module = net()
    packed = pack_module(module, tuple(sorted(PARTS, key=lambda part: part.name)))
    assert isinstance(packed, SeveralInputs)
    assert list(packed.state_dict()) == list(module.state_dict())
    given = tensors()
    told = module(**given)
    torch.testing.assert_close(packed(**given), told)
    torch.testing.assert_close(packed(given["words"], given["seen"], given["image"], given["age"]), told)


@pytest.mark.parametrize(
    ("x", "says"),
    [
        ({**X, "colour": X["age"]}, "no parameter 'colour'"),
        ({**X, "age": X["age"][:3]}, "different lengths"),
        ((*X.values(), X["age"]), "names 4 parameters"),
        ({**X, "words": X["words"].astype(np.float32)}, "does not take samples"),
    ],
)
def test_inputs_that_forward_does_not_take_are_refused_by_name(x: Any, says: str) -> None:  # noqa: ANN401
    with pytest.raises(ProgramRefused, match=says):
        fc.compile(net(), x)


def test_a_device_reads_named_arrays_and_is_told_what_is_wrong_with_others(
    program: TrainingProgram, tmp_path: Path
) -> None:
    named: dict[str, Any] = {f"x.{name}": values for name, values in X.items()}
    np.savez(tmp_path / "train.npz", **named, y=Y)
    local = load_folder(tmp_path).train
    assert not describe_misfit(program.manifest, local)
    state = program.step(program.start(), local.x, local.y)
    assert state.loss == program.step(program.start(), X, Y).loss
    del named["x.age"]
    np.savez(tmp_path / "train.npz", **named)
    local_, labels = load_with_or_without_labels(tmp_path)
    assert not labels
    assert "lack the array 'age'" in describe_misfit(program.manifest, local_.train)
    np.savez(tmp_path / "train.npz", x=X["age"][:, None], y=Y)
    assert "the model takes several: save x.age" in describe_misfit(program.manifest, load_folder(tmp_path).train)
    np.savez(tmp_path / "train.npz", **named, y=Y)
    (tmp_path / "train").mkdir()
    np.savez(tmp_path / "train" / "more.npz", x=X["age"][:, None], y=Y)
    with pytest.raises(ConfigError, match=r"samples are image float .* others are one array x"):
        load_folder(tmp_path)


def test_a_folder_of_the_program_is_checked_against_the_module_itself(program: TrainingProgram, tmp_path: Path) -> None:
    rows = check_folder(program.save(tmp_path / "program"), net())
    assert rows
    assert all(row["ok"] for row in rows)
    again = TrainingProgram.open(tmp_path / "program")
    np.testing.assert_array_equal(again.predict(again.weights, X), program.predict(program.weights, X))
    with pytest.raises(UsageError, match="lack the array"):
        again.predict(again.weights, {"words": X["words"]})


def test_a_simulated_fleet_trains_on_named_arrays_and_its_folder_predicts_from_them(tmp_path: Path) -> None:
    fleet = fc.fleet((X, Y), partition="iid", devices=3, seed=0)
    result = fc.simulate(fc.FeSEM(2, local_steps=2), fleet=fleet, model=net(), rounds=1)
    told = result.predict(X, center=0)
    again = fc.load(result.save(tmp_path / "run"))
    np.testing.assert_array_equal(again.predict(X, center=0), told)
    assert again.nearest(X, Y).best in (0, 1)
    other = {"anna": (X, Y), "ben": ({name: values for name, values in X.items() if name != "age"}, Y)}
    with pytest.raises(ConfigError, match="ben: samples lack the array 'age'"):
        fc.fleet(other)


def test_a_model_by_name_declares_its_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = ModelEntry(make=SeveralInputs, parts=PARTS, classes=3)
    assert entry.input == (6 + 6 + 25 + 1,)
    monkeypatch.setattr("tests.support.architectures.TWO", lambda: entry, raising=False)
    model = build_model("tests.support.architectures:TWO", seed=0)
    assert {part.name: part for part in model.program_facts["parts"]} == {part.name: part for part in PARTS}
    with torch.no_grad():
        assert model.module(torch.from_numpy(pack_arrays(X))).shape == (N, 3)


def test_parts_of_a_sample_say_their_kind() -> None:
    assert str(InputPart(name="words", shape=(6,), kind="int", below=11)) == "words int [6]"


class CategoricalColumns(nn.Module):
    """Categorical columns of several ranges in one table, each behind the one before."""

    offsets: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offsets", torch.tensor([0, 9, 11]))
        self.embed, self.head = nn.Embedding(14, 4), nn.Linear(4, 2)

    def forward(self, columns: Tensor) -> Tensor:
        return self.head(self.embed(columns + self.offsets).sum(1))  # type: ignore[no-any-return]


COLUMNS = np.stack([RNG.permutation(N) % 9, np.arange(N) % 2, np.arange(N) % 3], 1)


def test_columns_of_several_ranges_in_one_array_are_drawn_within_each() -> None:
    module, shape, parts = read_example(CategoricalColumns(), {"columns": COLUMNS})
    assert [part.below for part in parts] == [2]
    assert make_source(module, input=shape, parts=parts).target == (2,)


def test_columns_that_no_drawn_numbers_suit_are_refused_with_what_to_do() -> None:
    wide = (InputPart(name="columns", shape=(3,), kind="int", below=9),)
    with pytest.raises(ProgramRefused, match=r"samples of columns int \[3\]: index out of range") as refused:
        make_source(pack_module(CategoricalColumns(), wide), input=(3,), parts=wide)
    assert "columns of other ranges as arrays" in refused.value.hint
