from __future__ import annotations

import tracemalloc
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_client.data.dataset import Dataset
from edge_client.errors import ConfigError
from emulator.data.fleet_split import (
    FleetData,
    PartitionIndices,
    device_names,
    digits_fleet,
    label_permutation_groups,
    make_fleet_data,
    rotate_images,
)
from emulator.data.given_parts import given_parts
from emulator.data.loaders.samples import DataSet, RawSamples
from emulator.data.partition_schemes import parse_scheme
from emulator.data.registry import load_data_set
from tests.support.raw_data_files import numbered

NUMBERED = numbered(400, 0)


def parts(split: FleetData) -> list[tuple[str, Dataset]]:
    everybody = {**split.devices, **split.new_devices}
    return [(c, part) for c, local in everybody.items() for part in (local.train, local.test) if part is not None]


@settings(max_examples=30)
@given(devices=st.integers(1, 20), new=st.integers(0, 4), groups=st.integers(1, 5), seed=st.integers(0, 999))
def test_every_sample_is_held_once_or_kept_for_reference(devices: int, new: int, groups: int, seed: int) -> None:
    if groups > devices:
        return
    split = label_permutation_groups(NUMBERED, devices=devices, new=new, groups=groups, seed=seed)
    held = np.concatenate([part.x[:, 0] for _, part in parts(split)] + [split.reference[:, 0]])
    assert sorted(held.tolist()) == list(range(400))


def test_each_group_writes_every_class_differently_from_every_other() -> None:
    split = label_permutation_groups(NUMBERED, devices=9, new=3, groups=3, seed=4)
    written: dict[int, dict[int, int]] = {g: {} for g in range(3)}
    for c, part in parts(split):
        for x, y in zip(part.x[:, 0], part.y, strict=True):
            assert written[split.groups[c]].setdefault(int(x) % 10, int(y)) == y
    assert all(sorted(w.values()) == list(range(10)) for w in written.values())
    for digit in range(10):
        assert len({written[g][digit] for g in range(3)}) == 3


def test_devices_are_alike_in_size_and_keep_a_fifth_for_testing() -> None:
    split = digits_fleet()
    assert sorted(split.devices) == [f"device-{i:02d}" for i in range(12)]
    assert sorted(split.new_devices) == ["new-0", "new-1", "new-2"]
    sizes = [(len(local.train), len(local.test or ())) for local in split.devices.values()]
    assert {a + b for a, b in sizes} <= {118, 119}  # 1797 - 16 kept = 1781 samples over 15 devices
    assert all(abs(a / (a + b) - 0.8) < 0.01 for a, b in sizes)
    assert Counter(split.groups[c] for c in split.devices) == {0: 4, 1: 4, 2: 4}
    assert sorted(split.groups[c] for c in split.new_devices) == [0, 1, 2]


def test_a_cut_without_a_test_part_tests_on_training_samples_also_where_the_data_have_a_test_part() -> None:
    """As a user's own partition does (docs/plug-ins.md)."""
    train, rows = NUMBERED.train, [np.arange(i, 400, 2) for i in range(2)]
    data = DataSet(train=train, test=RawSamples(x=train.x + 1_000, y=train.y))
    split = make_fleet_data(data, PartitionIndices(train=rows), np.random.default_rng(0))
    for mine, local in zip(rows, split.devices.values(), strict=True):
        assert local.test is not None
        held = np.concatenate([local.train.x[:, 0], local.test.x[:, 0]])
        assert sorted(held.tolist()) == mine.tolist()


def test_new_devices_count_groups_from_the_first() -> None:
    split = digits_fleet(devices=4, new=3, groups=3)
    assert [split.groups[f"new-{i}"] for i in range(3)] == [0, 1, 2]


def test_the_same_seed_cuts_alike_and_another_does_not() -> None:
    first, again, other = (digits_fleet(seed=s) for s in (3, 3, 4))
    a, b, c = (s.devices["device-00"].train for s in (first, again, other))
    assert (a.x == b.x).all()
    assert (a.y == b.y).all()
    assert not np.array_equal(a.x, c.x)


def test_devices_with_two_samples_have_one_to_test_and_a_share_that_tests_is_kept_to() -> None:
    few = label_permutation_groups(NUMBERED, devices=192, groups=2, seed=0).devices.values()
    assert {(len(local.train), len(local.test or ())) for local in few} == {(1, 1)}
    half = label_permutation_groups(replace(NUMBERED, train_share=0.5), devices=4, groups=2, seed=0).devices.values()
    assert {(len(local.train), len(local.test or ())) for local in half} == {(48, 48)}


@pytest.mark.parametrize("wrong", [{"devices": 0}, {"groups": 0}, {"groups": 13}, {"devices": 2}, {"devices": 1500}])
def test_a_cut_that_cannot_be_made_is_refused_with_a_hint(wrong: dict[str, int]) -> None:
    settings_ = {"devices": 12, "groups": 3, "seed": 0, **wrong}
    with pytest.raises(ConfigError) as refused:
        label_permutation_groups(load_data_set("digits"), **settings_)
    assert refused.value.hint


def test_a_quarter_turn_is_counter_clockwise_and_four_of_them_are_none() -> None:
    image = np.arange(4).reshape(1, 1, 2, 2)
    assert rotate_images(image, 1).tolist() == [[[[1, 3], [0, 2]]]]
    np.testing.assert_array_equal(rotate_images(image, 4), image)
    np.testing.assert_array_equal(rotate_images(rotate_images(image, 3), 1), image)


def test_what_is_no_square_image_cannot_be_turned() -> None:
    with pytest.raises(ConfigError, match="cannot be turned"):
        rotate_images(np.zeros((2, 1, 2, 3)), 1)


def held_by(devices: int) -> tuple[int, FleetData]:
    """Bytes that a cut into so many devices holds beside the samples that it was given."""
    whole = RawSamples(x=np.ones((20_000, 100), np.float32), y=np.arange(20_000) % 10)
    tracemalloc.start()
    split = parse_scheme("iid").split(DataSet(train=whole), devices=devices, seed=0)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return held, split


def test_ten_thousand_devices_hold_the_samples_once() -> None:
    few, _ = held_by(10)
    many, split = held_by(10_000)
    sets = [part for local in split.devices.values() for part in (local.train, local.test) if part is not None]
    assert len({id(part.x.base) for part in sets}) == 2  # one array of training samples, one of test samples
    assert sum(part.x.nbytes for part in sets) == 20_000 * 100 * 4
    # A device is two data sets of two views each: 1,000 bytes with their headers and the name. A copy would add 800.
    assert many - few < 10_000 * 1_100


def test_devices_with_the_same_samples_share_them() -> None:
    whole = RawSamples(x=np.ones((200, 100), np.float32), y=np.arange(200) % 10)
    split = given_parts([np.arange(200)] * 500).split(DataSet(train=whole), devices=0, seed=0)
    assert len(split.devices) == 500
    assert len({id(local.train) for local in split.devices.values()}) == 1


class _Counted(str):
    """A number as text, which counts how often its length is looked at."""

    __slots__ = ()
    looks = 0

    def __len__(self) -> int:
        type(self).looks += 1
        return super().__len__()

    def __str__(self) -> str:
        return self

    def removesuffix(self, suffix: str) -> str:
        return self if not self.endswith(suffix) else str.removesuffix(self, suffix)


def test_naming_many_devices_looks_at_each_name_a_few_times() -> None:
    names = device_names([_Counted(number) for number in range(1_000)], "phone")
    assert names[:2] + names[-1:] == ["phone-000", "phone-001", "phone-999"]
    assert 1_000 <= _Counted.looks <= 5_000
