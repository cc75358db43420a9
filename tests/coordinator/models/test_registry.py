"""Models by name: the same seed gives the same weights, and a wrong name gets a useful answer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from coordinator.models.registry import MODELS, ModelEntry, build_model
from edge_client.errors import ConfigError, UsageError


def mine() -> ModelEntry:
    return ModelEntry(make=lambda: nn.Linear(3, 2), input=(3,), classes=2, loss="squared-error")


def rows() -> ModelEntry:
    return ModelEntry(make=lambda: nn.Linear(3, 2), input=(4, 3), target=(4, 2), loss="squared-error")


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


@pytest.mark.parametrize("output", [{}, {"classes": 2, "target": (2,)}])
def test_a_model_has_one_output(output: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="give classes for a classifier, or target"):
        ModelEntry(make=lambda: nn.Linear(3, 2), input=(3,), **output)
