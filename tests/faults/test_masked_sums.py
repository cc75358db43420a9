"""`secure` over the network: real coordinator and devices in virtual time, with dropouts and crashes at every stage."""

from __future__ import annotations

import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coordinator.config_sections import RunConfig
from coordinator.runtime.exchange.masked_sums import MaskedSums
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.strategies.base import Replies, SealedSums, SumByCenter
from edge_client.protocol.secure.masks import Words
from edge_client.runtime import task_runner
from edge_client.training.summed_work import SummedAnswer, add_words
from tests.support.virtual_federation import Anything, Federation

DEVICES = 6


def run_of(method: str = "fedavg", rounds: int = 2, **settings: Anything) -> RunConfig:
    given = {"local-steps": 3, "batch-size": 8, "secure": "updates", "secure-bits": 24, "secure-clip": 10.0}
    return RunConfig(method=method, rounds=rounds, name="fesem", settings=given | settings)


@dataclass
class Ledger:
    """What the devices added in the clear, by device, and the sums that the coordinator was given."""

    words: dict[str, list[Words]] = field(default_factory=lambda: defaultdict(list))
    sums: dict[ExchangeKey, SealedSums] = field(default_factory=dict)
    last: dict[ExchangeKey, dict[str, Words]] = field(default_factory=dict)


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Ledger:
    noted = Ledger()
    sums = MaskedSums.sums

    def note_words(*args: Any, **kwargs: Any) -> SummedAnswer:  # noqa: ANN401
        found = add_words(*args, **kwargs)
        noted.words[threading.current_thread().name].append(found.words)
        return found

    def note_sums(self: MaskedSums, first: ExchangeKey, exchange: SumByCenter) -> Replies:
        found = sums(self, first, exchange)
        assert isinstance(found, SealedSums)
        noted.sums[first] = found
        noted.last[first] = {cid: all_of[-1] for cid, all_of in noted.words.items()}
        return found

    monkeypatch.setattr(task_runner, "add_words", note_words)
    monkeypatch.setattr(MaskedSums, "sums", note_sums)
    return noted


def test_the_coordinator_is_given_exactly_the_sum_of_the_words_of_the_devices(tmp_path: Path, ledger: Ledger) -> None:
    fed = Federation.of(tmp_path, devices=DEVICES, runs=(run_of(),))
    fed.start()
    fed.complete()
    assert len(ledger.sums) == 4  # of two rounds, each with an evaluation
    for key, found in ledger.sums.items():
        assert found.members == {0: sorted(ledger.words)}, key
        bits = 24 if key.exchange == 0 else 32  # an evaluation has words of 32 bits
        expected = np.sum(list(ledger.last[key].values()), axis=0, dtype=np.uint32) & np.uint32(2**bits - 1)
        np.testing.assert_array_equal(found.sums[0], expected)
