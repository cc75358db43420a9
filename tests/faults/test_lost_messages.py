"""Messages that a broker loses: the residuals of i8 follow what the coordinator took, whichever messages are lost.

An update that the coordinator took is the device's difference, plus the residual of the update that it took before,
minus the residual that is left. So the sum of what was sent, plus what is owed, is the sum of what was learned.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.config_sections import RunConfig
from coordinator.storage.store import Store
from edge_client.protocol import codecs, messages
from edge_client.protocol.task import Flat
from edge_client.runtime.state import DeviceState, TaskKey
from tests.support.memory_broker import MemoryBroker
from tests.support.virtual_federation import BALLAST, TOPICS, Federation

ROUNDS, DEVICES = 3, 2
LOSABLE = ("task", "rdy", "go", "in", "ack", "stop")
Loss = tuple[str, int]  # kind, and which message of this kind of the device d01
losses = st.frozensets(st.tuples(st.sampled_from(LOSABLE), st.integers(1, 8)), max_size=6)


class Sent(NamedTuple):
    """One update that a device computed: the residual that it added, and the one that is left."""

    key: TaskKey
    center: int | None
    sha256: str
    added: Flat | None
    left: Flat


def losing(lost: Iterable[Loss]) -> Callable[[str, bytes], tuple[bytes, ...]]:
    """A broker that loses these messages, and keeps the connections."""
    lost, seen = set(lost), Counter[str]()

    def tamper(topic: str, payload: bytes) -> tuple[bytes, ...]:
        route = TOPICS.parse(topic)
        if route.cid != "d01" or route.kind not in ("t", "rq", "in"):
            return (payload,)
        kind = "in" if route.kind == "in" else messages.read_message(payload, route.kind)["k"]
        seen[kind] += 1
        return () if (kind, seen[kind]) in lost else (payload,)

    return tamper


@contextmanager
def watched() -> Iterator[dict[str, list[Sent]]]:
    """What each device sends, in order; a device's thread has its name."""
    sent: dict[str, list[Sent]] = {}
    asked: dict[str, tuple[TaskKey, int | None]] = {}
    residual, encode = DeviceState.residual, codecs.encode_with_feedback

    def ask(state: DeviceState, key: TaskKey, center: int | None, schema: Any) -> Flat | None:  # noqa: ANN401
        asked[threading.current_thread().name] = key, center
        return residual(state, key, center, schema)

    def send(delta: Flat, added: Flat | None, *args: Any, **more: Any) -> tuple[bytes, Flat]:  # noqa: ANN401
        data, left = encode(delta, added, *args, **more)
        name = threading.current_thread().name
        one = Sent(*asked[name], hashlib.sha256(data).hexdigest(), added, left)
        sent.setdefault(name, []).append(one)
        return data, left

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DeviceState, "residual", ask)
        patch.setattr(codecs, "encode_with_feedback", send)
        yield sent


def taken(folder: Path) -> set[tuple[str, int, int, str, str]]:
    """The updates that the coordinator has stored: run, round, exchange, device, sha256."""
    query = "select run, round, exchange, cid, sha256 from {}"
    with closing(Store(folder / "store")) as store:
        return {tuple(row) for table in ("replies", "late") for row in store.database.rows(query.format(table))}


def check_residuals(sent: dict[str, list[Sent]], stored: set[tuple[str, int, int, str, str]]) -> None:
    for cid, updates in sent.items():
        owed: dict[int | None, tuple[int, Flat]] = {}
        for one in updates:
            since, left = owed.get(one.center, (0, None))
            if left is None:
                assert one.added is None, (cid, one.key)
            else:
                assert one.added is not None, (cid, one.key)
                share = np.float32(0.5 ** max(0, one.key.round - since - 1))
                np.testing.assert_array_equal(one.added, left * share, err_msg=f"{cid} {one.key}")
            if (one.key.run, one.key.round, one.key.exchange, cid, one.sha256) in stored:
                owed[one.center] = one.key.round, one.left


@settings(max_examples=15, deadline=None)
@given(lost=losses, method=st.sampled_from(["fesem", "fedavg-late"]), restart=st.booleans())
@example(lost={("ack", 2)}, method="fesem", restart=False)
@example(lost={("ack", 1)}, method="fedavg-late", restart=False)
@example(lost={("rdy", 1)}, method="fedavg-late", restart=False)
@example(lost={("rdy", 1)}, method="fesem", restart=True)
def test_a_residual_is_added_once_and_only_after_its_update_was_taken(
    lost: frozenset[Loss],
    method: str,
    restart: bool,  # noqa: FBT001
) -> None:
    more: dict[str, Any] = {"clusters": 2, "restarts": 2} if method == "fesem" else {}
    run = RunConfig(method=method, rounds=ROUNDS, name="run", settings={"local-steps": 2, "batch-size": 8, **more})
    with TemporaryDirectory() as folder, watched() as sent:
        fed = Federation.of(
            Path(folder),
            broker=MemoryBroker(tamper=losing(lost)),
            ballast=BALLAST,
            runs=(run,),
            codec="i8",
            devices=DEVICES,
            quorum=0.5,
            deadline_s=40.0,
        )
        fed.start(DEVICES)
        if restart:
            fed.world.run(lambda: "d01" in sent)
            fed.world.kill("coordinator.0")
            fed.start_coordinator()
        fed.complete()
        check_residuals(sent, taken(fed.config.folder))
