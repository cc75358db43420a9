"""Which methods and settings work without rounds, and what the others are told."""

from __future__ import annotations

import pytest

from coordinator.rounds.asynchronous.options import Asynchronous, check_asynchronous
from coordinator.strategies.registry import METHODS, make_method
from edge_client.errors import ConfigError

FLEET = {f"d{i}": 10 + i for i in range(8)}
REASONS = {
    "cfl": "concurrency with CFL: its `round` works on whole rounds",
    "wecfl": "Gram matrix",
    "tkm": "its `_cluster`",
    "fedem": "its `round`",
    "fedavg-late": "its `_updates`",
    "fedsgd": "concurrency with FedSGD: it is no method of local SGD",
}


@pytest.mark.parametrize("name", sorted(METHODS))
def test_every_method_either_works_without_rounds_or_is_refused_with_a_reason_and_a_way_out(name: str) -> None:
    if name in ("fedavg", "fedprox", "fesem", "hypcluster", "ifca"):
        check_asynchronous(make_method(name), FLEET)
        return
    with pytest.raises(ConfigError, match=REASONS.get(name, "concurrency with")) as wrong:
        check_asynchronous(make_method(name), FLEET)
    assert "leave out concurrency" in str(wrong.value.hint)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("reduce", "median"),
        ("privacy-noise", 1.0),
        ("secure", "updates"),
        ("fraction-train", 0.5),
        ("label-prior", "device"),
    ],
)
def test_what_needs_a_whole_round_is_refused_by_name(setting: str, value: str | float) -> None:
    with pytest.raises(ConfigError, match=f"concurrency with {setting}"):
        check_asynchronous(make_method("fedavg", **{setting: value}), FLEET)


@pytest.mark.parametrize(("option", "least"), [("concurrency", 1), ("buffer", 1), ("max_staleness", 0)])
def test_an_option_below_its_least_value_is_refused_by_name(option: str, least: int) -> None:
    assert getattr(Asynchronous(**{"concurrency": 4, option: least}), option) == least
    with pytest.raises(ConfigError, match=option.replace("_", "-")):
        Asynchronous(**{"concurrency": 4, option: least - 1})
    assert Asynchronous(concurrency=4) == Asynchronous(concurrency=4, buffer=10, max_staleness=20)


def test_wecfl_works_without_rounds_where_each_update_goes_to_the_nearest_center() -> None:
    check_asynchronous(make_method("wecfl", **{"e-step": "nearest"}), FLEET)
