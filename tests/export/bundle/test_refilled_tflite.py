"""A center's TFLite file with the weights of another one: the bytes of a conversion, or none where that is not sure."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_client.protocol.task import Array
from export.bundle import writer
from export.bundle.bundle_contents import BundleSource
from export.bundle.center_files import export_center, load_infer_module
from export.bundle.refilled_tflite import refillable
from export.bundle.writer import BundleOptions, write_bundle
from export.compiler.program import compile_program, vector_of
from tests.support.programs import compiled, model


class Reads(nn.Module):
    """An embedding and an LSTM, whose first step drops a product with zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.read = nn.Embedding(5, 2), nn.LSTM(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.read(self.embed(x.long()))[0][:, -1]
        return made


class ByCosine(nn.Module):
    """Its weights are in the file, and so are their lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T / self.weight.square().sum(1)


class ByMean(nn.Linear):
    """Its weights are in the file, and so is their mean, which looks like any number."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) - self.weight.mean()


def convolves() -> nn.Module:
    """Filters for all channels and for single ones, and a mean over places."""
    filters = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3, groups=4), nn.AvgPool2d(2)]
    return nn.Sequential(*filters, nn.Flatten(), nn.Linear(4, 3))


def normalises() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(32, 2))


def center(make: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, list[Array]]:
    """A module with weights of its own, and these."""
    module, rng = make(), np.random.default_rng(seed)
    weights = [p for p in module.state_dict().values() if p.dtype == torch.float32]
    for weight in weights:
        weight.copy_(torch.from_numpy(rng.random(tuple(weight.shape), dtype=np.float32)))
    return module, [weight.numpy().copy() for weight in weights]


@pytest.mark.parametrize(("make", "shape"), [(convolves, (1, 6, 6)), (Reads, (3,))])
def test_a_file_with_the_weights_of_another_center_has_the_bytes_of_its_conversion(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    (first, weights), (other, its) = center(make, 1), center(make, 2)
    made = refillable(export_center(first, shape, "tflite"), weights)
    assert made is not None
    assert made.refilled(its) == export_center(other, shape, "tflite")


@pytest.mark.parametrize(("make", "shape"), [(normalises, (1, 6, 6)), (ByCosine, (4,))])
def test_a_file_with_constants_that_come_from_weights_is_not_refilled(
    make: Callable[[], nn.Module], shape: tuple[int, ...]
) -> None:
    """Those of a batch norm take the place of weights, those of ByCosine are beside them."""
    module, weights = center(make, 1)
    assert refillable(export_center(module, shape, "tflite"), weights) is None


def test_a_weight_that_may_be_taken_for_another_or_for_a_constant_is_not_looked_for() -> None:
    module, weights = center(lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)), 1)
    file = export_center(module, (3,), "tflite")
    assert refillable(file, weights) is not None
    assert refillable(file, [*weights, weights[0]]) is None
    assert refillable(file, [*weights[:-1], np.zeros(3, np.float32)]) is None


def test_a_bundle_converts_one_center_and_the_files_of_the_others_are_those_of_a_conversion(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, calls = compiled("digits-mlp"), count()
    start = vector_of(model("digits-mlp").module, made.program.schema)
    centers = [start + np.float32(0.01) * np.arange(len(start), dtype=np.float32) / len(start) * k for k in range(3)]

    def counted(*args: Any) -> bytes:  # noqa: ANN401 - as the function
        next(calls)
        return export_center(*args)

    monkeypatch.setattr(writer, "export_center", counted)
    source = BundleSource(program=made.program, files=made.files, centers=centers, cards=[{}, {}, {}])
    write_bundle(tmp_path / "bundle", source, BundleOptions(formats=("tflite",)))
    assert next(calls) == 1
    infer = made.files[made.program.containers["pt2"]["infer"].sha256]
    last = load_infer_module(infer, made.program.schema, centers[-1])
    written = (tmp_path / "bundle" / "centers" / "center-2" / "model.tflite").read_bytes()
    assert written == export_center(last, made.program.input, "tflite")


def test_a_bundle_converts_a_center_whose_refilled_file_differs_from_it(tmp_path: Path) -> None:
    made = compile_program(ByMean(4, 3), (4,), engines=("pt2",))
    centers = [np.arange(15, dtype=np.float32) * k for k in (1, 2)]
    source = BundleSource(program=made.program, files=made.files, centers=centers, cards=[{}, {}])
    write_bundle(tmp_path / "bundle", source, BundleOptions(formats=("tflite",)))
