"""Partitions of flwr-datasets give fleets, and ours are partitioners there; with the real library where it is."""

# ruff: noqa: ANN401 - the objects of flwr-datasets have no types

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from sklearn.model_selection import KFold

import fedcenters as fc
from edge_client.data.dataset import DeviceData
from edge_client.errors import ConfigError, UsageError
from emulator.api.data import partitions
from emulator.api.data.flower import for_flower, rows_of_devices
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.partition_schemes import PARTITION_SCHEMES
from tests.support.raw_data_files import numbered

DATA = numbered(600, 0, users=12)


DETERMINISTIC = {
    "num_partitions": 6,
    "partition_by": "y",
    "num_classes_per_partition": 5,
    "class_assignment_mode": "deterministic",
}


def rows(local: DeviceData) -> set[int]:
    return {int(v) for part in (local.train, local.test) if part is not None for v in part.x[:, 0]}


@pytest.fixture
def theirs() -> Any:
    return pytest.importorskip("flwr_datasets.partitioner", reason="no flwr-datasets here; `make readers` has it")


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("IidPartitioner", {"num_partitions": 6}),
        ("LinearPartitioner", {"num_partitions": 6}),
        ("SquarePartitioner", {"num_partitions": 6}),
        ("ExponentialPartitioner", {"num_partitions": 4}),
        ("SizePartitioner", {"partition_sizes": [100, 200, 300]}),
        ("DirichletPartitioner", {"num_partitions": 6, "partition_by": "label", "alpha": 0.5}),
        ("PathologicalPartitioner", DETERMINISTIC),
        ("ShardPartitioner", {"num_partitions": 6, "partition_by": "label", "num_shards_per_partition": 2}),
        ("NaturalIdPartitioner", {"partition_by": "subject"}),
        ("GroupedNaturalIdPartitioner", {"partition_by": "subject", "group_size": 3}),
        ("ContinuousPartitioner", {"num_partitions": 6, "partition_by": "age", "strictness": 0.5}),
    ],
)
@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # pyarrow, of a call by datasets
def test_each_of_their_partitioners_makes_a_fleet_of_its_own_parts(
    theirs: Any, name: str, settings: dict[str, Any]
) -> None:
    asked = getattr(theirs, name)(**settings)
    split = partitions.as_scheme(asked).split(DATA, devices=0, seed=0)
    held = [rows(local) for local in split.devices.values()]
    assert sum(map(len, held)) == len(set.union(*held)) <= 600
    assert set.union(*held) == set(range(600))
    assert not asked.is_dataset_assigned()  # so that it makes a second fleet
    if name == "NaturalIdPartitioner":
        assert all(len({row // 7 % 12 for row in mine}) == 1 for mine in held)


def test_a_partitioner_that_has_a_data_set_is_refused(theirs: Any) -> None:
    datasets = pytest.importorskip("datasets", reason="comes with flwr-datasets")
    used = theirs.IidPartitioner(num_partitions=2)
    used.dataset = datasets.Dataset.from_dict({"label": [0, 1]})
    with pytest.raises(ConfigError, match="make a new one"):
        partitions.as_scheme(used).split(DATA, devices=0, seed=0)


def test_one_of_ours_shares_their_data_set(theirs: Any) -> None:
    datasets = pytest.importorskip("datasets", reason="comes with flwr-datasets")
    mine = for_flower(partitions.ClusterDirichlet(groups=3, alpha_group=0.5, least=2), devices=9, seed=1)
    assert isinstance(mine, theirs.Partitioner)
    mine.dataset = datasets.Dataset.from_dict({"label": DATA.train.y.tolist(), "row": list(range(600))})
    assert mine.num_partitions == 9
    found = [mine.load_partition(i)["row"] for i in range(9)]
    assert sorted(row for part in found for row in part) == list(range(600))
    assert sorted(set(mine.groups.values())) == [0, 1, 2]


@pytest.mark.parametrize(
    "scheme", [partitions.Iid(), partitions.Shards(2), partitions.SizeSkew("square"), partitions.ByUser()]
)
def test_the_rows_of_ours_are_those_of_the_same_fleet(scheme: Any) -> None:
    user = DATA.train.user
    found, _ = rows_of_devices(scheme, DATA.train.y, user, devices=6, seed=3)
    split = scheme.split(DATA, devices=6, seed=3)
    assert [set(part.tolist()) for part in found] == [rows(local) for local in split.devices.values()]


@pytest.mark.parametrize(
    "scheme", [partitions.Rotations(2), partitions.LabelPermutations(2), partitions.Shifts(groups=2, turns=1)]
)
def test_a_partition_that_changes_samples_is_not_for_flower(scheme: Any) -> None:
    with pytest.raises(UsageError, match="changes samples or labels"):
        for_flower(scheme, devices=4)


def test_every_scheme_of_the_command_line_is_a_value() -> None:
    values = {getattr(partitions, name) for name in partitions.__all__} - {for_flower}
    assert values == set(PARTITION_SCHEMES.values())


def test_what_is_given_in_place_of_a_scheme() -> None:
    def halves(y: Any, devices: int, seed: int) -> Any:
        assert (len(y), devices, seed) == (600, 2, 5)
        return {"left": np.arange(300), "right": y >= 0}

    split = partitions.as_scheme(halves).split(DATA, devices=2, seed=5)
    assert list(split.devices) == ["left", "right"]
    assert rows(split.devices["left"]) == set(range(300))
    assert rows(split.devices["right"]) == set(range(600))
    pairs = [(np.arange(0, 100), np.arange(100, 150)), (np.arange(50), np.arange(590, 600))]
    of_pairs = partitions.as_scheme(pairs).split(DATA, devices=0, seed=0).devices
    assert [len(local.train) for local in of_pairs.values()] == [100, 50]
    assert [len(local.test or ()) for local in of_pairs.values()] == [50, 10]
    assert partitions.as_scheme(partitions.Iid) == partitions.Iid()
    assert partitions.as_scheme("shards:each=3") == partitions.Shards(3)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([[0, 1], [5, 600]], r"device 1 has sample 600\n\nhint: there are 600: use 0 to 599"),
        ([[0, 1], [-1, 2]], "device 1 has sample -1"),
        ([[0, 1], [3]], "device 1 has 1 samples"),
        ([[0, 1], ([3], [4])], "does not say which samples test"),
        ([[0.5, 1.5]], "list its numbers"),
        ({"a": [0, 1], "b": []}, "b has 0 samples"),
        (7, "one list of sample numbers per device"),
        ([], "one list of sample numbers per device"),
    ],
)
def test_parts_that_cannot_be_are_refused_by_device(parts: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        partitions.as_scheme(parts).split(DATA, devices=0, seed=0)


def test_given_parts_need_the_number_of_devices_and_pairs_where_there_is_a_test_part() -> None:
    with pytest.raises(ConfigError, match="3 devices, but the partition has 2"):
        partitions.as_scheme([[0, 1], [2, 3]]).split(DATA, devices=3, seed=0)
    both = DataSet(train=DATA.train, test=RawSamples(x=DATA.train.x, y=DATA.train.y))
    with pytest.raises(ConfigError, match="pairs of indices"):
        partitions.as_scheme([[0, 1], [2, 3]]).split(both, devices=0, seed=0)


def test_samples_that_are_listed_twice_are_told_since_they_would_test_what_trained(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two ranges that overlapped gave an accuracy on samples that other devices had trained on, without a word."""
    x, y = np.zeros((300, 4), np.float32), np.arange(300) % 3
    fc.fleet((x, y), partition=[range(200), range(100, 300)])
    assert [message.split(" of the")[0] for message in caplog.messages] == ["100 samples"]
    caplog.clear()
    fc.fleet((x, y), partition=[range(200), range(200, 300)])
    fc.fleet((x, y), partition=[(range(200), range(200, 300)), (range(100, 200), range(200, 300))])
    assert caplog.messages == []
    fc.fleet((x, y), partition=KFold(3).split(x))
    assert [message.split(" that test")[0] for message in caplog.messages] == ["300 of 300 samples"]
