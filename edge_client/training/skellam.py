"""Skellam noise: the difference of two Poisson numbers, whole numbers whose sums are Skellam again.

A device adds it to its words before they are masked, so that the sum over the devices is differentially private for the
server, too (Agarwal, Kairouz and Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning"). The
accountant is coordinator/aggregation/skellam_accounting.py.
"""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import Array


def secret_stream() -> np.random.Generator:
    """Random numbers that follow from 256 bits of the operating system, which are forgotten."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(secrets.randbits(256))))


def with_noise(words: Array, deviation: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Whole numbers plus Skellam noise of this standard deviation, in units of a word."""
    half = deviation**2 / 2
    noise: NDArray[np.int64] = rng.poisson(half, words.shape) - rng.poisson(half, words.shape)
    return words.astype(np.int64) + noise
