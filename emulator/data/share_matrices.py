"""Matrices of class shares per device, and the split of samples by them. Every draw comes from `rng`.

`shares` is [devices, classes]: the part of each class's samples that each device gets; a column sums to 1. Dealing the
training and the test part by the same shares gives a device the same mixture of classes in both.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, I64

MAX_DRAWS = 20_000


def dirichlet_shares(rows: int, classes: int, alpha: float, rng: np.random.Generator) -> F64:
    """[rows, classes]: each class is divided by a symmetric Dirichlet over the rows; a small alpha favours few."""
    columns: F64 = rng.dirichlet(np.full(rows, alpha), size=classes)
    return np.transpose(columns)


def n_class_shares(rows: int, allowed: I64, classes: int, each: int, rng: np.random.Generator) -> F64:
    """[rows, classes]: every row draws `each` of the `allowed` classes; a class is shared equally by who drew it."""
    drawn = np.zeros((rows, classes))
    for row in drawn:
        row[rng.choice(allowed, size=each, replace=False)] = 1.0
    shared: F64 = drawn / np.maximum(drawn.sum(axis=0), 1.0)
    return shared


def expand_group_shares(group_shares: F64, member: I64, within: Callable[[int, int], F64]) -> F64:
    """[devices, classes] from shares of groups [G, classes]; `within(g, size)` [size, classes] divides a group's part.

    `member` [devices] is every device's group.
    """
    shares = np.zeros((len(member), group_shares.shape[1]))
    for g, whole in enumerate(group_shares):
        rows = np.flatnonzero(member == g)
        shares[rows] = whole * within(g, len(rows))
    return shares


def deal_by_shares(labels: I64, shares: F64, rng: np.random.Generator) -> list[I64]:
    """The numbers of each device's samples, sorted: every class is shuffled and cut where the shares end.

    Disjoint always, and complete if every column of `shares` sums to 1.
    """
    parts: list[list[I64]] = [[] for _ in shares]
    for c in range(shares.shape[1]):
        rows = rng.permutation(np.flatnonzero(labels == c))
        ends = _ends(shares[:, c], len(rows))
        for part, piece in zip(
            parts, np.split(rows, ends)[:-1], strict=True
        ):  # samples beyond the sum of all shares are not used
            part.append(piece)
    left = int(np.isin(labels, np.arange(shares.shape[1]), invert=True).sum())
    if left:
        raise ValueError(f"{left} labels have no column in shares of {shares.shape[1]} classes")
    return [np.sort(np.concatenate(part)) for part in parts]


def dealt_sizes(shares: F64, counts: I64) -> I64:
    """[devices] how many samples each will be dealt of classes with these [classes] counts."""
    ends = np.stack([_ends(shares[:, c], int(n)) for c, n in enumerate(counts)], axis=1)
    dealt: I64 = np.diff(ends, axis=0, prepend=0).sum(axis=1)
    return dealt


def deal_evenly(n: int, devices: int, rng: np.random.Generator) -> list[I64]:
    """Shuffled samples 0..n-1 in parts that differ by one at most."""
    return [np.sort(part) for part in np.array_split(rng.permutation(n), devices)]


def draw_until(draw: Callable[[], F64], fits: Callable[[F64], bool], *, what: str, hint: str) -> F64:
    """The first draw that fits. Raises ConfigError when none of 20,000 does."""
    for _ in range(MAX_DRAWS):
        shares = draw()
        if fits(shares):
            return shares
    raise ConfigError(f"no draw of {MAX_DRAWS} gave {what}", hint=hint)


def _ends(share: F64, n: int) -> I64:
    """Where each device's part of n samples ends; half a sample at most is rounded away, and none is lost."""
    return np.minimum(np.rint(np.cumsum(share) * n), n).astype(np.int64)
