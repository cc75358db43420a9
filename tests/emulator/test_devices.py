from __future__ import annotations

import numpy as np

from edge_client.protocol.task import Fit, Probe
from emulator.devices import PROFILES, draw_profiles

W = np.zeros(4)


def test_the_same_seed_draws_the_same_fleet_whatever_the_order() -> None:
    names = [f"c{i}" for i in range(20)]
    assert draw_profiles(names, 1) == draw_profiles(reversed(names), 1)
    assert draw_profiles(names, 1) != draw_profiles(names, 2)
    assert set(draw_profiles(names, 1).values()) == set(PROFILES)


def test_time_grows_with_steps_models_and_bytes() -> None:
    board = PROFILES[0]
    one, ten = (Fit(start=W, steps=steps, lr=0.1, batch=8, seed=0) for steps in (1, 10))
    assert board.work_s(ten, 100) == 10 * board.work_s(one, 100)
    two = Probe(models=[W, W], want=frozenset({"loss"}), batch=8, seed=0)
    assert board.work_s(two, 17) == 2 * 3 * board.evaluate_s
    assert board.up_s(1_000_000) == board.latency_s + 1.0
    assert board.down_s(0) == board.latency_s
