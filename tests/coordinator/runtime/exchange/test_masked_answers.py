"""Answers to the stages of a masked sum that a device must not give are refused when they arrive."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from coordinator.rounds.update_validation import AskedStage
from coordinator.runtime.exchange.masked_sums import MaskedSums
from coordinator.runtime.exchange.task_messages import NetworkExchange
from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import SumByCenter
from edge_client.errors import Malformed
from edge_client.protocol.secure.keys import public_prekey
from edge_client.protocol.secure.parameters import LEAST_COHORT
from edge_client.protocol.secure.sum_messages import PrekeyBatch
from edge_client.protocol.sum_codec import KEPT
from edge_client.protocol.task import ClientId, Fit
from tests.support.sum_tasks import FIT

CIDS = [f"d{i}" for i in range(LEAST_COHORT)]
FIRST = ExchangeKey("r", 2, 0)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "store")) as made:
        yield made


def asked(store: Store, exchange: SumByCenter) -> AskedStage:
    """The stage of d0 in the first exchange, which no device answers."""
    heard: list[NetworkExchange] = []

    def ask(_: ExchangeKey, tasks: NetworkExchange) -> Collection[ClientId]:
        heard.append(tasks)
        return []

    MaskedSums(ask=ask, store=store, federation="test").sums(FIRST, exchange)
    stage = heard[0]["d0"]
    assert isinstance(stage, AskedStage)
    return stage


def offer(number: int) -> bytes:
    return PrekeyBatch(keys=(public_prekey(number, number.to_bytes(32, "big")),)).to_bytes()


def test_a_prekey_that_was_offered_before_is_refused(store: Store) -> None:
    known = {cid: PrekeyBatch.from_bytes(offer(7)) for cid in CIDS}
    store.prekeys.take(ExchangeKey("r", 1, 1), CIDS, known)
    stage = asked(store, SumByCenter(dict.fromkeys(CIDS, FIT), least=LEAST_COHORT))
    assert (stage.stage, stage.after) == ("prekeys", 7)
    with pytest.raises(Malformed, match="a prekey with a number up to 7") as refused:
        stage.decode(offer(7))
    assert refused.value.code == "rejected"
    assert stage.decode(offer(8)).n == 1


@pytest.mark.parametrize("told", [b"", b"\x01", KEPT + KEPT])
def test_of_a_fit_that_stays_on_the_device_nothing_else_is_taken_than_that_it_was_done(
    store: Store, told: bytes
) -> None:
    fit = Fit(start="own", init=np.zeros(3, np.float32), steps=1, lr=0.1, batch=8, seed=0, upload=False)
    stage = asked(store, SumByCenter(dict.fromkeys(CIDS, fit), least=LEAST_COHORT))
    assert stage.stage == "keep"
    with pytest.raises(Malformed) as refused:
        stage.decode(told)
    assert refused.value.code == "bad_schema"
    assert stage.decode(KEPT).n == 1
