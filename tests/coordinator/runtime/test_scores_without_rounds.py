"""Devices test centers while updates go on: which centers, by which devices, and after a kill."""

from __future__ import annotations

from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.artifacts.finished_run import make_strategy
from coordinator.rounds.asynchronous.snapshot import unpack
from coordinator.rounds.round import serving_probe
from coordinator.runtime.exchange.updates_and_test import UpdatesAndTest
from coordinator.storage.store import Store
from edge_client.protocol.task import Reply
from edge_client.training.learner import EngineLearner
from emulator.simulation.emulated_devices import EmulatedDevices
from tests.coordinator.runtime.test_without_rounds import DEVICES, ROUNDS, RUNS, federation
from tests.support import softmax_program
from tests.support.virtual_federation import Federation, Spy, program


def check_scores(fed: Federation) -> list[dict[str, Any]]:
    """Each record of a test has the accuracies of the centers that it names; -> these records."""
    local = softmax_program.grouped_fleet(DEVICES, 2)
    devices = EmulatedDevices(learner=EngineLearner(softmax_program.SoftmaxEngine(), program()), local=local)
    strategy = make_strategy(fed.config.runs[0], fed.config)
    found = [record for record in fed.rounds()[:-1] if "tested" in record.get("asynchronous", {})]
    with closing(Store(fed.config.folder / "store")) as store:
        for record in found:
            state = store.states.of_round(store.states.run_id("run", str), record["asynchronous"]["tested"]["round"])
            assert state is not None
            before = unpack(state)
            assert before is not None
            assert list(before.training.versions) == record["asynchronous"]["tested"]["versions"]
            for who, accuracy in record["per_device"].items():
                reply = devices.answer(who, serving_probe(strategy, before.training.state, who, batch=8))
                assert isinstance(reply, Reply)
                assert reply.confusion is not None
                assert accuracy == pytest.approx(np.trace(reply.confusion[0]) / reply.confusion[0].sum())
    return found


@pytest.mark.parametrize("method", RUNS)
def test_devices_test_every_so_many_rounds_while_updates_go_on(tmp_path: Path, method: str) -> None:
    fed = federation(tmp_path, method, rounds=9, evaluate_every=3).play()
    tested = check_scores(fed)
    assert tested
    assert {record["asynchronous"]["tested"]["round"] % 3 for record in tested} == {0}
    assert all(len(record["per_device"]) >= 0.75 * DEVICES for record in tested)
    assert not [record["refused"] for record in fed.rounds()[:-1] if "refused" in record]
    others = [record for record in fed.rounds()[1:-1] if record not in tested]
    assert all(not record["per_device"] for record in others)


def test_the_last_test_asks_a_device_that_has_sent_its_part_of_the_round_too(tmp_path: Path) -> None:
    fed = federation(tmp_path, "ifca")
    spy = Spy(fed.world.broker)
    fed.play()
    last = [spy.said("task", cid=who)[-1] for who in fed.final_state("run").assignment]
    assert len(last) == DEVICES
    assert {task["job"] for task in last} == {"probe"}
    assert len({(task["round"], task["exchange"]) for task in last}) == 1


def test_after_the_last_test_devices_test_centers_as_they_are_exported(tmp_path: Path) -> None:
    """In an exchange of its own, behind that of the models which they are served."""
    fed = federation(tmp_path, "ifca", buffered=True, settings={"batch-norm": "batch"})
    spy = Spy(fed.world.broker)
    fed.play()
    sent = [(task["round"], task["exchange"]) for task in spy.said("task") if task["job"] == "probe"]
    served, exported = [key for key in sorted(set(sent)) if sent.count(key) == DEVICES][-2:]
    assert exported == (ROUNDS, served[1] + 1)
    assert fed.rounds()[-1]["centers"]


def slow_test(folder: Path, **more: Any) -> Federation:  # noqa: ANN401 - keys of the file
    """A run whose tests wait for a device that never answers: they outlast rounds."""
    fed = federation(folder, rounds=14, quorum=1.0, devices=DEVICES, concurrency=2, deadline_s=1.0, **more)
    fed.start_coordinator()
    fed.start_devices(DEVICES - 1)
    fed.start_mute_device(f"d{DEVICES - 1:02d}")
    return fed


def test_a_test_outlasts_rounds_and_ends_at_the_deadline(tmp_path: Path) -> None:
    fed = slow_test(tmp_path)
    fed.finish()
    fed.world.end()
    tested = check_scores(fed)
    assert any(record["round"] > record["asynchronous"]["tested"]["round"] + 2 for record in tested)
    assert all(1 <= len(record["per_device"]) < DEVICES for record in tested)


def test_a_coordinator_that_starts_again_sends_the_tasks_of_a_test_once(tmp_path: Path) -> None:
    """And once more to a device that announces itself to it."""
    fed = federation(tmp_path, rounds=4, evaluate_every=1, devices=DEVICES, concurrency=2)
    fed.start(DEVICES)

    def testing() -> bool:
        live = None if fed.server is None or fed.server.session is None else fed.server.session.dispatcher.exchange.live
        test = live.test if isinstance(live, UpdatesAndTest) else None
        return test is not None and not test.closed and test.count_answers == 0

    fed.world.run(testing)
    fed.world.kill("coordinator.0")
    spy = Spy(fed.world.broker)
    fed.start_coordinator()
    fed.complete()
    names = [f"d{number:02d}" for number in range(DEVICES)]
    sent = Counter((cid, task["round"]) for cid in names for task in spy.said("task", cid=cid) if not task["exchange"])
    assert max(sent.values()) == 2


@pytest.mark.parametrize("keep_rounds", [0, 2])
def test_a_test_that_a_kill_interrupts_goes_on_with_the_same_tasks(tmp_path: Path, keep_rounds: int) -> None:
    """A store that keeps two rounds keeps the centers that are tested, too."""
    fed = slow_test(tmp_path, keep_rounds=keep_rounds)

    def outlasts() -> bool:
        live = None if fed.server is None or fed.server.session is None else fed.server.session.dispatcher.exchange.live
        test = live.test if isinstance(live, UpdatesAndTest) else None
        return test is not None and not test.closed and live is not None and live.key.round > test.key.round + 1

    fed.world.run(outlasts)
    fed.world.kill("coordinator.0")
    with closing(Store(fed.config.folder / "store")) as store:
        run = store.states.run_id("run", str)
        last = store.states.last(run)
        assert last is not None
        before = unpack(last[1])
        assert before is not None
        begun = before.test
        assert 0 < begun < last[0] + 1
    fed.start_coordinator()
    fed.complete()
    assert [record["round"] for record in fed.rounds()] == list(range(1, 15))
    tested = [record for record in fed.rounds() if "tested" in record.get("asynchronous", {})]
    assert begun - 1 in {record["asynchronous"]["tested"]["round"] for record in tested}
    if not keep_rounds:
        check_scores(fed)


def test_tasks_that_are_done_in_a_long_pause_count_after_it(tmp_path: Path) -> None:
    fed = federation(tmp_path, rounds=4, deadline_s=50.0, evaluate_every=9)
    fed.start()
    fed.world.run(lambda: fed.live is not None)
    assert fed.server is not None
    fed.server.pause()
    fed.world.run(lambda: fed.world.clock.time_s > 500.0)
    assert len(fed.rounds()) == 1
    fed.server.resume()
    fed.complete()
    assert sum(record["asynchronous"]["expired"] for record in fed.rounds()) == 0
    assert fed.world.clock.time_s < 550.0
