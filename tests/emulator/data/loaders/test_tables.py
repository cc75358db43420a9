from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits

from edge_client.errors import ConfigError
from emulator.data.loaders import tables
from tests.support.raw_data_files import unknown

ROOT = Path(__file__).parents[4]


def test_the_digits_are_the_scans_that_scikit_learn_ships() -> None:
    data, theirs = tables.digits(), load_digits()
    held = data.dataset(data.train)
    assert np.array_equal(data.train.x.reshape(-1, 64), theirs.data)
    assert np.array_equal(data.train.y, theirs.target)
    assert held.x.shape == (1797, 1, 8, 8)
    assert held.x.dtype == np.dtype(np.float32)
    assert (held.x.min(), held.x.max()) == (0.0, 1.0)


def test_reading_the_digits_and_scoring_groups_imports_no_scikit_learn() -> None:
    """It takes longer than the training of a short run."""
    code = (
        "import sys; from coordinator.rounds import metrics; from emulator.data.loaders import tables\n"
        "tables.digits(), metrics.ari([0, 1], [1, 0]), metrics.nmi([0, 1], [1, 0])\n"
        "print({'sklearn', 'scipy', 'pandas'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert done.stdout == "set()\n"


def test_wisdm_is_standardised_and_an_undefined_peak_is_the_mean(tmp_path: Path) -> None:
    x = np.array([[1.0, 5.0, 2.0], [3.0, np.nan, 2.0], [5.0, 9.0, 2.0]], np.float32)
    (tmp_path / "wisdm").mkdir()
    np.savez(tmp_path / "wisdm" / "wisdm_v1.1_transformed.npz", x=x, y=np.array([0, 1, 5]), user=np.array([1, 1, 36]))
    data = tables.wisdm(unknown(tmp_path))
    np.testing.assert_allclose(data.train.x[:, 0], [-1.2247449, 0.0, 1.2247449], rtol=1e-6)
    assert data.train.x[:, 1].tolist() == [-1.0, 0.0, 1.0]
    assert data.train.x[:, 2].tolist() == [0.0, 0.0, 0.0]
    assert data.train.user is not None
    assert data.train.user.tolist() == [1, 1, 36]


def test_shakespeare_asks_each_part_for_the_character_after_eighty(tmp_path: Path) -> None:
    said = "".join(chr(97 + i % 26) for i in range(90))
    text = "\n\n".join([f"HAMLET:\n{said}"] * 20 + ["GHOST:\nboo"] + ["a line without a name"])
    (tmp_path / "shakespeare").mkdir()
    (tmp_path / "shakespeare" / "tinyshakespeare.txt").write_text(text)
    data = tables.shakespeare(unknown(tmp_path))
    alphabet = sorted(set(text))
    assert data.train.x.shape[1] == 80
    spoken = "".join(alphabet[int(c)] for c in data.train.x[0])
    assert spoken == said[:80]
    assert alphabet[data.train.y[0]] == said[80]
    assert data.train.user is not None
    assert set(data.train.user.tolist()) == {0}  # the ghost says too little


def test_shakespeare_without_parts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shakespeare").mkdir()
    for text in (b"", b"nobody speaks", bytes([255])):
        (tmp_path / "shakespeare" / "tinyshakespeare.txt").write_bytes(text)
        with pytest.raises(ConfigError):
            tables.shakespeare(unknown(tmp_path))


@pytest.mark.parametrize("domains", [2, 8])
def test_least_squares_recovers_the_regressions_and_leaves_the_unit_noise(domains: int) -> None:
    data = tables.regression(domains, seed=3)
    assert data.test is not None
    thetas = []
    for s in range(domains):
        rows = data.train.domain == s
        theta, *_ = np.linalg.lstsq(data.train.x[rows].astype(np.float64), data.train.y[rows, 0], rcond=None)
        thetas.append(theta)
        assert data.test.domain is not None
        test = np.flatnonzero(data.test.domain == s)
        residual = data.test.y[test, 0] - data.test.x[test] @ theta
        # The mean of n squared normals has deviation sqrt(2 / n); five of them.
        assert abs((residual**2).mean() - 1) < 5 * np.sqrt(2 / len(test))
    if domains == 2:
        assert np.sum((thetas[0] - thetas[1]) ** 2) == pytest.approx(165.0, rel=0.02)


def test_another_seed_draws_another_regression() -> None:
    first, again, other = (tables.regression(2, seed=s).train.y for s in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
