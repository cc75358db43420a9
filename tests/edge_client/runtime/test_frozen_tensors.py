"""What no training changes is fetched once: not again in a later round, nor for another function or process."""

from __future__ import annotations

from pathlib import Path

import pytest

from edge_client.protocol.program import FROZEN
from edge_client.protocol.task import Probe
from tests.support.frozen_stage import fetches_of_the_base, frozen_stage
from tests.support.scripted_coordinator import DeviceStage, Script


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return frozen_stage(tmp_path)


def rounds(stage: DeviceStage, *numbers: int) -> Script:
    yield
    for number in numbers:
        asked = Probe(models=[stage.model(0)], want=frozenset({"loss"}), batch=8, seed=0)
        stage.ask(asked if number % 2 else stage.fit(number), round_=number)
        yield
        stage.go()
        yield
        stage.ack("ok")
        yield


def test_the_base_is_fetched_once_for_all_rounds_and_functions(stage: DeviceStage) -> None:
    stage.play(rounds(stage, 1, 2, 3))
    stage.play(rounds(stage, 4, 5))
    assert fetches_of_the_base(stage) == 1
    assert [name for name in stage.opened if name != FROZEN] == ["evaluate", "step", "step", "evaluate"]
    assert stage.opened.count(FROZEN) == len(stage.opened) / 2  # whatever was opened was given it


def test_a_base_that_was_damaged_on_disk_is_fetched_again(stage: DeviceStage) -> None:
    base = stage.program.containers["onnx"][FROZEN].sha256
    stage.play(rounds(stage, 1))
    (stage.folder / "state" / "cache" / base).write_bytes(b"rot" * 1000)
    stage.play(rounds(stage, 2))
    assert stage.last("nack")["code"] == "bad_hash"
    stage.play(rounds(stage, 4))
    assert fetches_of_the_base(stage) == 2
