"""What the coordinator's loop says of a lost connection."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from coordinator.local_broker import MOSQUITTO_CONF
from coordinator.runtime.event_loop import MANY_CUTS, MOST_CUTS, SHORT_S, lost_broker
from coordinator.status_in_words import status_lines
from coordinator.storage.status import STATUS_FILE, read_status
from edge_client.errors import NetworkError
from edge_client.protocol.blocks import HEADER
from edge_client.transport.base import Disconnected
from edge_client.transport.mqtt import MqttTransport
from tests.support.guarded_broker import run_mosquitto
from tests.support.patience import patience
from tests.support.ports import free_port
from tests.support.virtual_federation import FEDERATION, TOPICS, Federation, Spy

PATIENCE_S = patience(60)
OUTAGE_S = 1_000.0


@pytest.mark.broker
@pytest.mark.parametrize("option", ["max_packet_size", "message_size_limit"])
def test_a_broker_that_takes_no_block_is_told_with_the_size_that_it_must_take(tmp_path: Path, option: str) -> None:
    """Mosquitto calls a message beyond its `message_size_limit` a protocol error, from 2.0 on."""
    port = free_port()
    text = MOSQUITTO_CONF.format(port=port, web="").replace("max_packet_size 1114112", f"{option} 9000")
    (tmp_path / "mosquitto.conf").write_text(text)
    with run_mosquitto(tmp_path / "mosquitto.conf", port):
        transport = MqttTransport(f"mqtt://127.0.0.1:{port}", "home.coordinator.0")
        transport.connect()
        transport.publish("fc/v1/home/dn/dev-1/b/0123456789abcdef/0", bytes(12_288))
        events = (transport.receive(PATIENCE_S) for _ in range(2))
        reason = next(event.reason for event in events if isinstance(event, Disconnected))
        transport.close()
    said = lost_broker(reason, 12_288)
    assert said.startswith(f"the broker is gone ({reason}): it ")
    assert f"Set its {option}" in said
    assert said.endswith("to 12800 or more, or `block` in the coordinator's file to less; connecting again")


def test_another_loss_is_told_by_its_reason() -> None:
    assert lost_broker("Connection reset", 65_536) == "the broker is gone (Connection reset); connecting again"


def test_a_broker_that_is_back_is_told_and_the_first_connection_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fed = Federation.of(tmp_path, devices=1)
    fed.start_coordinator()
    fed.world.run(lambda: fed.happened("start"))
    fed.start_mute_device("d00")
    fed.world.run(lambda: fed.happened("joined"))
    assert not [said for said in caplog.messages if "broker" in said]
    fed.world.broker.drop_connection(f"{FEDERATION}.coordinator.0")
    fed.world.run(lambda: "the broker is back" in caplog.messages)
    fed.world.end()
    gone, back = (said for said in caplog.messages if "broker" in said)
    assert (gone.startswith("the broker is gone"), back) == (True, "the broker is back")


@pytest.mark.parametrize("below_quorum", ["stop", "continue"])
def test_the_time_without_a_broker_is_taken_from_no_deadline_and_status_says_that_there_is_none(
    tmp_path: Path, below_quorum: str
) -> None:
    fed = Federation.of(tmp_path, devices=3, deadline_s=60.0, below_quorum=below_quorum)
    fed.start(3)
    fed.world.run(lambda: fed.live is not None and fed.live.progress()["round"] == 1)
    fed.world.broker.kill(f"{FEDERATION}.coordinator.0")
    began_s = fed.world.clock.time_s
    fed.world.run(lambda: fed.world.clock.time_s > began_s + OUTAGE_S)
    written = json.loads((fed.config.folder / STATUS_FILE).read_text())
    assert written["phase"] == "no broker"
    assert written["unix_ms"] > fed.world.clock.unix_ms() - 10_000  # it is written on
    first, second, *_ = status_lines(read_status(fed.config.folder))
    assert first.endswith(": no broker")
    assert "connected" not in second
    assert fed.server is not None
    assert fed.server.session is not None
    fed.server.session.transport.connect()
    fed.finish()
    assert [(each["round"], each.get("silent")) for each in fed.rounds()] == [(1, None), (2, None)]
    assert read_status(fed.config.folder)["phase"] != "no broker"


def waiting(folder: Path) -> Federation:
    """An exchange waits for a device that does not answer."""
    fed = Federation.of(folder, devices=1, deadline_s=600.0)
    fed.start_coordinator()
    fed.start_mute_device("d00")
    fed.world.run(lambda: fed.live is not None)
    return fed


def cut_after(fed: Federation, seconds: float) -> None:
    until_s = fed.world.clock.time_s + seconds
    fed.world.run(lambda: fed.world.clock.time_s >= until_s)
    fed.world.broker.drop_connection(f"{FEDERATION}.coordinator.0")


def test_a_broker_that_cuts_each_connection_soon_ends_the_run_and_is_named(tmp_path: Path) -> None:
    """As one that takes no block. No deadline ran while there was no broker, so the run went on without an end."""
    fed = waiting(tmp_path)
    for seconds in (*[1.0] * (MANY_CUTS - 1), SHORT_S + 1.0, *[1.0] * (MANY_CUTS - 1)):  # one that lasted begins anew
        cut_after(fed, seconds)
    cut_after(fed, 1.0)
    with pytest.raises(NetworkError, match=f"has cut the connection {MANY_CUTS} times"):
        fed.finish()


def test_a_link_that_breaks_each_minute_ends_no_run_while_blocks_of_an_answer_come(tmp_path: Path) -> None:
    """A large update over a mobile link may need more than ten connections."""
    fed = waiting(tmp_path)
    assert fed.server is not None
    assert fed.server.session is not None
    spy, session = Spy(fed.world.broker), fed.server.session
    for number in range(MANY_CUTS + 1):
        fed.world.run(lambda: session.sender.link > number)  # noqa: B023 - used at once
        spy.publish(TOPICS.upload(0, "d00", "0" * 16, number), b"a part of it")
        cut_after(fed, 1.0)
    fed.world.run(lambda: session.sender.link > MANY_CUTS + 1)
    fed.world.end()
    assert not fed.happened("error")


@pytest.mark.parametrize("part", ["block of an answer", "block of a model"])
def test_a_device_that_lets_parts_arrive_for_ever_keeps_no_run_from_its_end(tmp_path: Path, part: str) -> None:
    """One block of an upload that is never announced, or the same block of a model again: each was progress."""
    fed = waiting(tmp_path)
    assert fed.server is not None
    assert fed.server.session is not None
    spy, session, mark = Spy(fed.world.broker), fed.server.session, 0
    cut_after(fed, 0.1)
    for number in range(MOST_CUTS - 1):
        fed.world.run(lambda: session.sender.link > number + 1 and spy.said("task", cid="d00") != [])  # noqa: B023 - used at once
        if part == "block of an answer":
            spy.publish(TOPICS.upload(0, "d00", "0" * 16, 0), b"of no upload")
        else:
            start = spy.said("task", cid="d00")[-1]["start"]
            spy.say("d00", "get", sha256=start["sha256"], block=start["block"], at=[[0, 1]], mark=mark)
            fed.world.run(lambda: len(marks(spy)) > number)  # noqa: B023
            mark = marks(spy)[-1]
        cut_after(fed, 0.1)
    with pytest.raises(NetworkError, match=f"cut the connection {MOST_CUTS} times.* and no answer of d00 arrived"):
        fed.finish()


def marks(spy: Spy) -> list[int]:
    """Of the blocks that were sent to the device, oldest first."""
    return [HEADER.unpack_from(e.payload)[2] for e in spy.heard() if TOPICS.parse(e.topic).kind == "b"]


def test_a_link_that_breaks_each_minute_ends_no_run_while_blocks_arrive_at_a_device(tmp_path: Path) -> None:
    """A large model over such a link needs as many connections; the device shows that blocks came when it asks on."""
    fed = waiting(tmp_path)
    assert fed.server is not None
    assert fed.server.session is not None
    spy, session, mark = Spy(fed.world.broker), fed.server.session, 0
    cut_after(fed, 1.0)  # the task is sent again
    for number in range(MANY_CUTS + 1):
        fed.world.run(lambda: session.sender.link > number + 1 and spy.said("task", cid="d00") != [])  # noqa: B023 - used at once
        start = spy.said("task", cid="d00")[-1]["start"]
        spy.say("d00", "get", sha256=start["sha256"], block=start["block"], at=[[0, 1]], mark=mark)
        fed.world.run(lambda: len(marks(spy)) > number)  # noqa: B023
        mark = marks(spy)[-1]
        cut_after(fed, 1.0)
    fed.world.run(lambda: session.sender.link > MANY_CUTS + 2)
    fed.world.end()
    assert not fed.happened("error")
