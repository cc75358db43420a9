"""Tries to make every exchange last until its deadline, by a device that answers now and then."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from coordinator.rounds.silence import ANSWERS_FOR_ONE, WAITED_MISSES
from coordinator.storage.exchange_store import ExchangeKey
from tests.support.virtual_federation import Federation, Spy

LIAR, HONEST, ROUNDS, DEADLINE_S = "d99", 3, 10, 300.0


def key_of(task: Mapping[str, Any]) -> ExchangeKey:
    return ExchangeKey(task["run"], task["round"], task["exchange"])


@pytest.mark.parametrize("each", [2, 3])
def test_a_device_that_answers_now_and_then_costs_few_deadlines(tmp_path: Path, each: int) -> None:
    """It refuses one task in two, or three. That ended each row of misses, so the run waited in all other exchanges."""
    fed = Federation.of(tmp_path, devices=HONEST + 1, quorum=0.5, deadline_s=DEADLINE_S, rounds=ROUNDS)
    spy = Spy(fed.world.broker)
    fed.start(HONEST)
    fed.start_mute_device(LIAR)
    began_s, seen = fed.world.clock.time_s, list[ExchangeKey]()

    def lie() -> bool:
        live = fed.live
        if live is not None and live.key not in seen[-1:]:
            for task in [task for task in spy.said("task", cid=LIAR)[-1:] if key_of(task) == live.key]:
                seen.append(live.key)
                if len(seen) % each == 0:
                    spy.say(LIAR, "nack", re=task["id"], code="unavailable", **live.key._asdict())
        return fed.happened("done")

    fed.world.run(lie)
    waited = (fed.world.clock.time_s - began_s) / DEADLINE_S
    assert len(seen) == 2 * ROUNDS
    assert 1 < waited < WAITED_MISSES + 2 * ROUNDS / (1 + ANSWERS_FOR_ONE) + 1
    fed.world.end()
