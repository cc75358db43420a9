"""The user's own samples become the same fleet from whatever library they come; what is wrong is named."""

# ruff: noqa: ANN401 - the objects of other libraries have no types

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset
from torch.utils.data import Dataset as TorchDataset

import fedcenters as fc
from edge_client.data.dataset import Dataset, DeviceData
from edge_client.errors import ConfigError, FedcentersError, UsageError
from emulator import bundle_source
from emulator.options import SimulateArgs
from emulator.run.load import make_fleet

RNG = np.random.default_rng(0)
N = 60
X = RNG.normal(size=(N, 4)).astype(np.float32)
Y = RNG.integers(3, size=N)
WHO = np.repeat(["anna", "ben", "cleo"], N // 3)


class Items(TorchDataset[Any]):
    """A data set that makes each sample when it is asked for."""

    def __init__(self, *, named: bool) -> None:
        self._named = named

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> Any:
        x = torch.from_numpy(X[i])
        return {"image": x, "label": int(Y[i]), "subject": WHO[i]} if self._named else (x, int(Y[i]), WHO[i])


class Stream(IterableDataset[Any]):
    """Samples without a length and without places."""

    def __iter__(self) -> Any:
        return iter(zip(X, Y, strict=True))


def listed(labels: list[Any]) -> Any:
    """A data set of one sample for each label."""
    return Subset([(X[i], label) for i, label in enumerate(labels)], range(len(labels)))  # type: ignore[arg-type]


def held(local: DeviceData) -> Dataset:
    assert local.test is not None
    return local.test


def frame() -> pd.DataFrame:
    return pd.DataFrame({f"f{i}": X[:, i] for i in range(4)} | {"label": Y, "subject": WHO, "note": "text"})


SOURCES = {
    "arrays": lambda: fc.fleet((X, Y), by=WHO),
    "lists": lambda: fc.fleet([X.tolist(), Y.tolist()], by=WHO.tolist()),
    "tensors": lambda: fc.fleet((torch.from_numpy(X), torch.from_numpy(Y)), by=WHO),
    "TensorDataset": lambda: fc.fleet(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), by=WHO),
    "tuples": lambda: fc.fleet(Items(named=False), by=2),
    "mappings": lambda: fc.fleet(Items(named=True), by="subject"),
    "DataLoader": lambda: fc.fleet(DataLoader(Items(named=True), batch_size=7, shuffle=True), by="subject"),
    "collated": lambda: fc.fleet(DataLoader(Items(named=True), collate_fn=_collate), by="subject"),
    "data frame": lambda: fc.fleet(frame(), by="subject"),
    "named columns": lambda: fc.fleet(frame(), x=["f0", "f1", "f2", "f3"], y="label", by="subject"),
}


def _collate(samples: list[Any]) -> Any:
    return {"image": torch.stack([s["image"] for s in samples]), "label": [s["label"] for s in samples]} | {
        "subject": [s["subject"] for s in samples]
    }


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_makes_the_same_devices(source: str) -> None:
    made, plain = SOURCES[source](), SOURCES["arrays"]()
    assert list(made) == ["anna", "ben", "cleo"]
    for who, local in plain.items():
        np.testing.assert_array_equal(made[who].train.x, local.train.x)
        np.testing.assert_array_equal(made[who].train.y, local.train.y)
        np.testing.assert_array_equal(held(made[who]).x, held(local).x)
        assert made[who].train.x.dtype == np.float32
        assert made[who].train.y.dtype == np.int64


def test_each_device_has_all_samples_of_its_value_and_the_share_that_tests() -> None:
    made = fc.fleet((X, Y), by=WHO, test=0.25)
    for who, local in made.items():
        rows = np.concatenate([local.train.x, held(local).x])
        assert {row.tobytes() for row in rows} == {row.tobytes() for row in X[who == WHO]}
        assert len(held(local)) == 5


def test_a_value_that_is_a_number_names_its_device_behind_the_column() -> None:
    data = frame().assign(subject=np.repeat([1, 2, 30], 20))
    assert list(fc.fleet(data, by="subject")) == ["subject-01", "subject-02", "subject-30"]
    assert list(fc.fleet((X, Y), by=np.repeat(["a b", "a/b", "c"], 20))) == ["0-a-b", "1-a-b", "2-c"]


def test_a_device_is_found_by_what_the_user_called_it() -> None:
    numbered = fc.fleet(frame().assign(subject=np.repeat([1, 2, 30], 20)), by="subject")
    assert numbered[2] is numbered["subject-02"]
    assert numbered.name(np.int64(30)) == "subject-30"
    assert 1 in numbered  # type: ignore[comparison-overlap]
    assert 4 not in numbered  # type: ignore[comparison-overlap]
    spaced = fc.fleet({"a b": (X, Y), "c": (X, Y)})
    assert spaced["a b"] is spaced["a-b"]


def test_devices_are_left_out_and_are_the_new_ones() -> None:
    made = fc.fleet(frame().assign(subject=np.repeat([1, 2, 30], 20)), by="subject")
    for rest in (made.without([30]), made.only([1, 2]), made.without(30), made.without(["subject-30"])):
        assert list(rest) == ["subject-01", "subject-02"]
        assert list(rest.new_devices) == ["subject-30"]
        assert repr(rest.new_devices).startswith("{'subject-30': DeviceData(train=Dataset(16 samples [4], classes), ")
        np.testing.assert_array_equal(rest.new_devices[30].train.x, made[30].train.x)
        with pytest.raises(KeyError, match=r"30 does not train: fleet\.new_devices has it"):
            rest[30]
    assert list(made.without([30]).without([1])) == ["subject-02"]
    assert sorted(made.without([30]).without([1]).new_devices) == ["subject-01", "subject-30"]
    assert made.without([30]).options["partition"] == "by=subject without subject-30"
    told = "2 devices with 16 training samples [4: f0, f1, f2, f3] of 3 classes, by=subject without subject-30"
    assert repr(made.without([30])) == f"Fleet(data frame, {told})"
    assert repr(made.without([30]).without([1])).startswith("Fleet(data frame, 1 devices with 16 training samples")
    many = fc.fleet((X, Y), devices=20).only("device-00").options["partition"]
    assert many.startswith("iid without 19 devices (")
    with pytest.raises(UsageError, match="no device 'dora'"):
        made.without(["dora"])
    with pytest.raises(UsageError, match="a fleet without devices"):
        made.without(made)


def test_a_left_out_device_finds_its_center() -> None:
    fleet = fc.fleets.digits(devices=7).without(["device-06"])
    result = fc.simulate(fc.FeSEM(3, local_steps=20), fleet=fleet, rounds=3)
    assert "device-06" not in result.assignments
    new = fleet.new_devices["device-06"]
    found = result.nearest(new.train.x, new.train.y)
    same = [who for who, group in result.split.groups.items() if group == fleet.groups["device-06"] and who in fleet]
    assert found.center == result.assignments[same[0]]


def test_a_partition_shares_the_samples_among_the_devices() -> None:
    made = fc.fleet((X, Y), partition=fc.partitions.Dirichlet(1.0, least=2), devices=5, seed=1)
    assert len(made) == 5
    assert sum(len(local.train) + len(held(local)) for local in made.values()) == N
    assert repr(made).startswith("Fleet(arrays, 5 devices with ")
    lengths = torch.utils.data.random_split(TensorDataset(torch.from_numpy(X)), [20, 40])
    assert [len(d.train) + len(held(d)) for d in fc.fleet((X, Y), partition=lengths).values()] == [20, 40]
    assert len(fc.fleet((X, Y), devices=6)) == 6


def test_a_run_takes_the_fleet_and_its_seed() -> None:
    made = fc.fleet((X, Y), by=WHO)
    args, split = make_fleet(SimulateArgs(model="x:y", seed=3), made)
    assert (args.data_set, args.partition, args.devices) == ("arrays", "by=array", 3)
    other = make_fleet(SimulateArgs(model="x:y", seed=4), made)[1]
    assert split.devices["anna"].train.x.tobytes() != other.devices["anna"].train.x.tobytes()
    with pytest.raises(UsageError, match="no model of ours suits arrays"):
        make_fleet(SimulateArgs(), made)


def test_test_data_of_its_own_test() -> None:
    train, test = frame(), frame()[::4]
    made = fc.fleet(train, by="subject", test=test)
    assert {who: len(held(local)) for who, local in made.items()} == {"anna": 5, "ben": 5, "cleo": 5}
    assert {len(local.train) for local in made.values()} == {20}
    with pytest.raises(ConfigError, match="only in the test data, as 'dora'"):
        fc.fleet(train, by="subject", test=test.assign(subject="dora"))


def test_texts_are_classes_whose_names_are_kept_and_floats_are_targets() -> None:
    named = fc.fleet((X, np.array(["cat", "dog", "ant"])[Y]), by=WHO)
    assert named.classes == ("ant", "cat", "dog")
    assert {int(v) for v in named["anna"].train.y} <= {0, 1, 2}
    targets = fc.fleet((X, X[:, 0]), by=WHO)
    assert targets["anna"].train.y.shape == (16, 1)
    assert targets["anna"].train.y.dtype == np.float32


LABELS = ["run", "sit", "walk"] * 20
UNLABELLED: dict[str, Any] = {
    "NaN": pd.Series(LABELS, dtype=object).where(np.arange(N) > 1),
    "None": pd.Series([None, None, *LABELS[2:]], dtype=object),
    "NA": pd.Series([pd.NA, pd.NA, *LABELS[2:]], dtype=object),
    "string": pd.Series(LABELS).astype("string").where(np.arange(N) > 1),
    "category": pd.Series(LABELS).astype("category").where(np.arange(N) > 1),
    "boolean": pd.Series([None, None, *[True, False] * 29], dtype="boolean"),
    "list": [np.nan, None, *LABELS[2:]],
    "array": np.array([np.nan, None, *LABELS[2:]], dtype=object),
}


@pytest.mark.parametrize("kind", UNLABELLED)
def test_a_missing_label_is_refused_and_no_class_of_its_own(kind: str) -> None:
    labels = UNLABELLED[kind]
    sources: list[Any] = [(X, labels)]
    if isinstance(labels, pd.Series):
        sources.append(frame().assign(label=labels).drop(columns="subject"))
    for data in sources:
        with pytest.raises(ConfigError, match=r"y holds NaN, None or NA in 2 samples\n\nhint: drop the samples"):
            fc.fleet(data, by=WHO)


@pytest.mark.parametrize(("classes", "gap"), [([1, 2, 3], 0), ([0, 1, 90], 2), ([0, 1, 2], None)])
def test_a_class_without_a_sample_is_told(
    classes: list[int], gap: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Labels 1, 2 and 3 were four classes, and 0, 1 and 90 were 91, most of them without a sample; no line said so."""
    rng = np.random.default_rng(0)
    made = fc.fleet((rng.normal(size=(40, 3)), np.array(classes)[rng.permutation(40) % 3]), by=np.repeat([1, 2], 20))
    assert f"of {classes[-1] + 1} classes" in repr(made)
    said = [] if gap is None else [f"y holds 3 of the classes 0 to {classes[-1]}: class {gap} has an output"]
    assert [message.partition(" of the model")[0] for message in caplog.messages] == said


def test_an_index_that_a_csv_file_kept_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its row numbers, up to thousands, were inputs without a word."""
    frame().drop(columns="note").to_csv(tmp_path / "mine.csv")
    made = fc.fleet(pd.read_csv(tmp_path / "mine.csv"), by="subject")
    assert made.columns[0] == "Unnamed: 0"
    (told,) = caplog.messages
    assert told == "column 'Unnamed: 0' of x is the index of a table that was saved: read it with index_col=0"
    fc.fleet(pd.read_csv(tmp_path / "mine.csv", index_col=0), by="subject")
    assert len(caplog.messages) == 1


def test_columns_that_are_no_numbers_are_named_when_they_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = (
        frame().assign(f1=["?", *map(str, X[1:, 1])], when=pd.Timestamp("2026-01-01"), made="left").drop(columns="note")
    )
    data["size"] = pd.Categorical(["s", "l"] * 30)
    made = fc.fleet(data, by="subject", groups="made")
    assert caplog.messages[-1].startswith("left out of x: f1 (text), when (dates), size (categories). Name what x is")
    assert made.columns == ("f0", "f2", "f3")
    fc.fleet({who: part.drop(columns="subject") for who, part in data.groupby("subject")}, groups="made")
    assert "; ".join(caplog.messages[1:]).count("left out of x: f1 (text), when (dates)") == 1
    caplog.clear()
    fc.fleet(data, by="subject", x=["f0", "f2", "f3"])
    fc.fleet(frame().drop(columns="note"), by="subject")
    assert caplog.messages == []


def test_the_true_groups_are_a_column_or_an_array() -> None:
    made = np.where(WHO == "ben", "left", "right")
    for fleet in (
        fc.fleet((X, Y), by=WHO, groups=made),
        fc.fleet(frame().assign(made=made), by="subject", groups="made"),
    ):
        assert dict(fleet.groups) == {"anna": 1, "ben": 0, "cleo": 1}
    assert dict(fc.fleet((X, Y), by=WHO, groups=np.arange(N) % 2).groups) == {}


def test_a_column_of_true_groups_is_no_input_unless_x_names_it() -> None:
    data = frame().drop(columns="note").assign(made=(WHO == "ben").astype(int))
    by_device = {who: part.drop(columns="subject") for who, part in data.groupby("subject")}
    for fleet in (fc.fleet(data, by="subject", groups="made"), fc.fleet(by_device, groups="made")):
        assert fleet.columns == ("f0", "f1", "f2", "f3")
    assert fc.fleet(data, by="subject", groups="made", x=["f0", "made"]).columns == ("f0", "made")


def test_a_fleet_of_a_table_shows_its_columns_or_the_first_and_the_last_of_many() -> None:
    """A number that is no input, as that of the kind of device, became one and nothing showed it."""
    kind = frame().drop(columns="note").assign(kind=1)
    made = fc.fleet(kind[["kind", *kind.columns[:-1]]], by="subject")
    assert " samples [5: kind ... f3] of 3 classes" in repr(made)


def test_a_column_of_true_groups_that_is_not_there_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="no column 'mades' for groups") as refused:
        fc.fleet(frame().assign(made=1), by="subject", groups="mades")
    assert "did you mean 'made'?" in str(refused.value.hint)
    with pytest.raises(UsageError, match="no column 'made' for groups") as refused:
        fc.fleet((X, Y), by=WHO, groups="made")
    assert "groups=array" in str(refused.value.hint)


def test_the_true_groups_of_devices_are_a_mapping() -> None:
    left_or_right = {"anna": "right", "ben": "left", "cleo": "right", "dora": "left"}
    whole = fc.fleet((X, Y), by=WHO, groups=left_or_right)
    chosen = fc.fleet({who: whole[who] for who in ("anna", "ben")}, groups=left_or_right)
    frames = fc.fleet({who: part.assign(made=who) for who, part in frame().groupby("subject")}, groups="made")
    assert dict(whole.groups) == {"anna": 1, "ben": 0, "cleo": 1}
    assert dict(chosen.groups) == {"anna": 1, "ben": 0}
    assert dict(frames.groups) == {"anna": 0, "ben": 1, "cleo": 2}
    assert dict(fc.fleet((X, Y), by=np.repeat([1, 2, 30], 20), groups={1: 0, 2: 1, 30: 0}).groups) == {
        "device-01": 0,
        "device-02": 1,
        "device-30": 0,
    }


def test_data_of_each_device_stay_there(tmp_path: Path) -> None:
    parts = {who: (X[who == WHO], Y[who == WHO]) for who in ("anna", "ben")}
    made = fc.fleet(parts)
    assert {who: len(local.train) for who, local in made.items()} == {"anna": 16, "ben": 16}
    for who, (x, y) in parts.items():
        (tmp_path / who).mkdir()
        np.savez(tmp_path / who / "train.npz", x=x[:15], y=y[:15])
        np.savez(tmp_path / who / "test.npz", x=x[15:], y=y[15:])
    read = fc.fleet(tmp_path)
    for who, (x, y) in parts.items():
        np.testing.assert_array_equal(read[who].train.x, x[:15])
        np.testing.assert_array_equal(held(read[who]).y, y[15:])
    with pytest.raises(UsageError, match=r"(?s)each device has samples of its own that test.*leave out test"):
        fc.fleet(tmp_path, test=0.5)


def test_the_order_of_a_dict_of_devices_does_not_matter() -> None:
    """The samples that test were drawn in the order of the devices."""
    given = {7: (X[:20], Y[:20]), "ben": (X[20:40], Y[20:40]), 10: (X[40:], Y[40:])}
    one, other = fc.fleet(given, groups=WHO), fc.fleet(dict(reversed(given.items())), groups=WHO)
    assert list(one) == list(other)
    for who, local in one.items():
        np.testing.assert_array_equal(held(local).x, held(other[who]).x)
    assert one.name(7) == other.name(7)


def test_samples_are_the_one_value_beside_label_and_device_or_are_named() -> None:
    rows = [{"vector": x, "label": y, "who": who} for x, y, who in zip(X, Y, WHO, strict=True)]
    np.testing.assert_array_equal(fc.fleet(rows, by="who")["anna"].train.x, fc.fleet((X, Y), by=WHO)["anna"].train.x)
    with pytest.raises(UsageError, match=r"no column of \['vector', 'label', 'who', 'more'\] is surely x"):
        fc.fleet([row | {"more": 0.0} for row in rows], by="who")


def test_a_loader_of_a_subset_gives_the_subset() -> None:
    made = fc.fleet(DataLoader(Subset(TensorDataset(torch.from_numpy(X), torch.from_numpy(Y)), range(20))), devices=2)
    assert sum(len(local.train) + len(held(local)) for local in made.values()) == 20


WRONG: list[tuple[Any, str]] = [
    (lambda: fc.fleet(X, devices=2), r"have no labels\n\nhint: write fc.fleet\(\(x, y\)"),
    (lambda: fc.fleet((X, Y)), "nothing says how devices share"),
    (lambda: fc.fleet((X, Y), partition=fc.partitions.Dirichlet(0.1)), "for how many devices.*\n\nhint: add devices="),
    (lambda: fc.fleet((X, Y), by="subject"), "arrays have no column 'subject'\n\nhint: write by=array"),
    (lambda: fc.fleet(frame(), by="subjekt"), "there is no column 'subjekt' for by\n\nhint: did you mean 'subject'"),
    (lambda: fc.fleet(frame().drop(columns="label"), by="subject"), "is surely y\n\nhint: name it: y="),
    (lambda: fc.fleet(Items(named=False), by=7), "tuple of 3 and has no 7"),
    (lambda: fc.fleet((X, Y[:-1]), by=WHO), "different lengths: x has 60, y has 59, by has 60"),
    (lambda: fc.fleet((X, Y - 1), by=WHO), "the class -1\n\nhint: number the classes from 0"),
    (lambda: fc.fleet((X, Y.astype(np.uint64) + 2**63), by=WHO), "the class 9223372036854775808\n\nhint: number"),
    (lambda: fc.fleet((np.where(X > 2, np.nan, X), Y), by=WHO), r"^x holds NaN or .* of 60 samples, first in x\[\d+\]"),
    (lambda: fc.fleet({"anna": (X, Y), "ben": (X * np.nan, Y)}), r"^ben: x holds NaN or infinity in 60 of 60"),
    (lambda: fc.fleet((X, Y), by=[None, *WHO[1:]]), "1 samples have no value of by"),
    (lambda: fc.fleet((X, Y), by=WHO, groups="made"), "no column 'made' for groups"),
    (lambda: fc.fleet((X, Y), by=WHO, groups=[0, 1]), "groups are .2., for 60 samples"),
    (lambda: fc.fleet((X, Y), by=WHO, test=1.5), "test is 1.5\n\nhint: give the share"),
    (lambda: fc.fleet((X, Y), by=WHO, test=(X, Y)), "whose the test samples are"),
    (lambda: fc.fleet({"a": (X, Y), "b": (X[:, :2], Y)}), "b has samples of .2., a of .4."),
    (lambda: fc.fleet((X, Y), by=WHO, groups={"anna": 0}), "groups say nothing of 'ben'"),
    (lambda: fc.fleet((X, Y), by=WHO, test="0.2"), "test is '0.2'\n\nhint: give the share"),
    (lambda: fc.fleet((X, Y), by=WHO, test=None), "test is None\n\nhint: give the share"),
    (lambda: fc.fleet((X, Y), by=1.5), "by is float64 ..\n\nhint: give one value for each sample"),
    (lambda: fc.fleet((X, Y), by=np.zeros((N, 2))), "by is float64 .60, 2."),
    (lambda: fc.fleet((X, Y), by=np.arange(N)), "no device has enough samples"),
    (lambda: fc.fleet((X, Y), devices="3"), "devices is '3'\n\nhint: give a whole number"),  # type: ignore[arg-type]
    (lambda: fc.fleet((X, Y), devices=2.5), "devices is 2.5"),  # type: ignore[arg-type]
    (lambda: fc.fleet((X, Y), by=WHO, seed="a"), "seed is 'a'"),  # type: ignore[arg-type]
    (lambda: fc.fleet((X, Y), devices=2, partition=lambda y: [y]), "hint: write it as make.y, devices, seed."),
    (lambda: fc.fleet(Stream(), devices=2), "a stream has no order .*\n\nhint: give a data set with a length"),
    (lambda: fc.fleet(DataLoader(Stream()), devices=2), "a stream has no order"),
    (lambda: fc.fleet(listed([0, 1, None]), devices=2), "sample 2 has no label"),
    (lambda: fc.fleet(listed(["a", np.nan]), devices=2), "sample 1 has no label"),
    (
        lambda: fc.fleet((X, Y), by=np.array([pd.NA, *WHO[1:]], dtype=object)),
        r"1 samples have no value of by\n\nhint: fill",
    ),
    (lambda: fc.fleet(listed([[0], [1, 2], [0]]), devices=1), "label of sample 1 has shape .2., not .1."),
    (lambda: fc.fleet({"a": (X, Y)}, devices=3), "divided among devices already"),
    (lambda: fc.fleet(7, devices=2), "int is no data set\n\nhint: give a torch Dataset"),
    (lambda: fc.fleet("no-such-folder"), "no-such-folder is no folder"),
    (lambda: fc.fleet((X[:0], Y[:0]), devices=2), "there are no samples"),
]


@pytest.mark.parametrize(("make", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_what_is_wrong_is_named_with_what_to_write(make: Any, said: str) -> None:
    with pytest.raises(FedcentersError, match=said):
        make()


def test_a_command_that_needs_samples_given_in_python_says_so() -> None:
    with pytest.raises(ConfigError, match=r"'arrays' were given in Python.*\n\nhint: do it there: fc.load\(folder\)"):
        bundle_source._split({"data-set": "arrays", "method": "fesem"}, None)
