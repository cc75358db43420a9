"""What is said of settings that can work, and are likely a mistake."""

from __future__ import annotations

import pytest

from coordinator.strategies.common.setting_checks import spare_centers
from coordinator.strategies.registry import make_method


@pytest.mark.parametrize(
    ("method", "devices", "words"),
    [
        ("fesem", 5, "clusters is 10, with 5 devices: at least 5 centers will have no device"),
        ("ifca", 9, "clusters is 10, with 9 devices: at least 1 center will have no device"),
        ("fedgroup", 1, "clusters is 10, with 1 device: at least 9 centers will have no device"),
        ("wecfl", 10, ""),
    ],
)
def test_more_centers_than_devices_are_told_with_both_numbers(method: str, devices: int, words: str) -> None:
    assert spare_centers(make_method(method, clusters=10), devices) == words


def test_a_method_without_a_number_of_centers_has_none_too_many() -> None:
    assert spare_centers(make_method("fedcenters"), 1) == spare_centers(make_method("fedavg"), 1) == ""
