"""`secure` is refused, with a hint, beside what works on single updates."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.common.server_options import ServerOptions
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.registry import make_method
from edge_client.errors import ConfigError


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"reduce": "median"}, "robust rule"),
        ({"privacy-noise": 1.0, "secure-start": "k-means"}, "first k-means has sums without noise"),
        ({"label-prior": "device"}, "label counts"),
        ({"e-step": "k-means"}, "e-step k-means"),
        ({"representation": "projection"}, "representation"),
        ({"secure": "yes"}, "secure is 'yes'"),
        ({"secure-start": "groups"}, "secure-start is 'groups'"),
        ({"least-members": 1}, "least-members"),
        ({"secure-bits": 8}, "secure-bits"),
    ],
)
def test_a_setting_that_needs_single_updates_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words) as refused:
        make_method("fesem", **{"secure": "updates", **settings})
    assert refused.value.hint


@pytest.mark.parametrize("setting", [{"secure-bits": 24}, {"secure-clip": 10.0}, {"secure-start": "k-means"}])
def test_a_setting_of_sums_without_secure_is_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(setting))} is set and secure is off") as refused:
        make_method("fesem", **setting)
    assert "set secure = updates" in refused.value.hint
    make_method("fesem", **setting, secure="updates")


def test_secure_as_a_switch_is_answered_with_where_its_words_are() -> None:
    with pytest.raises(ConfigError, match="secure is True") as refused:
        make_method("fesem", secure=True)
    assert refused.value.hint == "use a word; docs/methods.md has those of each setting"


def test_the_hint_for_a_robust_method_does_not_lead_to_the_next_refusal() -> None:
    with pytest.raises(ConfigError, match="robust rule") as refused:
        make_method("tkm", secure="updates")
    assert "with a method other than tkm" in refused.value.hint


def test_a_method_with_a_round_of_its_own_is_refused() -> None:
    class OwnRound(FeSEM):
        round = FedAvg.round

    with pytest.raises(ConfigError, match="secure with OwnRound: its `round` works on"):
        OwnRound(server=ServerOptions(secure="updates"))
