"""Partitions of flwr-datasets as ours, and ours as theirs. Needs flwr-datasets only where one of theirs is used."""

# ruff: noqa: ANN401 - the objects of flwr-datasets have no types

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from edge_client.errors import ConfigError, RuntimeMissing, UsageError
from edge_client.protocol.task import I64
from emulator.api.data.columns import LABEL_COLUMNS
from emulator.data.fleet_split import FleetData
from emulator.data.given_parts import GivenParts
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.partition_schemes import LabelPermutations, PartitionScheme, Rotations, Shifts

ROW = "row of the data set"


@dataclass(frozen=True, kw_only=True, repr=False)
class FlowerParts:
    """A partitioner of flwr-datasets, asked for the rows of each device.

    It sees a data set of two columns, the row numbers and the one that it partitions by: the labels where that column
    is called label, y or target, else the users of the data set.
    """

    theirs: Any = field(kw_only=False)

    knows_devices: ClassVar[bool] = True  # 0 devices are as many as there are parts

    def split(self, data: DataSet, *, devices: int, seed: int) -> FleetData:
        if self.theirs.is_dataset_assigned():
            raise ConfigError(f"{self!r} has a data set already", hint="make a new one, without a data set")
        if data.test is not None:
            data = data.joined()
        theirs = copy.deepcopy(self.theirs)
        name = getattr(theirs, "_partition_by", None) or "label"
        of_labels = name in LABEL_COLUMNS or data.train.user is None
        column = data.train.y.reshape(len(data.train), -1)[:, 0] if of_labels else data.train.user
        theirs.dataset = _table({ROW: np.arange(len(data.train)), name: column})
        try:
            parts = [np.array(theirs.load_partition(i)[ROW], np.int64) for i in range(theirs.num_partitions)]
        except ValueError as wrong:
            raise ConfigError(f"{self!r}: {wrong}", hint="change its settings; this is its own message") from wrong
        return GivenParts(parts).split(data, devices=devices, seed=seed)

    def __repr__(self) -> str:
        return f"flwr_datasets {type(self.theirs).__name__}"


def for_flower(
    scheme: PartitionScheme, *, devices: int = 0, label: str = "label", by: str | None = None, seed: int = 0
) -> Any:
    """One of our partitions as a `Partitioner` for Flower's FederatedDataset; its `groups` are the true groups.

    `label` and `by` are columns of Flower's data set: the classes, and the user of each sample. A partition holds the
    training and the test samples of a device. Raises UsageError for a partition that changes samples or labels.

        from flwr_datasets import FederatedDataset
        theirs = for_flower(fc.partitions.ClusterDirichlet(groups=4), devices=100)
        FederatedDataset(dataset="mnist", partitioners={"train": theirs}).load_partition(0)
    """
    if isinstance(scheme, (Rotations, LabelPermutations, Shifts)):
        raise UsageError(f"{scheme!r} changes samples or labels", hint="Flower's partitions only share samples")
    try:
        from flwr_datasets.partitioner import Partitioner
    except ImportError as missing:
        raise RuntimeMissing("flwr-datasets is not installed", hint="pip install flwr-datasets") from missing

    class OurPartitioner(Partitioner):  # type: ignore[misc]  # a library without types
        def __init__(self) -> None:
            super().__init__()
            self._parts: list[I64] = []
            self.groups: Mapping[str, int] = {}

        def load_partition(self, partition_id: int) -> Any:
            return self.dataset.select(self._rows()[partition_id])

        @property
        def num_partitions(self) -> int:
            return len(self._rows())

        def _rows(self) -> list[I64]:
            if not self._parts:
                self._parts, self.groups = rows_of_devices(
                    scheme,
                    np.asarray(self.dataset[label]),
                    None if by is None else np.asarray(self.dataset[by]),
                    devices=devices,
                    seed=seed,
                )
            return self._parts

    return OurPartitioner()


def rows_of_devices(
    scheme: PartitionScheme,
    y: I64,
    user: Any,
    *,
    devices: int,
    seed: int,
) -> tuple[list[I64], Mapping[str, int]]:
    """-> the sorted rows of each device, training and test samples together, and the true groups by device."""
    users = None if user is None else np.unique(user, return_inverse=True)[1].astype(np.int64)
    numbered = RawSamples(x=np.arange(len(y), dtype=np.float64)[:, None], y=y, user=users)
    split = scheme.split(DataSet(train=numbered, ready=lambda x: x), devices=devices, seed=seed)
    parts = []
    for local in split.devices.values():
        held = [] if local.test is None else [local.test.x]
        parts.append(np.sort(np.concatenate([local.train.x, *held])[:, 0]).astype(np.int64))
    return parts, split.groups


def _table(columns: Mapping[str, Any]) -> Any:
    from datasets import Dataset as Table

    return Table.from_dict({name: list(values) for name, values in columns.items()})
