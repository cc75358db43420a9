"""A bundle becomes a Triton model repository, and the next bundle its next version."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from edge_client.errors import ConfigError
from export.serve.triton import model_config, write_repository
from tests.support.served_bundle import write_bundle
from tests.support.softmax_program import CLASSES, FEATURES, program


def test_each_center_is_a_model_and_each_bundle_a_version(tmp_path: Path) -> None:
    for version, mark in ((1, "one"), (2, "two")):
        write_bundle(tmp_path / "b", mark)
        assert write_repository(tmp_path / "b", tmp_path / "models") == [f"center-{k}/{version}" for k in (0, 1)]
    model = tmp_path / "models" / "center-1"
    assert (model / "1" / "model.onnx").read_bytes().startswith(b"one 1")
    assert (model / "2" / "model.onnx").read_bytes().startswith(b"two 1")
    assert sorted(p.name for p in model.iterdir()) == ["1", "2", "config.pbtxt"]


def test_the_same_bundle_again_changes_nothing(tmp_path: Path) -> None:
    """It became another version, which Triton loaded in the place of the same one."""
    write_bundle(tmp_path / "b", "one")
    first, models = write_repository(tmp_path / "b", tmp_path / "models"), tmp_path / "models"
    assert write_repository(tmp_path / "b", models) == first == ["center-0/1", "center-1/1"]
    assert sorted(p.name for p in models.glob("center-*/*")) == ["1", "1", "config.pbtxt", "config.pbtxt"]


def test_a_bundle_of_which_a_part_is_missing_is_written_again(tmp_path: Path) -> None:
    """As after a write that was interrupted between two centers."""
    write_bundle(tmp_path / "b", "one")
    write_repository(tmp_path / "b", tmp_path / "models")
    (tmp_path / "models" / "center-1" / "1" / "model.onnx").unlink()
    assert write_repository(tmp_path / "b", tmp_path / "models") == ["center-0/2", "center-1/2"]


@pytest.mark.parametrize(("mark", "version"), [("two", 2), ("three", 3)])
def test_after_a_writer_that_was_killed_between_two_centers_all_have_one_version(
    tmp_path: Path, mark: str, version: int
) -> None:
    """Its centers were a version ahead of the others for ever."""
    for done in ("one", "two"):
        write_bundle(tmp_path / "b", done)
        write_repository(tmp_path / "b", tmp_path / "models")
    shutil.rmtree(tmp_path / "models" / "center-1" / "2")
    write_bundle(tmp_path / "b", mark)
    assert write_repository(tmp_path / "b", tmp_path / "models") == [f"center-{k}/{version}" for k in (0, 1)]
    for k in (0, 1):
        model = tmp_path / "models" / f"center-{k}" / f"{version}" / "model.onnx"
        assert model.read_bytes().startswith(f"{mark} {k}".encode())


def test_what_a_killed_writer_has_left_is_removed(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    (tmp_path / "models" / "center-0" / ".version-4711.partial").mkdir(parents=True)
    write_repository(tmp_path / "b", tmp_path / "models")
    assert sorted(p.name for p in (tmp_path / "models" / "center-0").iterdir()) == ["1", "config.pbtxt"]


def test_a_center_that_the_next_bundle_has_not_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for mark, centers in (("one", 3), ("two", 3), ("two", 2)):
        assert not caplog.messages
        write_bundle(tmp_path / "b", mark, centers=centers)
        write_repository(tmp_path / "b", tmp_path / "models")
    assert "center-2 of an older bundle" in caplog.text


def test_the_configuration_names_what_the_file_takes_and_gives() -> None:
    """In protobuf's text format, as model_config.proto of the Triton server has it."""
    text = model_config("center-0", program())
    assert f'name: "x" data_type: TYPE_FP32 dims: [ {FEATURES} ]' in text
    assert f'name: "logits" data_type: TYPE_FP32 dims: [ {CLASSES} ]' in text
    assert text.startswith('name: "center-0"\nbackend: "onnxruntime"\nmax_batch_size: ')


def test_a_bundle_without_onnx_files_says_what_to_do(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", "one")
    with pytest.raises(ConfigError, match="--formats onnx"):
        write_repository(without_files(tmp_path / "b"), tmp_path / "models")


def without_files(bundle: Path) -> Path:
    manifest = json.loads((bundle / "manifest.json").read_text())
    for center in manifest["centers"]:
        center["files"] = {}
    (bundle / "manifest.json").write_text(json.dumps(manifest))
    return bundle
