"""A Hugging Face data set becomes a fleet; with the real library where it is."""

# ruff: noqa: ANN401 - the objects of datasets have no types

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import fedcenters as fc
from edge_client.errors import ConfigError, UsageError

N = 60
X = np.random.default_rng(0).normal(size=(N, 4)).astype(np.float32)
Y = np.arange(N) % 3
WHO = np.repeat(["anna", "ben", "cleo"], N // 3)


@pytest.fixture
def datasets() -> Any:
    return pytest.importorskip("datasets", reason="no Hugging Face datasets here; `make readers` has it")


def test_columns_make_the_same_devices_as_arrays(datasets: Any) -> None:
    table = datasets.Dataset.from_dict({"x": X.tolist(), "label": Y.tolist(), "subject": WHO.tolist()})
    made, plain = fc.fleet(table, by="subject"), fc.fleet((X, Y), by=WHO)
    assert list(made) == list(plain)
    for who, local in plain.items():
        np.testing.assert_array_equal(made[who].train.x, local.train.x)
        np.testing.assert_array_equal(made[who].train.y, local.train.y)
    wide = datasets.Dataset.from_dict({f"f{i}": X[:, i] for i in range(4)} | {"y": Y, "who": WHO})
    again = fc.fleet(wide, x=["f0", "f1", "f2", "f3"], by="who")
    np.testing.assert_array_equal(again["anna"].train.x, plain["anna"].train.x)


def test_a_data_set_of_two_splits_says_what_to_write(datasets: Any) -> None:
    part = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
    both = datasets.DatasetDict({"train": part, "test": part})
    with pytest.raises(UsageError, match=r"fc.fleet\(data\['train'\], test=data\['test'\]"):
        fc.fleet(both, devices=2)
    assert len(fc.fleet(both["train"], test=both["test"], devices=2)) == 2


def test_test_data_that_number_the_classes_otherwise_are_refused(datasets: Any) -> None:
    """The accuracy was of other classes."""

    def labelled(*names: str) -> Any:
        kinds = datasets.Features(
            {"x": datasets.Sequence(datasets.Value("float32")), "y": datasets.ClassLabel(names=names)}
        )
        return datasets.Dataset.from_dict({"x": X.tolist(), "y": (Y % 2).tolist()}, features=kinds)

    with pytest.raises(ConfigError, match="the test data have the classes dog, cat, the training data cat, dog"):
        fc.fleet(labelled("cat", "dog"), test=labelled("dog", "cat"), devices=2)
    assert fc.fleet(labelled("cat", "dog"), test=labelled("cat", "dog"), devices=2).classes == ("cat", "dog")


def test_images_have_their_channels_first(datasets: Any) -> None:
    image = pytest.importorskip("PIL.Image", reason="no pillow here; `make readers` has it")
    pixels = np.random.default_rng(0).integers(256, size=(20, 6, 5, 3), dtype=np.uint8)
    kinds = datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["a", "b"])})
    table = {"img": [image.fromarray(p) for p in pixels], "label": [i % 2 for i in range(20)]}
    made = fc.fleet(datasets.Dataset.from_dict(table, features=kinds), devices=2)
    assert made["device-00"].train.x.shape[1:] == (3, 6, 5)
    assert made.classes == ("a", "b")
    parts = [part for local in made.values() for part in (local.train, local.test) if part is not None]
    seen = {x.tobytes() for part in parts for x in part.x}
    assert seen == {(np.moveaxis(p, -1, 0).astype(np.float32) / np.float32(255)).tobytes() for p in pixels}
