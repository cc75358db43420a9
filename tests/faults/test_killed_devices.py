"""Devices that lose power at any step, or for good: what they had kept goes on, and the others finish without them."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from edge_client.transport import blobs
from tests.support import softmax_program
from tests.support.direct_calls import train_directly
from tests.support.virtual_federation import BALLAST, Federation
from tests.support.virtual_time import Killed

DEVICES = 2
OTHER, VICTIM = "d00", "d01"
STEPS = {OTHER: 58, VICTIM: 57}  # times that an undisturbed device changes its disk: checked below
HALF = STEPS[OTHER] // 2


class Power:
    """Cuts the power of each device of `fatal` at that change of its disk: in the middle of it, or right after.

    `steps` counts the changes of each thread, by its name: a device's has its own.
    """

    def __init__(self, patch: pytest.MonkeyPatch, fatal: Mapping[str, int] | None = None, moment: str = "") -> None:
        self.steps, self._fatal, self._moment = Counter[str](), fatal or {}, moment
        self.fed: Federation | None = None
        self._publish, self._write_at = blobs._publish, blobs._write_at
        self._rename = blobs.StagedBlob.rename
        patch.setattr(blobs, "_publish", self.publish)
        patch.setattr(blobs.StagedBlob, "rename", lambda staged: self.rename(staged))  # noqa: PLW0108 - a bound method would not get it
        patch.setattr(blobs, "_write_at", self.write_at)

    def publish(self, beside: Path, path: Path) -> None:
        """A rename is whole or not at all; cut in the middle of what comes before it."""
        if self._now() and self._moment == "in the middle":
            os.truncate(beside, beside.stat().st_size // 2)
            self._cut()
        self._publish(beside, path)
        self._after()

    def rename(self, staged: blobs.StagedBlob) -> None:
        """As `publish`, of a blob whose blocks have all arrived."""
        if self._now() and self._moment == "in the middle":
            os.truncate(staged.beside, staged.beside.stat().st_size // 2)
            self._cut()
        self._rename(staged)
        self._after()

    def write_at(self, descriptor: int, data: bytes, offset: int) -> None:
        if self._now() and self._moment == "in the middle":
            self._write_at(descriptor, data[: len(data) // 2], offset)
            self._cut()
        self._write_at(descriptor, data, offset)
        self._after()

    def _after(self) -> None:
        if self._now():
            self._cut()
        self.steps[threading.current_thread().name] += 1

    def _now(self) -> bool:
        name = threading.current_thread().name
        return self.steps[name] + 1 == self._fatal.get(name)

    def _cut(self) -> None:
        name = threading.current_thread().name
        self.steps[name] += 1
        assert self.fed is not None
        self.fed.world.participants[name].vanish()
        raise Killed


def start_again(fed: Federation, names: Collection[str]) -> None:
    """Each of these devices, once it has lost its power."""
    dying = [fed.world.participants[name] for name in names]
    while dying:
        fed.world.run(lambda: any(one.ended for one in dying))  # noqa: B023 - used at once
        for one in (one for one in dying if one.ended):
            fed.start_device(one.name, softmax_program.grouped_fleet(fed.config.fleet.min_devices, 2)[one.name])
        dying = [one for one in dying if not one.ended]


class DevicesBaseline(NamedTuple):
    states: dict[str, bytes]
    steps: Mapping[str, int]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> DevicesBaseline:
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        fed = Federation.of(tmp_path_factory.mktemp("undisturbed"), ballast=BALLAST, devices=DEVICES).play()
    return DevicesBaseline(fed.final_states(), power.steps)


def test_the_cuts_below_reach_every_step_of_a_device(undisturbed: DevicesBaseline) -> None:
    assert {name: undisturbed.steps[name] for name in STEPS} == STEPS


@pytest.mark.parametrize(
    ("fatal", "moment"),
    [(step, "in the middle") for step in range(1, HALF + 1)] + [(step, "after") for step in range(1, HALF + 1, 4)],
)
def test_a_device_that_loses_power_at_any_step_continues_with_what_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed: DevicesBaseline, fatal: int, moment: str
) -> None:
    """One device at the steps of the first half, the other one, in the same training, at those of the second."""
    cuts = {VICTIM: fatal, OTHER: HALF + fatal}
    power = Power(monkeypatch, cuts, moment)
    power.fed = fed = Federation.of(tmp_path, ballast=BALLAST, devices=DEVICES)
    fed.start()
    start_again(fed, cuts)
    fed.complete()
    assert fed.final_states() == undisturbed.states


def test_thirty_percent_of_the_devices_gone_for_good_are_done_without(tmp_path: Path) -> None:
    gone = frozenset({"d02", "d05", "d08"})
    fed = Federation.of(tmp_path, devices=10, quorum=0.7, deadline_s=120.0, rounds=3)
    fed.start(10)
    fed.world.run(lambda: fed.happened("round"))
    for cid in sorted(gone):
        fed.world.kill(cid)
    fed.complete()
    expected, _ = train_directly(fed, silent=gone, since=2)
    found = fed.final_state()
    assert found.assignment == expected.assignment
    np.testing.assert_array_equal(found.centers, expected.centers)
    answered = [sorted(record["per_device"]) for record in fed.rounds()]
    everybody = sorted(softmax_program.grouped_fleet(10, 2))
    assert answered == [everybody, *[[cid for cid in everybody if cid not in gone]] * 2]


def test_one_device_too_many_gone_for_good_is_told_and_the_training_goes_on_when_it_is_back(tmp_path: Path) -> None:
    fed = Federation.of(tmp_path, devices=10, quorum=0.7, deadline_s=120.0, rounds=3)
    fed.start(10)
    fed.world.run(lambda: fed.happened("round"))
    for cid in ("d02", "d05", "d07", "d08"):
        fed.world.kill(cid)
    with pytest.raises(Exception, match="only 6 of 10 devices gave an answer that counts in round 2"):
        fed.finish()
    fed.start_coordinator()
    fed.start_device("d07", softmax_program.grouped_fleet(10, 2)["d07"])
    fed.complete()
    expected, _ = train_directly(fed, silent=frozenset({"d02", "d05", "d08"}), since=2)
    np.testing.assert_array_equal(fed.final_state().centers, expected.centers)


SUMMED: dict[str, Any] = {"local-steps": 3, "batch-size": 8, "secure": "updates", "secure-clip": 10.0}
MASKED = (RunConfig(method="fedavg", rounds=1, name="fesem", settings=SUMMED),)
SUMMED_DEVICES = 5  # the fewest that a sum may have
CUTS = 12  # spread over the changes of the disk in a round of masked sums


@pytest.fixture(scope="module")
def undisturbed_sums(tmp_path_factory: pytest.TempPathFactory, same_rounding: None) -> DevicesBaseline:
    with pytest.MonkeyPatch.context() as patch:
        power = Power(patch)
        fed = Federation.of(
            tmp_path_factory.mktemp("sums"), ballast=BALLAST, devices=SUMMED_DEVICES, runs=MASKED
        ).play()
    return DevicesBaseline(fed.final_states(), power.steps)


@pytest.mark.parametrize(
    ("part", "moment"),
    [(part, "in the middle") for part in range(CUTS)] + [(part, "after") for part in range(0, CUTS, 4)],
)
def test_a_device_that_loses_power_in_a_masked_sum_continues_with_what_it_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, undisturbed_sums: DevicesBaseline, part: int, moment: str
) -> None:
    """Its keys, the words that it masked and the shares that it showed are on disk before any of it is sent."""
    power = Power(monkeypatch, {VICTIM: 1 + part * undisturbed_sums.steps[VICTIM] // CUTS}, moment)
    power.fed = fed = Federation.of(tmp_path, ballast=BALLAST, devices=SUMMED_DEVICES, runs=MASKED)
    fed.start()
    start_again(fed, [VICTIM])
    fed.complete()
    assert fed.final_states() == undisturbed_sums.states
    assert all("failed" not in record["secure"] for record in fed.rounds())
