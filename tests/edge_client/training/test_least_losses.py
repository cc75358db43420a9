from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from edge_client.data.dataset import Dataset, DeviceData
from edge_client.protocol.program import IGNORED
from edge_client.protocol.task import F64, Probe
from edge_client.training.fit_probe import run_probe
from edge_client.training.learner import EngineLearner
from edge_client.training.least_losses import SAMPLES_AT_ONCE, least_losses
from tests.support.softmax_program import SoftmaxEngine, program, samples

LEARNER = EngineLearner(SoftmaxEngine(), program())
LOSSES = st.sampled_from([0.0, 0.5, 1.0, 3.0, np.inf, np.nan])
TABLES = st.tuples(st.integers(1, 4), st.integers(1, 12)).flatmap(
    lambda shape: arrays(np.float64, shape, elements=LOSSES)
)


@given(TABLES, st.integers(0, 2**12 - 1), st.integers(1, SAMPLES_AT_ONCE))
def test_the_least_is_that_of_all_samples_and_no_other_is_told_as_more_than_it_is(
    table: F64, uncounted: int, last: int
) -> None:
    """Each column of the table is the loss of `SAMPLES_AT_ONCE` samples, the last one that of `last`."""
    each = [SAMPLES_AT_ONCE] * (table.shape[1] - 1) + [last]
    labels = [IGNORED if uncounted >> k & 1 else 0 for k in range(table.shape[1])]
    y = np.array(labels).repeat(each).reshape(-1, 1)
    data = Dataset(np.arange(len(y), dtype=np.float64).reshape(-1, 1), y)
    calls: list[int] = []

    def evaluate(m: int, some: Dataset) -> F64:
        calls.append(m)
        mine: F64 = table[m][some.x[:, 0].astype(np.int64) // SAMPLES_AT_ONCE]
        return mine

    losses = least_losses(evaluate, len(table), data, at_once=SAMPLES_AT_ONCE)
    known = np.where(np.isnan(table), np.inf, table).repeat(each, axis=1)[:, data.counted].sum(axis=1)
    told = np.where(np.isnan(losses), np.inf, losses)[:, data.counted].sum(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(told == told.min()), np.flatnonzero(known == known.min()))
    assert (told <= known).all()
    assert told.min() == known.min()
    assert all(calls.count(m) <= table.shape[1] for m in range(len(table)))


def test_models_that_cannot_be_the_least_are_left_early() -> None:
    data, calls = Dataset(np.zeros((640, 1)), np.zeros(640, np.int64)), [0, 0, 0]

    def evaluate(m: int, some: Dataset) -> F64:
        calls[m] += len(some)
        return np.full(len(some), (1.0, 0.25, 2.0)[m])

    least_losses(evaluate, 3, data, at_once=64)
    assert calls == [3 * 64, 640, 2 * 64]


@pytest.mark.parametrize("prior", [False, True])
def test_a_probe_for_the_least_tells_its_loss_as_another_does(prior: bool) -> None:  # noqa: FBT001 - pytest's
    rng = np.random.default_rng(3)
    local, scales = DeviceData(train=samples(rng, 300)), (0.1, 9.0, 0.2, 12.0)
    models = [scale * rng.standard_normal(LEARNER.program.schema.size) for scale in scales]
    totals = [[1.0, 2.0, 3.0, 4.0]] * 4 if prior else None
    whole = Probe(models=models, want=frozenset({"loss"}), batch=16, seed=0, label_totals=totals)
    known, told = (run_probe(LEARNER, probe, local).losses for probe in (whole, replace(whole, least=True)))
    assert known is not None
    assert told is not None
    best = int(known.argmin())
    assert told.argmin() == best
    assert told[best] == pytest.approx(known[best], rel=1e-12)
    assert (told <= known * (1 + 1e-12)).all()
    assert (told < known).sum() >= 2  # those of large weights were not evaluated to their end
