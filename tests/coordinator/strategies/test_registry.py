from __future__ import annotations

import pytest

from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.registry import METHODS, Setting, make_method, method_settings
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
