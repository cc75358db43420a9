"""A new bundle takes the place of an older one as a whole, and of nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from edge_client.errors import Malformed, UsageError
from export.bundle.bundle_contents import BundleNames
from export.bundle.reader import MAX_DEVICES, read_bundle
from export.bundle.writer import BundleOptions, write_bundle
from tests.support.bundle_material import centers, judged, material
from tests.support.programs import compiled
from tests.support.size_limit import files_of_at_most


def test_what_a_killed_process_left_beside_a_bundle_goes_with_the_next_one(tmp_path: Path) -> None:
    for left in (".b.0123abcd.older", ".b.4567cdef.partial", ".b.partial"):  # the last is of an earlier version
        (tmp_path / left).mkdir()
        (tmp_path / left / "manifest.json").touch()
    for _ in range(2):  # there is none, and there is one
        write_bundle(tmp_path / "b", material(), BundleOptions(formats=()))
        assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_two_that_write_one_bundle_at_once_both_leave_a_whole_one(tmp_path: Path) -> None:
    """The second one removed what the first had written: a bundle of a manifest without its files took the place."""

    def sign(_: bytes) -> str:
        write_bundle(tmp_path / "b", material(cards=[{"devices": 2}] * 2), BundleOptions(formats=()))
        return ""

    write_bundle(tmp_path / "b", material(cards=[{"devices": 1}] * 2, sign=sign), BundleOptions(formats=()))
    assert [c["card"]["devices"] for c in read_bundle(tmp_path / "b").manifest["centers"]] == [1, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_a_bundle_that_does_not_fit_leaves_the_older_one_and_takes_no_room(tmp_path: Path) -> None:
    """What was written of it stayed until the next bundle, on a disk that is full."""
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=()))
    before = (tmp_path / "b" / "manifest.json").read_bytes()
    with files_of_at_most(2_000), pytest.raises(OSError, match="File too large"):
        write_bundle(tmp_path / "b", material(), BundleOptions(formats=()))
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    assert (tmp_path / "b" / "manifest.json").read_bytes() == before


def test_a_failed_bundle_leaves_no_folder_that_looks_complete(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="missing"):
        write_bundle(tmp_path / "b", material(files={}), BundleOptions(formats=()))
    assert not (tmp_path / "b").exists()


def test_a_new_bundle_takes_the_place_of_an_older_one_and_leaves_nothing_else(tmp_path: Path) -> None:
    for cards in ([{"devices": 1}] * 2, [{"devices": 2}] * 2):
        write_bundle(tmp_path / "b", material(cards=cards), BundleOptions(formats=()))
    assert [c["card"]["devices"] for c in read_bundle(tmp_path / "b").manifest["centers"]] == [2, 2]
    assert [p.name for p in tmp_path.iterdir()] == ["b"]


def test_a_bundle_has_its_name_only_when_its_files_last_through_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    fsync, rename = os.fsync, Path.rename

    def noted(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve())
        fsync(descriptor)

    def renamed(path: Path, target: Path) -> Path:
        assert {path, *path.rglob("*")} <= {*synced}
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(Path, "rename", renamed)
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=()))
    assert synced[-1] == tmp_path


@pytest.mark.parametrize("theirs", ["b/client.toml", "b/state/state.json", "b/manifest.json", "b"])
def test_a_bundle_takes_the_place_of_nothing_but_a_bundle(theirs: str, tmp_path: Path) -> None:
    path = tmp_path / theirs
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("a user's work")
    with pytest.raises(UsageError, match=r"is not a bundle[\s\S]*hint: give --out a new folder"):
        write_bundle(tmp_path / "b", material(), BundleOptions(formats=()))
    assert path.read_text() == "a user's work"


def test_what_no_reader_takes_is_refused_and_the_older_bundle_stays(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", material(cards=[{"devices": 1}] * 2), BundleOptions(formats=()))
    with pytest.raises(Malformed, match=r"names\.classes\[0\]"):
        write_bundle(tmp_path / "b", material(names=BundleNames(classes=("a" * 2_000,))), BundleOptions(formats=()))
    assert read_bundle(tmp_path / "b").manifest["centers"][0]["card"]["devices"] == 1


def test_a_bundle_that_was_read_gives_nothing_of_the_one_that_took_its_place(tmp_path: Path) -> None:
    write_bundle(tmp_path / "b", material(), BundleOptions(formats=()))
    before = read_bundle(tmp_path / "b")
    assert (before.vector(1) == centers()[1]).all()
    others = judged().rows(np.array([1, 0, 3, 2]))
    write_bundle(tmp_path / "b", material(centers=centers()[::-1], reference=others), BundleOptions(formats=()))
    with pytest.raises(Malformed, match="bad_hash"):
        before.vector(1)
    with pytest.raises(Malformed, match="bad_hash"):
        before.reference_samples()
    assert before.files() == compiled("digits-mlp").files  # the same in both


def test_a_fleet_of_more_devices_than_a_manifest_names_is_exported_without_their_names(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    names = BundleNames(classes=("a",), devices={f"d{i}": 0 for i in range(MAX_DEVICES + 1)})
    write_bundle(tmp_path / "b", material(names=names), BundleOptions(formats=()))
    assert read_bundle(tmp_path / "b").names == BundleNames(classes=("a",))
    assert "100,001 devices" in caplog.text
