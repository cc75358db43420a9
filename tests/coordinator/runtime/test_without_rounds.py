"""Runs that wait for no device over a broker: the journal is the run; silent or hostile devices hold up no other."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.artifacts import signed_program
from coordinator.artifacts.finished_run import make_strategy
from coordinator.config_sections import ModelConfig, RunConfig
from coordinator.identity.revoked_list import REVOKED_FILE
from coordinator.rounds.asynchronous import training as machine
from coordinator.rounds.asynchronous.options import check_asynchronous
from coordinator.rounds.asynchronous.snapshot import Snapshot, pack
from coordinator.rounds.asynchronous.training import Rules
from coordinator.rounds.update_validation import ReplySpec, update_moves
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.runtime.exchange.without_rounds import oldest_needed
from coordinator.status_in_words import status_lines
from coordinator.storage import state_codec
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.journal_store import EXPIRE, HAND, REFUSE, TAKE, Step
from coordinator.storage.status import read_status
from coordinator.storage.store import Store
from coordinator.strategies.base import State
from edge_client.errors import ConfigError
from edge_client.protocol.program import Program
from edge_client.protocol.task import ClientId, Fit, Task
from edge_client.training.learner import EngineLearner
from emulator.simulation.emulated_devices import EmulatedDevices, round_through_f32_delta
from tests.coordinator.rounds.asynchronous.test_training import a_start
from tests.coordinator.rounds.asynchronous.test_training import rules as a_rules
from tests.support import softmax_program
from tests.support.virtual_federation import BALLAST, Federation, Spy, program

DEVICES, ROUNDS = 5, 4
RUNS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"server-momentum": 0.5},
    "ifca": {"clusters": 2},
    "fesem": {"clusters": 2, "e-step": "nearest"},
}


def federation(folder: Path, method: str = "fedavg", **changes: Any) -> Federation:  # noqa: ANN401 - keys of the file
    settings = {"local-steps": 3, "batch-size": 8, **RUNS[method], **changes.pop("settings", {})}
    run = RunConfig(method=method, rounds=changes.pop("rounds", ROUNDS), name="run", settings=settings)
    given: dict[str, Any] = {
        "concurrency": 3,
        "buffer": 3,
        "devices": DEVICES,
        "keep_rounds": 0,
        "quorum": 0.75,
    } | changes
    return Federation.of(folder, runs=(run,), **given)


def journal(fed: Federation) -> list[tuple[int, Step]]:
    """The steps of the run, with their rounds."""
    with closing(Store(fed.config.folder / "store")) as store:
        run = store.states.run_id("run", str)
        rounds = range(1, fed.config.runs[0].rounds + 1)
        return [(number, step) for number in rounds for step in store.journal.steps(run, number)]


def first_state(fed: Federation) -> State:
    """The state after the last round that waited for its devices."""
    begun = min(number for number, _ in journal(fed))
    with closing(Store(fed.config.folder / "store")) as store:
        run = store.states.run_id("run", str)
        query = "select blob from states where run = ? and round = ?"
        ((blob,),) = store.database.rows(query, (run, begun - 1))
        return state_codec.decode_state(store.blobs.read(blob))


def played_in_one_process(fed: Federation) -> State:
    """The state machine in the journal's order, with devices that are computed here."""
    local = softmax_program.grouped_fleet(DEVICES, 2)
    learner = EngineLearner(softmax_program.SoftmaxEngine(), program())
    devices = EmulatedDevices(learner=learner, local=local, wire=round_through_f32_delta)
    options = fed.config.round.asynchronous
    assert options is not None
    strategy = check_asynchronous(make_strategy(fed.config.runs[0], fed.config), devices.fleet)
    rules = Rules(
        strategy=strategy, options=options, schema=program().schema, fleet=devices.fleet, seed=fed.config.seed
    )
    training, tasks = machine.begin_training(first_state(fed)), dict[ClientId, Task]()
    for number, step in journal(fed):
        if step.what == HAND:
            chosen = set(step.devices)
            training, given, _ = machine.hand_out(training, rules, number, chosen.__contains__)
            assert set(given) == chosen
            tasks |= given
        elif step.what == TAKE:
            who = step.devices[0]
            asked = tasks.pop(who)
            reply = devices.answer(who, asked)
            training, taken = machine.take(training, rules, who, reply, moves_of(asked, reply))
            tasks |= {} if taken.task is None else {who: taken.task}
        else:
            training = machine.release(training, step.devices[0])
    return machine.served_state(training, rules)


def moves_of(task: Task, reply: Any) -> Mapping[str, float]:  # noqa: ANN401 - a Reply
    vector = task.start if isinstance(task, Fit) and isinstance(task.start, np.ndarray) else None
    spec = ReplySpec(
        task=task,
        schema=program().schema,
        samples=1,
        codec="f32",
        base="",
        base_vector=None if vector is None else vector.astype(np.float32),
        max_update_rms=1.0,
    )
    return update_moves(spec, reply)


@pytest.mark.parametrize("method", RUNS)
def test_a_run_over_the_broker_has_the_bits_of_the_state_machine_in_the_same_order(tmp_path: Path, method: str) -> None:
    fed = federation(tmp_path, method).play()
    found, expected = fed.final_state("run"), played_in_one_process(fed)
    np.testing.assert_array_equal(found.centers, expected.centers)
    assert found.assignment == expected.assignment
    assert found.extra.keys() == expected.extra.keys()
    last = fed.rounds()[-1]
    assert last["asynchronous"]["counted"] == 3
    assert len(last["per_device"]) >= 0.75 * DEVICES


def test_each_task_that_was_answered_is_stored_with_its_device_the_second_one_of_ifca_too(tmp_path: Path) -> None:
    fed = federation(tmp_path, "ifca").play()
    taken = [step for _, step in journal(fed) if step.what == TAKE]
    assert len(taken) > 2 * ROUNDS
    with closing(Store(fed.config.folder / "store")) as store:
        run = store.states.run_id("run", str)
        for step in taken:
            assert list(store.exchanges.task_hashes(ExchangeKey(run, *step.task))) == list(step.devices)


@pytest.mark.parametrize(
    ("method", "fatal", "before"),
    [("fedavg", 8, True), ("fedavg", 11, False), ("fedavg", 15, False), ("ifca", 14, True)],
)
def test_after_a_kill_at_a_write_the_run_still_is_its_journal(
    tmp_path: Path, method: str, fatal: int, *, before: bool
) -> None:
    """Another order may come of a kill; whatever came, the models are those of the journal, and all of it counted."""
    fed = federation(tmp_path, method)
    victim = fed.start(fatal=fatal, before=before)
    fed.world.run(lambda: victim.ended)
    fed.start_coordinator()
    fed.complete()
    found, expected = fed.final_state("run"), played_in_one_process(fed)
    np.testing.assert_array_equal(found.centers, expected.centers)
    assert [record["round"] for record in fed.rounds()] == list(range(1, ROUNDS + 1))
    played = [record["asynchronous"] for record in fed.rounds() if "asynchronous" in record]
    assert [one["counted"] for one in played] == [3] * (ROUNDS - (method == "ifca"))  # whose first round is a round


def test_a_silent_device_holds_its_place_for_a_deadline_and_nobody_else(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=8, concurrency=2, buffer=2, devices=4, deadline_s=50.0)
    fed.start_coordinator()
    fed.start_devices(3)
    fed.start_mute_device("d03")
    fed.finish()
    assert fed.world.clock.time_s < 50.0 + 50.0 * 2  # rounds would take 50 s each
    fed.world.end()
    steps = [step for _, step in journal(fed)]
    assert sum(step.what == TAKE for step in steps) == 16
    assert {who for step in steps if step.what == TAKE for who in step.devices} == {"d00", "d01", "d02"}


def test_a_center_whose_other_devices_are_gone_goes_on_and_the_run_still_is_its_journal(tmp_path: Path) -> None:
    fed = federation(tmp_path, "ifca", rounds=12, devices=5, concurrency=5, buffer=5, max_staleness=1, deadline_s=50.0)
    fed.start()
    fed.world.run(lambda: sum(event["event"] == "round" for event in fed.events) == 2)
    serves = fed.rounds()[-1]["assignment"]
    few = [who for who in serves if serves[who] == serves["d01"]]
    for who in few[1:]:
        fed.world.kill(who)
    before = fed.rounds()[-1]["asynchronous"]["versions"][serves["d01"]]
    fed.world.run(lambda: sum(event["event"] == "round" for event in fed.events) == 9)
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.complete()
    assert fed.rounds()[-1]["asynchronous"]["versions"][serves["d01"]] > before + 2
    np.testing.assert_array_equal(fed.final_state("run").centers, played_in_one_process(fed).centers)


@pytest.mark.parametrize("restart", [False, True])
def test_a_revoked_device_holds_its_task_no_longer(tmp_path: Path, *, restart: bool) -> None:
    """Its update is missing in each buffer, which would wait for its deadline; also after a restart."""
    fed = federation(tmp_path, rounds=3, concurrency=3, buffer=3, devices=3, deadline_s=50_000.0, quorum=0.5)
    fed.start_coordinator()
    fed.start_devices(2)
    fed.start_mute_device("d02")
    fed.world.run(lambda: isinstance(fed.live, UpdatesAndTest) and fed.live.updates.has_task("d02"))
    if restart:
        fed.world.kill("coordinator.0")
    (fed.config.folder / REVOKED_FILE).write_text("d02\n")
    if restart:
        fed.start_coordinator()
    fed.complete()
    assert fed.world.clock.time_s < 50_000.0
    steps = [step for _, step in journal(fed)]
    assert [(step.what, step.devices) for step in steps if step.what in (REFUSE, EXPIRE)] == [(REFUSE, ["d02"])]
    assert fed.rounds()[0]["refused"] == {"d02": "revoked"}


def test_a_device_that_is_silent_for_longer_than_the_deadline_is_counted_as_expired(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=3, concurrency=1, buffer=2, devices=3, deadline_s=50.0, evaluate_every=9)
    fed.start_coordinator()
    fed.start_devices(2)
    fed.start_mute_device("d02")
    fed.finish()
    fed.world.end()
    steps = [step for _, step in journal(fed)]
    assert [step.devices for step in steps if step.what == EXPIRE].count(["d02"]) >= 1
    assert sum(record["asynchronous"]["expired"] for record in fed.rounds()) >= 1


def test_a_task_whose_center_went_too_far_is_stopped_and_counted(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=6, concurrency=3, buffer=2, devices=4, max_staleness=1, deadline_s=5_000.0)
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.start_devices(3)
    fed.start_mute_device("d03")
    fed.finish()
    fed.world.end()
    assert sum(record["asynchronous"]["stale"] for record in fed.rounds()) >= 1
    assert [m for m in spy.said("stop", cid="d03") if m["why"] == "another device has its turn"]
    assert any("stale" in reason for record in fed.rounds() for reason in record.get("refused", {}).values())


def test_a_hostile_update_is_refused_and_its_device_waits(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=3, max_update_rms=1e-9)  # no honest update is so small
    fed.start()
    fed.world.run(lambda: fed.world.clock.time_s > 100.0)
    fed.world.end()
    steps = [step for _, step in journal(fed)]
    assert {step.what for step in steps} == {HAND, REFUSE}
    assert sum(step.what == REFUSE for step in steps) == DEVICES


def test_a_device_that_comes_late_trains_in_a_later_round(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=6, devices=2, concurrency=2, buffer=2)
    fed.start(2)
    fed.world.run(lambda: fed.happened("round"))
    fed.start_device("a04", softmax_program.grouped_fleet(5, 2)["d04"])
    fed.finish()
    fed.world.end()
    assert "a04" in {who for _, step in journal(fed) if step.what == TAKE for who in step.devices}


def compile_other_engines(
    _config: object, store: Store, engines: Collection[str], before: str, _progress: object
) -> str:
    """As the compiler: the program with these engines too, whose containers have the bytes of the first one's."""
    kept = json.loads(before)
    known = Program.from_json(json.loads(store.blobs.read(kept["program"])))
    same = dict.fromkeys(engines, known.containers["onnx"])
    more = replace(known, containers={**known.containers, **same}, batch={**known.batch, **dict.fromkeys(engines, 8)})
    return signed_program.put_program(store, more, (), state_codec.decode_array(store.blobs.read(kept["initial"])))


def test_a_device_with_another_engine_that_comes_late_gets_a_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run went on with the program of its first round, which has no such engine, and ended with a KeyError."""
    monkeypatch.setattr(signed_program, "_compile", compile_other_engines)
    model = ModelConfig(name="softmax", batch_size=8, engines=("onnx", "litert"))
    fed = federation(tmp_path, model=model, deadline_s=50.0, devices=2, buffer=2, evaluate_every=9)
    spy = Spy(fed.world.broker)
    fed.start(2)
    fed.world.run(lambda: fed.happened("round"))
    fed.start_mute_device("a04", engine="litert")
    fed.complete()
    assert "fit" in {task["job"] for task in spy.said("task", cid="a04")}


def test_the_status_tells_of_updates_and_the_log_of_a_buffer_that_waits_for_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fed = federation(tmp_path, rounds=3, devices=2, concurrency=2, buffer=2)
    fed.start_coordinator()
    fed.start_mute_device("d00")
    fed.start_mute_device("d01")
    fed.world.run(lambda: fed.live_since(10.0))
    lines = "\n".join(status_lines(read_status(fed.config.folder)))
    fed.world.end()
    assert "2 devices at work (of at most 2), 0 of 2 updates" in lines
    assert "run: buffer is 2, with 2 devices: " in caplog.text


def test_a_small_history_is_kept_and_is_enough_for_a_restart(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=8, keep_rounds=2)  # a task of the first round may end in the fifth
    fed.start()
    fed.world.run(lambda: sum(event["event"] == "round" for event in fed.events) >= 4)
    fed.world.kill("coordinator.0")
    fed.start_coordinator()
    fed.complete()
    assert [record["round"] for record in fed.rounds()] == list(range(1, 9))
    with closing(Store(fed.config.folder / "store")) as store:
        assert store.journal.steps(store.states.run_id("run", str), 1) == []


def test_updates_in_blocks_come_one_after_another_where_there_is_one_credit(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=3, ballast=BALLAST, credits=1)
    spy = Spy(fed.world.broker)
    fed.play()
    assert [record["asynchronous"]["counted"] for record in fed.rounds()] == [3, 3, 3]
    assert {step.what for _, step in journal(fed)} == {HAND, TAKE}
    assert spy.said("go")
    assert {f"{err['code']}: {err['detail']}"[:21] for err in spy.said("err")} == {"busy: an upload waits"}


def test_rounds_are_kept_from_the_one_before_the_oldest_task_that_goes_on_or_ended_later(tmp_path: Path) -> None:
    by = a_rules()
    nothing, none_at_work = a_start("fedavg").state, a_start("fedavg")
    at_work, _, _ = machine.hand_out(none_at_work, by, 4, lambda _: True)
    with closing(Store(tmp_path / "store")) as store:

        def oldest(after: State) -> int:
            return oldest_needed(store, "run", after, 6)

        assert oldest(nothing) == 6
        assert oldest(pack(Snapshot(none_at_work))) == 6
        assert oldest(pack(Snapshot(at_work, dict.fromkeys(at_work.at_work, 5)))) == 4
        assert oldest(pack(Snapshot(none_at_work, {}, 4))) == 2  # the state before the round in which a test began
        store.journal.end("run", 6, 0, Step(EXPIRE, ["d0"], (1, 0)), "in time")
        store.journal.end("other", 7, 0, Step(EXPIRE, ["d0"], (1, 0)), "of another run")
        assert oldest(nothing) == 6
        store.journal.end("run", 7, 0, Step(EXPIRE, ["d0"], (3, 0)), "later")
        assert oldest(nothing) == 2


@pytest.mark.parametrize(
    ("method", "settings", "changes", "why"),
    [
        ("flhc", {}, {}, "whole round"),
        ("fedavg", {"reduce": "median"}, {}, "honest majority"),
        ("fedavg", {"secure": "updates"}, {}, "asked together"),
        ("fedavg", {}, {"over_select": 1.3}, "over-select"),
        ("fedavg", {}, {"concurrency": None}, "buffer without concurrency"),
    ],
)
def test_what_cannot_be_combined_is_refused_before_anything_is_done(
    tmp_path: Path, method: str, settings: dict[str, Any], changes: dict[str, Any], why: str
) -> None:
    run = RunConfig(method=method, rounds=2, name="run", settings={"batch-size": 8, **settings})
    with pytest.raises(ConfigError, match=why):
        Federation.of(tmp_path, runs=(run,), **({"concurrency": 3, "buffer": 3} | changes)).play()
