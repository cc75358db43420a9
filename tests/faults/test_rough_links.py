"""Slow, lossy, reordering, repeating and breaking links: they cost time, and change no bit of the outcome."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support.unreliable_broker import Weather
from tests.support.virtual_federation import BALLAST, FEDERATION, TOPICS, Federation

DEVICES = 4


def play(folder: Path, broker: Weather | None = None, *, devices: int = DEVICES, ballast: int = BALLAST) -> Federation:
    """A whole training in this weather."""
    fed = Federation.of(folder, broker=broker, ballast=ballast, devices=devices, deadline_s=3_000.0)
    if broker is not None:
        broker.begin(fed.world)
    fed.start(devices)
    fed.world.run(lambda: fed.catalog is not None, limit_s=50_000.0)
    fed.world.end()
    return fed


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    return play(tmp_path_factory.mktemp("calm"))


def test_two_seconds_of_latency_change_nothing(tmp_path: Path, calm: Federation) -> None:
    broker = Weather(latency=(2.0, 2.0))
    rough = play(tmp_path, broker)
    assert rough.outcome() == calm.outcome()
    assert rough.world.clock.time_s > 2.0 * 20  # four exchanges of a task, two gets, an update and its answers


@pytest.mark.parametrize("seed", range(3))
def test_messages_that_overtake_each_other_and_come_twice_change_nothing(
    tmp_path: Path, calm: Federation, seed: int
) -> None:
    assert play(tmp_path, Weather(latency=(0.0, 5.0), twice=0.3, seed=seed)).outcome() == calm.outcome()


@pytest.mark.parametrize("seed", range(3))
def test_thirty_percent_of_messages_lost_with_their_links_change_nothing(
    tmp_path: Path, calm: Federation, seed: int
) -> None:
    broker = Weather(latency=(0.0, 0.2), strikes=lambda _topic, rng: rng.random() < 0.3, seed=seed)
    assert play(tmp_path, broker).outcome() == calm.outcome()
    assert broker.struck > 0.2 * broker.delivered


def test_everything_at_once_changes_nothing(tmp_path: Path, calm: Federation) -> None:
    broker = Weather(latency=(0.0, 4.0), twice=0.3, strikes=lambda _topic, rng: rng.random() < 0.15, seed=9)
    assert play(tmp_path, broker).outcome() == calm.outcome()


@pytest.mark.parametrize("kind", ["in", "b"], ids=["upload", "download"])
@pytest.mark.parametrize("number", [1, 2, 4, 5, 7])
def test_a_link_that_is_cut_in_the_middle_of_a_transfer_goes_on_where_it_was(
    tmp_path: Path, calm: Federation, kind: str, number: int
) -> None:
    """The n-th block from or to one device is lost with its link; what had arrived is not sent again."""
    seen: list[str] = []

    def strikes(topic: str, _rng: random.Random) -> bool:
        route = TOPICS.parse(topic)
        if (route.cid, route.kind) != ("d01", kind):
            return False
        seen.append(topic)
        return len(seen) == number

    broker = Weather(latency=(0.01, 0.01), strikes=strikes)
    rough = play(tmp_path, broker)
    assert rough.outcome() == calm.outcome()
    assert broker.struck == 1
    assert len(seen) - len(set(seen)) <= 4 + 1  # a window that was under way, and the lost one


def test_half_a_fleet_that_reconnects_in_one_second_changes_nothing(tmp_path: Path) -> None:
    many = 20
    expected = play(tmp_path / "calm", devices=many, ballast=0)
    broker = Weather(latency=(0.2, 0.4))
    fed = Federation.of(tmp_path / "storm", broker=broker, devices=many)
    broker.begin(fed.world)
    fed.start(many)
    fed.world.run(lambda: fed.live is not None)
    for storm in range(3):
        for cid in range(storm % 2, many, 2):
            until_s = fed.world.clock.time_s + 1.0 / many
            fed.world.run(lambda: fed.world.clock.time_s >= until_s)  # noqa: B023 - used at once
            broker.drop_connection(f"{FEDERATION}.d{cid:02d}")
    assert not fed.happened("done")
    fed.complete()
    assert fed.outcome() == expected.outcome()
