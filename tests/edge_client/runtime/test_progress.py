"""A device says in one line each that it is connected, what it waits for, each round, what it sends, and why not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_client.config import ClientConfig
from edge_client.errors import DeviceRefused
from edge_client.join import reporter
from edge_client.runtime import client as client_module
from edge_client.runtime.progress import format_device_event
from tests.support import softmax_program
from tests.support.virtual_federation import Federation


def lines(fed: Federation, cid: str) -> list[str]:
    return [text for event in fed.told[cid] if (text := format_device_event(event))]


def test_a_device_tells_its_life_from_the_connection_to_the_end(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=2)
    fed.start_coordinator()
    fed.start_devices(1)
    fed.world.run(lambda: fed.world.clock.time_s > 5.0)
    fed.start_device("d01", softmax_program.grouped_fleet(2, 2)["d01"])
    fed.finish()
    fed.world.run(lambda: "serve" in [event.get("doing") for event in fed.told["d00"]])
    fed.world.end()
    told = lines(fed, "d00")
    n = len(softmax_program.grouped_fleet(2, 2)["d00"].train)
    first = told.index(f"round 1 of 2: trains on {n} samples")
    assert told[0] == "connected to memory"
    assert "waiting: 1 of 2 devices" in told[1:first]
    assert not any("takes part" in line for line in told)
    results = [event for event in fed.told["d00"] if event["event"] == "result" and event["job"] == "fit"]
    assert [event["round"] for event in results] == [1, 2]
    for event in results:
        said = f"round {event['round']} of 2: loss {event['loss']:.3f} after 0.0 s; sends {event['bytes']} bytes"
        assert f"{said} of weight differences" in told
        assert f"round {event['round']} of 2: accepted" in told
    assert sum("measured models on its samples" in line for line in told) == 2
    way = "stop this client and give the same --config to `fedcenters-edge nearest`, which prints where the file is"
    assert told[-1] == f"done: training is over; to get the center that fits as a file, {way}"


def test_a_device_that_joins_late_says_when_it_takes_part(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, rounds=4, quorum=0.5, deadline_s=30.0)
    fed.start_coordinator()
    fed.start_devices(3)
    fed.start_mute_device("d03")  # each exchange lasts until its deadline
    fed.world.run(lambda: fed.happened("round"))
    fed.start_device("a04", softmax_program.grouped_fleet(5, 2)["d04"])
    fed.finish()
    fed.world.end()
    told = lines(fed, "a04")
    assert told[1].startswith("waiting: fesem is in round ")
    assert told[1].endswith(" of 4; a new device takes part from the next round")
    assert told[2].startswith("round 3 of 4: measured models on its samples")  # to begin at the best center
    assert told[4].startswith("round 4 of 4: trains on ")


def test_a_coordinator_that_goes_away_is_told_and_a_new_one_says_what_it_does(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=2)
    fed.start_coordinator()
    fed.start_devices(1)
    fed.world.run(lambda: fed.world.clock.time_s > 5.0)
    fed.world.kill("coordinator.0")
    fed.world.run(lambda: {"event": "coordinator", "online": False} in fed.told["d00"])
    fed.world.end()
    assert lines(fed, "d00")[-1] == "the coordinator is away; waiting for it"


def test_a_refusal_is_told_with_its_reason_and_the_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def low(_config: ClientConfig) -> None:
        raise DeviceRefused("battery is at 3 %", retry_s=600)

    monkeypatch.setattr(client_module, "check_may_train", low)
    fed = Federation.of(tmp_path, devices=1, quorum=0.0, below_quorum="continue", rounds=1)
    fed.start_coordinator()
    fed.start_devices(1)
    fed.finish()
    fed.world.end()
    assert "round 1 of 1: refused: battery is at 3 %" in lines(fed, "d00")


def test_events_are_lines_of_text_or_json_objects_or_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    event = {"event": "answered", "round": 3, "of": 10, "job": "fit", "status": "late", "detail": ""}
    reporter("pi-1")(event)
    assert tuple(capsys.readouterr()) == ("", "pi-1: round 3 of 10: not counted: late\n")
    reporter("pi-1", quiet=True)(event)
    assert tuple(capsys.readouterr()) == ("", "")
    reporter("pi-1", as_json=True)(event)
    out, err = capsys.readouterr()
    assert (json.loads(out), err) == ({"device": "pi-1", **event}, "")


def test_a_device_tells_the_count_with_itself_and_not_the_one_before_it_came(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=2)
    fed.start_coordinator()
    fed.world.run(lambda: fed.world.clock.time_s > 5.0)
    fed.start_devices(1)
    fed.world.run(lambda: fed.world.clock.time_s > 15.0)
    fed.world.end()
    assert lines(fed, "d00") == ["connected to memory", "waiting: 1 of 2 devices"]
