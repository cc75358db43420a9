"""Methods that train one member of a sum after the other: a round without replies is no round of a phase."""

from __future__ import annotations

import numpy as np
import pytest

from coordinator.models.members import SumLayout
from coordinator.rounds.metrics import ari
from coordinator.strategies.additive.femam import PERSONAL
from edge_client.protocol.task import Fit, Probe
from tests.support.methods import build, world
from tests.support.softmax_program import grouped_fleet

LOCAL = grouped_fleet(6, 2)


@pytest.mark.parametrize(("case", "key"), [("cam warm-up=1", "warm-up-rounds"), ("femam", "rounds-trained")])
def test_a_round_without_replies_takes_none_of_the_rounds_of_a_phase(case: str, key: str) -> None:
    fleet = world(build(case), LOCAL)
    begun = int(fleet.state.extra[key])
    fleet.round(silent=list(LOCAL))
    assert int(fleet.state.extra[key]) == begun
    fleet.round()
    assert abs(int(fleet.state.extra[key]) - begun) == 1


def test_a_device_that_missed_the_level_of_groups_finds_its_group_before_it_trains_its_own_model() -> None:
    """It would be served the center of most devices, and train its model over that one."""
    fleet = world(build("femam level-rounds=4", k=3), local := grouped_fleet(9, 3))
    late = sorted(local)[-3:]  # one of each group
    for _ in range(8):
        fleet.round(silent=late)
    assert not fleet.state.assignment.keys() & set(late)
    fleet.round()
    found = fleet.state.assignment
    assert ari([i % 3 for i in range(9)], [found[c] for c in sorted(local)]) == 1.0
    fleet.round()
    layout = SumLayout(fleet.schema, 3)
    for c in late:
        task = fleet.exchanges[0][c]
        assert isinstance(task, Fit)
        assert task.init is not None
        np.testing.assert_array_equal(task.init, layout.with_trained(fleet.state.centers[found[c]], PERSONAL))


def test_models_that_devices_compare_at_the_start_differ_in_the_member_of_the_group_alone() -> None:
    """A center without devices became one half of another in all members, and the common one is held."""
    made = world(build("cam start=loss least-members=2"), grouped_fleet(16, 2), rounds=1)
    layout = SumLayout(made.schema, 2)
    compared = [task.models for exchange in made.exchanges for task in exchange.values() if isinstance(task, Probe)]
    wide = [np.stack([np.asarray(model) for model in models]) for models in compared if len(models) > 2]
    assert len(wide) == 4 * 16
    for models in wide:
        assert np.ptp(models[:, layout.places[0]], axis=0).max() < 1e-12  # means of equal numbers are rounded
        assert np.ptp(models[:, layout.places[-1]], axis=0).max() > 1e-3
