"""Samples on the device: moved once, dropped in time, never mistaken for others'."""

from __future__ import annotations

import numpy as np
import torch

from edge_client.data.dataset import Dataset
from emulator.engines.gpu.objective import Objective
from emulator.engines.gpu.resident_data import DeviceDataCache
from tests.support.engine_models import model_of

BYTES = 8 * (64 + 10)  # of one sample of digits-mlp in float64, with its one-hot label


def resident(*, samples: int) -> DeviceDataCache:
    objective = Objective(model_of("digits-mlp"), device=torch.device("cpu"), dtype="float64")
    return DeviceDataCache(objective, limit=BYTES * samples)


def drawn(n: int, seed: int = 0) -> Dataset:
    rng = np.random.default_rng(seed)
    return Dataset(rng.standard_normal((n, 1, 8, 8)), rng.integers(10, size=n))


def test_a_data_set_is_moved_once_and_its_labels_are_one_hot() -> None:
    kept, data = resident(samples=10), drawn(4)
    x, y = kept.tensors_of(data)
    assert kept.tensors_of(data)[0] is x
    np.testing.assert_array_equal(x, data.x)
    np.testing.assert_array_equal(y.argmax(1), data.y)
    np.testing.assert_array_equal(y.sum(1), np.ones(4))


def test_the_least_recently_used_makes_room() -> None:
    kept, sets = resident(samples=10), [drawn(4, seed) for seed in range(3)]
    first, second, _ = (kept.tensors_of(sets[i])[0] for i in (0, 1, 0))
    kept.tensors_of(sets[2])  # 12 samples: one of the others must go
    assert kept.nbytes == BYTES * 8
    assert kept.tensors_of(sets[0])[0] is first
    assert kept.tensors_of(sets[1])[0] is not second


def test_one_data_set_is_kept_however_large() -> None:
    kept, data = resident(samples=1), drawn(5)
    assert kept.tensors_of(data)[0] is kept.tensors_of(data)[0]
    assert kept.free_bytes == 0


def test_what_nobody_holds_any_more_is_forgotten() -> None:
    kept, stays = resident(samples=100), drawn(4)
    kept.tensors_of(stays)
    for seed in range(20):
        data = drawn(3, seed)  # at an address that an earlier one may have had
        np.testing.assert_array_equal(kept.tensors_of(data)[0], data.x)
        del data
    kept.tensors_of(stays)
    assert kept.nbytes == BYTES * 4
    assert kept.free_bytes == BYTES * 96


def test_samples_of_several_data_sets_are_gathered_in_order() -> None:
    kept, one, other = resident(samples=2), drawn(5), drawn(4, seed=1)  # too little room for both
    index = np.array([3, 1]), np.array([0, 2, 2])
    x, y = kept.gather([(one, index[0]), (other, index[1]), (one, index[0])])
    np.testing.assert_array_equal(x, np.concatenate([one.x[index[0]], other.x[index[1]], one.x[index[0]]]))
    np.testing.assert_array_equal(y.argmax(1), np.concatenate([one.y[index[0]], other.y[index[1]], one.y[index[0]]]))
