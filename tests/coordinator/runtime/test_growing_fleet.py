"""Devices that join before the start are waited for; devices that join later are let in at the next round."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.local_broker import Broker
from coordinator.runtime.presence import FleetPresence
from coordinator.runtime.server import Server
from coordinator.runtime.training_fleet import TrainingFleet
from coordinator.storage.event_log import EventLog
from coordinator.storage.status import read_status
from coordinator.storage.store import Store
from coordinator.strategies.baselines.fedavg import FedAvg
from edge_client.runtime.client import Client
from edge_client.runtime.progress import format_device_event
from edge_client.transport.clock import SystemClock
from tests.support import softmax_program
from tests.support.mqtt_device import coordinator_dial, mqtt_device
from tests.support.virtual_federation import Federation, Spy, config, seed_program

LATE = "a04"  # the first in the order of the virtual world's turns, so that it is heard at once


@dataclass(frozen=True, kw_only=True)
class FixedFleet(FedAvg):
    """A method of a user's own that says that its fleet stays as it is."""

    takes_newcomers = False


def run_of(method: str, **settings: Any) -> RunConfig:  # noqa: ANN401 - the method's
    name = method.rpartition(":")[2].lower()
    return RunConfig(method=method, rounds=4, name=name, settings={"local-steps": 3, "batch-size": 8, **settings})


def start_late(fed: Federation) -> None:
    fed.start_device(LATE, softmax_program.grouped_fleet(5, 2)["d04"])


def at(fed: Federation) -> tuple[str, int]:
    """The run and the round whose exchange is open."""
    if fed.live is None or fed.store is None:
        return "", 0
    return fed.store.states.run_names()[fed.live.key.run], fed.live.key.round


def devices_of(fed: Federation, run: str) -> list[list[str]]:
    """Which devices every round of a run has tested."""
    return [sorted(record["per_device"]) for record in fed.rounds() if record["run"] == run]


def test_the_coordinator_waits_for_its_devices_without_an_end_and_says_how_many_are_here(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=3)
    fed.start_coordinator()
    fed.start_devices(2)
    fed.world.run(lambda: fed.world.clock.time_s > 600.0)  # it once left after 300
    assert [e for e in fed.progress if e["event"] == "waiting"][-1] == {"event": "waiting", "here": 2, "needed": 3}
    assert (read_status(fed.config.folder)["here"], read_status(fed.config.folder)["needed"]) == (2, 3)
    fed.start_device("d02", softmax_program.grouped_fleet(3, 2)["d02"])
    fed.finish()
    fed.world.end()
    assert devices_of(fed, "fesem") == [["d00", "d01", "d02"]] * 2


def test_a_coordinator_waits_for_no_device_once_enough_are_here(tmp_path: Path) -> None:
    """`waiting: 300 of 250 devices` was its last line before the training."""
    fed = Federation.of(tmp_path, devices=3)
    fed.play()
    waited = [(event["here"], event["needed"]) for event in fed.progress if event["event"] == "waiting"]
    assert waited
    assert [(here, needed) for here, needed in waited if here >= needed] == []


def test_a_device_without_samples_asks_for_the_program_too(tmp_path: Path) -> None:
    """A phone's page learns from the program what its user can add."""
    asked, presence = list[list[str]](), FleetPresence(limit=9)
    with closing(Store(tmp_path)) as store:
        log = EventLog(tmp_path / "metrics.jsonl", store.events, lambda _: None, lambda: 0)
        fleet = TrainingFleet(store, presence, ["onnx", "pt2"], log, lambda engines: asked.append(sorted(engines)))
        assert not fleet.is_asked_for()
        presence.update("phone", {"s": "on", "bd": 1, "caps": {"engine": "onnx", "n": 0}})
        assert fleet.is_asked_for()
        assert fleet.ready() == {}
        fleet.compile_program()
    assert asked == [["onnx"]]


@pytest.mark.parametrize("method", ["fesem", "fedavg", "fedem"])
def test_a_device_that_joins_during_a_round_takes_part_from_the_next_one(method: str, tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, runs=(run_of(method),))
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: fed.happened("round"))
    start_late(fed)
    fed.finish()
    fed.world.end()
    four = ["d00", "d01", "d02", "d03"]
    assert devices_of(fed, method) == [four, four, [LATE, *four], [LATE, *four]]
    assert [(e["device"], e["run"], e["round"]) for e in fed.events if e["event"] == "let-in"] == [(LATE, method, 3)]
    assert {task["round"] for task in spy.said("task", cid=LATE)} == {3, 4}
    assert spy.said("nack") == []


def test_rounds_from_before_a_device_joined_are_played_again_without_it_where_their_states_are_damaged(
    tmp_path: Path,
) -> None:
    """They were asked of it, too, so that the coordinator could not go on: `asks other things than before`."""
    calm, rough = (Federation.of(tmp_path / name, runs=(run_of("fesem", clusters=2),)) for name in ("calm", "rough"))
    for fed in (calm, rough):
        fed.start_coordinator()
        fed.start_devices(4)
        fed.world.run(lambda: fed.happened("round"))  # noqa: B023 - used at once
        start_late(fed)
        fed.world.run(lambda: sum(event["event"] == "round" for event in fed.events) == 3)  # noqa: B023
        if fed is rough:
            fed.world.kill("coordinator.0")
            with closing(Store(fed.config.folder / "store")) as store:
                for (blob,) in store.database.rows("select blob from states where round > 0"):
                    store.blobs.path(blob).write_bytes(b"rot")
            fed.start_coordinator()
        fed.complete()
    assert rough.final_states() == calm.final_states()


@pytest.mark.parametrize(("method", "joins"), [("fedavg", [LATE]), (f"{__name__}:FixedFleet", [])])
def test_further_rounds_of_a_run_have_the_devices_that_joined_in_the_run_after_it_unless_its_fleet_is_fixed(
    method: str, joins: list[str], tmp_path: Path
) -> None:
    first, second = run_of(method), replace(run_of("fesem", clusters=2), name="second")
    fed = Federation.of(tmp_path, runs=(replace(first, rounds=2), second))
    fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: any(event["event"] == "round" and event["run"] == "second" for event in fed.events))
    start_late(fed)
    fed.complete()
    assert devices_of(fed, "second")[-1] == [LATE, "d00", "d01", "d02", "d03"]
    before = fed.final_states()
    again = Federation.of(tmp_path, runs=(first, second))
    again.start_coordinator()
    again.start_devices(4)
    start_late(again)
    again.complete()
    four = ["d00", "d01", "d02", "d03"]
    assert devices_of(again, first.name) == [four, four, [*joins, *four], [*joins, *four]]
    assert again.final_states()["second"] == before["second"]


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("how", ["plain", "secure"])
def test_a_round_under_way_keeps_its_fleet_where_the_run_before_it_gets_more_rounds(
    how: str, number: int, tmp_path: Path
) -> None:
    """That run let a device in, which the round was then to ask, too: the coordinator could not go on.

    Of `secure`, exchange 0 asks for keys; in round 2 there is none, because all devices have unused ones.
    """
    secure: dict[str, Any] = {"secure": "updates", "secure-bits": 24, "secure-clip": 10.0}
    first, second = run_of("fedavg"), replace(run_of("fedavg", **(secure if how == "secure" else {})), name="second")
    fed = Federation.of(tmp_path, devices=6, runs=(replace(first, rounds=2), second))
    fed.start_coordinator()
    fed.start_devices(6)
    fed.world.run(lambda: at(fed) == ("second", number))
    fed.world.end()
    again = Federation.of(tmp_path, devices=6, runs=(first, second))
    again.start_coordinator()
    again.start_devices(6)
    start_late(again)
    again.world.run(lambda: at(again) == ("fedavg", 3))
    assert again.server is not None
    again.server.pause()  # the rounds take no time, and a device needs some to announce itself
    again.world.run(lambda: any(e["event"] == "joined" and e["device"] == LATE for e in again.events))
    again.server.resume()
    again.complete()
    told = [(e["device"], e["run"], e["round"]) for e in again.events if e["event"] == "let-in"]
    assert told == [(LATE, "second", number + 1)]
    assert len(devices_of(again, "second")) == 4


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("writes", [1, 3, 6, 9, 14])
def test_a_killed_coordinator_replays_a_fleet_that_has_grown_bit_for_bit(
    fraction: float, writes: int, tmp_path: Path
) -> None:
    runs = (run_of("fesem", clusters=2, restarts=3, **{"fraction-train": fraction}),)
    calm, rough = (Federation.of(tmp_path / name, runs=runs) for name in ("calm", "rough"))
    for fed in (calm, rough):
        participant = fed.start_coordinator()
        fed.start_devices(4)
        fed.world.run(lambda: fed.happened("round"))  # noqa: B023 - used at once
        start_late(fed)
        if fed is rough:
            fed.world.run(lambda: fed.happened("let-in"))  # noqa: B023 - used at once
            assert fed.store is not None
            fed.store.database.fatal = fed.store.database.writes + writes
            fed.world.run(lambda: participant.ended)  # noqa: B023 - used at once
            fed.start_coordinator()
        fed.finish()
        fed.world.end()
    assert calm.final_states() == rough.final_states()
    assert calm.rounds() == rough.rounds()
    assert len([e for e in rough.events if e["event"] == "let-in"]) == 1


def test_a_round_that_is_replayed_lets_no_device_in(tmp_path: Path) -> None:
    """Its tasks are stored already; another fleet would give others."""
    fed = Federation.of(tmp_path, runs=(run_of("fedavg", **{"fraction-train": 0.5}),))
    fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: fed.live is not None and fed.live.key.round == 2)
    fed.world.kill("coordinator.0")
    start_late(fed)
    fed.start_coordinator()
    fed.world.run(lambda: fed.live is not None)
    assert fed.server is not None
    fed.server.pause()  # the rounds take no time, and a device needs some to announce itself to the new process
    fed.world.run(lambda: any(e["event"] == "joined" and e["device"] == LATE for e in fed.events))
    fed.server.resume()
    fed.finish()
    fed.world.end()
    assert [(e["device"], e["round"]) for e in fed.events if e["event"] == "let-in"] == [(LATE, 3)]


def test_a_method_with_a_fixed_fleet_takes_it_from_the_next_run_and_both_sides_are_told(tmp_path: Path) -> None:
    method = f"{__name__}:FixedFleet"
    second = replace(run_of(method), rounds=2, name="second")
    fed = Federation.of(tmp_path, runs=(replace(run_of(method), rounds=3), second))
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_devices(4)
    fed.world.run(lambda: fed.happened("round"))
    start_late(fed)
    fed.finish()
    fed.world.end()
    four = ["d00", "d01", "d02", "d03"]
    assert devices_of(fed, "fixedfleet") == [four] * 3
    assert devices_of(fed, "second") == [[LATE, *four]] * 2
    (joined,) = [e for e in fed.events if e["event"] == "joined" and e["device"] == LATE]
    assert joined["takes_part"] == "next-run"
    states = [record["state"]["newcomers"] for record in spy.records() if "state" in record]
    assert list(dict.fromkeys(states)) == ["now", "next-run", "no"]


def test_after_the_last_round_a_new_device_is_told_that_it_came_too_late(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, rounds=1)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_devices(4)
    fed.finish()
    start_late(fed)
    fed.start_mute_device("visitor", n=0)  # it asks for a center and has nothing to train on
    fed.world.run(lambda: {LATE, "visitor"} <= {e.get("device") for e in fed.events})
    fed.world.run(lambda: "state" in spy.records()[-1] and spy.records()[-1]["state"]["doing"] == "serve")
    fed.world.end()
    told = {e["device"]: e.get("takes_part") for e in fed.events if e["event"] == "joined"}
    assert (told[LATE], told["visitor"]) == ("no", None)


def test_a_device_whose_engine_the_program_lacks_is_named_with_the_reason(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=2)
    fed.start_coordinator()
    fed.start_devices(1)
    fed.start_mute_device("d09", engine="litert")
    fed.world.run(lambda: fed.happened("left-out"))
    fed.world.end()
    (told,) = [e for e in fed.events if e["event"] == "left-out"]
    assert (told["device"], told["why"]) == ("d09", "the program is not for litert; it is for onnx")


@pytest.mark.broker
def test_over_mosquitto_a_late_device_trains_and_both_sides_say_so(tmp_path: Path, mosquitto: Broker) -> None:
    made = config(tmp_path / "run", devices=2, rounds=1_000)
    key, locals_ = open_signing_key(made.folder).public, softmax_program.grouped_fleet(3, 2)
    clients: dict[str, Client] = {}
    events: list[Mapping[str, Any]] = []
    told: list[str] = []

    def start(cid: str) -> None:
        def tell(event: Mapping[str, Any]) -> None:
            told.append(f"{cid}: {format_device_event(event)}")

        clients[cid] = mqtt_device(mosquitto.url, cid, tmp_path, locals_[cid], key=key, tell=tell)
        threading.Thread(target=clients[cid].run, daemon=True).start()

    def watch(event: Mapping[str, Any]) -> None:
        events.append(event)
        rounds = [e["round"] for e in events if e["event"] == "let-in"]
        if event["event"] == "round" and event["round"] == 1:
            start("d02")
        elif event["event"] == "round" and rounds and event["round"] > rounds[0] + 1:
            server.stop()

    with closing(Store(made.folder / "store")) as store:
        seed_program(store)
        server = Server(made, store, dial=coordinator_dial(mosquitto.url), clock=SystemClock(), watch=watch)
        for cid in ("d00", "d01"):
            start(cid)
        server.run()
    for client in clients.values():
        client.stop()
    (first,) = [e["round"] for e in events if e["event"] == "let-in"]
    (joined,) = [e for e in events if e["event"] == "joined" and e["device"] == "d02"]
    assert joined["takes_part"] == "next-round"
    tested = {e["round"]: sorted(e["per_device"]) for e in events if e["event"] == "round"}
    assert (tested[first - 1], tested[first]) == (["d00", "d01"], ["d00", "d01", "d02"])
    assert any(line.startswith(f"d02: round {first} of 1000: measured models on its samples") for line in told)
    assert f"d02: round {first + 1} of 1000: trains on {len(locals_['d02'].train)} samples" in told
