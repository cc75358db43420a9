from __future__ import annotations

import weakref
from dataclasses import replace

import numpy as np
import pytest

from coordinator.aggregation.centers import ROW_BLOCK
from coordinator.rounds.round import round_rng, run_round
from coordinator.strategies.base import Exchange, Replies, StoredReplies, drive, notify_reply, vector_samples
from coordinator.strategies.common.updates import ClientUpdates
from edge_client.protocol.task import Array, ClientId, Reply
from tests.support.methods import build, world
from tests.support.softmax_program import grouped_fleet


def test_updates_are_sorted_by_client_and_a_reply_without_a_model_is_silence() -> None:
    updates = ClientUpdates.from_replies(
        {"b": Reply(n=2, update=np.ones(3)), "a": Reply(n=1, update=np.zeros(3)), "c": Reply(n=9)}, 3
    )
    assert updates.clients == ("a", "b")
    assert updates.n.tolist() == [1.0, 2.0]
    assert ClientUpdates.from_replies({}, 3).rows.shape == (0, 3)


@pytest.mark.parametrize("case", ["fedavg", "fedcenters", "fesem", "fesem e-step=k-means", "ifca", "wecfl", "cam"])
def test_of_the_updates_on_disk_a_round_holds_as_many_at_a_time_as_are_added_together(case: str) -> None:
    """`fedcenters` and `fesem` held those of all devices, to look for newcomers' losses among them."""
    made, held, most = world(build(case), grouped_fleet(2 * ROW_BLOCK, 2), rounds=1), list[weakref.ref[Array]](), [0]

    def ask(exchange: Exchange) -> Replies:
        told = {who: made.devices.answer(who, task) for who, task in exchange.items()}

        def read(who: ClientId) -> Reply:
            if told[who].update is None:
                return told[who]
            update = np.array(told[who].update)
            held.append(weakref.ref(update))
            most[0] = max(most[0], sum(one() is not None for one in held))
            return replace(told[who], update=update)

        for who in told:
            notify_reply(exchange, who, read(who))
        return StoredReplies(told, read, {"update": vector_samples(told, "update")})

    drive(run_round(made.strategy, made.state, made.schema, made.fleet, round_rng(0, 2), batch=64), ask)
    assert 0 < most[0] <= ROW_BLOCK + 1
