"""A sum of models: what a step moves by its switches, where members lie in its vector, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from coordinator.models.members import SumLayout, summed_name
from coordinator.models.registry import Model, build_model, summed
from coordinator.models.sums import Sum
from edge_client.data.dataset import Dataset
from edge_client.errors import ConfigError
from edge_client.protocol.task import Fit
from edge_client.training.fit_probe import run_fit
from emulator.engines.cpu.cpu_engine import cpu_recipe
from export.compiler.program import schema_of, vector_of

TWO = build_model("digits-mlp+digits-mlp", seed=0)
SCHEMA = schema_of(TWO.module)
LAYOUT = SumLayout(SCHEMA, 2)
START = vector_of(TWO.module, SCHEMA)


def samples() -> Dataset:
    rng = np.random.default_rng(0)
    return Dataset(rng.standard_normal((24, 1, 8, 8)).astype(np.float32), rng.integers(10, size=24))


def test_a_sum_begins_as_its_first_member_and_the_members_differ() -> None:
    x = torch.from_numpy(samples().x)
    first = build_model("digits-mlp", seed=0).module
    torch.testing.assert_close(TWO.module.eval()(x), first.eval()(x))
    one, other = (START[places] for places in LAYOUT.places)
    assert len(one) == len(other)
    assert not np.array_equal(one, other)


@pytest.mark.parametrize("member", [0, 1, -1])
def test_a_step_moves_the_member_that_is_switched_on_and_no_other(member: int) -> None:
    learner = cpu_recipe(TWO).open()
    sent = LAYOUT.with_trained(START, member)
    found = run_fit(learner, Fit(start=sent, steps=3, lr=0.1, momentum=0.9, batch=8, seed=0), samples()).vector
    moved = [bool((found[places] != sent[places]).any()) for places in LAYOUT.places]
    assert moved == [m == member % 2 for m in range(2)]
    np.testing.assert_array_equal(found[SCHEMA.slices["trained"]], sent[SCHEMA.slices["trained"]])


def test_the_gradient_of_a_member_is_that_of_the_loss_of_the_sum() -> None:
    """By hand, in torch: the other member's output is a constant that is added."""
    x, y = torch.from_numpy(samples().x), torch.from_numpy(samples().y)
    module = Sum([build_model("digits-mlp", seed=s).module.double() for s in (0, 1)]).train()
    nn.init.normal_(module.members[1][3].weight)  # type: ignore[index]
    module.trained[:] = torch.tensor([0.0, 1.0])
    fixed, moved = module.members
    own = list(moved.parameters())
    got = torch.autograd.grad(nn.functional.cross_entropy(module(x.double()), y), [*fixed.parameters(), *own])
    by_hand = nn.functional.cross_entropy(fixed(x.double()).detach() + moved(x.double()), y)
    assert not any(gradient.any() for gradient in got[: -len(own)])
    for mine, theirs in zip(got[-len(own) :], torch.autograd.grad(by_hand, own), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_vector_takes_a_member_of_another_and_keeps_the_rest() -> None:
    other = START + 1
    mixed = LAYOUT.with_member(START, -1, other)
    np.testing.assert_array_equal(mixed[LAYOUT.places[1]], other[LAYOUT.places[1]])
    np.testing.assert_array_equal(mixed[~LAYOUT.places[1]], START[~LAYOUT.places[1]])
    np.testing.assert_array_equal(LAYOUT.with_trained(START), START)
    assert LAYOUT.with_trained(np.stack([START, other]), 0)[:, SCHEMA.slices["trained"]].tolist() == [[1, 0], [1, 0]]


def test_names_of_sums_are_built_and_stay() -> None:
    assert summed_name("a", 1) == "a"
    assert summed_name("a", 3) == "a+a+a"
    assert summed_name("a+b", 3) == "a+b"
    mixed = build_model("mnist-mlp+wecfl-cnn", seed=0)
    assert isinstance(mixed.module, Sum)
    assert (mixed.name, mixed.input, mixed.output) == ("mnist-mlp+wecfl-cnn", (1, 28, 28), (10,))


def test_a_model_of_the_users_is_summed_once() -> None:
    mine = Model(name="Net", module=nn.Linear(4, 2), input=(4,), classes=2)
    assert summed(mine, 1) is mine
    two = summed(mine, 2)
    assert two.name == "Net+Net"
    assert summed(two, 2) is two
    assert "members.0.weight" not in dict(mine.module.named_parameters())


def test_models_of_other_samples_cannot_be_added() -> None:
    with pytest.raises(ConfigError, match="takes") as refused:
        build_model("digits-mlp+mnist-mlp", seed=0)
    assert "same samples" in str(refused.value.hint)
    with pytest.raises(ConfigError, match="a sum itself"):
        Sum([TWO.module, TWO.module])


@pytest.mark.parametrize(("name", "members", "told"), [("digits-mlp", 2, "none"), ("digits-mlp+digits-mlp", 3, "of 2")])
def test_a_method_says_what_sum_it_needs(name: str, members: int, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        SumLayout(schema_of(build_model(name, seed=0).module), members)
    assert "digits-mlp+digits-mlp" in str(refused.value.hint)
