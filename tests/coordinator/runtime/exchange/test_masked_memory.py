"""The coordinator adds masked uploads one by one: what grows with the cohort is less than a vector for each device."""

from __future__ import annotations

import tracemalloc
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from coordinator.storage.exchange_store import ExchangeKey
from coordinator.storage.store import Store
from coordinator.strategies.base import SealedSums, SumByCenter
from edge_client.protocol.sum_codec import Work
from edge_client.protocol.summed_task import SummedFit, SumScale, Words
from tests.support.secure_cohort import cids
from tests.support.stored_cohort import StoredCohort

SIZE = 200_000
FEW, MANY = 12, 48
FIRST = ExchangeKey("r", 1, 0)


def work(devices: int, center: int) -> SummedFit:
    centers = np.zeros((2, SIZE), np.float32)
    return SummedFit(
        start=centers[0], steps=1, lr=0.1, batch=8, seed=0, upload=False, stage="add", choose="given", group=center,
        centers=centers, scale=SumScale(bits=32, devices=devices, clip=1.0), open=(center,),
    )  # fmt: skip


def words_of(cid: str, asked: Work) -> Words:
    """Of a device that moved each parameter by nothing but rounding."""
    if not isinstance(asked, SummedFit):
        raise TypeError("a fit is played")
    rounded = np.random.default_rng(list(cid.encode())).integers(0, 2, SIZE, np.uint32)
    return np.concatenate([rounded, np.array([asked.scale.levels, 1], np.uint32)])


def summed(folder: Path, devices: int, dropped: list[str]) -> tuple[SealedSums, int]:
    """The sums of two centers, and the most bytes that coordinator and devices held meanwhile."""
    with closing(Store(folder)) as store:
        played = StoredCohort(store, words_of, silent={"add": dropped})
        groups = {cid: i % 2 for i, cid in enumerate(cids(devices))}
        works = [work(devices, center) for center in range(2)]
        exchange = SumByCenter({cid: works[groups[cid]] for cid in groups}, least=5, groups=groups)
        tracemalloc.start()
        try:
            sums = played.masked_sums().sums(FIRST, exchange)
            held = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert isinstance(sums, SealedSums)
        return sums, held


@pytest.mark.parametrize("part", [0.0, 0.2])
def test_a_masked_sum_holds_no_vector_for_each_device(tmp_path: Path, part: float) -> None:
    """With devices that drop out, whose masks with all their neighbours are taken off."""
    peaks = []
    for number, devices in enumerate((FEW, MANY)):
        dropped = cids(devices)[: round(part * devices)]
        sums, held = summed(tmp_path / str(number), devices, dropped)
        peaks.append(held)
        assert sorted(cid for members in sums.members.values() for cid in members) == cids(devices)[len(dropped) :]
        for group, members in sums.members.items():
            total = np.zeros(SIZE + 2, np.uint32)
            for cid in members:
                total += words_of(cid, work(devices, group))
            np.testing.assert_array_equal(sums.sums[group], total)
    assert peaks[1] - peaks[0] < (MANY - FEW) * 4 * SIZE / 4
