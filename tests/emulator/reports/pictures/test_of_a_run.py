"""A simulated run leaves what its pictures need, and is the same run as one that nobody hears."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.rounds.metrics import ari
from coordinator.strategies.fesem import FeSEM
from emulator.options import SimulateArgs
from emulator.reports.pictures.records import PICTURES_FILE, read_picture_data
from emulator.reports.run_figures import draw_run
from emulator.run.execute import run_simulation
from emulator.run.settings import RunSettings
from emulator.simulate import simulate_json
from tests.support.softmax_program import devices_of, grouped_fleet, play, start_of


def test_a_run_that_is_heard_ends_with_the_same_centers() -> None:
    local, method = grouped_fleet(6, 3), FeSEM(clusters=3, local_steps=4, batch_size=8)
    heard = run_simulation(method, start_of(), devices_of(local), RunSettings(rounds=4, seed=0, batch=8))
    np.testing.assert_array_equal(heard.state.centers, play(method, local, rounds=4).centers)
    assert [(m.round, m.who) for m in heard.kept.moments] == [(n, tuple(sorted(local))) for n in (1, 2, 4)]


@pytest.mark.parametrize(("method", "shares"), [("fesem", False), ("fedsoft", True)])
def test_a_run_of_digits_leaves_its_pictures_and_little_else(tmp_path: Path, method: str, *, shares: bool) -> None:
    said = simulate_json(SimulateArgs(method=method, rounds=2, settings={"local-steps": 5}, out=tmp_path))
    folder = Path(str(said["run"]))
    kept = read_picture_data(folder / PICTURES_FILE)
    assert (folder / PICTURES_FILE).stat().st_size < 100_000
    assert [m.points.shape for m in kept.moments] == [(12, 650)] * 2  # the last layer of digits-mlp
    assert (kept.shares is not None) == shares
    assert kept.images is not None
    assert kept.images.pixels.shape[1:] == (1, 8, 8)
    left: list[str] = []
    written = draw_run(folder, tmp_path / "figures", say=left.append)
    assert len(written) + len(left) == 10
    assert {path.stem for path in written} >= {"devices-pca", "cosines-within", "images"}
    assert ("weights" in {path.stem for path in written}) == shares


def test_the_points_that_are_kept_tell_the_groups_apart_as_the_method_did(tmp_path: Path) -> None:
    said = simulate_json(SimulateArgs(method="fesem", rounds=2, out=tmp_path))
    (last,) = (m for m in read_picture_data(Path(str(said["run"])) / PICTURES_FILE).moments if m.round == 2)
    apart = np.linalg.norm(last.points[:, None] - last.points, axis=2)
    near = apart.argsort(axis=1)[:, :4].min(axis=1)  # each group of four by its first member
    assert ari([int(c[-2:]) % 3 for c in last.who], near.tolist()) == said["ari"] == 1.0
