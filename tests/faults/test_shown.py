"""The server shows a strategy each reply when it is stored, before the exchange closes, and keeps no whole update."""

from __future__ import annotations

from pathlib import Path

import pytest

from coordinator.runtime.exchange.live_exchange import LiveExchange
from coordinator.strategies.common.streaming_gram import StreamingDistances, StreamingGram
from edge_client.protocol.task import ClientId, Reply
from tests.support.virtual_federation import BALLAST, Federation


@pytest.mark.parametrize("ballast", [0, BALLAST], ids=["inline", "blocks"])
def test_each_reply_is_shown_while_its_exchange_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ballast: int
) -> None:
    fed = Federation.of(tmp_path, ballast=ballast)
    seen: list[tuple[ClientId, bool, int]] = []
    for kind in (StreamingGram, StreamingDistances):

        def see(self: object, who: ClientId, reply: Reply, *, original: object = kind.add_reply) -> None:
            live = fed.live
            waiting = live is not None and not live.closed
            held = 0 if not isinstance(live, LiveExchange) else sum(r.update is not None for r in live.replies.values())
            seen.append((who, waiting, held))
            original(self, who, reply)  # type: ignore[operator]

        monkeypatch.setattr(kind, "add_reply", see)
    fed.play()
    early = [who for who, waiting, _ in seen if waiting]
    assert sorted(early) == sorted(2 * [f"d0{i}" for i in range(4)])  # in each of two rounds
    assert all(held == 0 for _, _, held in seen)
