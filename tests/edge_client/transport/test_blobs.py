"""Blobs on disk: whole or absent, transfers that go on after a restart, and a budget."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.errors import Malformed
from edge_client.protocol.blocks import Manifest, body_range, manifest_of
from edge_client.transport import blobs
from edge_client.transport.blobs import BlobFolder, PartialBlob, write_atomically
from tests.support.size_limit import files_of_at_most

BLOCK = 4_096
DATA = bytes(range(256)) * 80  # five blocks


@pytest.fixture
def folder(tmp_path: Path) -> BlobFolder:
    return BlobFolder(tmp_path / "blobs")


def named(data: bytes = DATA) -> Manifest:
    return manifest_of(data, "model", block=BLOCK)


def body(index: int, data: bytes = DATA) -> bytes:
    start, stop = body_range(named(data), index)
    return data[start:stop]


def fill(partial: PartialBlob, indices: Iterator[int] | range) -> None:
    for index in indices:
        partial.write_block(index, body(index))


def test_what_is_put_is_read_back(folder: BlobFolder) -> None:
    sha256 = folder.put(DATA)
    assert folder.has(sha256)
    assert folder.read(sha256) == DATA == folder.path(sha256).read_bytes()


def test_an_absent_blob_is_unknown(folder: BlobFolder) -> None:
    assert not folder.has("0" * 64)
    with pytest.raises(Malformed, match=r"^unknown_blob: "):
        folder.read("0" * 64)


def test_a_blob_that_rotted_on_disk_is_noticed_and_gone(folder: BlobFolder) -> None:
    sha256 = folder.put(DATA)
    folder.path(sha256).write_bytes(DATA[:-1] + b"x")
    with pytest.raises(Malformed, match=r"^bad_hash: "):
        folder.read(sha256)
    assert not folder.has(sha256)


@pytest.mark.parametrize("name", ["../../etc/passwd", "a/b", "", "0" * 63, "G" * 64, "partial"])
def test_no_name_leads_out_of_the_folder(folder: BlobFolder, name: str) -> None:
    for use in (folder.has, folder.read, folder.path, folder.drop):
        with pytest.raises(Malformed):
            use(name)


@given(order=st.permutations(range(5)), repeats=st.lists(st.integers(0, 4), max_size=5))
def test_blocks_in_any_order_and_number_make_the_blob(
    tmp_path_factory: pytest.TempPathFactory, order: list[int], repeats: list[int]
) -> None:
    folder = BlobFolder(tmp_path_factory.mktemp("blobs"))
    partial = folder.partial(named())
    new = [partial.write_block(index, body(index)) for index in [*order[:2], *repeats, *order]]
    assert new.count(True) == 5
    assert partial.finish().read_bytes() == DATA


def test_a_transfer_goes_on_after_a_restart(folder: BlobFolder, tmp_path: Path) -> None:
    before = folder.partial(named())
    fill(before, iter([4, 1]))
    before.close()
    partial = BlobFolder(tmp_path / "blobs").partial(named())
    assert partial.bitmap.missing(5) == [[0, 1], [2, 2]]
    fill(partial, iter([0, 2, 3]))
    partial.finish()
    assert folder.read(named().sha256) == DATA
    assert list((tmp_path / "blobs" / "partial").iterdir()) == []


def test_an_unfinished_transfer_is_no_blob(folder: BlobFolder) -> None:
    partial = folder.partial(named())
    fill(partial, range(4))
    assert not folder.has(named().sha256)
    with pytest.raises(Malformed):
        partial.finish()
    partial.close()


def test_good_blocks_with_a_wrong_whole_are_dropped(folder: BlobFolder) -> None:
    partial = folder.partial(named())
    for index in range(5):
        partial.write_block(index, body(index, DATA[::-1]))
    with pytest.raises(Malformed, match=r"^bad_hash: "):
        partial.finish()
    assert not folder.has(named().sha256)
    again = folder.partial(named())
    assert again.bitmap.count == 0
    again.close()


def test_a_disk_that_cannot_finish_a_transfer_costs_no_descriptor(
    folder: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    opened: set[int] = set()
    for _ in range(2):
        partial = folder.partial(named())
        fill(partial, range(5))
        opened.add(partial._open())
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", broken)
            with pytest.raises(OSError, match="Input/output"):
                partial.finish()
    assert len(opened) == 1  # the number is free again


def test_a_block_of_a_wrong_length_is_refused(folder: BlobFolder) -> None:
    partial = folder.partial(named())
    for index, wrong in ((0, body(0)[:-1]), (4, body(4) + b"x"), (5, b"x")):
        with pytest.raises(Malformed):
            partial.write_block(index, wrong)
    assert partial.bitmap.count == 0
    partial.close()


def test_a_damaged_bitmap_begins_again(folder: BlobFolder, tmp_path: Path) -> None:
    partial = folder.partial(named())
    fill(partial, range(5))
    partial.close()
    file = tmp_path / "blobs" / "partial" / f"{named().sha256}.{BLOCK}"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")  # claims blocks that do not exist
    again = folder.partial(named())
    assert again.bitmap.count == 0
    again.close()


def test_transfers_can_be_dropped_all_at_once(folder: BlobFolder, tmp_path: Path) -> None:
    partial = folder.partial(named())
    fill(partial, range(2))
    partial.close()
    folder.drop_partials()
    assert list((tmp_path / "blobs" / "partial").iterdir()) == []


def test_a_full_folder_refuses(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path, 1_000)
    first = folder.put(bytes(600))
    with pytest.raises(Malformed, match=r"^no_space: "):
        folder.put(bytes(601))
    assert folder.has(first)


def test_the_least_recently_used_makes_room_but_never_what_is_pinned(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path, 1_000, evict=True)
    blobs_ = [folder.put(bytes([k]) * 300) for k in range(3)]
    for age, sha256 in enumerate(blobs_):
        os.utime(tmp_path / sha256, (age, age))
    folder.read(blobs_[0])  # now the most recently used
    folder.pinned = {blobs_[1]}
    folder.put(b"x" * 300)
    assert [folder.has(sha256) for sha256 in blobs_] == [True, True, False]


def test_a_folder_that_evicts_keeps_a_thousand_blobs_however_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_client.transport.blobs.MOST_KEPT", 3)
    evicts, keeps = BlobFolder(tmp_path / "cache", 1 << 30, evict=True), BlobFolder(tmp_path / "store", 1 << 30)
    for age in range(5):
        sha256 = evicts.put(bytes([age]))
        os.utime(tmp_path / "cache" / sha256, (age, age))
        keeps.put(bytes([age]))
    assert [evicts.has(hashlib.sha256(bytes([age])).hexdigest()) for age in range(5)] == [
        False,
        False,
        True,
        True,
        True,
    ]
    assert all(keeps.has(hashlib.sha256(bytes([age])).hexdigest()) for age in range(5))


def test_transfers_that_were_given_up_make_room_too(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path, 3 * len(DATA), evict=True)
    for age in range(5):
        given_up = folder.partial(named(bytes([age]) * len(DATA)))
        given_up.write_block(0, bytes([age]) * BLOCK)
        given_up.close()
        os.utime(given_up._file, (age, age))
    partial = folder.partial(named())
    fill(partial, range(5))
    assert partial.finish().is_file()
    assert list((tmp_path / "partial").iterdir()) == [given_up._file]


def test_a_blob_above_the_budget_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    folder = BlobFolder(tmp_path, 1_000, evict=True)
    with pytest.raises(Malformed, match=r"^no_space: "):
        folder.partial(named())
    assert list((tmp_path / "partial").iterdir()) == []


def test_a_blob_that_does_not_fit_on_the_disk_is_refused(folder: BlobFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=len(DATA)))
    with pytest.raises(Malformed, match=r"^no_space: "):
        folder.partial(named())


def disk_of(size: int, folder: Path) -> SimpleNamespace:
    """A disk of so many bytes that holds nothing but the blobs of a folder and its transfers."""
    used = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return SimpleNamespace(free=size - used)


def test_what_was_used_least_makes_room_on_a_disk_that_is_smaller_than_the_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk_of(3 * len(DATA), path))
    folder = BlobFolder(tmp_path, 100 * len(DATA), evict=True)
    earlier = [folder.put(bytes([age]) * len(DATA)) for age in range(2)]
    for age, sha256 in enumerate(earlier):
        os.utime(tmp_path / sha256, (age, age))
    partial = folder.partial(named())
    fill(partial, range(5))
    assert partial.finish().is_file()
    assert [folder.has(sha256) for sha256 in earlier] == [False, True]


def test_a_transfer_goes_on_where_the_disk_has_room_for_the_rest_alone(
    folder: BlobFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folder.partial(named())
    fill(first, range(3))
    first.close()
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=3 * BLOCK))
    again = folder.partial(named())
    fill(again, range(3, 5))
    assert again.finish().read_bytes() == DATA


def test_a_transfer_goes_on_where_a_file_system_tells_no_blocks(
    folder: BlobFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = folder.partial(named())
    fill(first, range(3))
    first.close()
    stat = Path.stat

    def as_on_windows(path: Path, **more: bool) -> object:
        found = stat(path, **more)
        return SimpleNamespace(**{name: getattr(found, name) for name in ("st_mode", "st_size", "st_mtime_ns")})

    monkeypatch.setattr(Path, "stat", as_on_windows)
    again = folder.partial(named())
    fill(again, range(3, 5))
    assert again.finish().read_bytes() == DATA


def test_nothing_is_removed_for_a_blob_that_does_not_fit_even_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk_of(len(DATA), path))
    folder = BlobFolder(tmp_path, 100 * len(DATA), evict=True)
    earlier = folder.put(DATA[:BLOCK])
    with pytest.raises(Malformed, match=r"^no_space: .* does not fit on the disk"):
        folder.partial(named())
    assert folder.has(earlier)
    folder.pinned = {folder.put(DATA[BLOCK : 2 * BLOCK])}
    small = BlobFolder(tmp_path, 2 * BLOCK, evict=True)
    small.pinned = folder.pinned
    with pytest.raises(Malformed, match=r"^no_space: .* do not fit into the folder"):
        small.put(bytes(BLOCK + 1))
    assert small.has(earlier)


def test_a_small_blob_takes_the_room_of_others_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk_of(len(DATA), path))
    folder = BlobFolder(tmp_path, 100 * len(DATA), evict=True)
    earlier = folder.put(DATA[: 4 * BLOCK])
    later = folder.put(DATA[: 3 * BLOCK])
    assert (folder.has(earlier), folder.has(later)) == (False, True)


def test_only_what_is_wanted_is_kept(folder: BlobFolder) -> None:
    keep, drop = folder.put(b"a"), folder.put(b"b")
    folder.keep_only({keep})
    assert folder.has(keep)
    assert not folder.has(drop)


def test_a_power_cut_during_a_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomically(tmp_path / "f", b"old")

    def power_cut(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(blobs, "_publish", power_cut)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "f", b"new")
    assert (tmp_path / "f").read_bytes() == b"old"


def test_a_write_that_finds_no_room_names_its_file_and_leaves_the_old_one(tmp_path: Path) -> None:
    """A device with a full disk, and what it told the coordinator, named no file."""
    write_atomically(tmp_path / "f", b"old")
    with files_of_at_most(100), pytest.raises(OSError, match=r"File too large: '.*/f'$"):
        write_atomically(tmp_path / "f", bytes(1_000))
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("f", b"old")]


def test_what_a_power_cut_left_of_a_write_counts_and_makes_room(tmp_path: Path) -> None:
    """It stayed for ever, beside a cache that believed itself small."""
    folder = BlobFolder(tmp_path, 1_000, evict=True)
    half = tmp_path / f"{'0' * 64}.tmp"
    half.write_bytes(bytes(900))
    whole = folder.put(b"x" * 90)
    os.utime(half, (1, 1))
    other = folder.put(b"y" * 90)
    assert folder.has(whole)
    assert folder.has(other)
    assert not half.exists()


def test_a_link_at_the_place_of_a_transfer_is_not_followed(tmp_path: Path) -> None:
    """A link in a folder of state must not let a transfer write into another file."""
    folder, precious = BlobFolder(tmp_path / "blobs"), tmp_path / "precious"
    precious.write_bytes(b"precious")
    manifest = manifest_of(b"x" * 10_000, "delta", block=4096)
    (tmp_path / "blobs" / "partial" / f"{manifest.sha256}.4096").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic link"):
        folder.partial(manifest)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("kind", ["link", "name of another file", "file that another user holds open"])
def test_what_is_in_the_place_of_a_file_that_is_written_beside_is_not_written_to(tmp_path: Path, kind: str) -> None:
    """As root may write in the folder of a broker's user."""
    place, precious = tmp_path / "state.json.tmp", tmp_path / "precious"
    precious.write_bytes(b"precious")
    if kind == "link":
        place.symlink_to(precious)
    elif kind == "name of another file":
        place.hardlink_to(precious)
    else:
        place.write_bytes(b"precious")
    with (place if kind.startswith("file") else precious).open("rb") as held:
        write_atomically(tmp_path / "state.json", b"new")
        assert held.read() == b"precious"
    assert (tmp_path / "state.json").read_bytes() == b"new"
