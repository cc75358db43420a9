"""Skellam noise: the difference of two Poisson numbers, whole numbers whose sums are Skellam again.

A device adds it to its words before they are masked, so that the sum over the devices is differentially private for the
server, too (Agarwal, Kairouz and Liu 2021, "The Skellam Mechanism for Differentially Private Federated Learning"). The
accountant is coordinator/aggregation/skellam_accounting.py.
"""

from __future__ import annotations

import math
import secrets
from functools import partial

import numpy as np
from numpy.typing import NDArray

from edge_client.protocol.task import F64, Array

NUMPY_MEAN = 2.0**36  # beyond 1e13 the deviation of numpy's is off by 2 to 25 %: it subtracts terms of mean log mean
BLOCK = 1 << 16  # numbers that are drawn at once, which bounds the memory of a board


def secret_stream() -> np.random.Generator:
    """Random numbers that follow from 256 bits of the operating system, which are forgotten."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(secrets.randbits(256))))


def with_noise(words: Array, deviation: float, rng: np.random.Generator) -> NDArray[np.int64]:
    """Whole numbers plus Skellam noise of this standard deviation, in units of a word."""
    half = deviation**2 / 2
    out = words.astype(np.int64)
    flat, draw = out.reshape(-1), rng.poisson if half < NUMPY_MEAN else partial(_large_poisson, rng=rng)
    for start in range(0, flat.size, BLOCK):
        part = flat[start : start + BLOCK]
        part += draw(half, part.size) - draw(half, part.size)
    return out


def _large_poisson(mean: float, count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """[count] Poisson numbers less the whole part of their mean, as in the page (Hörmann 1993, PTRS)."""
    b = 0.931 + 2.53 * math.sqrt(mean)
    a = -0.059 + 0.02483 * b
    inverse, sure = 1.1239 + 1.1328 / (b - 3.4), 0.9277 - 3.6224 / (b - 2)
    rest = math.fmod(mean, 1.0)
    out, todo = np.empty(count, np.int64), np.arange(count)
    while todo.size:
        u, v = rng.random(todo.size) - 0.5, 1.0 - rng.random(todo.size)
        us = np.maximum(0.5 - np.abs(u), 2.0**-54)
        at = np.floor((2 * a / us + b) * u + rest + 0.43)
        likely = np.log(v * inverse / (a / us**2 + b)) <= _log_share((at - rest) / mean, mean)
        good = ((us >= 0.07) & (v <= sure)) | (likely & ((us >= 0.013) | (v <= us)))  # noqa: PLR2004 - of the paper
        out[todo[good]] = at[good]
        todo = todo[~good]
    return out


def _log_share(x: F64, mean: float) -> F64:
    """The logarithm of the probability of the number mean (1 + x), without the difference of large terms: Stirling."""
    x = np.maximum(x, -0.5)  # thousands of deviations away, where a number is refused in any case
    k = mean * (1 + x)
    logs: F64 = -mean * ((1 + x) * np.log1p(x) - x) - 0.5 * np.log(2 * np.pi * k) - 1 / (12 * k)
    return logs
