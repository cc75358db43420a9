"""A fleet by the name of its data set: the same devices as the command line's, cut when they are needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ConfigError, UsageError
from emulator.api.data import fleets
from emulator.data.partition_schemes import Dirichlet
from emulator.data.registry import DATA_SETS
from emulator.options import SimulateArgs
from emulator.run.load import make_fleet


def test_every_data_set_of_the_command_line_has_its_function() -> None:
    made = {value.name for value in vars(fleets).values() if isinstance(value, fleets.NamedFleet)}
    assert made == set(DATA_SETS)
    assert all(getattr(fleets, name.replace("-", "_"))().options["data_set"] == name for name in DATA_SETS)


@pytest.mark.parametrize("seed", [0, 3])
def test_a_run_of_the_value_has_the_samples_and_options_of_the_same_names(seed: int) -> None:
    asked = SimulateArgs(devices=5, groups=2, seed=seed)
    args, split = make_fleet(asked)
    same, mine = make_fleet(SimulateArgs(seed=seed), fleets.digits(devices=5, groups=2))
    assert same == args
    assert list(mine.devices) == list(split.devices)
    for who, local in split.devices.items():
        np.testing.assert_array_equal(mine.devices[who].train.x, local.train.x)
        np.testing.assert_array_equal(mine.devices[who].train.y, local.train.y)
    assert mine.groups == split.groups


def test_a_fleet_with_a_seed_of_its_own_is_the_same_in_every_run() -> None:
    fleet = fleets.digits(devices=4, seed=7)
    (args, first), (_, second) = (make_fleet(SimulateArgs(seed=seed), fleet) for seed in (1, 2))
    assert args.data_seed == 7
    assert first.groups == second.groups
    np.testing.assert_array_equal(first.devices["device-00"].train.x, second.devices["device-00"].train.x)
    _, again = make_fleet(args)
    np.testing.assert_array_equal(again.devices["device-00"].train.x, first.devices["device-00"].train.x)


def test_a_fleet_is_a_mapping_of_devices_that_says_what_it_is() -> None:
    fleet = fleets.digits(devices=4, partition=Dirichlet(alpha=0.5))
    assert repr(fleet) == "Fleet(digits, 4 devices, dirichlet:alpha=0.5)"
    assert len(fleet) == 4
    assert fleet["device-00"].train.x.shape[1:] == (1, 8, 8)
    assert repr(fleet).endswith("training samples [1, 8, 8] of 10 classes, dirichlet:alpha=0.5)")
    with pytest.raises(KeyError, match="no device 'device-9'"):
        fleet["device-9"]


def test_nothing_is_read_before_it_is_needed_and_a_missing_file_is_named(tmp_path: Path) -> None:
    fleet = fleets.mnist(data=tmp_path)
    assert repr(fleet) == "Fleet(mnist, 200 devices, rotations:groups=4)"
    with pytest.raises(ConfigError, match="train-images"):
        len(fleet)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"devices": "x"}, "devices is 'x'.*give a whole number"),
        ({"devices": 2.5}, "devices is 2.5.*give a whole number"),
        ({"devices": -1}, "devices is -1.*use at least 1"),
        ({"groups": "x"}, "groups is 'x'.*give a whole number"),
        ({"seed": "x"}, "seed is 'x'.*give a whole number"),
        ({"data": 3}, "data is 3.*give the folder of data sets"),
    ],
)
def test_a_setting_of_another_kind_is_told_when_the_fleet_is_made(given: dict[str, Any], said: str) -> None:
    with pytest.raises((UsageError, ConfigError), match=f"(?s){said}"):
        fleets.digits(**given)


def test_a_partitions_setting_of_another_kind_is_told_when_the_partition_is_made() -> None:
    with pytest.raises(ConfigError, match=r"(?s)alpha is 'a'.*use a number"):
        Dirichlet("a")  # type: ignore[arg-type]
