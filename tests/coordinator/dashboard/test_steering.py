"""Pause, resume, close and stop, honoured by a real coordinator between real devices, in virtual time."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.runtime.server import Server
from coordinator.storage.exchange_store import ExchangeKey
from edge_client.errors import NetworkError
from tests.support.virtual_federation import Federation

WHILE_S = 500.0


def running(fed: Federation) -> Server:
    assert fed.server is not None
    return fed.server


def open_key(fed: Federation) -> ExchangeKey | None:
    """Of the exchange that is open."""
    return None if fed.live is None else fed.live.key


def rounds(fed: Federation) -> int:
    return sum(event["event"] == "round" for event in fed.events)


def passed(fed: Federation, seconds: float) -> None:
    until_s = fed.world.clock.time_s + seconds
    fed.world.run(lambda: fed.world.clock.time_s >= until_s)


def test_while_it_pauses_no_exchange_is_begun_and_afterwards_the_run_is_the_same(tmp_path: Path) -> None:
    plain = Federation.of(tmp_path / "plain")
    plain.start(4)
    plain.finish()
    plain.world.end()

    fed = Federation.of(tmp_path / "paused")
    fed.start(4)
    fed.world.run(lambda: fed.happened("round"))
    running(fed).pause()
    passed(fed, WHILE_S)
    assert rounds(fed) == 1
    assert fed.live is None
    running(fed).resume()
    fed.finish()
    assert fed.rounds() == plain.rounds()


def test_a_closed_exchange_goes_on_with_those_who_have_answered(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=0.5, deadline_s=10_000.0)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: fed.live_since(60.0))
    began_s = fed.world.clock.time_s
    key = open_key(fed)
    assert key is not None
    running(fed).close_round(key)
    fed.world.run(lambda: open_key(fed) != key)
    assert fed.world.clock.time_s - began_s < 5.0
    store = fed.store
    assert store is not None
    assert store.exchanges.closed_with(key) == ["d00", "d01", "d02"]


def test_closing_below_the_quorum_does_what_the_deadline_would_do(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, quorum=1.0, deadline_s=10_000.0)
    fed.start(3)
    fed.start_mute_device("d03")
    fed.world.run(lambda: fed.live_since(60.0))
    key = open_key(fed)
    assert key is not None
    running(fed).close_round(key)
    with pytest.raises(NetworkError, match="only 3 of 4 devices"):
        fed.finish()


def test_an_exchange_that_is_over_cannot_be_closed(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    fed.start(4)
    fed.world.run(lambda: fed.live_since(0.0))
    old = open_key(fed)
    assert old is not None
    fed.world.run(lambda: fed.happened("round"))
    running(fed).close_round(old)
    fed.finish()
    assert rounds(fed) == 2


def test_a_paused_coordinator_can_be_stopped(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path)
    me = fed.start_coordinator()
    fed.start_devices()
    fed.world.run(lambda: fed.happened("round"))
    running(fed).pause()
    passed(fed, 50.0)
    running(fed).stop()
    fed.world.run(lambda: me.ended)
