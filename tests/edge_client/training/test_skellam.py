"""The noise of a device is Skellam: of the deviation that the accountant counts, with the tails of a normal number."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from edge_client.protocol.summed_task import SumScale
from edge_client.training.skellam import NUMPY_MEAN, _large_poisson, with_noise

DRAWS = 200_000


@pytest.mark.parametrize(("devices", "multiplier"), [(5, 1.0), (5, 4.0), (8, 1.0), (20, 1.0), (1_000, 1.0)])
def test_noise_has_the_deviation_that_is_counted_in_fleets_of_any_size(devices: int, multiplier: float) -> None:
    """Words of few devices are fine, so their noise is a large number: of five its Poisson numbers have a mean of 1e15.

    The deviation of so many draws is off by 0.16 % at one deviation of its own.
    """
    scale = SumScale(bits=32, devices=devices, clip=1.0, noise=multiplier / math.sqrt(devices))
    drawn = with_noise(np.zeros(DRAWS, np.uint32), scale.deviation, np.random.default_rng(7)) / scale.deviation
    assert drawn.std() == pytest.approx(1.0, rel=0.007)
    assert abs(drawn.mean()) < 0.01
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert (np.abs(drawn) > 3).mean() == pytest.approx(0.0027, rel=0.25)


@pytest.mark.parametrize("mean", [1_000.3, 40_000.0])
def test_large_poisson_numbers_have_their_probabilities(mean: float) -> None:
    """Beside the exact ones, which are known for means that numpy draws by itself."""
    drawn = _large_poisson(mean, DRAWS, np.random.default_rng(3)) + math.floor(mean)
    edges = np.unique(np.floor(stats.poisson.ppf(np.linspace(0.001, 0.999, 80), mean)))
    below = np.concatenate([[0.0], stats.poisson.cdf(edges - 1, mean), [1.0]])
    counts = np.histogram(drawn, np.concatenate([[-np.inf], edges, [np.inf]]))[0]
    assert stats.chisquare(counts, np.diff(below) * DRAWS).pvalue > 1e-3


def test_noise_is_added_to_every_word_whatever_their_number() -> None:
    words = np.arange(2**16 + 5, dtype=np.uint32).reshape(-1, 1)
    deviation = math.sqrt(2 * NUMPY_MEAN)
    noise = with_noise(words, deviation, np.random.default_rng(1)) - words
    assert noise.shape == words.shape
    assert noise.std() == pytest.approx(deviation, rel=0.02)
    assert (noise == 0).mean() < 1e-3
    assert (words[:, 0] == np.arange(2**16 + 5)).all()
