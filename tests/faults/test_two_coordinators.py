"""Two coordinators never lead one federation: the lower epoch is ignored, is told so, and ends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from coordinator.identity.signing_key import open_signing_key
from coordinator.runtime.leadership import Superseded
from edge_client.protocol import messages
from edge_client.protocol.topics import Topics
from tests.support.virtual_federation import FEDERATION, Federation

TOPICS = Topics(FEDERATION)


def record(fed: Federation) -> dict[str, object]:
    """The retained record of who leads."""
    return messages.read_message(fed.world.broker.retained[TOPICS.coord()], "coord")


def copy_keys(one: Federation, other: Federation) -> None:
    """Give the other coordinator the federation's signing key."""
    open_signing_key(one.config.folder)
    other.config.folder.mkdir(parents=True)
    for name in ("signing.key", "signing.pub"):
        shutil.copy2(one.config.folder / name, other.config.folder / name)


def test_every_start_takes_a_higher_epoch_and_a_new_boot(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    seen = []
    for _ in range(3):
        fed.start_coordinator()
        fed.world.run(
            lambda: fed.world.broker.retained.get(TOPICS.coord()) is not None and record(fed)["online"] is True
        )
        seen.append((record(fed)["epoch"], record(fed)["boot"]))
        fed.world.kill("coordinator.0")
        assert record(fed)["online"] is False
    assert [epoch for epoch, _ in seen] == [1, 2, 3]
    assert len({boot for _, boot in seen}) == 3


def test_a_restored_backup_leads_with_an_epoch_above_what_the_fleet_has_seen(tmp_path: Path) -> None:
    new, restored = Federation.of(tmp_path / "new"), Federation.of(tmp_path / "restored")
    copy_keys(new, restored)
    restored.world.broker = new.world.broker
    for _ in range(4):
        new.start_coordinator()
        new.world.run(lambda: new.happened("program"))
        new.world.kill("coordinator.0")
        new.events.clear()
    restored.start_coordinator()
    restored.world.run(lambda: restored.happened("start"))
    assert [event["epoch"] for event in restored.events if event["event"] == "start"] == [5]
    restored.world.end()


def test_the_second_coordinator_leads_and_the_first_ends(tmp_path: Path) -> None:
    first = Federation.of(tmp_path)
    second = Federation(first.world, Federation.of(tmp_path / "second").config)
    copy_keys(first, second)
    first.start(3)
    first.start_mute_device("d03")
    first.world.run(lambda: first.live_since(10.0))
    second.start_coordinator(name="coordinator.1")
    with pytest.raises(Superseded, match="another coordinator leads this federation"):
        first.world.run(lambda: False)
    first.world.run(lambda: second.happened("program"))
    assert record(second)["epoch"] == 2
    first.world.end()


@pytest.mark.parametrize("count", [1, 2])
def test_a_coordinator_that_the_devices_call_old_ends_and_leads_when_it_is_started_again(
    tmp_path: Path, count: int
) -> None:
    """The broker has forgotten the record of a later coordinator, but the devices have not: a backup was restored."""
    run: dict[str, Any] = {"runs": (RunConfig(method="fedavg", rounds=2, name="fesem", settings={"local-steps": 3}),)}
    fed = Federation.of(tmp_path, quorum=0.5)
    for _ in range(3):
        fed.start(count)
        fed.world.run(lambda: sum(event["event"] == "joined" for event in fed.events) == count)
        for name in ("coordinator.0", *("d00", "d01")[:count]):
            fed.world.kill(name)
        fed.events.clear()
    fed.world.broker.retained.clear()
    old = Federation(fed.world, Federation.of(tmp_path / "old", devices=count, **run).config)
    copy_keys(fed, old)
    old.start_coordinator(name="coordinator.1")
    fed.start_devices(count)
    with pytest.raises(Superseded):
        fed.world.run(lambda: False)
    old.start_coordinator(name="coordinator.1")
    fed.world.run(lambda: old.catalog is not None)
    fed.world.end()


def test_two_federations_of_one_name_at_a_broker_are_told_of_each_other(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither ends: any client of a broker without access rules could end both."""
    first = Federation.of(tmp_path)
    second = Federation(first.world, Federation.of(tmp_path / "second").config)
    first.start_coordinator()
    first.world.run(lambda: first.happened("program"))
    caplog.clear()
    second.start_coordinator(name="coordinator.1")
    first.world.run(lambda: second.happened("program") and len(caplog.messages) >= 2)
    told = [message for message in caplog.messages if message.startswith("ignored the record at the broker")]
    assert len(told) >= 2
    assert all(f"serves federation {FEDERATION} there, give one of the two another" in message for message in told)
    first.world.end()


def test_a_lower_record_is_put_right(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    for _ in range(2):
        fed.start_coordinator()
        fed.world.run(lambda: fed.happened("program"))
        if fed.events[0]["epoch"] == 1:
            fed.world.kill("coordinator.0")
            fed.events.clear()
    boot = "0" * 16
    signature = open_signing_key(fed.config.folder).sign_record(boot, 1, FEDERATION)
    stale = json.loads(fed.world.broker.retained[TOPICS.coord()]) | {"epoch": 1, "boot": boot, **signature}
    intruder = fed.world.broker.client("intruder")
    intruder.connect()
    intruder.publish(TOPICS.coord(), messages.canonical_json(stale), retain=True)
    fed.world.run(lambda: record(fed)["epoch"] == 2)
    fed.world.end()


def test_the_will_of_an_earlier_connection_that_comes_late_is_put_right(tmp_path: Path) -> None:
    """A broker may publish it when the next connection is there. Devices were told that the coordinator is away."""
    fed = Federation.of(tmp_path)
    fed.start()
    fed.finish()
    late = {name: value for name, value in record(fed).items() if name not in ("v", "k", "id", "t", "state")}
    will = messages.write_message("coord", ident="c1-1", t_ms=0, **late | {"online": False})
    fed.world.broker.publish(None, TOPICS.coord(), will, retain=True)
    fed.world.run(lambda: record(fed)["online"] is True, limit_s=5.0)
    fed.world.broker.drop_connection(f"{FEDERATION}.coordinator.0")
    fed.world.run(lambda: (record(fed)["online"], record(fed)["link"]) == (True, 2), limit_s=5.0)
    fed.world.end()


def test_garbage_where_the_record_should_be_is_no_epoch(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.world.broker.retained[TOPICS.coord()] = b"\xff not json"
    fed.start_coordinator()
    fed.world.run(lambda: fed.happened("start"))
    assert fed.events[0]["epoch"] == 1
    fed.world.end()


def test_a_coordinator_says_goodbye_when_it_is_stopped(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    process = fed.start_coordinator()
    fed.world.run(lambda: fed.happened("program"))
    assert fed.server is not None
    fed.server.stop()
    fed.world.run(lambda: process.ended)
    assert process.error is None
    assert record(fed)["online"] is False
