"""A coordinator that is killed at any moment and started again finishes with the same bits as one that never was."""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from coordinator.config_sections import RunConfig
from coordinator.rounds.round import round_rng
from coordinator.runtime.exchange import upload_receiver
from coordinator.storage.exchange_store import ReplayDiverged
from edge_client.transport.blobs import PartialBlob
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_federation import BALLAST, TOPICS, Anything, Federation, Outcome, Spy
from tests.support.virtual_time import Killed, Participant

DEVICES = 3
WRITES = 34  # of an undisturbed life: checked below, so that no write is left out when there are more of them
SENDS, BLOCKS_UP = 93, 30  # messages of the coordinator, and blocks that it is sent
OURS = ("coord", "cat", "t", "b")


class CoordinatorBaseline(NamedTuple):
    outcome: Outcome
    writes: int
    sends: int
    blocks_up: int


def federation(folder: Path, **changes: Anything) -> Federation:
    return Federation.of(folder, ballast=BALLAST, devices=DEVICES, **changes)


def outcome_after(fed: Federation, victim: Participant) -> Outcome:
    """How the training ends with a new coordinator in the place of the victim."""
    fed.world.run(lambda: victim.ended)
    fed.start_coordinator()
    return fed.complete().outcome()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> CoordinatorBaseline:
    fed = federation(tmp_path_factory.mktemp("undisturbed"))
    spy = Spy(fed.world.broker)
    fed.start()
    fed.finish()
    assert fed.store is not None
    writes = fed.store.database.writes
    fed.world.end()
    kinds = Counter[str](TOPICS.parse(message.topic).kind for message in spy.heard())
    return CoordinatorBaseline(fed.outcome(), writes, sum(kinds[k] for k in OURS), kinds["in"])


def test_the_kills_below_reach_every_write_of_the_store_and_every_message(undisturbed: CoordinatorBaseline) -> None:
    assert (undisturbed.writes, undisturbed.sends, undisturbed.blocks_up) == (WRITES, SENDS, BLOCKS_UP)


@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
@pytest.mark.parametrize("fatal", range(1, WRITES + 1))
def test_a_kill_at_any_write_changes_no_bit_of_the_outcome(
    tmp_path: Path, undisturbed: CoordinatorBaseline, fatal: int, *, before: bool
) -> None:
    fed = federation(tmp_path)
    victim = fed.start(fatal=fatal, before=before)
    assert outcome_after(fed, victim) == undisturbed.outcome


@pytest.mark.parametrize("fatal", range(1, SENDS, 4))  # the last one is the will, which the broker sends
def test_a_kill_at_any_message_that_it_sends_changes_no_bit_of_the_outcome(
    tmp_path: Path, undisturbed: CoordinatorBaseline, fatal: int
) -> None:
    """Before a task, in the middle of a download, after an update is on disk and before its `ack`."""
    sent = 0

    def dies(topic: str, body: bytes) -> tuple[bytes, ...]:
        nonlocal sent
        sent += TOPICS.parse(topic).kind in OURS
        if sent != fatal:
            return (body,)
        sent += 1  # only once
        victim.vanish()
        raise Killed

    fed = federation(tmp_path, broker=MemoryBroker(tamper=dies))
    victim = fed.start()
    assert outcome_after(fed, victim) == undisturbed.outcome


@pytest.mark.parametrize("fatal", range(2, BLOCKS_UP + 1, 4))
def test_a_kill_in_the_middle_of_an_upload_changes_no_bit_of_the_outcome(
    tmp_path: Path, undisturbed: CoordinatorBaseline, fatal: int
) -> None:
    seen = 0

    def counts(topic: str, body: bytes) -> tuple[bytes, ...]:
        nonlocal seen
        seen += TOPICS.parse(topic).kind == "in"
        return (body,)

    fed = federation(tmp_path, broker=MemoryBroker(tamper=counts))
    fed.start()
    fed.world.run(lambda: seen >= fatal)
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.complete()
    assert fed.outcome() == undisturbed.outcome


@pytest.mark.parametrize(("owner", "step"), [(PartialBlob, "stage"), (upload_receiver, "publish_blobs")])
@pytest.mark.parametrize("fatal", range(1, 2 * DEVICES + 1))
def test_a_kill_between_an_updates_last_block_and_its_reply_costs_no_deadline_and_no_bit(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    undisturbed: CoordinatorBaseline,
    fatal: int,
    owner: object,
    step: str,
) -> None:
    """Every block is on disk then: the device sends none, and waiting for one would last until the deadline."""
    fed = federation(tmp_path)
    act, count = getattr(owner, step), 0

    def dies(*args: object) -> object:
        nonlocal count
        blobs = len(args[0]) if isinstance(args[0], list) else 1
        count += blobs if threading.current_thread().name == "coordinator.0" else 0
        if count < fatal or not blobs or victim.doomed:
            return act(*args)
        victim.vanish()
        raise Killed

    monkeypatch.setattr(owner, step, dies)
    victim = fed.start()
    fed.world.run(lambda: victim.ended)
    fed.start_coordinator()
    fed.world.run(lambda: fed.happened("done"), limit_s=60.0)
    fed.world.end()
    assert fed.outcome() == undisturbed.outcome


def test_a_coordinator_that_is_killed_again_and_again_still_gets_there(
    tmp_path: Path, undisturbed: CoordinatorBaseline
) -> None:
    fed = federation(tmp_path)
    fed.start_devices(DEVICES)
    for _ in range(60):
        victim = fed.start_coordinator(fatal=8)
        fed.world.run(lambda: victim.ended or fed.happened("done"))  # noqa: B023 - used at once
        if fed.happened("done"):
            break
    fed.world.end()
    assert fed.final_states() == undisturbed.outcome[0]


def test_the_downtime_does_not_count_against_the_deadline(tmp_path: Path) -> None:
    fed = federation(tmp_path, deadline_s=100.0)
    fed.start(DEVICES - 1)
    mute = fed.start_mute_device("d02")
    fed.world.run(lambda: fed.live_since(20.0))
    fed.world.kill("coordinator.0")
    fed.world.clock.time_s += 1_000.0
    fed.start_coordinator()
    fed.world.kill(mute.name)
    fed.start_devices(DEVICES)
    fed.world.run(lambda: fed.happened("round"), limit_s=70.0)
    fed.world.end()


def test_other_settings_do_not_continue_a_training(tmp_path: Path) -> None:
    fed = federation(tmp_path)
    victim = fed.start(fatal=20)
    fed.world.run(lambda: victim.ended)
    changed = federation(tmp_path, seed=99)
    changed.start_coordinator()
    with pytest.raises(Exception, match="holds a training with other settings: seed = 3, now 99\n"):
        changed.world.run(lambda: False)
    fed.world.end()


def test_a_method_that_asks_something_else_than_before_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fed = federation(tmp_path)
    victim = fed.start(fatal=12)
    fed.world.run(lambda: victim.ended)
    monkeypatch.setattr("coordinator.runtime.training_loop.round_rng", lambda seed, number: round_rng(seed + 1, number))
    fed.start_coordinator()
    with pytest.raises(ReplayDiverged, match="round 1 of run fesem asks other things than before") as diverged:
        fed.finish()
    assert "restore the backup of before" in (diverged.value.hint or "")
    fed.world.end()


def test_another_ratio_of_samples_in_an_open_round_is_refused_and_the_old_one_goes_on(tmp_path: Path) -> None:
    run = RunConfig(method="fedavg", rounds=2, name="run", settings={"local-steps": 3, "batch-size": 8})
    undisturbed = Federation.of(tmp_path / "one", runs=(run,)).play()
    fed = Federation.of(tmp_path / "other", runs=(run,))
    fed.start()
    fed.world.run(lambda: fed.live is not None and fed.live.key.exchange == 1)  # the test of new centers
    fed.world.kill("coordinator.0")
    before = fed.config
    fed.config = replace(before, fleet=replace(before.fleet, max_samples_ratio=1.0))
    fed.start_coordinator()
    with pytest.raises(ReplayDiverged) as diverged:
        fed.finish()
    assert "max-samples-ratio" in (diverged.value.hint or "")
    fed.config = before
    fed.start_coordinator()
    fed.complete()
    assert fed.outcome() == undisturbed.outcome()


def test_a_restart_does_not_say_again_who_was_revoked(tmp_path: Path) -> None:
    fed = federation(tmp_path, quorum=0.5)
    victim = fed.start()
    fed.world.run(lambda: fed.happened("round"))
    (fed.config.folder / "revoked").write_text("d02\n")
    fed.world.run(lambda: fed.happened("revoked"))
    victim.vanish()
    fed.world.run(lambda: victim.ended)
    fed.start_coordinator()
    fed.complete()
    said = [event["device"] for event in fed.events if event["event"] == "revoked"]
    assert (said, [event["epoch"] for event in fed.events if event["event"] == "start"]) == (["d02"], [1, 2])


def test_several_runs_continue_in_the_run_that_was_killed(tmp_path: Path) -> None:
    settings = {"local-steps": 2, "batch-size": 8}
    runs = tuple(RunConfig(method="fedavg", rounds=1, name=name, settings=settings) for name in ("one", "two"))
    fed = federation(tmp_path, runs=runs)
    fed.start()
    fed.world.run(lambda: fed.happened("round"))
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.complete()
    assert [(r["run"], r["round"]) for r in fed.rounds()] == [("one", 1), ("two", 1)]
    states = fed.final_states()
    assert states["one"] == states["two"]
