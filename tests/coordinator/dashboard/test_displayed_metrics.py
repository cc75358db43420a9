"""The view says what the events say, live or read again from a file, and never grows without end."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coordinator.dashboard import displayed_metrics as views
from coordinator.dashboard import round_history as histories
from coordinator.dashboard.device_states import DEVICE_STATES
from coordinator.dashboard.displayed_metrics import DashboardView, replay_events
from coordinator.rounds.round_record import RoundRecord

COUNT = 6
Anything = Any  # what a test passes on

EXCHANGE = {
    "run": "1f",
    "round": 3,
    "exchange": 0,
    "asked": 2,
    "wanted": 2,
    "quorum": 1,
    "left_s": 9.0,
    "closed": False,
    "answered": ["d0"],
    "uploading": [],
    "waiting": [],
    "refused": [],
    "open": ["d1"],
}


def joined(number: int) -> dict[str, Any]:
    return {"event": "joined", "device": f"d{number}", "engine": "onnx", "n": 40 + number}


def round_event(
    number: int, centers: list[int], *, run: str = "fesem", refused: dict[str, str] | None = None
) -> dict[str, Any]:
    assignment = {f"d{i}": k for i, k in enumerate(centers)}
    return {
        "event": "round",
        "run": run,
        "method": "fesem",
        "round": number,
        "of": 9,
        "accuracy": {"micro": 0.5 + number / 100, "macro": 0.4},
        "f1_of_devices": {"weighted": 0.3, "unweighted": 0.2},
        "f1_pooled": 0.25,
        "per_device": {cid: i / 10 for i, cid in enumerate(assignment)},
        "per_center": [0.5, 0.25, None],
        "assignment": assignment,
        "bytes": {"down": 10 * number, "up": number},
        "seconds": 1.5,
        **({"refused": refused} if refused else {}),
    }


def seen(**changes: Anything) -> dict[str, Any]:
    return {
        "phase": "asking",
        "paused": False,
        "unix_ms": 1,
        "connected": 2,
        "bytes": {"down": 1, "up": 2},
        "since_ms": 1,
        "exchange": None,
        "presence": {"d0": "on", "d1": "sleep"},
        "heard": {},
        "devices": {},
        "names": {"1f": "fesem"},
        **changes,
    }


def test_a_round_is_shown_with_the_numbers_of_its_event() -> None:
    view = DashboardView()
    view.event(round_event(1, [0, 0, 1, 1, 0, 0]))
    view.event(event := round_event(2, [0, 1, 1, 1, 0, -1]))
    (run,) = view.snapshot()["runs"]
    line = run["lines"][-1]
    for key in ("round", "accuracy", "f1_of_devices", "f1_pooled", "per_center", "bytes", "seconds"):
        assert line[key] == event[key]
    assert (line["sizes"], line["moved"]) == ([2, 3, 0], 1)
    assert run["centers"] == [0, 1, 1, 1, 0, -1]


def test_a_round_on_masked_sums_is_shown_with_what_the_coordinator_sees() -> None:
    view = DashboardView()
    secure = {"mode": "updates+membership", "least_members": 5, "sees": "sums of 5 or more devices"}
    view.event(round_event(1, []) | {"secure": secure})
    assert view.snapshot()["runs"][0]["lines"][-1]["secure"] == secure


@given(st.lists(st.lists(st.integers(-1, 2), min_size=COUNT, max_size=COUNT), max_size=8))
def test_a_page_that_was_there_all_the_time_knows_what_a_new_one_is_told(rounds: list[list[int]]) -> None:
    live = DashboardView()
    page: dict[str, list[Any]] = {}
    events = [*(joined(i) for i in range(COUNT)), *(round_event(i, r) for i, r in enumerate(rounds, 1))]
    for event in events:
        for kind, data in live.event(event):
            page.setdefault(kind, []).append(data)
    again = replay_events(json.dumps(event) for event in events)
    assert again.snapshot() == live.snapshot()
    runs = again.snapshot()["runs"]
    assert [one["line"] for one in page.get("round", [])] == (runs[0]["lines"] if runs else [])
    assert [cid for data in page["fleet"] for cid in data.get("new", [])] == again.snapshot()["fleet"]["ids"]


def test_of_the_fleet_only_what_has_changed_is_told() -> None:
    view = DashboardView()
    first = dict(view.status(seen()))
    codes = [DEVICE_STATES.index(state) for state in ("idle", "sleeping")]
    assert [code for code, _ in first["fleet"]["states"]] == codes
    assert view.status(seen(unix_ms=2)) == []
    ((kind, told),) = view.status(seen(unix_ms=3, presence={"d0": "on", "d1": "on"}))
    assert (kind, told) == ("fleet", {"states": [[DEVICE_STATES.index("idle"), [1]]]})


def test_a_device_that_was_revoked_is_away_and_no_longer_idle() -> None:
    view = DashboardView()
    view.status(seen())
    ((kind, told),) = view.status(seen(presence={"d1": "sleep"}))  # the coordinator forgets a revoked device
    assert (kind, told) == ("fleet", {"states": [[DEVICE_STATES.index("away"), [0]]]})


def test_a_device_that_announces_more_samples_is_shown_with_them() -> None:
    view = DashboardView()
    view.event({**joined(0), "n": 0})
    assert ("fleet", {"facts": [[0, "onnx", 160]]}) in view.status(seen(devices={"d0": ("onnx", 160)}))
    assert view.snapshot()["fleet"]["samples"] == [160, 0]
    assert view.status(seen(devices={"d0": ("onnx", 160)})) == []


def test_a_device_that_only_asks_for_its_center_keeps_the_samples_that_it_trained_on() -> None:
    view = DashboardView()
    view.event({**joined(0), "n": 160})
    told = view.status(seen(devices={"d0": ("onnx", 0)}))
    assert not [message for kind, message in told if kind == "fleet" and "facts" in message]
    assert view.snapshot()["fleet"]["samples"] == [160, 0]


def test_a_phone_that_takes_part_is_shown_with_its_samples_also_from_the_file() -> None:
    events = [{**joined(0), "n": 0}, {**joined(0), "event": "offers", "n": 20}]
    assert replay_events(map(json.dumps, events)).snapshot()["fleet"]["samples"] == [20]


def test_a_device_that_fetched_a_center_is_shown_with_it() -> None:
    view = DashboardView()
    view.event({**joined(0), "n": 0})
    served = {"event": "served", "device": "d0", "center": 1, "format": "onnx"}
    assert ("fleet", {"fetched": [[0, 1]]}) in view.event(served)
    view.event({**served, "device": "d1", "center": 0})  # one that was enrolled before has no `joined`
    view.event(joined(2))
    assert view.snapshot()["fleet"]["fetched"] == [1, 0, -1]
    assert [about["fetched"] for cid in ("d0", "d1", "d2") if (about := view.device(cid))] == [1, 0, None]


def test_the_open_exchange_is_counted_by_the_name_of_its_run() -> None:
    view = DashboardView()
    view.status(seen(exchange=EXCHANGE))
    now = view.snapshot()["now"]["exchange"]
    assert (now["run"], now["id"], now["answered"], now["open"], now["quorum"]) == ("fesem", "1f", 1, 1, 1)


def test_a_device_has_its_history_and_the_reasons_why_answers_did_not_count() -> None:
    view = DashboardView()
    view.event(round_event(1, [0, 1]))
    view.event(round_event(2, [1, 1], refused={"d0": "late"}))
    about = view.device("d0")
    assert about is not None
    assert about["runs"]["fesem"] == [
        {"round": 1, "center": 0, "accuracy": 0.0},
        {"round": 2, "center": 1, "accuracy": 0.0},
    ]
    assert about["refused"] == [{"run": "fesem", "round": 2, "reason": "late"}]
    assert view.device("nobody") is None


def test_the_grid_is_sorted_by_the_newest_center() -> None:
    view = DashboardView()
    view.event(round_event(1, [1, 0, 2]))
    view.event(round_event(2, [2, 0, 1]))
    assert view.grid("fesem") == {"first": 1, "devices": ["d1", "d2", "d0"], "rows": ["00", "21", "12"], "of": 3}


def test_a_run_of_any_length_and_a_fleet_of_any_size_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MAX_CELLS", 30)
    monkeypatch.setattr(views, "MAX_DEVICES", 4)
    view = DashboardView()
    for number in range(1, 40):
        view.event(round_event(number, [0, 1, 0, 1, 0, 1]))
        view.event({"event": "served", "device": "x", "center": 0, "format": "onnx", "long": "x" * 10_000})
    (run,) = view.snapshot()["runs"]
    assert [line["round"] for line in run["lines"]] == list(range(33, 40))
    assert view.snapshot()["fleet"]["ids"] == ["d0", "d1", "d2", "d3"]
    assert len(json.dumps(view.snapshot()["events"])) < 300 * 2_000


def test_devices_that_join_share_one_line() -> None:
    view = DashboardView()
    for number in range(500):
        view.event(joined(number))
    (line,) = view.snapshot()["events"]
    assert (line["devices"], line["device"]) == (500, "d499")


def test_a_run_without_rounds_keeps_as_much_as_its_newest_records_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(histories, "MAX_ROUNDS", 3)
    history = histories.RunHistory("r", "fesem", 99)
    numbers = {f"d{i}": i for i in range(4)}
    told: dict[str, Any] = {"versions": [1, 1], "counted": 3, "tested": {"round": 0, "versions": [1, 1]}}
    sizes = []
    for number in range(1, 21):
        told["tested"]["round"] = max(0, number - 2)
        line = history.add(cast("RoundRecord", {**round_event(number, [0, 0, 1, 1]), "asynchronous": told}), numbers)
        assert (line["updates"], line["tested"]) == (3 * number, 3 * max(0, number - 2))
        sizes.append(sum(len(kept) for kept in vars(history).values() if hasattr(kept, "__len__")))
    assert sizes[3] == sizes[-1]
