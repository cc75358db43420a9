"""A broker that was taken over tries to fill a device's log, by messages that the device refuses."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.scripted_coordinator import DEVICE, DeviceStage

LABEL = "0" * 16
MANY = 200
MOST_LINES, MOST_CHARS = 3, 400


def long_topics(stage: DeviceStage) -> None:
    for number in range(MANY):
        stage.desk.publish(f"{stage.topics.down(DEVICE)}/{number}{'x' * 60_000}", b"?")


def unreadable_tasks(stage: DeviceStage) -> None:
    for _ in range(MANY):
        stage.desk.publish(stage.topics.down(DEVICE), b"?")


def forged_records(stage: DeviceStage) -> None:
    topic = stage.topics.coord()
    record = stage.broker.retained[topic]
    for boot in range(2, MANY):
        stage.desk.publish(topic, record.replace(f"{1:016x}".encode(), f"{boot:016x}".encode()))


def errors(stage: DeviceStage) -> None:
    for number in range(MANY):
        stage.tell("err", code="bad_field", detail=f"{number}")


@pytest.mark.parametrize("send", [long_topics, unreadable_tasks, forged_records, errors])
def test_messages_that_are_refused_have_few_and_short_lines(
    send: Callable[[DeviceStage], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = DeviceStage(tmp_path)
    with caplog.at_level(logging.WARNING):
        stage.play_turns(lambda: send(stage), 60)
    said = [record.getMessage() for record in caplog.records if record.name.startswith("edge_client")]
    assert 1 <= len(said) <= MOST_LINES
    assert max(map(len, said)) <= MOST_CHARS


def test_damaged_blocks_have_one_line_and_the_device_still_trains(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = DeviceStage(tmp_path, serve=False)

    def damage() -> None:
        get = stage.last("get")
        for _ in range(MANY):
            stage.send_blocks(get, damage=lambda block: block[:-1] + bytes([block[-1] ^ 1]))
        stage.serve = True

    with caplog.at_level(logging.WARNING):
        stage.play_turns(lambda: stage.ask(stage.fit()), damage, 120)
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("edge_client")]
    assert len(lines) == 1
    assert "checksum differs" in lines[0]
    assert stage.said("rdy")
