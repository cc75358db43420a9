"""Replies that are shown while they arrive are a head start, nothing else: a round depends on what it closes with."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.strategies.base import Replies, State, Strategy, StreamingExchange, notify_reply
from coordinator.strategies.baselines.fedavg import FedAvg
from coordinator.strategies.fesem import FeSEM
from coordinator.strategies.fesem_ma import FeSEMMA
from coordinator.strategies.robust_tkm import TKM
from coordinator.strategies.wecfl import WeCFL
from edge_client.protocol.task import ClientId, Reply
from tests.support.softmax_program import schema, start_of

FLEET = {f"d{i:02}": 10 + i for i in range(12)}
METHODS: list[FeSEM] = [
    FeSEM(),
    FeSEM(e_step="k-means", representation="projection"),
    FeSEM(representation="delta"),
    WeCFL(),
    WeCFL(fraction_train=0.5),
    FeSEMMA(e_step="k-means", representation="all"),
    TKM(trim_clusters=0.2),
]
NAMES = [f"{type(m).__name__}-{m.e_step}-{m.representation}-{m.fraction_train}" for m in METHODS]


def answers(seed: int, *, of: list[ClientId], dtype: type = np.float32) -> dict[ClientId, Reply]:
    """A model from each device: three groups, near one another."""
    rng = np.random.default_rng(seed)
    base, groups = start_of(), rng.standard_normal((3, start_of().size))
    made = {c: (base + groups[int(c[1:]) % 3] + rng.standard_normal(base.size)).astype(dtype) for c in of}
    return {c: Reply(n=FLEET[c], update=update) for c, update in made.items()}


def begun(method: Strategy) -> State:
    state = method.begin(start_of().astype(np.float32), schema(), FLEET, np.random.default_rng(0))
    return after(method, state, {}, shown=[], seed=1)


def after(method: Strategy, state: State, replies: Replies, *, shown: list[ClientId], seed: int) -> State:
    """One round. Without `replies` every asked device answers, as `answers` says."""
    exchanges = method.round(state, schema(), FLEET, np.random.default_rng(seed))
    exchange = next(exchanges)
    for who in shown:
        notify_reply(exchange, who, replies[who])
    try:
        exchanges.send({c: r for c, r in (replies or answers(seed, of=sorted(exchange))).items() if c in exchange})
    except StopIteration as done:
        state_after: State = done.value
        return state_after
    raise AssertionError("one exchange was expected")


def same(one: State, other: State) -> None:
    assert one.assignment == other.assignment
    np.testing.assert_array_equal(one.centers, other.centers)
    assert one.extra.keys() == other.extra.keys()
    for name, value in one.extra.items():
        np.testing.assert_array_equal(value, other.extra[name])


@pytest.mark.parametrize("first", [True, False], ids=["first-round", "later-round"])
@pytest.mark.parametrize("method", METHODS, ids=NAMES)
@settings(max_examples=12)
@given(data=st.data())
def test_the_order_of_arrival_copies_and_who_is_shown_change_nothing(
    method: FeSEM,
    first: bool,  # noqa: FBT001 - a parameter of the test
    data: st.DataObject,
) -> None:
    blank = method.begin(start_of().astype(np.float32), schema(), FLEET, np.random.default_rng(0))
    state = blank if first else begun(method)
    asked = sorted(next(method.round(state, schema(), FLEET, np.random.default_rng(2))))
    every = answers(data.draw(st.integers(0, 99)), of=asked)
    closed = {c: every[c] for c in asked if data.draw(st.booleans()) or c == asked[0]}
    # Shown in any order: some of them never, some twice, and some that the exchange then closes without.
    shown = data.draw(st.lists(st.sampled_from(asked), max_size=2 * len(asked)))
    alone = after(method, state, closed, shown=[], seed=2)
    exchanges = method.round(state, schema(), FLEET, np.random.default_rng(2))
    exchange = next(exchanges)
    for who in shown:
        notify_reply(exchange, who, every[who])
    with pytest.raises(StopIteration) as done:
        exchanges.send(closed)
    same(done.value.value, alone)


def test_what_is_kept_of_a_shown_reply_is_its_point() -> None:
    method = WeCFL()
    exchange = next(method.round(begun(method), schema(), FLEET, np.random.default_rng(2)))
    assert isinstance(exchange, StreamingExchange)
    reply = answers(2, of=["d00"])["d00"]
    notify_reply(exchange, "d00", reply)
    assert reply.update is not None
    reply.update[:] = np.nan  # whoever still held it would see this
    watch = exchange.on_reply.__self__  # type: ignore[attr-defined]
    assert np.isfinite(watch.matrix(["d00"], {"d00": reply})).all()


def test_a_reply_without_a_model_has_no_point() -> None:
    method = FeSEM(e_step="k-means")
    state, replies = begun(method), answers(2, of=sorted(FLEET))
    silent = {**replies, "d03": replace(replies["d03"], update=None, losses=np.ones(1))}
    fewer = {c: r for c, r in replies.items() if c != "d03"}
    same(
        after(method, state, silent, shown=sorted(silent), seed=2),
        after(method, state, fewer, shown=[], seed=2),
    )


def test_methods_that_do_not_care_are_shown_nothing() -> None:
    method = FedAvg()
    exchange = next(
        method.round(
            method.begin(start_of(), schema(), FLEET, np.random.default_rng(0)),
            schema(),
            FLEET,
            np.random.default_rng(1),
        )
    )
    assert not isinstance(exchange, StreamingExchange)
    notify_reply(exchange, "d00", Reply(n=1))


def test_a_watched_exchange_is_the_exchange() -> None:
    method = FeSEM()
    exchange = next(method.round(begun(method), schema(), FLEET, np.random.default_rng(2)))
    assert sorted(exchange) == sorted(FLEET)
    assert exchange == dict(exchange)
