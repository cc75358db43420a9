"""What strangers bring that is not read as it is: the error says what it is, and what to write instead."""

# ruff: noqa: ANN401 - the objects of other libraries have no types

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset, random_split

import fedcenters as fc
from edge_client.errors import FedcentersError

N = 60
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 3
WHO = np.repeat(["anna", "ben", "cleo"], N // 3)
TENSORS = TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
PARTS = [TENSORS[20 * k : 20 * k + 20] for k in range(3)]


def frame() -> pd.DataFrame:
    return pd.DataFrame({f"f{i}": X[:, i] for i in range(4)} | {"label": Y, "who": WHO, "make": Y})


class PolarsFrame:
    """A data frame as polars has it: rows, columns and `to_pandas`."""

    columns = ("f0", "label")

    def __len__(self) -> int:
        return N

    def __getitem__(self, place: int) -> Any:
        return self

    def to_pandas(self) -> pd.DataFrame:
        return frame()


class PolarsQuery:
    """A query as polars has it: it is not computed yet."""

    def collect_schema(self) -> None:
        """The names and kinds of its columns."""


class ArrowTable:
    """A table as pyarrow has it, or a data set of Hugging Face."""

    column_names = ("f0", "label")

    def __init__(self, *, of: str) -> None:
        if of == "hugging face, streaming":
            self.with_format = lambda _: self

    def __getitem__(self, place: int) -> Any:
        return place

    def to_pandas(self) -> pd.DataFrame:
        return frame()


RECORDS = np.array([(1.0, 0), (2.0, 1)], dtype=[("f0", "f4"), ("label", "i8")])
PANDAS = "give it as a pandas data frame: "
BY_DEVICE = "give each device its data in a dict, as dict(enumerate(data))"
WRONG: dict[str, tuple[Any, str, str]] = {
    "a frame of polars": (lambda: fc.fleet(PolarsFrame(), devices=2), "a PolarsFrame of ", PANDAS + "data.to_pandas()"),
    "a lazy frame": (
        lambda: fc.fleet(PolarsQuery(), devices=2),
        "a PolarsQuery of ",
        PANDAS + "data.collect().to_pandas()",
    ),
    "a table of pyarrow": (
        lambda: fc.fleet(ArrowTable(of="pyarrow"), devices=2),
        "a ArrowTable of ",
        PANDAS + "data.to_pandas",
    ),
    "frames of devices": (lambda: fc.fleet({"a": PolarsFrame()}), "a: a PolarsFrame of ", PANDAS + "data.to_pandas()"),
    "Hugging Face, streaming": (
        lambda: fc.fleet(ArrowTable(of="hugging face, streaming"), devices=2),
        "a stream has no order",
        "list(stream)",
    ),
    "a generator": (lambda: fc.fleet(zip(X, Y, strict=True), devices=2), "a stream has no order", "list(stream)"),
    "named fields": (lambda: fc.fleet(RECORDS, devices=2), "an array with named fields", "pandas.DataFrame(data)"),
    "a dict of columns": (
        lambda: fc.fleet({"x": X, "y": Y, "who": WHO}, by="who"),
        "a dict of arrays: x, y, who",
        "fc.fleet((data['x'], data['y']), by=data['who']), or pandas.DataFrame(data)",
    ),
    "groups": (lambda: fc.fleet(frame().groupby("who"), y="label"), "the groups of a data frame", "dict(list(data))"),
    "frames": (lambda: fc.fleet([frame()] * 3, y="label"), "3 data sets (DataFrame)", BY_DEVICE),
    "data sets": (lambda: fc.fleet(random_split(TENSORS, [20, 20, 20])), "3 data sets (Subset)", BY_DEVICE),
    "two data sets": (
        lambda: fc.fleet(random_split(TENSORS, [30, 30])),
        "two data sets (Subset) in the place of samples and labels",
        "fc.fleet(train, test=test, by='column')",
    ),
    "two loaders of a device": (
        lambda: fc.fleet({"a": (DataLoader(TENSORS), DataLoader(TENSORS))}),
        "a: two data sets (DataLoader) in the place of samples and labels",
        "for devices give a dict with one data set for each, of which test=0.2 is held out",
    ),
    "pairs": (lambda: fc.fleet(PARTS), "3 pairs of arrays", BY_DEVICE),
    "pairs, two": (lambda: fc.fleet(PARTS[:2]), "2 pairs of arrays", BY_DEVICE),
    "a dict in a dict": (lambda: fc.fleet({"a": {"x": X, "y": Y}}), "a: a dict with x, y", "(data['x'], data['y'])"),
    "an empty table of a device": (
        lambda: fc.fleet({"a": frame(), "b": pd.DataFrame(columns=frame().columns)}, y="label"),
        "b: there are no samples",
        "or leave the device out",
    ),
    "no numbers": (
        lambda: fc.fleet(frame()[["f0", "label", "who"]].astype({"f0": object}), y="label", by="who"),
        "no column of numbers is left for x, f0 (numbers as objects)",
        "pd.to_numeric makes numbers of text that holds some, pd.get_dummies of names and categories",
    ),
    "arrays": (
        lambda: fc.fleet(pd.DataFrame({"vector": list(X), "label": Y, "who": "anna"}), by="who"),
        "no column of numbers is left for x, vector (arrays)",
        "name the one of arrays: x='vector'",
    ),
    "several targets": (
        lambda: fc.fleet(frame(), by="who", y=["f0", "f1"]),  # type: ignore[arg-type]
        "y is a list",
        "several targets, are arrays: fc.fleet((data[['a', 'b']], labels), by=...)",
    ),
    "labels of their own": (
        lambda: fc.fleet(frame(), by="who", y=pd.Series(Y)),
        "y is a Series",
        "give the name of one column: y='name'",
    ),
    "by two columns": (
        lambda: fc.fleet(frame(), by=["who", "make"], y="label"),
        "by names 2 columns",
        "by=data['who'].astype(str) + '-' + data['make'].astype(str)",
    ),
    "several yes and no": (
        lambda: fc.fleet((X, X > 0), by=WHO),
        "labels are bool [60, 4]",
        "give y.astype('float32'), and a loss of these",
    ),
}


@pytest.mark.parametrize("case", list(WRONG))
def test_data_that_are_not_read_are_named_with_what_to_write(case: str) -> None:
    make, told, hint = WRONG[case]
    with pytest.raises(FedcentersError) as wrong:
        make()
    message, _, said = str(wrong.value).partition("\n\nhint: ")
    assert message.startswith(told)
    assert hint in said


def test_a_path_of_tables_says_how_to_read_them(tmp_path: Path) -> None:
    frame().to_csv(tmp_path / "anna.csv", index=False)
    with pytest.raises(FedcentersError, match=r"anna.csv is a file\n\nhint: read it first, as pandas.read_csv\(path\)"):
        fc.fleet(tmp_path / "anna.csv", y="label")
    with pytest.raises(FedcentersError, match=r"has tables and no subfolders\n\nhint: .*file.stem: pandas.read_csv"):
        fc.fleet(tmp_path, y="label")
    (tmp_path / "anna.csv").rename(tmp_path / "anna.parquet")
    with pytest.raises(FedcentersError, match=r"(?s)has tables .*pandas.read_parquet\(file\) .*glob\('\*.parquet'\)}"):
        fc.fleet(tmp_path, y="label")


def test_a_data_set_with_the_habits_of_a_frame_is_read() -> None:
    class FrameLikeSamples(TensorDataset):
        dtype, shape = torch.float32, (N, 4)

        def to_pandas(self) -> pd.DataFrame:
            return frame()

    made = fc.fleet(FrameLikeSamples(torch.from_numpy(X), torch.from_numpy(Y)), by=WHO)
    np.testing.assert_array_equal(made["anna"].train.x, fc.fleet((X, Y), by=WHO)["anna"].train.x)


@pytest.mark.parametrize("named", [False, True])
def test_a_list_of_samples_makes_the_same_devices_as_arrays(*, named: bool) -> None:
    """What the hint for a stream says to write."""
    stream = (({"x": x, "y": y, "who": who} if named else (x, y, who)) for x, y, who in zip(X, Y, WHO, strict=True))
    made, plain = fc.fleet(list(stream), by="who" if named else 2), fc.fleet((X, Y), by=WHO)
    for who, local in plain.items():
        np.testing.assert_array_equal(made[who].train.x, local.train.x)
        np.testing.assert_array_equal(made[who].train.y, local.train.y)


def test_a_loader_of_some_samples_gives_no_others_also_where_its_batches_are_drawn_by_the_user() -> None:
    some, rows = SubsetRandomSampler(range(20, 40)), slice(20, 40)
    batches = BatchSampler(some, 5, drop_last=False)
    for loader in (DataLoader(TENSORS, sampler=some), DataLoader(TENSORS, batch_sampler=batches)):
        made, plain = fc.fleet(loader, by=WHO[rows]), fc.fleet((X[rows], Y[rows]), by=WHO[rows])
        np.testing.assert_array_equal(made["ben"].train.x, plain["ben"].train.x)


def test_true_in_a_column_of_pyarrow_is_no_infinity(monkeypatch: pytest.MonkeyPatch) -> None:
    """`isin` takes True of such a column for infinity."""
    isin = pd.Series.isin
    monkeypatch.setattr(pd.Series, "isin", lambda mine, of: mine if mine.dtype == bool else isin(mine, of))
    made = fc.fleet(pd.DataFrame({"yes": Y > 0, "f0": X[:, 0], "label": Y, "who": WHO}), y="label", by="who")
    plain = fc.fleet((np.stack([Y > 0, X[:, 0]], axis=1), Y), by=WHO)
    np.testing.assert_array_equal(made["anna"].train.x, plain["anna"].train.x)
