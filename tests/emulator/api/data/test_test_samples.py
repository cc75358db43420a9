"""Test samples that the user gives, and what is said of samples that look like a mistake."""

# ruff: noqa: ANN401 - the objects of other libraries have no types

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import fedcenters as fc
from edge_client.errors import FedcentersError

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(40, 4)).astype(np.float32), np.arange(40) % 3
TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
PLACES = {"anna": (slice(0, 12), slice(12, 16)), "ben": (slice(16, 34), slice(34, 40))}


def frame(rows: slice, columns: str = "pqrs") -> pd.DataFrame:
    return pd.DataFrame(X[rows], columns=list("pqrs"))[list(columns)].assign(label=Y[rows])


def some(rows: slice) -> Any:
    return Subset(TENSORS, range(rows.start, rows.stop))


KINDS: dict[str, Any] = {
    "arrays": lambda rows: (X[rows], Y[rows]),
    "data sets": some,
    "loaders": lambda rows: DataLoader(some(rows), batch_size=5, shuffle=True),
    "data frames": frame,
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_dict_of_test_samples_tests_each_device_on_its_own(kind: str) -> None:
    train, test = ({who: KINDS[kind](rows[k]) for who, rows in PLACES.items()} for k in (0, 1))
    for who, local in fc.fleet(train, test=test).items():
        for data, rows in zip((local.train, local.test), PLACES[who], strict=True):
            assert data is not None
            order = np.argsort(X[rows][:, 0])
            mine = np.argsort(data.x[:, 0])
            np.testing.assert_array_equal(data.x[mine], X[rows][order])
            np.testing.assert_array_equal(data.y[mine], Y[rows][order])


def test_a_device_with_a_single_sample_is_left_out_of_a_dict_as_of_a_column(caplog: pytest.LogCaptureFixture) -> None:
    told = "1 of 3 devices have a single sample and are left out: 70"
    data = {9: frame(slice(0, 12)), 70: frame(slice(12, 13)), 8: frame(slice(13, 30))}
    made = fc.fleet(data, groups={9: "a", 70: "b", 8: "b"})
    assert caplog.messages == [told]
    by_column = fc.fleet((X[:30], Y[:30]), by=np.repeat([9, 70, 8], [12, 1, 17]))
    assert list(made) == list(by_column) == ["device-08", "device-09"]
    np.testing.assert_array_equal(np.sort(made[8].train.x[:, 0]), np.sort(fc.fleet({8: data[8]})[8].train.x[:, 0]))
    with pytest.raises(FedcentersError, match="there is no device with two samples"):
        fc.fleet({70: data[70]})


def test_the_error_for_test_arrays_without_devices_names_two_dicts() -> None:
    with pytest.raises(FedcentersError, match=r"fc.fleet\({'a': train}, test={'a': test}\), or test=0.2"):
        fc.fleet((X, Y), by=np.arange(40) % 4, test=(X, Y))


def test_a_frame_that_tests_has_its_columns_in_any_order() -> None:
    first, second = PLACES["anna"]
    local = fc.fleet({"anna": frame(first)}, test={"anna": frame(second, "srqp")})["anna"]
    assert local.test is not None
    assert sorted(local.test.x[:, 0].tolist()) == sorted(X[second][:, 0].tolist())


@pytest.mark.parametrize(
    ("test", "said"),
    [
        ({"anna": (X[12:16], Y[12:16])}, "ben without test samples, beside devices that have some"),
        ({"cleo": (X[12:16], Y[12:16])}, "there are test samples of 'cleo', which has no training samples"),
        ({}, "test has no device\n\nhint: leave it out"),
    ],
)
def test_test_samples_of_other_devices_are_refused(test: dict[str, Any], said: str) -> None:
    with pytest.raises(FedcentersError, match=said):
        fc.fleet({who: (X[rows[0]], Y[rows[0]]) for who, rows in PLACES.items()}, test=test)


@pytest.mark.parametrize(
    "data",
    [{"a": ((X, Y), (X, Y))}, {"a": (TENSORS, TENSORS)}, {"a": {"train": TENSORS, "test": TENSORS}}],
    ids=["pairs", "data sets", "dicts"],
)
def test_training_and_test_data_in_one_value_are_told_to_be_two_dicts(data: Any) -> None:
    with pytest.raises(FedcentersError) as wrong:
        fc.fleet(data)
    assert "fc.fleet({'a': train}, test={'a': test})" in str(wrong.value.hint)


@pytest.mark.parametrize(("shared", "told"), [(10, True), (3, False)])
def test_test_samples_that_train_too_are_told(caplog: pytest.LogCaptureFixture, *, shared: int, told: bool) -> None:
    """Of a table whose test part was not taken out of it, all."""
    whole = pd.DataFrame(X.astype(np.float64)).rename(columns=str).assign(label=Y, who=np.repeat(["anna", "ben"], 20))
    rows = range(15, 25)
    train = whole.drop(index=list(rows)[shared:])
    fc.fleet(train, y="label", by="who", test=whole.iloc[rows])
    mine, theirs = ({"anna": (X[part], Y[part])} for part in (slice(0, 20 + shared), slice(20, 30)))
    fc.fleet(mine, test=theirs)
    assert ["samples are training samples, too" in line for line in caplog.messages] == [True, True] * told


def test_samples_of_few_values_which_are_equal_by_chance_are_not_told_to_train_too(
    caplog: pytest.LogCaptureFixture,
) -> None:
    answers = RNG.integers(0, 2, size=(80, 3))
    fc.fleet({"anna": (answers[:60], answers[:60, 0])}, test={"anna": (answers[60:], answers[60:, 0])})
    assert caplog.messages == []


def test_a_column_of_groups_is_read_of_the_training_and_the_test_samples() -> None:
    train, test = (
        {who: frame(PLACES[who][k]).assign(site=site) for who, site in (("anna", "south"), ("ben", "north"))}
        for k in (0, 1)
    )
    fleet = fc.fleet(train, test=test, y="label", groups="site")
    assert fleet.groups == {"anna": 1, "ben": 0}


def test_test_targets_of_another_width_than_the_training_targets_are_refused() -> None:
    with pytest.raises(FedcentersError, match=r"test targets are \[2\], training targets \[1\]"):
        fc.fleet((X, X[:, 0]), devices=2, test=(X + 1, X[:, :2]))


@pytest.mark.parametrize(
    ("y", "said"), [(np.eye(3)[Y], "one-hot rows, which are targets. For classes give y.argmax"), (X[:, :3], "")]
)
def test_one_hot_labels_are_told_to_be_targets(caplog: pytest.LogCaptureFixture, y: Any, said: str) -> None:
    fc.fleet((X, y), devices=2)
    assert [said in line for line in caplog.messages] == [True] * bool(said)


class Pictures(TorchDataset[Any]):
    """A data set of a folder for each class, as torchvision's."""

    classes = 2  # of other data sets a number

    def __init__(self, **numbers: int) -> None:
        self.class_to_idx = numbers

    def __len__(self) -> int:
        return 8

    def __getitem__(self, place: int) -> Any:
        return X[place], list(self.class_to_idx.values())[place % len(self.class_to_idx)]


@pytest.mark.parametrize(
    ("other", "lines"), [({"cat": 0, "eel": 1}, 1), ({"cat": 0, "dog": 1}, 0), ({"cat": 0, "eel": 2}, 0)]
)
def test_devices_whose_data_sets_number_other_classes_are_told(
    caplog: pytest.LogCaptureFixture, other: dict[str, int], lines: int
) -> None:
    mine, theirs = Pictures(cat=0, dog=1), Pictures(**other)
    fc.fleet({"anna": mine, "ben": theirs})
    fc.fleet({"anna": mine}, test={"anna": DataLoader(theirs)})
    fc.fleet(mine, test=theirs, devices=2)
    places = ("the data of anna, and eel in the data of ben", "the data of anna, and eel in the data of anna")
    told = [f"class 1 is dog in {place}. Give" for place in (*places, "the training data, and eel in the test data")]
    heard = [line for line in caplog.messages if "training samples, too" not in line]
    assert [line.startswith(start) for line, start in zip(heard, told * lines, strict=True)] == [True] * 3 * lines


@pytest.mark.parametrize("who", [["u", None], ["u", np.nan], [1, "u"]])
def test_a_device_that_is_missing_is_told_also_beside_test_data(who: list[Any]) -> None:
    """NumPy could not sort them."""
    train, known = frame(slice(0, 20)).assign(who="u"), frame(slice(20, 40)).assign(who="u")
    strange = known.assign(who=who * 10)
    for data, test in ((train, strange), (strange, known)):
        with pytest.raises(FedcentersError, match=r"10 samples have no value of by|by holds int and str"):
            fc.fleet(data, by="who", test=test)


def test_a_folder_of_pictures_by_class_says_how_to_read_it(tmp_path: Path) -> None:
    (tmp_path / "site a" / "cat").mkdir(parents=True)
    with pytest.raises(FedcentersError) as wrong:
        fc.fleet(tmp_path)
    assert "torchvision.datasets.ImageFolder(home) for home in Path(folder).iterdir()" in str(wrong.value.hint)
