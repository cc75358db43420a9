"""The i8 codec over a broker: what it loses comes back with later updates, also from a device that lost its power."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from coordinator.config_sections import UpdateConfig
from coordinator.storage import state_codec
from tests.support.softmax_program import grouped_fleet
from tests.support.virtual_federation import Federation, Spy

LOCAL = grouped_fleet(3, 2)
ROUNDS = 3
Moment = Callable[[Spy], bool]


def federation(folder: Path, codec: str) -> Federation:
    return Federation.of(folder, codec=codec, devices=len(LOCAL), rounds=ROUNDS)


def trained(fed: Federation, moment: Moment | None = None) -> dict[str, bytes]:
    """The last states; with a `moment` d01 loses its power then, and is started again with what it kept."""
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    for cid, local in LOCAL.items():
        fed.start_device(cid, local)
    if moment is not None:
        fed.world.run(lambda: moment(spy))
        fed.world.kill("d01")
        fed.start_device("d01", LOCAL["d01"])
    fed.complete()
    assert {task.get("center") for task in spy.said("task") if task["job"] == "fit"} == {None, 0, 1}
    return fed.final_states()


def said(kind: str, number: int) -> Moment:
    """When d01 has been part of `number` messages of a kind about fits."""
    return lambda spy: (
        len([m for m in spy.said(kind, cid="d01") if kind == "ack" or m.get("what") == "delta"]) >= number
    )


@pytest.mark.parametrize("kind", ["rdy", "ack"])
@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_power_cut_before_or_after_an_acknowledgement_changes_no_bit(tmp_path: Path, kind: str, number: int) -> None:
    calm = trained(federation(tmp_path / "calm", "i8"))
    cut = trained(federation(tmp_path / "cut", "i8"), said(kind, number))
    assert cut == calm


@pytest.mark.parametrize("seed", [2, 10])
def test_a_storm_of_kills_changes_no_bit(tmp_path: Path, seed: int) -> None:
    calm = trained(federation(tmp_path / "calm", "i8"))
    fed, rng = federation(tmp_path / "storm", "i8"), random.Random(seed)  # noqa: S311 - repeatable on purpose
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    for cid, local in LOCAL.items():
        fed.start_device(cid, local)
    kills = 0
    while fed.catalog is None:
        until = len(spy.heard()) + rng.randint(1, 25)
        fed.world.run(lambda: len(spy.heard()) >= until or fed.catalog is not None)  # noqa: B023 - used at once
        who = rng.choice([*LOCAL, "coordinator.0"])
        if fed.catalog is None:
            kills += 1
            fed.world.kill(who)
            if who in LOCAL:
                fed.start_device(who, LOCAL[who])
            else:
                fed.start_coordinator()
    fed.complete()
    assert kills > ROUNDS
    assert fed.final_states() == calm


def test_centers_over_i8_are_near_those_over_f32(tmp_path: Path) -> None:
    exact, coded = (
        state_codec.decode_state(trained(federation(tmp_path / codec, codec))["fesem"]) for codec in ("f32", "i8")
    )
    assert coded.assignment == exact.assignment
    moved = np.abs(exact.centers - exact.extra["start"]).max()
    assert 0 < np.abs(coded.centers - exact.centers).max() < moved / 50  # a step of i8 is 1/127 of a row's largest move


def test_it_is_the_codec_of_a_configuration_that_names_none() -> None:
    assert UpdateConfig().codec == "i8"
