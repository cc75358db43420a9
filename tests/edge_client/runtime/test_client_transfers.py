"""A device gets whole blobs over a link that loses, damages and breaks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from edge_client.protocol.messages import canonical_json
from tests.support.scripted_coordinator import BLOCK, DEVICE, FEDERATION, DeviceStage, Script


@pytest.fixture
def stage(tmp_path: Path) -> DeviceStage:
    return DeviceStage(tmp_path)


def test_lost_blocks_are_asked_for_again_and_three_timeouts_give_up(stage: DeviceStage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield 8 + 16 + 31
        assert stage.said("nack") == []
        yield 1

    stage.play(script())
    assert len(stage.said("get")) == 3
    assert stage.last("nack")["code"] == "unreachable"


def test_damaged_blocks_are_dropped_and_fetched_again(stage: DeviceStage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.send_blocks(stage.last("get"), damage=lambda message: message[:-1] + bytes([message[-1] ^ 1]))
        yield
        stage.serve = True
        yield 8

    stage.play(script())
    assert len(stage.said("rdy")) == 1


def test_a_blob_with_good_blocks_and_a_wrong_hash_is_refused_after_a_second_try(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        other = stage.blob(b"x" * len(stage.blobs[stage.containers["step"].sha256]), "container")
        stage.blobs[stage.containers["step"].sha256] = stage.blobs[other.sha256]
        stage.ask(stage.fit())
        yield

    stage.play(script())
    assert stage.last("nack")["code"] == "bad_hash"
    assert stage.opened == []


def test_a_broken_link_asks_again_at_once(stage: DeviceStage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.serve = True
        stage.broker.drop_connection(f"{FEDERATION}.{DEVICE}")
        yield

    stage.play(script())
    assert stage.clock.time_s == 0
    assert len(stage.said("rdy")) == 1


def test_a_coordinator_that_was_started_again_is_asked_at_once_for_what_the_one_before_did_not_send(
    stage: DeviceStage,
) -> None:
    stage.serve = False

    def script() -> Script:
        stage.lead(1)
        yield
        stage.ask(stage.fit())
        yield
        stage.serve = True
        stage.lead(2)
        yield

    stage.play(script())
    assert stage.clock.time_s == 0
    assert len(stage.said("rdy")) == 1


def test_a_partial_download_survives_a_restart(stage: DeviceStage) -> None:
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        stage.serve = True
        stage.listen()
        get = next(m for m in reversed(stage.said("get")))
        stage.send_blocks(get)
        yield
        stage.serve = False
        yield

    stage.play(script())
    already = stage.served_blocks
    stage.serve = True

    stage.play_turns(lambda: stage.ask(stage.fit()))
    data = [stage.blobs[sha] for sha in (stage.manifest.sha256, stage.containers["step"].sha256)]
    model = stage.put(stage.model(0), "model")
    every_block = sum(-(-len(d) // BLOCK) for d in data) + model.total
    assert already > 0
    assert stage.served_blocks == every_block


def test_an_error_to_a_request_of_an_earlier_task_stops_no_later_one(stage: DeviceStage) -> None:
    """The coordinator grants a device the blobs of its last task only."""
    stage.serve = False

    def script() -> Script:
        yield
        stage.ask(stage.fit())
        yield
        earlier = stage.last("get")["id"]
        stage.ask(stage.fit(seed=1), round_=2)
        yield
        assert stage.last("get")["id"] != earlier
        stage.tell("err", re=earlier, code="not_yours")
        yield
        stage.serve = True
        yield 8

    stage.play(script())
    assert stage.said("nack") == []
    assert stage.last("rdy")["round"] == 2


def test_a_model_of_the_task_at_hand_makes_room_for_no_other(stage: DeviceStage) -> None:
    """The anchor is there from an earlier round, and is the blob that was used longest ago."""
    stage.play_turns(lambda: stage.ask(stage.fit(0)), lambda: stage.ask(stage.fit(1), round_=2))
    cache = stage.folder / "state" / "cache"
    sizes = [file.stat().st_size for file in cache.iterdir() if file.is_file()]
    anchor = stage.put(stage.model(0), "model")
    os.utime(cache / anchor.sha256, (0, 0))

    def script() -> Script:
        yield
        assert stage.playing is not None
        stage.playing._session.cache._budget = sum(sizes)  # room for two models
        stage.ask(stage.fit(2, anchor=stage.model(0), mu=0.1), round_=3)
        yield

    stage.play(script())
    assert stage.said("nack") == []
    assert stage.last("rdy")["round"] == 3


def test_the_models_of_a_task_that_is_over_make_room_for_another_program(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        stage.ask(stage.fit(0))
        yield
        assert stage.playing is not None
        folder = stage.folder / "state" / "cache"
        stage.playing._session.cache._budget = sum(file.stat().st_size for file in folder.iterdir() if file.is_file())
        other = replace(stage.program, model=stage.program.model[::-1])
        manifest = stage.blob(canonical_json(other.to_json()), "program")
        stage.ask(stage.fit(1), round_=2, program=manifest.to_json())
        yield

    stage.play(script())
    assert stage.said("nack") == []
    assert stage.last("rdy")["round"] == 2


def test_a_task_whose_models_are_larger_than_the_cache_is_told_so(stage: DeviceStage) -> None:
    def script() -> Script:
        yield
        assert stage.playing is not None
        stage.playing._session.cache._budget = 2 * stage.put(stage.model(0), "model").size
        stage.ask(stage.fit(0, anchor=stage.model(1), mu=0.1))
        yield

    stage.play(script())
    assert stage.last("nack")["code"] == "no_space"
    assert "do not fit" in stage.last("nack")["detail"]
