"""Samples that files are compared on: as a user saved them, and held against the program before they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_client.errors import ConfigError
from edge_client.protocol.samples.input_parts import pack_arrays
from edge_client.protocol.task import Array
from export.bundle.bundle_contents import LabelledSamples
from tests.support import softmax_program

X = np.random.default_rng(0).random((4, softmax_program.FEATURES), dtype=np.float32)
Y = np.arange(4) % softmax_program.CLASSES


def test_samples_that_are_no_npz_are_refused_without_advice_of_numpys(tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text("1,2\n")
    with pytest.raises(ConfigError, match=r"a\.csv is no npz file") as refused:
        LabelledSamples.read(table)
    assert refused.value.hint == "give an npz file with an array x"


def test_a_damaged_file_is_no_bug_of_ours(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "whole.npz", x=X, y=Y)
    whole = (tmp_path / "whole.npz").read_bytes()
    for at in range(0, len(whole), 7):
        (tmp_path / "flipped.npz").write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        (tmp_path / "cut.npz").write_bytes(whole[:at])
        for name in ("flipped.npz", "cut.npz"):
            try:
                found = LabelledSamples.read(tmp_path / name)
            except ConfigError:
                continue
            np.testing.assert_array_equal(found.x, X)  # what was flipped is no part of the arrays


def test_a_file_without_x_is_told_as_that_and_several_inputs_are_packed(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", inputs=X)
    with pytest.raises(ConfigError, match="lacks the array 'x'"):
        LabelledSamples.read(tmp_path / "a.npz")
    parts: dict[str, Array] = {"ids": np.arange(4)[:, None], "meta": X}
    named: dict[str, Any] = {f"x.{name}": value for name, value in parts.items()}
    np.savez(tmp_path / "b.npz", **named)
    np.testing.assert_array_equal(LabelledSamples.read(tmp_path / "b.npz").x, pack_arrays(parts))


@pytest.mark.parametrize(
    ("x", "y", "told"),
    [
        (X, Y[:, None], r"y has labels of shape \[1\]"),
        (X, Y + 100, "y holds the label 103"),
        (X, Y - 1, "one integer per sample, from 0"),
        (X, Y.astype(float), "save class labels as integers"),
        (X, Y.astype(str), "y is <U"),
        (X[:, :2], Y, r"x has samples of shape \[2\]"),
        (X * np.nan, None, "x holds NaN or infinity"),
    ],
)
def test_samples_that_the_program_cannot_read_are_told_with_what_to_correct(x: Array, y: Array, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        LabelledSamples(x=x, y=y).require_fit(softmax_program.program())
    LabelledSamples(x=X, y=Y).require_fit(softmax_program.program())
    LabelledSamples(x=X).require_fit(softmax_program.program())
