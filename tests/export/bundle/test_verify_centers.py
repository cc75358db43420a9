"""What a smaller file may lose: classes by name, numbers by their variance."""

from __future__ import annotations

import io
import json
import os
import zipfile
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
import torch

from edge_client.errors import ConfigError, Malformed, ProgramRefused
from edge_client.protocol.program import IGNORED
from export.bundle.bundle_contents import LabelledSamples
from export.bundle.commands import verify_bundle
from export.bundle.verify_centers import accuracy_by_device, lost_share
from export.bundle.writer import BundleOptions, write_bundle
from tests.support import served_bundle
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
    assert made["centers"][0]["files"]["onnx"]["parity"] < 1e3  # some machines round as torch does: 0


class Payload:
    """A pickle that makes a folder when it is read."""

    def __init__(self, folder: Path) -> None:
        self._folder = str(folder)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (os.mkdir, (self._folder,))


def replaced(bundle: Path, name: str, data: bytes, variant: str = "") -> None:
    """Another file in its place, as a stranger's bundle has it; under another variant's name, if one is given."""
    (bundle / name).write_bytes(data)
    manifest = json.loads((bundle / "manifest.json").read_text())
    files = manifest["centers"][0]["files"]
    fmt = next(fmt for fmt, file in files.items() if file["path"] == name)
    files[variant or fmt] = {**files.pop(fmt), "sha256": sha256(data).hexdigest(), "size": len(data)}
    (bundle / "manifest.json").write_text(json.dumps(manifest))


def test_verify_runs_no_code_of_a_bundle(tmp_path: Path) -> None:
    """torch unpickles the inputs that a file was traced with, which older bundles have."""
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=("pt2",)))
    name, pickled = "centers/center-0/model.pt2", io.BytesIO()
    torch.save(({"x": Payload(tmp_path / "ran")}, {}), pickled)
    samples = "archive/data/sample_inputs/model.pt"
    with zipfile.ZipFile(tmp_path / "b" / name) as archive:
        members = {member: archive.read(member) for member in archive.namelist()}
    assert members[samples] == b""  # a new file has none
    for pickle, place in ((pickled.getvalue(), samples), (pickled.getvalue(), "archive/data/constants/custom_obj_0")):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as archive:
            for member, data in (members | {place: pickle}).items():
                archive.writestr(member, data)
        replaced(tmp_path / "b", name, made.getvalue())
        if place == samples:
            assert verify_bundle(tmp_path / "b")[0]["ok"]
        else:
            with pytest.raises(ProgramRefused, match="custom_obj_0, which no program has"):
                verify_bundle(tmp_path / "b")
        assert not (tmp_path / "ran").exists()


def test_verify_names_a_format_that_it_does_not_know(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=("onnx",)))
    name = "centers/center-0/model.onnx"
    replaced(tmp_path / "b", name, (tmp_path / "b" / name).read_bytes(), variant="coreml-int4")
    with pytest.raises(ConfigError, match="unknown format, coreml-int4"):
        verify_bundle(tmp_path / "b")


def test_verify_names_the_graph_that_a_bundle_lacks(tmp_path: Path) -> None:
    """What is compared with torch's graph needs that graph."""
    served_bundle.write_bundle(tmp_path / "b", "one")
    with pytest.raises(Malformed, match="no infer for pt2"):
        verify_bundle(tmp_path / "b")
