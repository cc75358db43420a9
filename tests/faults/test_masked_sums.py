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
from edge_client.protocol.secure.parameters import LEAST_COHORT
from edge_client.runtime import task_runner
from edge_client.training.summed_work import SummedAnswer, add_words
from tests.support.softmax_program import CLASSES
from tests.support.virtual_federation import Anything, Federation

DEVICES = 6
BITS = 24  # of the words of a round
EVALUATED = CLASSES**2 + 3  # words of an evaluation, which have 32 bits


def run_of(method: str = "fedavg", rounds: int = 2, **settings: Anything) -> RunConfig:
    given = {"local-steps": 3, "batch-size": 8, "secure": "updates", "secure-bits": BITS, "secure-clip": 10.0}
    given |= {"clusters": 2} if method not in ("fedavg", "ditto") else {}
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


def check_exact(ledger: Ledger) -> None:
    """Each sum is that of the words of its members, modulo 2^bits."""
    for key, found in ledger.sums.items():
        for group, members in found.members.items():
            assert len(members) >= LEAST_COHORT
            if group in found.sums:
                total = np.sum([ledger.last[key][cid] for cid in members], axis=0, dtype=np.uint32)
                bits = 32 if len(total) == EVALUATED else BITS
                np.testing.assert_array_equal(found.sums[group], total & np.uint32(2**bits - 1))


@pytest.mark.parametrize(
    ("method", "mode", "sums"),
    [
        ("ifca", "updates", 1 + 2 + 2),  # the random groups, two rounds of one sum, and two evaluations
        ("ifca", "updates+membership", 1 + 4 + 2),  # choices are summed, too
        ("fesem", "updates+membership", 14 + 4 + 2),  # k-means in the first round: seven steps of two sums
        ("fedem", "updates", 1 + 2 + 2),  # a device has a part in every center
        ("ditto", "updates", 2 + 2 + 2),  # and the second fits, of which nothing is told
    ],
)
def test_the_coordinator_is_given_exactly_the_sum_of_the_words_of_the_devices(
    tmp_path: Path, ledger: Ledger, method: str, mode: str, sums: int
) -> None:
    fed = Federation.of(tmp_path, devices=12, runs=(run_of(method, secure=mode),))
    fed.start()
    fed.complete()
    assert len(ledger.sums) == sums
    assert all(found.sums for found in ledger.sums.values() if found.members)
    check_exact(ledger)
    assert all("failed" not in record["secure"] for record in fed.rounds())
