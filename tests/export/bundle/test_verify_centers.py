"""What a smaller file may lose: classes by name, numbers by their variance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_client.protocol.program import IGNORED
from export.bundle.bundle_contents import LabelledSamples
from export.bundle.verify_centers import accuracy_by_device, lost_share
from export.bundle.writer import BundleOptions, write_bundle
from tests.support.bundle_material import material, reference


def test_a_regression_loses_what_it_is_off_beside_its_variance() -> None:
    expected = np.array([[1.0], [3.0], [1.0], [3.0]])
    assert lost_share(expected, expected, None) == 0
    assert lost_share(expected + 0.1, expected, None) == pytest.approx(0.01)
    assert lost_share(np.full((4, 1), 2.0), expected, None) == pytest.approx(1)  # knows the mean only
    assert lost_share(np.full((4, 1), np.nan), expected, None) == np.inf
    constant = np.full((4, 1), 2.0)
    assert lost_share(constant * 0.9, constant, None) == pytest.approx(0.01)


def test_classes_are_named_along_their_own_axis() -> None:
    pixels = np.zeros((1, 2, 1, 4))  # [n, classes, height, width]
    pixels[0, 1, 0, :3] = 1
    one_off = pixels.copy()
    one_off[0, :, 0, 3] = (0, 1)
    assert lost_share(one_off, pixels, 1) == 0.25
    assert lost_share(np.full_like(pixels, np.nan), pixels, 1) == np.inf


def test_a_device_without_a_label_that_counts_has_no_accuracy() -> None:
    """It was NaN, which no card can hold: the export of the run ended with an error of json."""
    y = np.array([[0, 1], [IGNORED, IGNORED], [1, IGNORED], [1, 1]])
    samples = LabelledSamples(x=np.zeros((4, 2)), y=y, device=np.array(["c", "a", "b", "c"]))
    logits = np.zeros((4, 2, 3))
    logits[..., 1] = 1
    assert accuracy_by_device(logits, samples) == {"b": 1.0, "c": 0.75}


def test_files_are_judged_by_the_scale_of_all_samples_that_they_are_compared_on(tmp_path: Path) -> None:
    """The first sample alone told the scale: files were refused where it was small and others were large."""
    x = reference() * np.array([0, 1e6, 1e6, 1e6], np.float32).reshape(4, 1, 1, 1)
    source = material(reference=LabelledSamples(x=x))
    made = write_bundle(tmp_path / "b", source, BundleOptions(formats=("onnx",), stacked=True))
    assert made["centers"][0]["files"]["onnx"]["parity"] > 1e-3
