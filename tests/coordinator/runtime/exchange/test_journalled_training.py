"""The journal is the run: another process that takes its steps is where this one was."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from coordinator.rounds.asynchronous.snapshot import Snapshot
from coordinator.rounds.asynchronous.training import Rules, begin_training
from coordinator.runtime.exchange.journalled_training import EXPIRED, STALE, JournalledTraining
from coordinator.storage.exchange_store import ReplayDiverged, StoredReply
from coordinator.storage.journal_store import EXPIRE, HAND, REFUSE, TAKE
from coordinator.strategies.base import State
from edge_client.protocol.task import Reply
from tests.support.updates_run import DEADLINE_S, ROUND, Begun, UpdatesRun, begun, full
from tests.support.wired_coordinator import DEVICES, SAMPLES

__all__ = ["begun"]  # a fixture


def again(run: UpdatesRun, rules: Rules | None = None) -> JournalledTraining:
    """The round as another process finds it in the journal."""
    made = JournalledTraining("run1", run.coordinator.context)
    start = run.coordinator.context.prepared.initial
    training = begin_training(State(centers=start[None].astype(np.float64), extra={"start": start}))
    made.open_round(ROUND, Snapshot(training), rules or run.rules, run.coordinator.context)
    return made


def test_another_process_takes_the_steps_of_the_journal_and_is_where_this_one_was(begun: Begun) -> None:
    run = begun(concurrency=2, buffer=3)
    tasks = run.tasks()
    first, second = sorted(tasks)
    run.announce(tasks[first], first)
    ((third, task),) = run.tasks().items()
    run.refuse(third, task["id"], "no_data")
    run.clock.time_s = DEADLINE_S
    run.live.tick()
    assert {HAND, TAKE, REFUSE, EXPIRE} <= set(run.steps())
    mine, theirs = run.live.updates.journalled, again(run)
    assert theirs.tasks == mine.tasks
    assert theirs.rounds == dict.fromkeys(mine.tasks, ROUND)
    assert theirs.counts == mine.counts
    assert theirs.refused == mine.refused
    assert (mine.refused[second], mine.refused[third]) == (EXPIRED, "no_data")
    assert (theirs.closed, theirs.wanted, theirs.round) == (False, 2, ROUND)
    assert theirs.training.versions == mine.training.versions
    assert theirs.training.buffered == mine.training.buffered == {first}
    assert theirs.training.at_work.keys() == mine.training.at_work.keys()
    np.testing.assert_array_equal(theirs.training.buffers[0][first].row, mine.training.buffers[0][first].row)
    for who in mine.tasks:
        assert theirs.prepared[who].sha256 == mine.prepared[who].sha256
    run.live.close()
    assert again(run).closed


@pytest.mark.parametrize("other", ["seed", "fewer devices at work"])
def test_a_journal_of_other_tasks_is_not_played(begun: Begun, other: str) -> None:
    run = begun(concurrency=2)
    options = replace(run.rules.options, concurrency=1)
    rules = replace(run.rules, seed=99) if other == "seed" else replace(run.rules, options=options)
    with pytest.raises(ReplayDiverged):
        again(run, rules)


def test_the_last_updates_of_a_round_are_as_many_as_it_wants_and_others_count_in_the_next(begun: Begun) -> None:
    run = begun(concurrency=4, buffer=3, staleness=9)
    tasks = run.tasks()
    run.coordinator.more = True
    for cid in DEVICES:
        run.announce(tasks[cid], cid)
    run.live.sync()
    assert sorted(run.told()) == [(cid, "ack", "ok") for cid in ("d0", "d1", "d2")]
    state = run.live.updates.journalled
    assert (state.counts.staleness, state.wanted, state.closed) == ([0, 0, 0], 0, True)
    run.next_round()
    assert ("d3", "ack", "ok") in run.told()
    state = run.live.updates.journalled
    assert (state.counts.staleness, state.wanted, state.refused) == ([1], 2, {})
    assert run.steps(ROUND + 1)[:1] == [TAKE]


def test_an_update_counts_by_the_samples_that_its_device_has_in_the_fleet_of_this_round(begun: Begun) -> None:
    """It was read when it arrived, in a round whose fleet was another one."""
    run = begun(concurrency=1, buffer=3)
    ((who, _),) = run.tasks().items()
    state = run.live.updates.journalled
    update = run.coordinator.context.prepared.initial + np.float32(1)
    record = StoredReply(who, "ab" * 32, 99, 3 * SAMPLES, "delta", "", 1.0)
    orders = state.take({who: (record, Reply(n=3 * SAMPLES, update=update))})
    assert orders is not None
    assert state.training.buffers[0][who].n == SAMPLES


def test_a_task_that_was_stopped_on_a_full_disk_is_over_once_it_has_room(
    begun: Begun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A device that missed the `stop` was answered `busy` without an end."""
    run = begun(concurrency=4, buffer=3, staleness=0)
    tasks = run.tasks()
    with monkeypatch.context() as patch:
        patch.setattr(run.coordinator.store.journal, "stop", full)
        for cid in ("d0", "d1", "d2"):
            run.announce(tasks[cid], cid)
        assert ("d3", "stop", "") in run.told()
        run.announce(tasks["d3"], "d3")
        assert run.told() == [("d3", "err", "busy")]
    run.next_round()
    run.said()
    run.announce(tasks["d3"], "d3")
    assert run.told() == [("d3", "ack", "late")]
    assert run.coordinator.store.exchanges.refusals("run1", ROUND)["d3"] == STALE
