"""The seeds of the tasks of a run that waits for no device."""

from __future__ import annotations

import pytest

from coordinator.rounds.asynchronous.training import hand_out
from tests.coordinator.rounds.asynchronous.test_training import a_start, answer, rules


@pytest.mark.parametrize("method", ["fesem", "ifca"])
def test_a_device_that_gets_several_tasks_in_a_round_has_other_batches_in_each(method: str) -> None:
    by, training, fits = rules(method, buffer=8), a_start(method), list[tuple[str, int, int]]()
    for moment in range(60):  # two fast devices of center 0, whose buffer is full at their share
        training, tasks, _ = hand_out(training, by, 1 + moment // 30, lambda who: who in ("d0", "d2", "d4", "d6"))
        fits += [(who, 1 + moment // 30, task.seed) for who, task in tasks.items()]
        training, _ = answer(training, by, min(training.at_work), moment)
    assert len({(who, number) for who, number, _ in fits}) < len(fits)
    assert len({seed for *_, seed in fits}) == len(fits)
