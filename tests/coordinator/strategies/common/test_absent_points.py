from __future__ import annotations

import numpy as np
import pytest

from coordinator.strategies.common import absent_points
from coordinator.strategies.common.absent_points import recall_points, remember_points

A, B = np.array([1.0, 2.0]), np.array([3.0, 4.0])


def test_a_device_is_remembered_in_the_rounds_that_follow_until_it_is_too_old() -> None:
    extra = remember_points({"start": A}, {"a": A, "b": B}, max_age=2)
    for age in range(1, 4):
        extra = remember_points(extra, {"b": B + age}, max_age=2)
        known = recall_points(extra, {"a", "b"}, 2)
        assert sorted(known) == (["a", "b"] if age < 2 else ["b"])
        assert known["b"].tolist() == (B + age).tolist()
    assert extra["start"] is A


def test_only_asked_for_devices_of_the_same_width_are_recalled() -> None:
    extra = remember_points({}, {"a": A, "b": B}, max_age=5)
    assert sorted(recall_points(extra, {"b", "stranger"}, 2)) == ["b"]
    assert recall_points(extra, {"a", "b"}, 3) == {}


def test_without_room_the_oldest_are_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(absent_points, "MAX_VALUES", 4)  # two points of two numbers
    extra = remember_points(remember_points({}, {"a": A}, max_age=9), {"b": B, "c": B}, max_age=9)
    assert sorted(recall_points(extra, {"a", "b", "c"}, 2)) == ["b", "c"]


def test_the_input_is_left_as_it_was() -> None:
    extra = remember_points({}, {"a": A}, max_age=5)
    before = {name: value.copy() for name, value in extra.items()}
    remember_points(extra, {"b": B}, max_age=5)
    assert extra.keys() == before.keys()
    assert all((extra[name] == before[name]).all() for name in before)
