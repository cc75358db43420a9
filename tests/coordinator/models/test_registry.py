"""Models by name: the same seed gives the same weights, and a wrong name gets a useful answer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coordinator.models.registry import MODELS, Model, ModelEntry, build_model
from edge_client.errors import ConfigError, UsageError
from edge_client.protocol.program import Loss
from export.compiler.program import compile_program


def mine() -> ModelEntry:
    return ModelEntry(make=lambda: nn.Linear(3, 2), input=(3,), classes=2, loss="squared-error")


def rows() -> ModelEntry:
    return ModelEntry(make=lambda: nn.Linear(3, 2), input=(4, 3), target=(4, 2), loss="squared-error")


def half(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * nn.functional.mse_loss(outputs[:, 0, 0], targets, reduction="none")


def with_own_loss() -> ModelEntry:
    return replace(rows(), own_loss=half, own_targets=())


def no_entry() -> int:
    return 3


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_same_seed_gives_the_same_weights_and_another_seed_others(name: str) -> None:
    one, same, other = (build_model(name, seed=s).module.state_dict() for s in (1, 1, 2))
    assert all(torch.equal(one[k], same[k]) for k in one)
    assert any(not torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_a_model_maps_its_input_to_its_classes(name: str) -> None:
    model = build_model(name, seed=0)
    assert model.module(torch.zeros(2, *model.input)).shape == (2, model.classes)


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("digits-mlp", 4_810),
        ("mnist-mlp", 159_010),
        ("wecfl-cnn", 29_034),
        ("cifar-lenet", 62_006),
        ("femnist-cnn", 6_603_710),
        ("celeba-cnn", 31_202),
        ("letters-cnn", 1_671_578),
        ("linear-regression", 10),
    ],
)
def test_parameter_counts_are_those_of_the_papers(name: str, count: int) -> None:
    assert sum(p.numel() for p in build_model(name, seed=0).module.parameters()) == count


def test_building_leaves_torchs_global_generator_as_it_was() -> None:
    before = torch.random.get_rng_state()
    build_model("digits-mlp", seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_users_model_comes_by_import_path() -> None:
    model = build_model("tests.coordinator.models.test_registry:mine", seed=0)
    assert (model.input, model.classes, model.loss) == ((3,), 2, "squared-error")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("digit-mlp", "did you mean 'digits-mlp'"),
        ("zzz", "celeba-cnn, cifar-lenet, digits-mlp"),
        ("no.such.module:Factory", "there is no module 'no'"),
        ("json:NoSuchName", "has no 'NoSuchName'"),
        ("tests.coordinator.models.test_registry:no_entry", "is int"),
    ],
)
def test_a_wrong_name_is_answered_with_a_hint(name: str, said: str) -> None:
    with pytest.raises((ConfigError, UsageError)) as wrong:
        build_model(name, seed=0)
    assert said in str(wrong.value)
    assert "hint: " in str(wrong.value)


def test_a_users_model_may_have_targets_of_any_shape() -> None:
    model = build_model("tests.coordinator.models.test_registry:rows", seed=0)
    assert model.module(torch.zeros(5, *model.input)).shape == (5, *model.output)


def test_a_users_model_may_bring_its_loss_which_becomes_the_programs() -> None:
    model = build_model("tests.coordinator.models.test_registry:with_own_loss", seed=0)
    made = compile_program(model.module, **model.program_facts, engines=("pt2",)).program
    assert (made.own_loss, made.loss, made.target, made.truth) == (True, "squared-error", (4, 2), ())


@pytest.mark.parametrize(
    ("loss", "labels"), [("cross-entropy", (2,)), ("pixel-cross-entropy", (2,)), ("token-cross-entropy", (4,))]
)
def test_labels_for_a_loss_of_the_users_have_the_outputs_shape_without_the_classes(
    loss: Loss, labels: tuple[int, ...]
) -> None:
    model = Model(name="m", module=nn.Linear(3, 2), input=(4, 3), target=(4, 2), loss=loss, own_loss=half)
    assert model.program_facts["targets"].shape == (1, *labels)


@pytest.mark.parametrize("output", [{}, {"classes": 2, "target": (2,)}])
def test_a_model_has_one_output(output: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give classes for a classifier, or target"):
        ModelEntry(make=lambda: nn.Linear(3, 2), input=(3,), **output)
