"""A fleet as a value: which samples it shows, and which a run has."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedcenters as fc
from edge_client.data.dataset import DeviceData
from emulator.data import fleet as fleets
from emulator.data.fleet import Fleet
from emulator.options import SimulateArgs
from emulator.run.load import make_fleet


def test_a_fleet_without_a_seed_warns_where_it_shows_other_samples_than_a_run_has(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Held-out samples of `fleet["device-0"]` had trained the model of a run with another seed."""
    x, by = np.random.default_rng(0).normal(size=(60, 4)), np.repeat(np.arange(3), 20)

    def own(seed: int | None = None) -> Fleet:
        return fc.fleet((x, by), by=by, seed=seed)

    def run(fleet: Fleet, seed: int) -> Fleet:
        make_fleet(SimulateArgs(model="digits-mlp", seed=seed), fleet)
        return fleet

    fixed, same, unseen = run(own(3), 5), run(own(), 0), run(run(own(), 5), 6)
    assert len(fixed[0].train) == len(same[0].train) == 16
    assert repr(unseen)
    given = fc.fleet({k: DeviceData(train=part.train, test=part.train) for k, part in own().items()})
    assert len(run(given, 5)["device-0"].train) == 16
    assert not caplog.records
    assert len(unseen[0].train) == 16
    assert [record.message for record in caplog.records] == [fleets.OTHER_CUT]
    before = own()
    assert len(before[0].train) == 16
    run(run(before, 5), 6)
    assert [record.message for record in caplog.records] == [fleets.OTHER_CUT] * 2  # once for each fleet


class CutsOfAnotherThread(dict[int, Any]):
    """The cuts that a fleet keeps, of which another thread, that cuts by another seed, leaves none."""

    def __setitem__(self, seed: int, found: object) -> None:
        self.clear()


def test_a_cut_is_given_also_where_another_thread_has_cut_meanwhile() -> None:
    fleet = fc.fleet((np.eye(8), np.arange(8) % 2), devices=2)
    object.__setattr__(fleet, "_cuts", CutsOfAnotherThread())
    assert list(fleet.cut(3).devices) == ["device-00", "device-01"]
