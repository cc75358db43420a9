"""The result of a loader: raw samples with labels, and the user and the domain of each.

Pixels stay uint8 until a device's samples are split off and converted: 28 x 28 images of Fashion-MNIST are 55 MB raw
and 220 MB as float32, CIFAR-10 is 184 MB and 737 MB.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from edge_client.data.dataset import Dataset
from edge_client.protocol.samples.input_parts import Parts
from edge_client.protocol.task import I64, Array

TRAIN_SHARE = 0.8


@dataclass(frozen=True, kw_only=True)
class RawSamples:
    """`x` [n, ...] raw, `y`: [n] int64 classes or [n, width] float32 targets; [n] numbers of its user and domain.

    A domain is a distribution that samples come from (upper or lower case, one of two regressions): the true groups
    of clustering.
    """

    x: Array
    y: Array
    user: I64 | None = field(default=None, repr=False)
    domain: I64 | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        columns = [c for c in (self.x, self.y, self.user, self.domain) if c is not None]
        if len({len(c) for c in columns}) != 1:
            raise ValueError(f"columns of different lengths: {[len(c) for c in columns]}")

    def __len__(self) -> int:
        return len(self.x)

    def rows(self, index: I64) -> RawSamples:
        user = None if self.user is None else self.user[index]
        return RawSamples(
            x=self.x[index], y=self.y[index], user=user, domain=None if self.domain is None else self.domain[index]
        )


def to_float(x: Array) -> Array:
    """Raw numbers as float32, unchanged."""
    return x.astype(np.float32, copy=False)


def to_unit_range(x: Array) -> Array:
    """Pixels 0..255 to 0..1, as LEAF does."""
    return x.astype(np.float32) / np.float32(255)


def to_centered_range(x: Array) -> Array:
    """Pixels 0..255 to -1..1: mean 0.5 and deviation 0.5 per channel, as WeCFL does."""
    return to_unit_range(x) * np.float32(2) - np.float32(1)


@dataclass(frozen=True, kw_only=True)
class DataSet:
    """A whole data set. Without an official `test` part every device trains on `train_share` of its own samples.

    `ready` turns raw rows into float32 that a model takes; `note` is a caveat to print beside any result. `names` are
    those of the users, by their numbers; without them devices are numbered. `parts`: the arrays that each sample was
    packed of, where it was.
    """

    train: RawSamples
    test: RawSamples | None = None
    ready: Callable[[Array], Array] = to_float
    note: str = ""
    train_share: float = TRAIN_SHARE
    names: Sequence[str] = field(default=(), repr=False)
    parts: Parts = ()

    @property
    def classes(self) -> int:
        """How many classes the labels of both parts name; 0 for targets, and for a label per token or pixel."""
        single = self.train.y.ndim == 1 and np.issubdtype(self.train.y.dtype, np.integer)
        return 1 + max(int(part.y.max()) for part in (self.train, self.test) if part) if single else 0

    def dataset(self, samples: RawSamples) -> Dataset:
        return Dataset(self.ready(samples.x), samples.y, parts=self.parts)

    def joined(self) -> DataSet:
        """One part that holds all samples, training before test."""
        return self if self.test is None else replace(self, train=concatenate(self.train, self.test), test=None)


def concatenate(*parts: RawSamples) -> RawSamples:
    """The samples of all parts in order; a user or domain column survives if every part has it."""

    def column(name: str) -> I64 | None:
        found = [getattr(part, name) for part in parts]
        return None if any(c is None for c in found) else np.concatenate(found)

    x, y = (np.concatenate([getattr(part, name) for part in parts]) for name in ("x", "y"))
    return RawSamples(x=x, y=y, user=column("user"), domain=column("domain"))
