from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coordinator.models.registry import MODELS
from edge_client.errors import ConfigError, UsageError
from emulator.data.fleet import is_named_fleet
from emulator.data.loaders.folder import data_folder
from emulator.data.partition_schemes import parse_scheme
from emulator.data.registry import DATA_SETS, load_data_set
from emulator.options import SimulateArgs
from emulator.run.load import make_fleet
from export import plugins


def at_hand(home: str) -> None:
    """Skip, with the reason, a test that needs a real data set that this machine lacks."""
    if not (data_folder() / home).is_dir():
        pytest.skip(f"no {home} in the data folder; set FEDCENTERS_DATA")


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UsageError, match="unknown data set 'digit'") as wrong:
        load_data_set("digit")
    assert "did you mean 'digits'" in wrong.value.hint


@pytest.mark.parametrize("name", sorted(DATA_SETS))
def test_each_default_model_and_partition_exists(name: str) -> None:
    entry = DATA_SETS[name]
    assert entry.model == "" or entry.model in MODELS
    assert parse_scheme(entry.partition)


@pytest.mark.parametrize("name", sorted(set(DATA_SETS) - {"digits", "regression", "regression-8"}))
def test_an_empty_folder_is_an_error_with_a_hint_for_each(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as wrong:
        load_data_set(name, tmp_path)
    assert wrong.value.hint.startswith("get it from ")


@pytest.mark.parametrize(
    ("name", "train", "test", "classes"),
    [("fashion-mnist", 60_000, 10_000, 10), ("mnist", 60_000, 10_000, 10), ("mnist-writers", 70_000, 0, 10)],
)
def test_the_published_files_have_the_published_sizes(name: str, train: int, test: int, classes: int) -> None:
    at_hand(name.removesuffix("-writers"))
    data = load_data_set(name)
    assert (len(data.train), len(data.test or ()), data.classes) == (train, test, classes)


def test_the_mean_pixel_of_fashion_mnist_is_the_known_one() -> None:
    at_hand("fashion-mnist")
    data = load_data_set("fashion-mnist")
    assert data.train.x.mean() / 255 == pytest.approx(0.28604, abs=1e-5)
    assert np.bincount(data.train.y).tolist() == [6_000] * 10


def test_wisdm_has_its_36_users() -> None:
    at_hand("wisdm")
    user = load_data_set("wisdm").train.user
    assert user is not None
    assert len(np.unique(user)) == 36


def test_each_of_the_six_speakers_of_fsdd_says_every_digit_five_times_in_the_test() -> None:
    at_hand("fsdd")
    data = load_data_set("fsdd")
    assert data.test is not None
    assert data.test.user is not None
    assert (len(data.train), data.train.x.shape[1:]) == (2_700, (1, 49, 10))
    assert np.bincount(data.test.user * 10 + data.test.y).tolist() == [5] * 60


def test_fsdd_without_a_model_is_refused_with_what_to_do() -> None:
    at_hand("fsdd")
    with pytest.raises(UsageError, match=r"no model of ours suits fsdd: .* \[1, 49, 10\] of 10 classes") as wrong:
        make_fleet(SimulateArgs(data_set="fsdd"))
    assert "--model" in wrong.value.hint


def test_samples_given_in_python_are_not_looked_for_among_the_installed_packages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each run asks, and reading what every package registered takes nearly as long as a round of a small fleet."""
    monkeypatch.setattr(plugins, "entry_points", lambda **_: pytest.fail("looked"))
    assert not is_named_fleet("arrays of each device", "")
