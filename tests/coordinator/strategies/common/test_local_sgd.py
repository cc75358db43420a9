from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.strategies.baselines.fedprox import FedProx
from coordinator.strategies.common.local_sgd import LocalSgd, merge_anchors
from coordinator.strategies.registry import make_method
from edge_client.errors import ConfigError
from edge_client.protocol.task import OPTIMISERS, Optimiser


@given(s=st.integers(1, 5), seed=st.integers(0, 999))
def test_a_folded_anchor_pulls_like_all_its_summands_together(s: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    anchors, mus, w = rng.standard_normal((s, 4)), rng.random(s) + 0.01, rng.standard_normal(4)
    anchor, mu = merge_anchors(anchors, mus.tolist())
    assert anchor is not None
    np.testing.assert_allclose(mu * (w - anchor), (mus[:, None] * (w - anchors)).sum(axis=0), atol=1e-12)


def test_no_pull_needs_no_anchor_and_a_negative_one_is_refused() -> None:
    assert merge_anchors(np.ones((2, 3)), [0.0, 0.0]) == (None, 0.0)
    with pytest.raises(ValueError, match="not negative"):
        merge_anchors(np.ones((2, 3)), [1.0, -1.0])


def test_plain_sgd_needs_no_optimiser_in_its_tasks() -> None:
    fit = LocalSgd(momentum=0.5).fit(start=np.zeros(3), seed=0)
    assert (fit.momentum, fit.optimiser) == (0.5, None)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({"nesterov": True}, Optimiser(name="sgd", momentum=0.9, nesterov=True)),
        ({"clip_norm": 2.0, "momentum": 0.0}, Optimiser(name="sgd", clip_norm=2.0)),
        ({"optimiser": "adam", "adam_eps": 1e-3, "beta1": 0.5}, Optimiser(name="adam", beta1=0.5, eps=1e-3)),
        ({"optimiser": "adamw", "weight_decay": 0.1}, Optimiser(name="adamw", weight_decay=0.1)),
    ],
)
def test_settings_become_the_optimiser_of_every_fit(settings: dict[str, object], wanted: Optimiser) -> None:
    fit = LocalSgd(**settings).fit(start=np.zeros(3), seed=0)  # type: ignore[arg-type]
    assert (fit.momentum, fit.optimiser) == (0.0, wanted)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimiser": "lion"}, "use one of sgd, adam, adamw"),
        ({"beta1": 0.5}, "set optimiser = adam or adamw, or leave beta1 out"),
        ({"optimiser": "adam", "nesterov": True}, "set optimiser = sgd, or leave nesterov out"),
        ({"optimiser": "adam", "momentum": 0.5}, "set optimiser = sgd, or leave momentum out"),
        ({"nesterov": True, "momentum": 0.0}, "set a momentum above 0"),
        ({"nesterov": 1}, "use true or false"),
        ({"optimiser": "adam", "beta2": 1.0}, "use a number from 0 to"),
        ({"clip_norm": -1.0}, "use a number at least 0"),
    ],
)
def test_an_option_that_cannot_work_is_refused_with_what_to_do(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        LocalSgd(**settings)  # type: ignore[arg-type]
    assert said in refused.value.hint


@pytest.mark.parametrize("value", [True, "true"])
def test_a_switch_is_read_from_a_file_and_from_a_command_line(value: bool | str) -> None:  # noqa: FBT001 - both kinds
    assert make_method("fedavg", nesterov=value) == make_method("fedavg", nesterov=True)
    with pytest.raises(ConfigError, match="nesterov is 'yes'"):
        make_method("fedavg", nesterov="yes")


def test_the_bound_of_a_pull_is_that_of_sgd() -> None:
    """A step of Adam is about the learning rate long, however strong the pull."""
    with pytest.raises(ConfigError, match="diverges"):
        FedProx(mu=50.0)
    assert FedProx(mu=50.0, optimiser="adam").optimiser in OPTIMISERS


def test_a_method_of_the_users_own_says_steps_and_a_linear_term_and_asks_the_cohort() -> None:
    method = LocalSgd(local_steps=7, fraction_train=0.5)
    start, linear = np.zeros(3), np.ones(3)
    assert method.fit(start=start, seed=0).steps == 7
    asked = method.fit(start=start, seed=0, steps=2, linear=linear)
    assert asked.steps == 2
    assert asked.linear is linear
    fleet = {f"d{i}": 10 for i in range(7)}
    cohort = method.cohort(fleet, np.random.default_rng(0))
    assert len(set(cohort)) == 4
    assert cohort == sorted(cohort)
    assert set(cohort) <= set(fleet)
