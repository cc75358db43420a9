from __future__ import annotations

import numpy as np

from coordinator.strategies.common.updates import ClientUpdates
from edge_client.protocol.task import Reply


def test_updates_are_sorted_by_client_and_a_reply_without_a_model_is_silence() -> None:
    updates = ClientUpdates.from_replies(
        {"b": Reply(n=2, update=np.ones(3)), "a": Reply(n=1, update=np.zeros(3)), "c": Reply(n=9)}, 3
    )
    assert updates.clients == ("a", "b")
    assert updates.n.tolist() == [1.0, 2.0]
    assert ClientUpdates.from_replies({}, 3).rows.shape == (0, 3)
