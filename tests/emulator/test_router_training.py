"""The guide of an emulated run is written whatever its devices' samples and losses are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedcenters as fc


def test_a_device_whose_local_round_diverges_leaves_the_guide_without_the_way_round(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    x = rng.normal(size=(6, 30, 3)).astype(np.float32)
    y = x.sum(axis=2, keepdims=True)
    x[5] *= 1e4  # its updates are not finite, and do not count
    fleet = fc.fleet({f"d{i}": (x[i], y[i]) for i in range(6)})
    result = fc.simulate(fc.FedAvg(local_steps=5, learning_rate=0.05), fleet=fleet, rounds=2)
    bundle = result.export(tmp_path / "centers", formats=())
    assert bundle.router is not None
    assert "loss" in bundle.router.ways
    assert "round" not in bundle.router.ways
    assert "no way `round`" in capsys.readouterr().err
