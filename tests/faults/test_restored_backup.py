"""A coordinator's folder that is restored from a backup: devices that are further already take part again."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from coordinator.config_sections import RunConfig
from tests.support.virtual_federation import Federation

SUMS = {"secure": "updates", "secure-bits": 24, "secure-clip": 10.0}


def played_from_a_backup(folder: Path, **settings: Any) -> tuple[Federation, int]:  # noqa: ANN401 - of the run
    """-> a federation that ended, was restored from the time of its second round, and ended again; the devices."""
    devices = 6 if settings else 4
    given = {"local-steps": 3, "batch-size": 8} | settings
    run = RunConfig(method="fedavg", rounds=4, name="fesem", settings=given)
    fed = Federation.of(folder, devices=devices, runs=(run,), deadline_s=60.0)
    first = fed.start()
    fed.world.run(lambda: sum(event["event"] == "round" for event in fed.events) == 2)
    fed.world.kill("coordinator.0")
    fed.world.run(lambda: first.ended)
    shutil.copytree(fed.config.folder, folder / "backup")
    second = fed.start_coordinator()
    fed.finish()
    fed.world.kill("coordinator.0")
    fed.world.run(lambda: second.ended)
    shutil.rmtree(fed.config.folder)
    (folder / "backup").rename(fed.config.folder)
    fed.events.clear()
    fed.start_coordinator()
    fed.complete()
    return fed, devices


def test_devices_that_are_further_play_the_rounds_of_a_restored_coordinator_again(tmp_path: Path) -> None:
    undisturbed = Federation.of(
        tmp_path / "undisturbed",
        devices=4,
        runs=(RunConfig(method="fedavg", rounds=4, name="fesem", settings={"local-steps": 3, "batch-size": 8}),),
        deadline_s=60.0,
    )
    undisturbed.play()
    fed, _ = played_from_a_backup(tmp_path / "restored")
    assert fed.outcome() == undisturbed.outcome()


@pytest.mark.usefixtures("same_rounding")
def test_masked_sums_of_a_restored_coordinator_take_no_key_twice(tmp_path: Path) -> None:
    """Devices refuse the first roster, whose keys they have used, and offer others."""
    fed, devices = played_from_a_backup(tmp_path, **SUMS)
    rounds = fed.rounds()
    assert [record["round"] for record in rounds] == [1, 2, 3, 4]
    assert [len(record.get("refused") or ()) for record in rounds] == [0, 0, devices, 0]
    assert ["failed" in record["secure"] for record in rounds] == [False, False, True, False]
