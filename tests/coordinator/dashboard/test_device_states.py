"""What a device is said to do follows from who is connected and how far the open exchange is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coordinator.dashboard.device_states import DEVICE_STATES, device_states, late_devices


def exchange(**groups: Sequence[str]) -> dict[str, Any]:
    empty: dict[str, Any] = {group: [] for group in ("answered", "uploading", "waiting", "refused", "open")}
    return {**empty, "wanted": 2, **groups}


def test_each_group_of_the_open_exchange_has_its_word() -> None:
    presence = dict.fromkeys("abcdefg", "on")
    open_now = exchange(answered=["a"], uploading=["b"], waiting=["c"], refused=["d"], open=["e"])
    found = device_states(presence, open_now, {"f"})
    assert found == {
        "a": "answered",
        "b": "uploading",
        "c": "waiting",
        "d": "rejected",
        "e": "training",
        "f": "late",
        "g": "idle",
    }
    assert set(found.values()) <= set(DEVICE_STATES)


def test_who_sleeps_or_is_gone_does_not_train() -> None:
    presence = {"a": "sleep", "b": "lost", "c": "off"}
    assert device_states(presence, exchange(open=["a", "b", "c", "d"]), ()) == {
        "a": "sleeping",
        "b": "away",
        "c": "away",
        "d": "away",
    }


def test_a_late_device_stays_late_until_it_answers() -> None:
    late = late_devices(exchange(answered=["a"], open=["b"]), ())
    assert late == {"b"}
    assert device_states({"b": "on"}, exchange(open=["b"]), late) == {"b": "late"}
    assert late_devices(exchange(answered=["b"], open=["a"]), late) == {"a"}


def test_nobody_is_late_for_an_exchange_that_had_enough_answers() -> None:
    assert late_devices(exchange(answered=["a", "b"], open=["c"]), ()) == frozenset()
