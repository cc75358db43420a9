"""Tasks whose answers are only ever summed: what a device adds to the sums of the centers, as words modulo 2^bits.

A device chooses its center, trains, and answers b-bit words. The server is given the sum of the words of many devices
(docs/privacy.md). One block of words belongs to one center:

    [ q((w - c_k) v) for every parameter,  q(v),  1 ]       v in [0, 1]: the weight of the device in center k
    q(x) = floor(x levels / clip + u) for a parameter, floor(x levels + u) for a weight,   u uniform in [0, 1)
    levels = floor((2^(bits - 1) - 1) / (devices + ceil(12 noise sqrt(devices))))

With `noise` a device adds Skellam noise of the deviation noise * levels to each parameter's word (training/skellam.py),
also where its share is zero. No word exceeds `levels` before it, and 12 deviations of the sum's noise have room, so the
sum of `devices` devices does not overflow. The mean of the center is c_k + clip S / V,
with S and V the sums of the first two parts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from edge_client.errors import Malformed
from edge_client.protocol.task import F64, Array, Fit, Probe

Words = NDArray[np.uint32]
CHOICES = ("only", "given", "loss", "nearest", "shares", "posterior")
SOFT = frozenset({"shares", "posterior"})  # a device has a part in every center
MIN_BITS, MAX_BITS = 16, 32
SCORE_LEVELS = 1_000  # of an accuracy or F1
EVALUATION_WORDS = 5


@dataclass(frozen=True, kw_only=True)
class SumScale:
    """The public scale of a sum: `bits` of a word, at most so many `devices`, the L2 norm `clip` of one contribution.

    `noise` is the standard deviation of the noise of one device, in units of `clip`.

    Raises Malformed where the sum of so many devices could overflow.
    """

    bits: int
    devices: int
    clip: float
    noise: float = 0.0

    def __post_init__(self) -> None:
        if not MIN_BITS <= self.bits <= MAX_BITS:
            raise Malformed("bad_task", f"words have {MIN_BITS} to {MAX_BITS} bits, got {self.bits}")
        if not (self.clip > 0 and np.isfinite(self.clip)):
            raise Malformed("bad_task", f"the bound of a contribution must be positive, got {self.clip}")
        if not (self.noise >= 0 and np.isfinite(self.noise)):
            raise Malformed("bad_task", f"the noise of a device must not be negative, got {self.noise}")
        if self.devices < 1 or self.levels < 1:
            raise Malformed("bad_task", f"a sum of {self.devices} devices overflows words of {self.bits} bits")

    @property
    def levels(self) -> int:
        """The greatest word of one device, in absolute value."""
        room = self.devices + math.ceil(12 * self.noise * math.sqrt(self.devices))
        return ((1 << (self.bits - 1)) - 1) // room

    @property
    def deviation(self) -> float:
        """The standard deviation of the noise in a word of one device."""
        return self.noise * self.levels

    def to_words(self, values: F64, rng: np.random.Generator) -> Words:
        """Values in [-1, 1] as words, rounded at random to a neighbour, so that the mean error is zero."""
        q = np.floor(np.clip(values, -1.0, 1.0) * self.levels + rng.random(values.shape)).astype(np.int64)
        return self.modulo(q)

    def modulo(self, values: Array) -> Words:
        """Whole numbers modulo 2^bits."""
        return (values.astype(np.int64) & ((1 << self.bits) - 1)).astype(np.uint32)

    def signed(self, words: Words) -> NDArray[np.int64]:
        """Sums modulo 2^bits as whole numbers from -2^(bits - 1) on."""
        half = 1 << (self.bits - 1)
        return ((words.astype(np.int64) + half) & ((1 << self.bits) - 1)) - half


@dataclass(frozen=True, kw_only=True, eq=False)
class SummedFit(Fit):
    """Train as `Fit` says from the device's own choice among `centers` [K, size], then tell a part of the result.

    The device trains once in a round, whatever the number of such tasks. `stage` "choose": one word per center, 1 for
    the device's own among the `open` ones, by weights for each in which it weighs 1/K or more. "add": a block for each
    of the open centers. "count" and "points": the same for k-means of the columns `compare`, around the centroids
    `points` [restarts, K, columns] of which `points_open` [restarts, K] take part; with `dealt` the device draws its
    cluster by lot.

    `choose` says how a center is found: "only"; "given" by `group`; by "loss"; the "nearest" to the trained model in
    the columns `compare`; or the weights of every center by "shares" of samples or by "posterior". `start` serves a
    device without a center. `share` in (0, 1] is the device's weight. A device repeats the fit `repeats` times, and
    goes the part `move` of the way each time.
    """

    stage: Literal["choose", "add", "count", "points"]
    choose: str
    centers: Array
    scale: SumScale
    open: tuple[int, ...]
    share: float = 1.0
    group: int | None = None
    compare: tuple[tuple[int, int], ...] = ()
    points: F64 | None = None
    points_open: NDArray[np.bool_] | None = None
    dealt: bool = False
    hysteresis: float = 0.0
    sigma: float = 0.0
    refresh: bool = True
    repeats: int = 1
    move: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.choose not in CHOICES:
            raise Malformed("bad_task", f"a center is chosen by one of {', '.join(CHOICES)}, got {self.choose!r:.40}")
        if not self.open or not set(self.open) <= set(range(len(self.centers))):
            raise Malformed("bad_task", "no center is open")


@dataclass(frozen=True, kw_only=True, eq=False)
class SummedProbe(Probe):
    """Evaluate the model that serves the device; the answer is words of 32 bits, to be summed.

    [ samples that are right, samples, accuracy and macro F1 times SCORE_LEVELS and rounded at random, 1 ]. No count of
    a label: it is the same in each evaluation, so the sums of two cohorts would tell those of a device that only one of
    them has. Scores are coarse: from an exact sum of few fractions with known denominators each would follow.

    `served` "asked": the task's models; "center": the one of them that the device chose last, or `usual`; "mixture":
    all, weighted by its last choice.
    """

    served: Literal["asked", "center", "mixture"]
    usual: int
    scale: SumScale
