"""FedSoft's fleets (Ruan 2022): every device draws from several distributions, in its own shares.

Samples are drawn with replacement, as the paper does: a class first, then one of its samples; targets have no classes.
The held-out samples of each pure distribution show which one a center has learned.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from coordinator.strategies.common.setting_checks import check_choice, check_range
from edge_client.data.dataset import Dataset
from edge_client.errors import ConfigError
from edge_client.protocol.task import F64, I64, Array
from emulator.data.fleet_split import FleetData, PartitionIndices, make_fleet_data, rotate_images
from emulator.data.loaders.samples import DataSet, RawSamples, concatenate
from emulator.data.scheme_checks import check_devices, check_kinds

SHARE_KINDS = ("10-90", "30-70", "linear", "random")
HOLDOUT_SAMPLES = 20_000  # drawn of each distribution with classes
MAX_QUARTER_TURNS = 4
MAX_SAMPLES = 1_000_000  # of a device


@dataclass(frozen=True, kw_only=True)
class Mixtures:
    """`shares` over the domains of the data; `turns` > 1 makes a domain of every quarter turn of its images too.

    "10-90" and "30-70": the first 1/S of the devices have 90% (70%) of domain 0, the next of domain 1, and so on, the
    rest is equal. "linear": device k has (k + 1/2) / N of domain 0. "random": the gaps between uniform points.
    """

    shares: str = field(default="10-90", kw_only=False)
    turns: int = 1
    least: int = 100  # training samples of a device, uniform from `least` to `most`
    most: int = 200

    def __post_init__(self) -> None:
        check_kinds(self)
        check_choice("shares", self.shares, SHARE_KINDS)
        check_range("turns", self.turns, low=1, high=MAX_QUARTER_TURNS)
        check_range("least", self.least, low=1, high=MAX_SAMPLES)
        check_range("most", self.most, low=self.least, high=MAX_SAMPLES)

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        """A fleet of `devices` and the hold-outs "domain 0", "domain 1", ...; a device's group is its largest share."""
        check_devices(devices)
        rng = np.random.Generator(np.random.PCG64(seed))
        data = _with_domains(data, self.turns)
        parts = [part for part in (data.train, data.test) if part is not None]
        if len(parts) != 2:  # noqa: PLR2004 - a training and a test part
            raise ConfigError("mixtures need a data set with a test part", hint="use another data set")
        train_rows, test_rows = (_rows_of_domains(part) for part in parts)
        if [len(rows) > 0 for rows in train_rows] != [len(rows) > 0 for rows in test_rows]:
            told = f"test samples of {len(test_rows)} domains, training samples of {len(train_rows)}"
            raise ConfigError(told, hint="mixtures need samples of each domain in both; use another partition")
        train_rows, test_rows = ([rows for rows in part if len(rows)] for part in (train_rows, test_rows))
        u = mixture_shares(self.shares, devices, len(train_rows), rng)
        count = rng.integers(self.least, self.most + 1, size=devices)
        cut = PartitionIndices(
            train=[_mixed(data.train, train_rows, row, int(n), rng) for row, n in zip(u, count, strict=True)],
            test=[_mixed(parts[1], test_rows, row, max(1, int(n) // 4), rng) for row, n in zip(u, count, strict=True)],
            groups=u.argmax(axis=1).astype(np.int64),
        )
        holdouts = {f"domain {s}": _holdout(data, parts[1], rows, rng) for s, rows in enumerate(test_rows)}
        return make_fleet_data(data, cut, rng, holdouts=holdouts)


def mixture_shares(kind: str, devices: int, domains: int, rng: np.random.Generator) -> F64:
    """[devices, domains], rows sum to 1."""
    check_choice("shares", kind, SHARE_KINDS)
    if domains < 2:  # noqa: PLR2004 - a mixture
        raise ConfigError(f"a mixture of {domains} domain", hint="mix at least two; turns=2 makes some")
    if kind == "random":
        points = np.sort(rng.random((devices, domains - 1)), axis=1)
        return np.diff(points, axis=1, prepend=0.0, append=1.0)
    if kind == "linear":
        if domains != 2:  # noqa: PLR2004 - a line between two
            raise ConfigError(f"linear shares of {domains} domains", hint="use random")
        first = (np.arange(devices) + 0.5) / devices
        return np.stack([first, 1 - first], axis=1)
    small = {"10-90": 0.1, "30-70": 0.3}[kind]
    u = np.full((devices, domains), small / (domains - 1))
    u[np.arange(devices), np.arange(devices) * domains // devices] = 1 - small
    return u


def _with_domains(data: DataSet, turns: int) -> DataSet:
    if turns == 1:
        return data
    return replace(
        data, train=_turned(data.train, turns), test=None if data.test is None else _turned(data.test, turns)
    )


def _turned(part: RawSamples, turns: int) -> RawSamples:
    before = np.zeros(len(part), np.int64) if part.domain is None else part.domain
    width = int(before.max()) + 1
    return concatenate(
        *(replace(part, x=rotate_images(part.x, q), domain=before + q * width, user=None) for q in range(turns))
    )


def _rows_of_domains(part: RawSamples) -> list[I64]:
    if part.domain is None:
        return [np.arange(len(part))]
    return [np.flatnonzero(part.domain == s) for s in range(int(part.domain.max()) + 1)]


def _mixed(part: RawSamples, rows: list[I64], share: Array, n: int, rng: np.random.Generator) -> I64:
    """[n] sample numbers; domain s gets round(share_s n), cumulatively, so that they sum to n."""
    ends = np.rint(np.cumsum(share) * n).astype(np.int64)
    counts = np.diff(ends, prepend=0)
    return np.concatenate([_drawn(part, r, int(k), rng) for r, k in zip(rows, counts, strict=True)])


def _drawn(part: RawSamples, rows: I64, n: int, rng: np.random.Generator) -> I64:
    """[n] of `rows` with replacement: a class first where there are classes."""
    if not np.issubdtype(part.y.dtype, np.integer):
        return rows[rng.integers(len(rows), size=n)]
    y = part.y[rows]
    order, present, starts, counts = _by_label(y)
    which = rng.integers(len(present), size=n)
    drawn: I64 = rows[order[starts[which] + rng.integers(counts[which])]]
    return drawn


def _by_label(y: I64) -> tuple[I64, I64, I64, I64]:
    order = np.argsort(y, kind="stable")
    present, starts, counts = np.unique(y[order], return_index=True, return_counts=True)
    return order, present, starts, counts


def _holdout(data: DataSet, part: RawSamples, rows: I64, rng: np.random.Generator) -> Dataset:
    return data.dataset(part.rows(_drawn(part, rows, HOLDOUT_SAMPLES, rng) if data.classes else rows))
