"""Partitions by classes whose numbers have gaps, stand in one part alone, or are too large for a table."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.errors import ConfigError
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.partition_schemes import NClass, parse_scheme


@pytest.mark.parametrize(
    "spec", ["n-class:classes=1,least=2", "cluster-n-class:groups=2,classes-group=2,classes=1,least=2"]
)
def test_numbers_that_no_sample_has_are_drawn_by_no_device(spec: str) -> None:
    y = np.array([3, 40, 900])[np.arange(120) % 3]
    data = DataSet(train=RawSamples(x=np.zeros((120, 1), np.float32), y=y))
    split = parse_scheme(spec).split(data, devices=6, seed=0)
    parts = [part for local in split.devices.values() for part in (local.train, local.test) if part is not None]
    assert sum(map(len, parts)) == len(y)
    assert {len(np.unique(local.train.y)) for local in split.devices.values()} == {1}


def test_more_classes_of_a_device_than_have_samples_are_refused() -> None:
    data = DataSet(train=RawSamples(x=np.zeros((40, 1), np.float32), y=np.arange(40) % 2 * 9))
    with pytest.raises(ConfigError, match="classes is 3"):
        NClass(3, least=2).split(data, devices=4, seed=0)


@pytest.mark.parametrize(
    "spec",
    [
        "dirichlet:alpha=5,least=2",
        "n-class:classes=2,least=2",
        "cluster-dirichlet:groups=2,alpha-group=5,least=2",
        "cluster-n-class:groups=2,classes-group=3,classes=2,least=2",
        "label-permutations:groups=2,new=0",
        "shifts:groups=2,turns=1,least=2",
    ],
)
def test_a_class_that_only_the_test_part_has_is_one_like_others(spec: str) -> None:
    train, test = (
        RawSamples(x=np.zeros((n, 1), np.float32), y=np.arange(n) % classes) for n, classes in ((120, 3), (60, 4))
    )
    split = parse_scheme(spec).split(DataSet(train=train, test=test), devices=6, seed=0)
    parts = [part for local in split.devices.values() for part in (local.train, local.test) if part is not None]
    assert sum(map(len, parts)) == 180 - len(split.reference)


def test_a_class_of_a_number_that_fits_no_table_is_refused() -> None:
    data = DataSet(train=RawSamples(x=np.zeros((40, 1), np.float32), y=np.arange(40) % 2 * 10**9))
    with pytest.raises(ConfigError, match="y holds the class 1000000000"):
        NClass(1, least=2).split(data, devices=4, seed=0)
