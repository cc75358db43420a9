"""Prekeys in the coordinator's store: each is taken once, ever, and a replay is given the same ones."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.round_pruning import prune_rounds
from coordinator.storage.store import Store
from coordinator.strategies.base import State
from edge_client.protocol.secure.keys import public_prekey
from edge_client.protocol.secure.sum_messages import PrekeyBatch

CIDS = ("d1", "d2")


def batch(first: int, count: int = 3) -> PrekeyBatch:
    return PrekeyBatch(keys=tuple(public_prekey(n, n.to_bytes(32, "big")) for n in range(first, first + count)))


def key(number: int, exchange: int = 1) -> ExchangeKey:
    return ExchangeKey("r1", number, exchange)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(tmp_path / "store")) as made:
        yield made


def test_each_prekey_is_taken_by_one_sum_in_rising_order(store: Store) -> None:
    prekeys = store.prekeys
    assert prekeys.lacking(CIDS) == set(CIDS)
    first = prekeys.take(key(1), CIDS, {cid: batch(0) for cid in CIDS})
    assert {cid: one.number for cid, one in first.items()} == {"d1": 0, "d2": 0}
    assert first["d1"] == batch(0).keys[0]
    second = prekeys.take(key(2), ("d1",), {})
    assert {cid: one.number for cid, one in second.items()} == {"d1": 1}
    assert prekeys.taken(key(2)) == second
    third = prekeys.take(key(3), CIDS, {})
    assert {cid: one.number for cid, one in third.items()} == {"d1": 2, "d2": 1}
    assert prekeys.lacking(CIDS) == {"d1"}
    assert (prekeys.newest("d1"), prekeys.newest("d2"), prekeys.newest("d3")) == (2, 2, -1)


def test_a_prekey_that_is_offered_again_is_not_taken_again(store: Store) -> None:
    for number in range(1, 4):
        store.prekeys.take(key(number), ("d1",), {"d1": batch(0)})
    assert store.prekeys.take(key(4), ("d1",), {"d1": batch(0)}) == {}
    assert store.prekeys.take(key(5), ("d1",), {"d1": batch(0, 4)})["d1"].number == 3


def test_what_a_sum_took_survives_a_restart(tmp_path: Path) -> None:
    with closing(Store(tmp_path / "store")) as before:
        taken = before.prekeys.take(key(1), CIDS, {cid: batch(0) for cid in CIDS})
    with closing(Store(tmp_path / "store")) as after:
        assert after.prekeys.taken(key(1)) == taken
        assert after.prekeys.take(key(2), ("d1",), {})["d1"].number == 1


def test_a_device_that_lost_its_prekeys_is_asked_for_new_ones(store: Store) -> None:
    store.prekeys.take(key(1), CIDS, {cid: batch(0) for cid in CIDS})
    store.prekeys.forget(key(1), "d1")
    assert store.prekeys.lacking(CIDS) == {"d1"}
    assert store.prekeys.newest("d1") == 2
    assert set(store.prekeys.taken(key(1))) == set(CIDS)
    assert store.prekeys.take(key(2), ("d1",), {"d1": batch(3)})["d1"].number == 3


def test_a_replay_forgets_no_prekeys_that_were_offered_for_a_sum_of_a_later_round(store: Store) -> None:
    store.prekeys.take(key(1), ("d1",), {"d1": batch(0)})
    store.prekeys.forget(key(1), "d1")
    store.prekeys.take(key(2), ("d1",), {"d1": batch(3)})
    store.prekeys.forget(key(1), "d1")
    assert store.prekeys.lacking(("d1",)) == set()


def test_what_a_sum_took_is_kept_as_long_as_its_round_and_the_newest_of_a_device_for_ever(store: Store) -> None:
    taken = [store.prekeys.take(key(number), CIDS, {cid: batch(0) for cid in CIDS}) for number in (1, 2, 3)]
    assert [store.prekeys.taken(key(number)) for number in (1, 2, 3)] == taken
    for last in (2, 3):
        store.states.put("r1", last, State(centers=np.zeros((1, 2))))
        prune_rounds(store, "r1", last)
        assert [store.prekeys.taken(key(number)) for number in (1, 2, 3)] == [{}, {}, taken[2]]
    assert store.prekeys.take(key(4), CIDS, {cid: batch(0) for cid in CIDS}) == {}
