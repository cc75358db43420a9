"""A loss of the user's own goes with the centers: what leaves the run measures newcomers as the run's devices were."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedcenters as fc
from edge_client.protocol.nearest.router import NEED_LABELS
from export.compiler.losses.sample_losses import LossFunction

DEVICES = 6


def yes_and_no() -> fc.Fleet:
    """Three answers for a sample; odd devices answer the opposite."""
    rng = np.random.default_rng(0)
    who = np.repeat(np.arange(DEVICES), 60)
    x = rng.normal(size=(len(who), 5)).astype(np.float32)
    y = ((x[:, :3] > 0) ^ (who % 2 == 1)[:, None]).astype(np.float32)
    return fc.fleet((x, y), by=who)


def trained(loss: LossFunction) -> fc.Result:
    method = fc.FeSEM(2, local_steps=40, learning_rate=1.0)
    return fc.simulate(method, fleet=yes_and_no(), model=nn.Linear(5, 3), rounds=4, loss=loss, progress=False)


def unexportable(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """No runtime has the Bessel function."""
    alike = nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none").mean(1)
    return alike + 0 * torch.special.i0e(outputs).mean(1)  # type: ignore[no-any-return]


def test_a_bundle_has_a_loss_that_gives_a_batchs_mean(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As `torch.nn` writes them. Its program had squared error, and new devices were told that no center fits them."""
    bundle = trained(nn.BCEWithLogitsLoss()).export(tmp_path / "b", formats=())
    assert bundle.program.own_loss
    assert "in its place" not in capsys.readouterr().err
    assert "trained for a loss of the user's own" in (tmp_path / "b/centers/center-0/card.md").read_text()


def test_where_another_loss_stands_for_the_runs_own_the_guide_is_of_that_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = trained(unexportable)
    bundle = result.export(tmp_path / "b", formats=())
    assert not bundle.program.own_loss
    assert "has squared-error in its place" in capsys.readouterr().err
    errors = []
    for who, device in result.split.devices.items():
        assert device.test is not None
        outputs = result.module(result.assignments[who])(torch.from_numpy(device.test.x)).detach().numpy()
        errors.append(float(np.square(outputs - device.test.y).mean()))
    assert bundle.router is not None
    middle, best = float(bundle.router.usual["loss"].middle[-1]), result.run.records[-1]["loss"]["micro"]
    assert best is not None
    assert best < 0.5 * min(errors) < middle < 2 * max(errors)
    again = fc.load(result.save(tmp_path / "mine"), loss=unexportable).export(tmp_path / "again", formats=())
    assert again.router is not None
    assert not again.router.usual.keys() & NEED_LABELS  # its devices taught by the own loss, and are not here


def test_a_loaded_run_without_its_own_loss_judges_no_device_by_another(tmp_path: Path) -> None:
    """The squared error was held against limits of the own loss, so that no center fitted its own devices."""
    result = trained(nn.BCEWithLogitsLoss())
    place, some = result.save(tmp_path / "mine"), result.split.devices["device-1"].train
    expected = result.nearest(some.x, some.y)
    again = fc.load(place, loss=nn.BCEWithLogitsLoss()).nearest(some.x, some.y)
    assert (again.center, again.fit) == (expected.center, expected.fit)
    without = fc.load(place)
    assert without.guide is not None
    assert not without.guide.usual.keys() & NEED_LABELS
    found = without.nearest(some.x, some.y)
    assert (found.best, found.fit) == (expected.best, "well")
