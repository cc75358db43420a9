"""Samples and labels of odd kinds: what they become, or what is wrong and what to write."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import sparse
from torch import nn

import fedcenters as fc
from edge_client.errors import ConfigError, FedcentersError
from edge_client.protocol.task import Array
from emulator.api.data.kinds import checked_labels

N = 60
RNG = np.random.default_rng(0)
X, Y, WHO = RNG.normal(size=(N, 4)), np.arange(N) % 3, np.repeat(["anna", "ben", "cleo"], N // 3)
FIRST, SECOND = slice(0, 20), slice(20, 40)


def frame(**columns: object) -> pd.DataFrame:
    return pd.DataFrame(X, columns=list("pqrs")).assign(label=Y, who=WHO).assign(**columns)


def run(y: Array, *outputs: int) -> object:
    """One round of a linear model with so many outputs, or of the default one."""
    model: nn.Module | None = nn.Sequential(nn.Linear(4, 6), nn.Unflatten(1, outputs)) if len(outputs) > 1 else None
    model = nn.Linear(4, *outputs) if len(outputs) == 1 else model
    return fc.simulate(fc.FedAvg(), fleet=fc.fleet((X, y), by=WHO), rounds=1, model=model)


def of_each(first: dict[str, object], second: dict[str, object]) -> dict[str, pd.DataFrame]:
    """Two devices, each with columns of its own beside the common ones."""
    return {
        who: frame().drop(columns="who")[rows].assign(**columns)
        for who, rows, columns in (("anna", FIRST, first), ("ben", SECOND, second))
    }


def pixels(x: Array) -> Array:
    return (np.abs(x) * 50).astype(np.uint8)


def holed(kind: str) -> pd.Series:
    column = pd.Series((X[:, 0] > 0).astype(int)).astype(kind)
    column[3] = pd.NA if kind[0].isupper() or kind == "boolean" else np.nan
    return column


WRONG: list[tuple[Callable[[], object], str]] = [
    *(
        (lambda kind=kind: fc.fleet(frame(q=holed(kind)), by="who"), "column 'q' of x holds NaN or infinity in 1 of 60")
        for kind in ("float", "Float64", "Int64", "boolean")
    ),
    (lambda: fc.fleet(frame(q="u"), by="who", x=["p", "q"]), "column 'q' of x is text"),
    (lambda: fc.fleet(pd.concat([frame(), frame()[["p"]]], axis=1), by="who"), "2 columns are called 'p'"),
    (lambda: fc.fleet((X, Y), by=np.array([1, "1", 2] * 20, dtype=object)), "by holds int and str"),
    (lambda: fc.fleet((X, Y), by=WHO, groups=np.array(["u", None] * 30, object)), "30 samples have no value of groups"),
    (lambda: fc.fleet((X, Y), by=WHO, groups=np.array([1, "u"] * 30, object)), "groups holds int and str"),
    (lambda: fc.fleet((X, Y), by=WHO, groups={"anna": 1, "ben": np.nan, "cleo": 2}), "20 samples have no value of gro"),
    (lambda: fc.fleet(frame(), by=frame().who[::-1]), r"by has the rows .* in another order.*by.loc\[data.index\] by"),
    (lambda: fc.fleet((frame()[["p"]], frame().label[::-1]), by=WHO), "y has the rows of the data frame in another"),
    (lambda: fc.fleet(frame(), by="who", groups=frame().who[::-1]), "groups has the rows of the data frame in another"),
    (lambda: fc.fleet((X, np.full((N, 4), -100)), by=WHO), "all labels are -100"),
    (lambda: fc.fleet((X, X[:, :0]), by=WHO), r"y is float64 \[60, 0\]"),
    (lambda: fc.fleet((X, np.zeros((N, 0), int)), by=WHO), r"y is int64 \[60, 0\]"),
    (lambda: fc.fleet(([[1, 2], [3]] * 2, [0, 1] * 2), by=[0, 0, 1, 1]), "values of different shapes"),
    (lambda: fc.fleet((X * 1e300, Y), by=WHO), "x holds numbers beyond float32.*scale them"),
    (lambda: fc.fleet((X, X[:, 0] * 1e300), by=WHO), "y holds numbers beyond float32"),
    (lambda: fc.fleet((X[:, :0], Y), by=WHO), r"x is float64 \[60, 0\]"),
    (lambda: fc.fleet((np.ma.masked_greater(X, 1), Y), by=WHO), "masked values"),
    (lambda: fc.fleet((X, X[:, 0].astype(complex)), by=WHO), "y is complex128"),
    (lambda: fc.fleet((X, np.array([0, None, 1] * 20)), by=WHO), "y holds NaN, None or NA in 20 samples"),
    (lambda: fc.fleet(frame(y=X[:, 0]), by="who"), "'y' and 'label' may both be y.*name it: y="),
    (lambda: fc.fleet(frame(x=0.0, y=X[:, 0], z=0.0).drop(columns="label"), by="who"), "is surely y"),
    (lambda: fc.fleet((X, Y), by=WHO, partition="iid", devices=3), "iid does not look at whose the samples are"),
    (lambda: fc.fleet({"a": (X, Y), "b": (X, Y * 1.0)}), "y of b is floating point numbers, of a whole numbers"),
    (lambda: fc.fleet({"a": (X, Y * 1.0), "b": (X, Y)}), "y of b is whole numbers, of a floating point numbers"),
    (lambda: fc.fleet({"a": (X, Y), "b": (X, Y[:, None])}), r"b has labels of \[1\], a of \[\]"),
    (lambda: fc.fleet({"a": (X, Y), "b": (X[:, :2], Y)}), r"b has samples of \[2\], a of \[4\]"),
    (lambda: fc.fleet({"a": (X, Y), "b": (X, WHO)}), "y of b is text, of a whole numbers"),
    (lambda: fc.fleet({"a": (pixels(X), Y), "b": (X, Y)}), "x of b is other numbers, of a uint8"),
    (lambda: fc.fleet({"a": (X, Y), "b": (pixels(X), Y)}), "x of b is uint8, of a other numbers"),
    (lambda: fc.fleet((X, Y), devices=3, test=(pixels(X), Y)), "x of the test data is uint8, of the training data"),
    (lambda: fc.fleet((X, Y), devices=3, test=(X, Y * 1.0)), "y of the test data is floating point numbers"),
    (lambda: fc.fleet(of_each({}, {"more": 1.0})), "ben has a column 'more' of numbers, which anna has not"),
    (lambda: fc.fleet(of_each({"more": 1.0}, {})), "ben: there is no column 'more' for x"),
    (lambda: fc.fleet(of_each({}, {"q": "u"})), "ben: column 'q' of x is text"),
    (lambda: fc.fleet(of_each({"q": "u"}, {})), "ben has a column 'q' of numbers, which anna has not"),
    (
        lambda: fc.simulate(fc.FedAvg(), fleet=fc.fleet(({"ids": X, "meta": X}, Y), by=WHO), rounds=1),
        "several arrays, and no model of ours takes them.*whose forward takes ids, meta",
    ),
    (lambda: run(np.stack([Y, Y], 1).astype(str), 2), "give one class for each sample, whole numbers, or float target"),
    (
        lambda: run((np.stack([Y, Y], 1) > 0).astype(int), 2),
        "whose labels are of shape.*one-hot.*for yes and no.*float32",
    ),
    (
        lambda: run((np.stack([Y, Y], 1) > 0).astype(int)),
        "a label per token or pixel.*one-hot.*for yes and no.*float32",
    ),
    (lambda: run((Y > 0).astype(int), 1), "Linear has 1 outputs.*one output per class: 2; or, for yes and no"),
    (lambda: run(np.stack([Y, Y * 0 + 255], 1), 3, 2), r"class 255.*-100 leaves a position out: y\[y == 255\] = -100"),
    (
        lambda: fc.simulate(fc.FedAvg(), fleet=fc.fleet((X, Y * 10**9), by=WHO), rounds=1),
        "y has the class 2000000000, of 3 classes.*number the classes from 0",
    ),
]


@pytest.mark.parametrize(("make", "said"), WRONG, ids=[said[:30] for _, said in WRONG])
def test_what_is_wrong_is_named_with_what_to_write(make: Callable[[], object], said: str) -> None:
    with pytest.raises(FedcentersError, match=f"(?s){said}"):
        make()


def test_a_column_of_other_rows_than_the_data_frame_is_taken_as_it_stands() -> None:
    later = frame().set_index(np.arange(N) + 7)
    assert len(fc.fleet(later, by=frame().who)) == len(fc.fleet(frame(), by=frame().who)) == len({*WHO})
    mixed = frame().set_index(pd.Index([*map(str, range(30)), *range(30)]))  # as of two frames, one below the other
    assert len(fc.fleet(mixed, by=frame().who)) == len({*WHO})
    with pytest.raises(ConfigError, match="in another order"):
        fc.fleet(mixed, by=mixed.who[::-1])


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (Y.astype(object), np.int64),
        (X[:, 0].astype(object), np.float32),
        (np.array([Decimal(int(value)) / 4 for value in Y]), np.float32),
    ],
)
def test_numbers_in_a_column_of_objects_are_numbers(labels: Array, kind: type) -> None:
    """They were texts: each float was a class of its own, and class 10 came before class 2. Samples were refused."""
    fleet = fc.fleet((X.astype(object), labels), by=WHO)
    np.testing.assert_array_equal(fleet["anna"].train.x, fc.fleet((X, labels), by=WHO)["anna"].train.x)
    assert fleet["anna"].train.y.dtype == kind
    assert not fleet.classes


def test_columns_may_have_numbers_as_names() -> None:
    numbered = pd.DataFrame(np.c_[X, Y].astype(np.float32)).assign(who=WHO)
    fleet = fc.fleet(numbered.astype({4: int}), by="who", y=4)
    assert fleet.columns == ("0", "1", "2", "3")
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=1)
    assert result.predict(numbered[:3], center=0).shape == (3,)


def test_pixels_become_a_unit_range() -> None:
    made = fc.fleet((RNG.integers(256, size=(N, 1, 8, 8), dtype=np.uint8), Y), by=WHO)["anna"].train.x
    assert made.dtype == np.float32
    assert 0 <= made.min() < made.max() <= 1


def test_uint8_is_read_in_the_same_way_in_a_prediction_as_in_training(tmp_path: Path) -> None:
    """A newcomer with pixels from 0 to 255 was told that no center fits."""
    x = RNG.integers(0, 256, (N, 4), dtype=np.uint8)
    fleet = fc.fleet((x, (x[:, 0] > 127).astype(int)), by=WHO)
    result = fc.simulate(fc.FedAvg(local_steps=5), fleet=fleet, rounds=2)
    expected = result.predict(x.astype(np.float32) / 255, center=0)
    assert expected.any()
    assert not expected.all()
    np.testing.assert_array_equal(result.predict(x, center=0), expected)
    loaded = fc.load(result.save(tmp_path / "mine"))
    np.testing.assert_array_equal(loaded.predict(x, center=0), expected)
    labels = fleet["anna"].train.y[:9]
    whole = (fleet["anna"].train.x[:9] * 255).round().astype(np.uint8)
    assert result.nearest(whole, labels) == result.nearest(fleet["anna"].train.x[:9], labels)


def test_uint8_in_a_prediction_of_a_run_on_other_numbers_stays_what_it_is() -> None:
    x = RNG.integers(0, 9, (N, 4))
    result = fc.simulate(fc.FedAvg(local_steps=2), fleet=fc.fleet((x, Y), by=WHO), rounds=1)
    np.testing.assert_array_equal(result.predict(x.astype(np.uint8), center=0), result.predict(x, center=0))


class ByteTokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.head(self.embed(x.long()).mean(1))
        return made


@pytest.mark.parametrize("kind", [np.uint8, np.int64])
def test_tokens_as_uint8_are_told_to_be_pixels(kind: type, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them became the token 0."""
    x: Array = RNG.integers(0, 256, (N, 5)).astype(kind)
    fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleet((x, Y), by=WHO), model=ByteTokens(), rounds=1)
    assert any("For tokens give x.astype('int64')" in said for said in caplog.messages) is (kind is np.uint8)


def test_true_and_false_are_samples_too() -> None:
    """A fleet by a column ended in a TypeError of numpy."""
    assert set(np.unique(fc.fleet((X > 0, Y), by=WHO)["anna"].train.x)) == {0.0, 1.0}


@pytest.mark.parametrize("kind", [np.int64, np.bool_, np.float32])
def test_samples_one_by_one_keep_their_numbers_where_the_first_is_of_a_narrower_kind(kind: type) -> None:
    rows = [(x.astype(kind) if i == 0 else x, int(y)) for i, (x, y) in enumerate(zip(X, Y, strict=True))]
    found = fc.fleet({"anna": rows, "ben": rows[1:]})["anna"]
    both = np.concatenate([found.train.x, found.test.x])  # type: ignore[union-attr]
    wanted = np.concatenate([X[:1].astype(kind), X[1:]]).astype(np.float32)
    np.testing.assert_array_equal(np.sort(both, axis=0), np.sort(wanted, axis=0))


@pytest.mark.parametrize("odd", [0, 7])
def test_pixels_among_other_samples_are_refused(odd: int) -> None:
    rows = [(pixels(x) if i == odd else x, int(y)) for i, (x, y) in enumerate(zip(X, Y, strict=True))]
    with pytest.raises(ConfigError, match=rf"^sample {odd or 1} is \w+, those before are \w+") as wrong:
        fc.fleet(rows, by=WHO)
    assert "uint8 are pixels" in wrong.value.hint


def test_images_of_several_shapes_in_a_column_are_told_what_to_do() -> None:
    images = [np.zeros((2, 3)), *(np.zeros((2, 2)) for _ in range(N - 1))]
    with pytest.raises(ConfigError, match="different shapes"):
        fc.fleet(frame(image=images), by="who", x="image")


def test_a_single_test_sample_may_have_several_labels() -> None:
    """Its labels were taken for as many samples."""
    y = np.stack([Y, Y], axis=1)
    (labels, one), _ = checked_labels([y, y[:1]])
    assert (labels.shape, one.shape) == ((N, 2), (1, 2))
    assert checked_labels([Y[:, None]])[0][0].shape == (N,)


def test_devices_without_test_samples_are_told_when_they_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    data = frame()
    fleet = fc.fleet(data, by="who", test=data[data["who"] != "anna"][::4])
    assert sorted(fleet) == ["ben", "cleo"]
    told = "1 of 3 devices have no test samples, or a single training sample, and are left out: anna"
    assert caplog.messages[0] == told


def tables(folder: Path, classes: dict[str, str], *, test: str = "") -> Path:
    """A folder of devices with a table each; `test` names one that has test samples too."""
    for who, order in classes.items():
        rows = [f"{x:.3f},{'on' if x > 0 else 'off'}" for x in X[who == WHO, 0]]
        for part in ("train", "test") if who == test else ("train",):
            (folder / who / part).mkdir(parents=True)
            (folder / who / part / "log.csv").write_text("\n".join(["p,state", *rows]))
        told = f'[csv]\nfeatures = ["p"]\nlabel = "state"\nclasses = [{order}]\n'
        (folder / who / "schema.toml").write_text(told)
    return folder


def test_the_classes_of_folders_have_their_names_and_one_order(tmp_path: Path) -> None:
    """A device whose schema.toml names them in another order had the other labels, without a word."""
    fleet = fc.fleet(tables(tmp_path / "same", dict.fromkeys(("anna", "ben"), '"off", "on"')))
    assert fleet.classes == ("off", "on")
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fleet, rounds=1)
    assert set(result.predict(np.ones((2, 1)), center=0)) <= {"off", "on"}
    other = tables(tmp_path / "other", {"anna": '"off", "on"', "ben": '"on", "off"'})
    with pytest.raises(ConfigError, match=r"ben has the classes on, off, anna off, on\n\nhint: name the same classes"):
        fc.fleet(other)


def test_what_is_wrong_in_a_folder_of_devices_names_the_device(tmp_path: Path) -> None:
    home = tables(tmp_path, dict.fromkeys(("anna", "ben", "cleo"), '"off", "on"'), test="ben")
    with pytest.raises(ConfigError, match=r"anna, cleo without test samples, beside devices that have some"):
        fc.fleet(home)
    (home / "cleo" / "train" / "log.csv").write_text("p,state\n,on\n")
    with pytest.raises(ConfigError, match=r"cleo: cannot use train/log.csv"):
        fc.fleet(home)


def test_a_share_that_tests_leaves_each_device_a_sample_to_train_on() -> None:
    for local in fc.fleet((X, Y), by=WHO, test=0.99).values():
        assert len(local.train) == 1


def test_numbers_beyond_float32_in_an_evaluation_are_no_crash_of_the_table() -> None:
    result = fc.simulate(fc.FedAvg(local_steps=1), fleet=fc.fleet((X, X[:, 0] * 1e30), by=WHO), rounds=1)
    assert "squared_error" in repr(result)


def test_a_data_frame_beside_its_labels_is_read_by_the_names_of_its_columns() -> None:
    table = pd.DataFrame(X, columns=list("pqrs"))
    turned = fc.fleet({"a": (table, Y), "b": (table[list("srqp")], Y)})
    assert turned.columns == ("p", "q", "r", "s")
    alike = fc.fleet({"a": (X, Y), "b": (X, Y)})
    for device, data in turned.cut().devices.items():
        np.testing.assert_array_equal(data.train.x, alike.cut().devices[device].train.x)
    assert fc.fleet((pd.DataFrame(X), Y), devices=2).columns == ()  # numbers of columns are no names


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (pd.DataFrame(X, columns=list("pqrt")), "there is no column 's' for x"),
        (pd.DataFrame(X, columns=list("pqrs")).assign(t=0.0), "a column 't' beside p, q, r, s"),
        (X, "2 arrays, and the columns p, q, r, s"),
    ],
)
def test_data_frames_of_other_columns_beside_their_labels_are_refused(other: object, told: str) -> None:
    with pytest.raises(FedcentersError, match=told):
        fc.fleet({"a": (pd.DataFrame(X, columns=list("pqrs")), Y), "b": (other, Y)})


@pytest.mark.parametrize(
    "made", [sparse.csr_matrix(X), sparse.coo_array(X), torch.tensor(X).to_sparse()], ids=["matrix", "array", "tensor"]
)
def test_a_sparse_matrix_is_told_how_to_make_dense(made: object) -> None:
    """It ended in "TypeError: len() of unsized object"."""
    with pytest.raises(ConfigError, match="a sparse matrix") as told:
        fc.fleet((made, Y), by=WHO)
    assert "x.toarray()" in told.value.hint


@pytest.mark.parametrize(
    ("kind", "how"), [("S1", "np.asarray(by).astype(str)"), (object, "[value.decode() for value in by]")]
)
def test_bytes_are_no_names_of_classes_or_devices(kind: type | str, how: str) -> None:
    """The classes were called "b'0'", which no label of the user's is, and the devices b-anna-."""
    labels = np.array([b"%d" % y for y in Y]).astype(kind)
    with pytest.raises(ConfigError, match="y holds bytes"):
        fc.fleet((X, labels), by=WHO)
    names = np.array([who.encode() for who in WHO])
    by = names if kind == "S1" else names.astype(kind)
    with pytest.raises(ConfigError, match="by holds bytes") as told:
        fc.fleet((X, Y), by=by)
    assert told.value.hint == f"make them texts: {how}"
    assert set(eval(how)) == {*WHO}  # noqa: S307 - what the hint says
    assert fc.fleet((X, labels.astype("S1").astype(str)), by=WHO).classes == ("0", "1", "2")


def test_names_of_devices_that_only_look_like_numbers_are_names() -> None:
    fleet = fc.fleet({"--1": (X, Y), "1-": (X, Y)})
    assert len(fleet) == 2


def test_half_precision_of_torch_becomes_float32() -> None:
    """bfloat16 ended in "TypeError: Got unsupported ScalarType BFloat16"."""
    half = torch.tensor(X, dtype=torch.bfloat16)
    made = fc.fleet((half, Y), by=WHO)
    assert set(made["anna"].train.x.ravel().tolist()) <= set(half.float().ravel().tolist())


def test_a_column_that_tells_the_devices_apart_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """It was an input of the model: what pandas' groupby gives still has the column by which it was grouped."""
    table = frame(who=np.repeat([7, 8, 9], N // 3))
    apart = dict(tuple(table.groupby("who")))
    fc.fleet({f"pump {who}": held for who, held in apart.items()})
    fc.fleet({who: held.drop(columns="who") for who, held in apart.items()})
    assert caplog.messages == []
    assert fc.fleet(apart).columns == ("p", "q", "r", "s", "who")
    assert [told.partition(":")[0] for told in caplog.messages] == [
        "column 'who' of x holds what each device is called"
    ]


def test_whole_numbers_as_floats_are_targets_and_a_line_says_how_they_would_be_classes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One missing value makes a column of classes floats; once it is dropped, a run was a regression in silence."""
    fc.fleet((X, Y.astype(float)), by=WHO)
    assert "give y.astype(int)" in caplog.messages[-1]
    caplog.clear()
    for targets in (Y / 2, Y + 1.5, X, np.zeros(N), np.arange(N, dtype=float)):
        fc.fleet((X, targets), by=WHO)
    assert caplog.messages == []


def test_whole_numbers_as_floats_are_told_where_the_test_samples_lack_a_class(
    caplog: pytest.LogCaptureFixture,
) -> None:
    train = frame(label=Y.astype(float))
    fc.fleet(train, y="label", by="who", test=train[train["label"] != 1])
    assert "give y.astype(int)" in caplog.messages[0]
