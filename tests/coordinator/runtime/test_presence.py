from __future__ import annotations

from typing import Any, NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.runtime.presence import MAX_REPORTED_CLIENTS, DevicePresence, FleetPresence, TokenBucket


def born(bd: int, *, engine: str = "onnx", n: int = 10) -> dict[str, Any]:
    return {"s": "on", "bd": bd, "caps": {"engine": engine, "n": n}}


def test_the_will_of_an_earlier_connection_changes_nothing() -> None:
    fleet = FleetPresence(limit=10)
    fleet.update("a", born(1))
    fleet.update("a", born(2))
    assert not fleet.update("a", {"s": "lost", "bd": 1})
    assert (fleet.online(), fleet.count(["a", "b"]), fleet.count(["b"])) == (["a"], 1, 0)
    assert fleet.update("a", {"s": "lost", "bd": 2})
    assert (fleet.online(), fleet.count(["a", "b"])) == ([], 0)


def test_a_device_that_only_said_goodbye_is_unknown() -> None:
    fleet = FleetPresence(limit=10)
    assert not fleet.update("a", {"s": "off", "bd": 1})
    assert fleet.devices == {}


def test_the_clients_of_devices_that_are_online_are_counted_and_the_rarest_of_many_left_out() -> None:
    fleet = FleetPresence(limit=100)
    for number in range(MAX_REPORTED_CLIENTS):
        for copy in range(2):
            fleet.update(f"d{number}-{copy}", born(1) | {"sw": f"fedcenters-edge 0.{number}"})
    fleet.update("rare", born(1) | {"sw": "fedcenters-edge 9"})
    fleet.update("silent", born(1))
    fleet.update("d0-0", {"s": "off", "bd": 1})
    shown = {f"fedcenters-edge 0.{number}": 2 for number in range(1, MAX_REPORTED_CLIENTS)}
    assert fleet.clients() == {"fedcenters-edge 0.0": 1} | shown
    fleet.update("rarer", born(1) | {"sw": "fedcenters-edge 9"})
    assert fleet.clients() == shown | {"fedcenters-edge 9": 2}


def test_a_device_that_lost_its_memory_is_welcome_again() -> None:
    fleet = FleetPresence(limit=10)
    fleet.update("a", born(7))
    fleet.update("a", born(1))
    assert fleet.devices["a"].birth == 1


def test_only_devices_with_samples_and_a_compiled_engine_can_train() -> None:
    fleet = FleetPresence(limit=10)
    for cid, engine, n in (("d", "onnx", 5), ("c", "litert", 5), ("b", "onnx", 0), ("a", "onnx", 1)):
        fleet.update(cid, born(1, engine=engine, n=n))
    assert list(fleet.ready({"onnx": None})) == ["a", "d"]


def test_beyond_the_limit_a_stranger_costs_one_counter() -> None:
    fleet = FleetPresence(limit=2)
    for i in range(1000):
        fleet.update(f"d{i}", born(1))
    assert (len(fleet.devices), fleet.rejected) == (2, 998)
    assert fleet.update("d0", born(2))


def test_a_newcomer_takes_the_place_of_the_device_that_has_been_away_for_the_longest_time() -> None:
    fleet, day_ms = FleetPresence(limit=3), 24 * 3_600_000
    for unix_ms, cid in enumerate(("here", "gone", "asleep")):
        fleet.update(cid, born(1))
        fleet.mark_heard(cid, unix_ms)
    assert not fleet.update("new", born(1), unix_ms=day_ms - 60_000)  # all are online
    fleet.update("asleep", {"s": "sleep", "bd": 1})
    fleet.update("gone", {"s": "off", "bd": 1})
    assert not fleet.update("new", born(1), unix_ms=day_ms)  # not for a day yet
    all_devices, fleet.devices = fleet.devices, Unlooked(fleet.devices)
    assert not fleet.update("new", born(1), unix_ms=day_ms + 59_999)  # it looks once a minute
    fleet.devices = all_devices
    assert fleet.update("new", born(1), unix_ms=day_ms + 60_000)
    assert (sorted(fleet.devices), sorted(fleet.heard)) == (["asleep", "here", "new"], ["asleep", "here"])
    assert not fleet.update("stranger", {"s": "off", "bd": 1}, unix_ms=3 * day_ms)
    assert sorted(fleet.devices) == ["asleep", "here", "new"]
    assert fleet.rejected == 3


def test_a_device_that_only_the_broker_calls_online_keeps_its_place_for_a_day() -> None:
    """As one that died while the broker was down, which then had no will to publish."""
    fleet, day_ms, start_ms = FleetPresence(limit=2), 24 * 3_600_000, 1_700_000_000_000
    for cid in ("dead", "here"):
        fleet.update(cid, born(1), unix_ms=start_ms, retained=True)
    fleet.update("here", born(1), unix_ms=start_ms)
    fleet.mark_heard("here", start_ms)
    fleet.update("dead", born(1), unix_ms=start_ms + day_ms // 2, retained=True)  # the broker says it again
    assert not fleet.update("new", born(1), unix_ms=start_ms + day_ms - 1)
    assert fleet.update("new", born(1), unix_ms=start_ms + day_ms + 60_000)
    assert (sorted(fleet.devices), fleet.gone) == (["here", "new"], ["dead"])


@pytest.mark.parametrize("how", ["lost", "off", "its broker"])
def test_a_device_that_had_nothing_to_say_for_days_keeps_its_place_for_a_day_when_it_goes(how: str) -> None:
    """After a broker's restart the coordinator may be back minutes before the devices."""
    fleet, day_ms, start_ms = FleetPresence(limit=1), 24 * 3_600_000, 1_700_000_000_000
    fleet.update("idle", born(1), unix_ms=start_ms)
    fleet.mark_heard("idle", start_ms)
    away_ms = start_ms + 3 * day_ms
    if how == "its broker":
        fleet.doubt_all()
        fleet.drop_doubted(away_ms)
    else:  # `off` too: the broker kept it while the coordinator was away
        fleet.update("idle", {"s": how, "bd": 1}, unix_ms=away_ms, retained=True)
        fleet.update("idle", {"s": how, "bd": 1}, unix_ms=away_ms + day_ms // 2, retained=True)  # it says it again
    assert not fleet.update("new", born(1), unix_ms=away_ms + day_ms - 1)
    assert fleet.update("new", born(1), unix_ms=away_ms + day_ms + 60_000)


def test_where_the_clock_is_set_back_a_newcomer_waits_for_a_day_and_not_until_it_has_caught_up() -> None:
    fleet, day_ms, right_ms = FleetPresence(limit=1), 24 * 3_600_000, 1_700_000_000_000
    wrong_ms = right_ms + 365 * day_ms
    fleet.update("gone", born(1), unix_ms=wrong_ms)
    fleet.mark_heard("gone", wrong_ms)
    fleet.update("gone", {"s": "lost", "bd": 1}, unix_ms=wrong_ms)
    assert not fleet.update("new", born(1), unix_ms=wrong_ms)
    assert not fleet.update("new", born(1), unix_ms=right_ms)
    assert not fleet.update("new", born(1), unix_ms=right_ms + day_ms - 1)
    assert fleet.update("new", born(1), unix_ms=right_ms + day_ms + 60_000)
    assert sorted(fleet.devices) == ["new"]


@given(st.lists(st.floats(0, 1, allow_nan=False), max_size=300))
def test_no_burst_gets_more_requests_through_than_the_pace_allows(gaps: list[float]) -> None:
    pace, now_s, allowed = TokenBucket(20.0, 40.0), 0.0, 0
    for gap in gaps:
        now_s += gap
        allowed += pace.allow(now_s)
        assert allowed <= 40 + 20 * now_s + 1e-6


def test_a_refusal_is_told_once_until_something_was_allowed() -> None:
    pace = TokenBucket(1.0, 1.0)
    assert pace.allow(0.0)
    assert not pace.allow(0.0)
    assert [pace.first_refusal(), pace.first_refusal()] == [True, False]
    assert pace.allow(2.0)
    assert not pace.allow(2.0)
    assert pace.first_refusal()


class Unlooked(dict[str, DevicePresence]):
    """A fleet that cannot be gone over."""

    def _refuse(self) -> NoReturn:
        pytest.fail("the whole fleet was looked at")

    __iter__ = items = values = keys = _refuse


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from(("on", "off", "lost")),
            st.integers(1, 3),
            st.sampled_from(("onnx", "litert")),
            st.integers(0, 1),
            st.booleans(),
        )
    )
)
def test_ready_devices_are_counted_without_going_over_the_fleet(
    said: list[tuple[str, str, int, str, int, bool]],
) -> None:
    fleet = FleetPresence(limit=2)
    for cid, state, birth, engine, n, able in said:
        refused = [] if able else [{"engine": engine, "runtime": "r", "difference": 1.0}]
        caps = {"caps": {"engine": engine, "n": n, "refused": refused}} if state == "on" else {}
        fleet.update(cid, {"s": state, "bd": birth, **caps})
    assert 0 not in fleet.kinds.values()
    ready = len(fleet.ready(["onnx"]))
    others = sum(d.is_online and d.n > 0 and d.engine != "onnx" for d in fleet.devices.values())
    fleet.devices = Unlooked(fleet.devices)
    assert fleet.count_ready(["onnx"]) == (ready, others)


def test_what_a_broker_kept_counts_no_device_before_it_has_said_so_itself() -> None:
    fleet = FleetPresence(limit=10)
    for cid in "abc":
        assert fleet.update(cid, born(1), retained=True)
    assert (fleet.online(), fleet.count_ready(["onnx"]), fleet.unheard()) == ([], (0, 0), ["a", "b", "c"])
    assert fleet.update("a", born(1))
    assert fleet.confirm("b")  # another message of the device
    assert not fleet.confirm("b")
    assert not fleet.update("a", born(1), retained=True)  # a copy of the broker's that comes late
    assert (fleet.online(), fleet.count_ready(["onnx"]), fleet.unheard()) == (["a", "b"], (2, 0), ["c"])


def test_a_device_that_is_silent_on_a_new_connection_is_not_online_any_more() -> None:
    fleet = FleetPresence(limit=10)
    for cid in "abc":
        fleet.update(cid, born(1))
    fleet.doubt_all()
    assert fleet.online() == ["a", "b", "c"]  # until they had time to say it
    assert not fleet.update("a", born(1))
    fleet.update("b", born(1), retained=True)
    fleet.update("c", {"s": "lost", "bd": 1})
    fleet.drop_doubted(0)
    assert (fleet.online(), fleet.count_ready(["onnx"]), fleet.unheard()) == (["a"], (1, 0), ["b"])
    assert fleet.update("b", born(1))
    assert fleet.online() == ["a", "b"]


def test_a_revoked_device_is_forgotten_and_counts_nowhere() -> None:
    fleet = FleetPresence(limit=10)
    fleet.update("a", born(1))
    fleet.revoke(["a", "stranger"])
    assert (len(fleet.devices), fleet.count_ready(["onnx"]), sorted(fleet.revoked)) == (0, (0, 0), ["a", "stranger"])
