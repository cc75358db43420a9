"""Tries to ruin centers through what training does not bound: batch norm's statistics, and one parameter of many."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.aggregation.centers import aggregate
from coordinator.aggregation.robust import REDUCER_NAMES, make_reducer
from coordinator.rounds.update_validation import ReplySpec, decode_reply, outliers, update_moves
from coordinator.runtime.training_loop import late_model
from coordinator.storage.exchange_store import StoredReply
from coordinator.storage.store import Store
from edge_client.errors import Malformed
from edge_client.protocol import codecs
from edge_client.protocol.task import Fit, Flat, Reply, Schema, TensorSpec

CHANNELS, PARAMETERS = 3, 10_000
SCHEMA = Schema(
    (
        TensorSpec(name="weight", role="p", shape=(PARAMETERS,)),
        TensorSpec(name="norm.running_mean", role="b", shape=(CHANNELS,)),
        TensorSpec(name="norm.running_var", role="b", shape=(CHANNELS,)),
    )
)
MEAN, VARIANCE = SCHEMA.slices["norm.running_mean"], SCHEMA.slices["norm.running_var"]
BASE = "ab" * 32
CENTER: Flat = np.where(np.arange(SCHEMA.size) >= VARIANCE.start, 1.0, 0.0).astype(np.float32)


def question(center: Flat = CENTER) -> ReplySpec:
    task = Fit(start=center, steps=1, lr=0.1, batch=8, seed=0)
    return ReplySpec(
        task=task, schema=SCHEMA, samples=40, codec="f32", base=BASE, base_vector=center, max_update_rms=10.0
    )


def model(*, mean: float = 0.5, variance: float = 2.0) -> Flat:
    """A trained model; the given values are those of the last channel."""
    out = CENTER + np.float32(0.01)
    out[MEAN.stop - 1], out[VARIANCE.stop - 1] = mean, variance
    return out


def received(asked: ReplySpec, vector: Flat) -> Flat:
    """What the coordinator makes of an upload of this model."""
    delta = vector if asked.base_vector is None else vector - asked.base_vector
    data = codecs.encode_vector(delta, SCHEMA, codec=asked.codec, kind="delta", base=asked.base)
    update = decode_reply(asked, data, 40).update
    assert update is not None
    return update


def test_the_same_update_has_no_negative_variance_when_it_is_late(tmp_path: Path) -> None:
    """One channel may be far below zero where another one rose by a thousand times as much."""
    store, asked = Store(tmp_path), question()
    vector = model(variance=-900.0)
    vector[VARIANCE.start] = 1e6
    data = codecs.encode_vector(vector - CENTER, SCHEMA, codec="f32", kind="delta", base=asked.base)
    in_time = decode_reply(asked, data, 40).update
    base = store.blobs.put(codecs.encode_vector(CENTER, SCHEMA, codec="f32", kind="model"))
    sha256 = store.updates("d03").put(data)
    late = late_model(store, StoredReply("d03", sha256, len(data), 40, "delta", base, 1.0), SCHEMA)
    store.close()
    assert in_time is not None
    assert (late[VARIANCE] >= 0).all()
    np.testing.assert_array_equal(late, in_time)


def test_a_growing_statistic_may_grow_on_but_not_by_five_orders_of_magnitude() -> None:
    grown = CENTER.copy()
    grown[VARIANCE] = 1e5
    asked = question(grown)
    assert received(asked, model(variance=5e8))[VARIANCE.stop - 1] == pytest.approx(5e8)
    with pytest.raises(Malformed, match="at most 1e\\+09"):
        received(asked, model(variance=5e9))


@pytest.mark.parametrize("name", [name for name in REDUCER_NAMES if name != "mean"])
def test_one_device_of_five_moves_no_buffer_of_a_robust_center_beyond_the_honest_ones(name: str) -> None:
    rng = np.random.default_rng(0)
    rows = CENTER + rng.normal(0.05, 0.01, (5, SCHEMA.size)).astype(np.float32)
    honest = rows[:4].copy()
    rows[4, MEAN], rows[4, VARIANCE] = 1e6, 1e6  # what the bound lets through
    new = aggregate(
        CENTER[None],
        rows,
        np.ones((5, 1)),
        np.ones(5),
        reduce=make_reducer(name, trim=0.2),
        n_params=SCHEMA.n_params,
        n=np.full(5, 40.0),
    )[0]
    room = 2 * np.abs(honest - CENTER).max()  # a geometric median and a clipped mean lean towards the fifth
    assert (np.abs(new - CENTER) <= room).all()


def test_one_parameter_of_many_does_not_hide_behind_the_root_mean_square() -> None:
    far = model()
    far[7] = 500.0  # 5 on the average of ten thousand parameters
    with pytest.raises(Malformed, match="one parameter moved by 500"):
        received(question(), far)


def test_at_the_closing_one_parameter_and_the_buffers_are_compared_with_other_devices() -> None:
    asked, sly, bold = question(), model(), model(mean=1e5)
    sly[7] = 5.0
    moves = {f"d{i}": update_moves(asked, Reply(n=40, update=model(mean=0.4 + i / 10))) for i in range(4)}
    moves |= {
        "sly": update_moves(asked, Reply(n=40, update=sly)),
        "bold": update_moves(asked, Reply(n=40, update=bold)),
    }
    assert moves["sly"]["delta"] < 10 * moves["d0"]["delta"]  # its root mean square is within the bound
    refused, _ = outliers(moves, {}, ratio=10.0)
    assert refused.keys() == {"sly", "bold"}
    assert "one parameter moved" in outliers({w: m for w, m in moves.items() if w != "bold"}, {}, ratio=10.0)[0]["sly"]
    assert "buffers moved" in refused["bold"]
