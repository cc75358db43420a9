from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

from coordinator.strategies.baselines.ditto import Ditto
from coordinator.strategies.baselines.fedavg_plus import FedAvgPlus
from coordinator.strategies.baselines.feddist import FedDist
from coordinator.strategies.baselines.pfedme import PFedMe
from coordinator.strategies.clove import CLoVE
from coordinator.strategies.common.local_sgd import LocalSgd
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.fedem import FedEM
from coordinator.strategies.fedsoft import FedSoft
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.ifca import IFCA
from coordinator.strategies.registry import METHODS, Setting, make_method, method_settings
from coordinator.strategies.similarity.cfl import CFL
from coordinator.strategies.similarity.fedgroup import FedGroup
from coordinator.strategies.similarity.flhc import FLHC
from edge_client.errors import ConfigError, UsageError


def test_settings_are_typed_as_users_write_them() -> None:
    assert make_method("fesem", **{"clusters": 4, "local-steps": 7, "lam": 0}) == FeSEM(
        clusters=4, local_steps=7, lam=0.0
    )


def test_texts_from_a_command_line_become_the_settings_type() -> None:
    texts: dict[str, Setting] = {"clusters": "4", "learning-rate": "1e-2", "e-step": "k-means"}
    assert make_method("fesem", **texts) == FeSEM(clusters=4, learning_rate=0.01, e_step="k-means")


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_says_of_itself_makes_it_again(name: str) -> None:
    assert make_method(name, **method_settings(make_method(name))) == make_method(name)


def test_an_unknown_method_names_the_nearest_and_all_others() -> None:
    with pytest.raises(UsageError, match="unknown method 'fesm'") as wrong:
        make_method("fesm")
    assert "did you mean 'fesem'" in wrong.value.hint
    assert all(name in wrong.value.hint for name in METHODS)


def test_an_unknown_setting_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="no setting 'local-step'") as wrong:
        make_method("fedavg", **{"local-step": 3})
    assert "did you mean 'local-steps'" in wrong.value.hint


@pytest.mark.parametrize(
    ("key", "value"),
    [("clusters", "three"), ("clusters", 2.5), ("clusters", True), ("lam", "much"), ("clusters", "inf"), ("e-step", 1)],
)
def test_a_value_of_the_wrong_kind_is_refused(key: str, value: Setting) -> None:
    with pytest.raises(ConfigError, match=key):
        make_method("fesem", **{key: value})


NAN = float("nan")
REFUSED: list[tuple[Callable[..., object], list[dict[str, Any]]]] = [
    (LocalSgd, [{"local_steps": 0}, {"learning_rate": NAN}, {"learning_rate": -0.1}, {"momentum": 1.5}]),
    (LocalSgd, [{"batch_size": 0}, {"fraction_train": 0.0}, {"fraction_train": 1.1}]),
    (ServerOptions, [{"server_momentum": -0.1}, {"server_momentum": 1.0}, {"server_momentum": NAN}]),
    (Ditto, [{"common_weight": -0.1}, {"common_weight": 1.1}, {"common_weight": NAN}, {"lam": 21.0}]),
    (FedAvgPlus, [{"runs": 0}, {"runs": 17}]),
    (FedDist, [{"eps": 0.0}, {"eps": -0.1}, {"eps": 1.1}, {"eps": NAN}]),
    (PFedMe, [{"lam": 0.0}, {"lam": 21.0, "eta": 0.01}, {"lam": 1.0, "eta": 2.0}, {"local_rounds": 0}]),
    (PFedMe, [{"beta": 1.5}, {"beta": 0.0}]),
    (
        CFL,
        [{"criterion": "x"}, {"linkage": "ward"}, {"eps_1": -1.0}, {"smallest": 1}, {"gamma": 2.0}, {"coverage": 0.0}],
    ),
    (CLoVE, [{"clusters": 0}, {"clusters": 17}, {"restarts": 0}, {"cap": 0.4}, {"cap": 1.1}, {"cap": NAN}]),
    (FedEM, [{"clusters": 0}, {"clusters": 17}, {"start": "noise"}]),
    (FedGroup, [{"clusters": 0}, {"per_group": 0}, {"first_steps": 0}, {"restarts": 0}]),
    (FedSoft, [{"lam": -1.0}, {"lam": 21.0}, {"tau": 0}, {"sigma": 0.0}, {"select": -1}, {"local_start": "x"}]),
    (FedSoft, [{"clusters": 17}]),
    (FeSEM, [{"clusters": 0}, {"lam": -1.0}, {"lam": 11.0}, {"restarts": 0}, {"representation": "x"}, {"e_step": "x"}]),
    (FeSEM, [{"weights": "x"}, {"hysteresis": 1.0}, {"max_age": -1}]),
    (FLHC, [{"metric": "x"}, {"linkage": "x"}, {"linkage": "ward"}, {"threshold": -1.0}, {"warm_up": -1}]),
    (IFCA, [{"clusters": 0}, {"clusters": 17}, {"weights": "x"}]),
    (partial(make_method, "tkm"), [{"reduce": "mean"}, {"trim-clusters": 0.5}, {"trim-updates": -0.1}]),
    (partial(make_method, "tkm"), [{"weights": "samples"}]),
    (partial(make_method, "nonfed"), [{"reduce": "median"}, {"server-momentum": 0.5}, {"privacy-noise": 1.0}]),
    (partial(make_method, "fedavg"), [{"trim-updates": 0.3}, {"trim-updates": 0.1, "reduce": "median"}]),
]


@pytest.mark.parametrize(("method", "wrong"), [(method, wrong) for method, many in REFUSED for wrong in many])
def test_a_setting_that_cannot_work_is_refused_by_its_name_and_with_a_hint(
    method: Callable[..., object], wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        method(**wrong)
    assert refused.value.hint
    assert next(iter(wrong)).replace("_", "-") in str(refused.value)


@dataclass(frozen=True, kw_only=True, repr=False)
class HasOtherKinds(FeSEM):
    """Settings of types that no method of ours has."""

    shares: tuple[float, ...] = ()
    most: int | None = None
    option: Any = None


OTHER_KINDS = f"{__name__}:HasOtherKinds"


def test_settings_of_other_types_are_read_from_a_runs_file() -> None:
    """They ended in a KeyError with the type's name."""
    read = make_method(OTHER_KINDS, shares=[0.5, 1.0], most="3", option=[1])  # type: ignore[arg-type]
    assert read == HasOtherKinds(shares=(0.5, 1.0), most=3, option=[1])
    assert make_method(OTHER_KINDS, **method_settings(HasOtherKinds(shares=(2.0,)))) == HasOtherKinds(shares=(2.0,))


def test_a_text_does_not_become_a_list_of_its_letters() -> None:
    with pytest.raises(ConfigError, match=r"shares is '12'\n\nhint: write a list, in a file: shares = \[\.\.\.\]"):
        make_method(OTHER_KINDS, shares="12")
