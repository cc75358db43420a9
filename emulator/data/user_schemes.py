"""Partition by the users of a data set: a device is one of them, or several."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edge_client.errors import ConfigError
from edge_client.protocol.task import I64
from emulator.data.fleet_split import FleetData, PartitionIndices, make_fleet_data
from emulator.data.loaders.samples import DataSet
from emulator.data.scheme_checks import check_counts, check_kinds
from emulator.data.window_overlap import windows_overlap

log = logging.getLogger(__name__)
MIN_SAMPLES = 2  # of a user: to train and to test
OVERLAP_WARNING = (
    "consecutive samples of a user overlap in time, and a random fifth of them tests: test accuracy is too high. "
    "Give the data set a test part that is cut by time, or windows that do not overlap"
)


@dataclass(frozen=True, kw_only=True)
class ByUser:
    """A device is a user of the data set; a random choice of them when fewer are asked for. Its domain is its group.

    With `per_device` > 1 a device is that many users, drawn at random; the last one may have fewer. Official parts
    stand where they share their users (LEAF), and are joined where they do not (QMNIST).
    """

    least: int = 10  # samples that a user must have
    per_device: int = 1

    def __post_init__(self) -> None:
        check_kinds(self)
        check_counts(self, least=0)
        if self.per_device < 1:
            raise ConfigError(f"per-device is {self.per_device}", hint="use at least one user a device")

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        if data.train.user is None:
            raise ConfigError("this data set does not say who its samples come from", hint="use another partition")
        if data.test is None or data.test.user is None or np.setdiff1d(data.test.user, data.train.user).size:
            data = data.joined()
        rng = np.random.Generator(np.random.PCG64(seed))
        train, test = _rows_by_user(data.train.user), None
        if data.test is not None:
            test = _rows_by_user(data.test.user)
        least = max(MIN_SAMPLES, self.least)
        able = [u for u, rows in train.items() if len(rows) >= least and (test is None or u in test)]
        if len(able) < len(train):
            log.info("%s of %s users have too few samples and are left out", len(train) - len(able), len(train))
        if devices > -(-len(able) // self.per_device):
            raise ConfigError(
                f"{devices} devices, but only {len(able)} users have {self.least} samples", hint="use fewer devices"
            )
        if not able:
            hint = "use a smaller `least`" if self.least > MIN_SAMPLES else "give each two: to train and to test"
            raise ConfigError(f"no device has enough samples: {least}", hint=hint)
        if test is None and windows_overlap(data.train.x, (train[u] for u in able)):
            log.warning(OVERLAP_WARNING)
        chosen = self._chosen(able, devices, rng)
        cut = PartitionIndices(
            train=[_rows(train, users) for users in chosen],
            test=None if test is None else [_rows(test, users) for users in chosen],
            groups=one_domain_each(data, [_rows(train, users) for users in chosen]),
            names=[data.names[user] for (user,) in chosen] if data.names and self.per_device == 1 else (),
        )
        return make_fleet_data(data, cut, rng)

    def _chosen(self, able: Sequence[int], devices: int, rng: np.random.Generator) -> list[list[int]]:
        """The users of each device."""
        many = min(devices * self.per_device, len(able)) if devices else len(able)
        drawn = rng.choice(np.array(able, np.int64), size=many, replace=False)
        if self.per_device == 1:
            return [[user] for user in sorted(drawn.tolist())]
        return [sorted(drawn[at : at + self.per_device].tolist()) for at in range(0, many, self.per_device)]


def _rows(of: dict[int, I64], users: list[int]) -> I64:
    return of[users[0]] if len(users) == 1 else np.concatenate([of[user] for user in users])


def _rows_by_user(user: I64 | None) -> dict[int, I64]:
    if user is None:
        return {}
    order = np.argsort(user, kind="stable")
    names, starts = np.unique(user[order], return_index=True)
    return dict(zip(names.tolist(), np.split(order, starts[1:]), strict=True))


def one_domain_each(data: DataSet, rows: Sequence[I64]) -> I64 | None:
    """The domain of each device as its true group; None where a device has samples of several."""
    if data.train.domain is None:
        return None
    found = [np.unique(data.train.domain[r]) for r in rows]
    return np.concatenate(found) if all(len(f) == 1 for f in found) else None
